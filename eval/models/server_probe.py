"""What a served model can do, found by asking it: does it read the same tokens, stop where it is told, and score what it is given."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from eval.models.answering import render_chat
from eval.models.server import Address, Served, check_length, find_served, is_ollama
from eval.models.server_answers import choices_of, likelihood_request, score_choice, tokens_counted
from eval.tasks.settings import Settings
from sft.errors import EvaluationError
from sft.recipe.eval import Server

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WORDS = "The 3 quick brown foxes, née Müller, jump: 12 + 7 = 19.\n"
"""Asked to compare tokenizers: letters, digits, accents, punctuation."""

PROBE_TOKENS = 2
EXTENDED = ("vllm", "sglang")
"""`owned_by` of servers that take vLLM's keys."""


def find(server: Server, label: str, model: str, alone: bool) -> Served:
    """A model of the evaluation on its server.

    Args:
        server: The recipe's section.
        label: base or tuned.
        model: Its folder, or its id on the hub.
        alone: One model is measured, and not a run's two.

    Raises:
        EvaluationError: It is not there, or the keys name other models.
    """
    key = "model" if alone else label
    given = [one for one in ("model", "base", "tuned", "base_url_of_base") if getattr(server, one) is not None]
    wrong = [one for one in given if (one == "model") != alone]
    if wrong:
        what = (
            "one model is measured: server.model names it"
            if alone
            else "a run has two models: server.base and server.tuned name them"
        )
        raise EvaluationError(f"eval.server.{wrong[0]} is given, and {what}.")
    assert server.base_url is not None, "check_backend refuses that"
    address = (server.base_url_of_base or server.base_url) if key == "base" else server.base_url
    return find_served(server, address, getattr(server, key) or model, key)


def check_two(found: list[Served]) -> None:
    """Refuse one served model as both base and tuned.

    Raises:
        EvaluationError: It is.
    """
    if len({(one.base_url, one.name) for one in found}) < len(found):
        raise EvaluationError(
            f"The base and the tuned model would both be {found[0].name}: eval.server.base and eval.server.tuned name the same model."
        )


def encoded(tokenizer: PreTrainedTokenizerBase, text: str, special: bool) -> list[int]:
    """Token ids of a text."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=special)
    return ids


def _whose(served: Served) -> str:
    return f"{served.name} at {served.base_url}"


def _check_count(served: Served, answer: dict[str, Any], expected: set[int], what: str, remedy: str) -> bool:
    """Whether the server has told its count of tokens, which must be one of those expected."""
    count = tokens_counted(answer)
    if count is not None and count not in expected:
        raise EvaluationError(
            f"{_whose(served)} reads {count} tokens in {what}, and the tokenizer of the evaluation makes "
            f"{' or '.join(map(str, sorted(expected)))} of it. {remedy}"
        )
    return count is not None


def _with_extensions(address: Address, path: str, payload: dict[str, Any]) -> list[int] | None:
    """Token ids that the server answers with; None where it does not know vLLM's keys."""
    try:
        (choice,) = choices_of(address.ask(path, payload | {"return_token_ids": True, "ignore_eos": True}), 1, path)
    except EvaluationError:  # OpenAI's own server refuses keys that it does not know; the plain request was answered
        return None
    ids = choice.get("token_ids")
    return ids if isinstance(ids, list) and all(isinstance(one, int) for one in ids) else None


def _dialect(served: Served, address: Address, path: str, payload: dict[str, Any]) -> Served:
    """Find out whether the server takes vLLM's keys, by ending an answer at its own first token."""
    first = _with_extensions(address, path, payload)
    if not first:
        return replace(served, dialect="vllm") if served.owner in EXTENDED else served
    stopped = _with_extensions(address, path, payload | {"stop_token_ids": first[:1]})
    ends = stopped is not None and len(stopped) <= 1 < len(first)
    return replace(served, dialect="vllm") if ends else served


def _probe_completions(served: Served, settings: Settings, tokenizer: PreTrainedTokenizerBase, path: str) -> Served:
    if is_ollama(served):
        raise EvaluationError(
            f"{served.base_url} is Ollama, which puts every prompt into the model's template and takes no token ids. Ask it by "
            "eval.server.api=chat; tasks that score given answers need another server, such as vLLM."
        )
    address = Address(served.base_url, served.timeout, served.api_key_env)
    own, bare = (encoded(tokenizer, WORDS, special) for special in (True, False))
    plain = {"model": served.name, "max_tokens": PROBE_TOKENS, "temperature": 0, "seed": settings.seed}
    try:
        answer = address.ask("/completions", plain | {"prompt": [bare]})
    except EvaluationError as error:
        raise EvaluationError(f"{error} (The prompts of eval.server.api=completions are token ids.)") from None
    choices_of(answer, 1, _whose(served))
    _check_count(served, answer, {len(bare)}, f"{len(bare)} token ids", "It does not take token ids as they are.")
    words = address.ask("/completions", plain | {"prompt": WORDS})
    another = f"It has another tokenizer than {path}: is it the right model?"
    compared = _check_count(served, words, {len(own), len(bare)}, f"the text {WORDS.strip()!r}", another)
    served = _dialect(replace(served, tokens_compared=compared), address, "/completions", plain | {"prompt": [bare]})
    try:
        scored = address.ask("/completions", likelihood_request(served.name, [bare], settings.seed))
        score_choice(choices_of(scored, 1, _whose(served))[0], bare, slice(1, len(bare)), _whose(served))
    except EvaluationError as error:
        return replace(served, no_likelihoods=str(error))
    return served


def chat_extras(served: Served, settings: Settings) -> dict[str, Any]:
    """What a chat request carries so that the server renders the chat as training did: without thoughts where it can think."""
    if settings.enable_thinking is None:
        return {}
    if served.owner == "library":  # Ollama's way to say so
        return {"reasoning_effort": "none"}
    return {"chat_template_kwargs": {"enable_thinking": settings.enable_thinking}}


def _probe_chat(served: Served, settings: Settings, tokenizer: PreTrainedTokenizerBase, path: str) -> Served:
    address = Address(served.base_url, served.timeout, served.api_key_env)
    chat = [{"role": "user", "content": WORDS.strip()}]
    plain = {
        "model": served.name,
        "messages": chat,
        "max_tokens": PROBE_TOKENS,
        "temperature": 0,
        "seed": settings.seed,
    }
    plain |= chat_extras(served, settings)
    answer = address.ask("/chat/completions", plain)
    choices_of(answer, 1, _whose(served))
    prompt = render_chat(tokenizer, settings, chat)
    # The remedy is vLLM's; Ollama's is its Modelfile.
    remedy = (
        f"It has another tokenizer or chat template than {path}. Serve it with that template (vLLM: --chat-template; Ollama: "
        "TEMPLATE in the Modelfile), or use eval.server.api=completions."
    )
    compared = _check_count(served, answer, {len(encoded(tokenizer, prompt, False))}, "a chat of one message", remedy)
    served = _dialect(replace(served, tokens_compared=compared), address, "/chat/completions", plain)
    return replace(served, no_likelihoods="chat requests give no log probabilities of a prompt")


def probe(served: Served, settings: Settings, tokenizer: PreTrainedTokenizerBase, path: str) -> Served:
    """Ask a served model what it can do.

    Args:
        served: From `find_served`.
        settings: Of the evaluation.
        tokenizer: What the prompts are made with.
        path: Of the tuned model, which it is from.

    Raises:
        EvaluationError: It cannot be asked as the evaluation says.
    """
    check_length(served, settings)
    return (_probe_chat if served.api == "chat" else _probe_completions)(served, settings, tokenizer, path)
