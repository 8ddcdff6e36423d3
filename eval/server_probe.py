"""What a served model can do, found by asking it: does it read the same tokens, stop where it is told, and score what it is given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from eval.answering import render_chat
from eval.server import (
    PROBE_TOKENS,
    WORDS,
    Address,
    Served,
    check_length,
    choices_of,
    encoded,
    is_ollama,
    likelihood_request,
    score_choice,
    tokens_counted,
)
from eval.settings import Reference, Settings
from sft.errors import EvaluationError

EXTENDED = ("vllm", "sglang")
"""`owned_by` of servers that take vLLM's keys."""


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


def _probe_completions(served: Served, settings: Settings, reference: Reference) -> Served:
    if is_ollama(served):
        raise EvaluationError(
            f"{served.base_url} is Ollama, which puts every prompt into the model's template and takes no token ids. Ask it by "
            "eval.server.api=chat; tasks that score given answers need another server, such as vLLM."
        )
    address = Address(served.base_url, served.timeout, served.api_key_env)
    own, bare = (encoded(reference.tokenizer, WORDS, special) for special in (True, False))
    plain = {"model": served.name, "max_tokens": PROBE_TOKENS, "temperature": 0, "seed": settings.seed}
    try:
        answer = address.ask("/completions", plain | {"prompt": [bare]})
    except EvaluationError as error:
        raise EvaluationError(f"{error} (The prompts of eval.server.api=completions are token ids.)") from None
    choices_of(answer, 1, _whose(served))
    _check_count(served, answer, {len(bare)}, f"{len(bare)} token ids", "It does not take token ids as they are.")
    words = address.ask("/completions", plain | {"prompt": WORDS})
    another = f"It has another tokenizer than {reference.path}: is it the right model?"
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


def _probe_chat(served: Served, settings: Settings, reference: Reference) -> Served:
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
    prompt = render_chat(reference.tokenizer, settings, chat)
    # The remedy is vLLM's; Ollama's is its Modelfile.
    remedy = (
        f"It has another tokenizer or chat template than {reference.path}. Serve it with that template (vLLM: --chat-template; Ollama: "
        "TEMPLATE in the Modelfile), or use eval.server.api=completions."
    )
    compared = _check_count(
        served, answer, {len(encoded(reference.tokenizer, prompt, False))}, "a chat of one message", remedy
    )
    served = _dialect(replace(served, tokens_compared=compared), address, "/chat/completions", plain)
    return replace(served, no_likelihoods="chat requests give no log probabilities of a prompt")


def probe(served: Served, settings: Settings, reference: Reference) -> Served:
    """Ask a served model what it can do.

    Args:
        served: From `find_served`.
        settings: Of the evaluation.
        reference: Whose tokenizer the prompts are made with.

    Raises:
        EvaluationError: It cannot be asked as the evaluation says.
    """
    check_length(served, settings)
    return (_probe_chat if served.api == "chat" else _probe_completions)(served, settings, reference)
