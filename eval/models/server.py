"""Find a model on an OpenAI-compatible server, and probe before any task loads that it reads, stops and scores as `hf` would.

Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from eval.models.generation import carried_by_openai, make_request, render_chat
from eval.tasks.settings import Settings
from sft.errors import EvaluationError, did_you_mean
from sft.recipe.eval import Server

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask
    from transformers import PreTrainedTokenizerBase

SECONDS_TO_CONNECT = 10
PROBE_TOKENS = 2
WORDS = "The 3 quick brown foxes, née Müller, jump: 12 + 7 = 19.\n"
"""Sent to compare tokenizers: letters, digits, accents, punctuation."""

OLLAMA = "library"
EXTENDED = ("vllm", "sglang")
"""`owned_by` of servers that take vLLM's keys."""


@dataclass(frozen=True)
class Served:
    """A model on a server, as the server described it; results.json records it."""

    base_url: str
    """Address with its /v1."""

    name: str
    api: Literal["completions", "chat"]
    num_concurrent: int
    timeout: int
    """Seconds."""

    api_key_env: str | None
    owner: str | None
    """`owned_by` of the model: vLLM and SGLang name themselves there, Ollama says `library`."""

    root: str | None = None
    """What the model was loaded from, where the server says so."""

    max_model_len: int | None = None
    dialect: Literal["vllm", "openai"] = "openai"
    """`vllm`: it follows stop_token_ids, repetition_penalty and others that OpenAI's own API does not have."""

    no_likelihoods: str | None = None
    """Why it cannot score given answers; None: it can."""

    tokens_compared: bool = False
    """Whether it reported how many tokens it makes of a text."""

    @property
    def place(self) -> str:
        """For messages."""
        return f"{self.name} at {self.base_url}"

    def ask(self, path: str, payload: dict[str, Any]) -> dict[str, Any]:
        """Send one request; see `ask`."""
        return ask(self.base_url, path, self.timeout, self.api_key_env, payload)


def authorization(api_key_env: str | None) -> dict[str, str]:
    """The header with the server's key."""
    return {} if api_key_env is None else {"Authorization": f"Bearer {os.environ[api_key_env]}"}


def ask(
    base_url: str, path: str, timeout: int, api_key_env: str | None, payload: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Send a request, and return the answer.

    Args:
        base_url: Address with its /v1.
        path: Such as `/models`.
        timeout: Seconds.
        api_key_env: Environment variable with the key.
        payload: Sent by POST; None for GET.

    Raises:
        EvaluationError: There is no answer, or one that is an error or not a JSON object.
    """
    import requests

    url, method = base_url + path, "GET" if payload is None else "POST"
    seconds = SECONDS_TO_CONNECT if payload is None else timeout
    limits = (SECONDS_TO_CONNECT, seconds)
    try:
        answer = requests.request(method, url, json=payload, headers=authorization(api_key_env), timeout=limits)
    except requests.Timeout:
        more = "" if payload is None else ", or set eval.server.timeout to more seconds"
        raise EvaluationError(
            f"{url} has not answered within {seconds} s. Is the server still loading its model? Wait until it serves{more}."
        ) from None
    except requests.RequestException as error:
        raise EvaluationError(
            f"No server can be reached at {url} ({innermost(error)}). Start it, or set eval.server.base_url to its address."
        ) from None
    if not answer.ok:
        raise EvaluationError(_refused(base_url, url, answer.status_code, answer.text, api_key_env))
    try:
        value = answer.json()
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise EvaluationError(
            f"{url} does not answer as an OpenAI-compatible server: {shortened(answer.text)!r} is no JSON object."
        )
    return value


def _refused(base_url: str, url: str, status: int, text: str, api_key_env: str | None) -> str:
    told = f"{url} answers {status}: {shortened(text)!r}."
    if status in (401, 403) and api_key_env is None:
        return (
            f"{told} The server wants a key: put it into an environment variable and name that one, "
            "server.api_key_env=MY_KEY."
        )
    if status in (401, 403):
        return f"{told} It does not take the key in {api_key_env}."
    if status == 404 and not base_url.endswith("/v1"):
        return f"{told} Servers of this kind answer under /v1: set eval.server.base_url={base_url}/v1"
    return f"{told} Is eval.server.base_url right?" if status == 404 else told


def innermost(error: BaseException) -> str:
    """The error at the bottom of a client's error in a few words, such as `Connection refused`."""
    while (below := error.__cause__ or error.__context__) is not None:
        error = below
    return str(getattr(error, "strerror", None) or type(error).__name__)


def shortened(text: str, length: int = 200) -> str:
    """The beginning of what a server said, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= length else f"{line[:length]}..."


def find_served(server: Server, label: str, model: str, alone: bool) -> Served:
    """A model of the evaluation on its server.

    Args:
        server: The recipe's section.
        label: base or tuned.
        model: Its folder, or its id on the hub: what it is served as unless the recipe names it.
        alone: Whether one model is measured, not a run's two.

    Raises:
        EvaluationError: The server cannot be reached or has no such model, or the keys name other models.
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
    base_url = ((server.base_url_of_base if key == "base" else None) or server.base_url).rstrip("/")
    name = getattr(server, key) or model
    listed = ask(base_url, "/models", server.timeout, server.api_key_env).get("data")
    entries = {str(one["id"]): one for one in listed or () if isinstance(one, dict) and "id" in one}
    if not entries:
        raise EvaluationError(f"The server at {base_url} lists no models.")
    # Ollama lists `name:latest` and answers to `name`.
    entry = entries.get(name) or entries.get(f"{name}:latest")
    if entry is None:
        known = ", ".join(f"`{one}`" for one in entries)
        raise EvaluationError(
            f"The server at {base_url} serves no model `{name}`{did_you_mean(name, list(entries), '.')} It serves {known}. Set "
            f"eval.server.{key} to one of them."
        )
    length = entry.get("max_model_len")
    return Served(
        base_url=base_url,
        name=str(entry["id"]),
        api=server.api,
        num_concurrent=server.num_concurrent,
        timeout=server.timeout,
        api_key_env=server.api_key_env,
        owner=str(entry["owned_by"]) if entry.get("owned_by") else None,
        root=str(entry["root"]) if entry.get("root") else None,
        max_model_len=length if isinstance(length, int) else None,
    )


def check_two(found: list[Served]) -> None:
    """Refuse one served model as both base and tuned, and two servers of which one ends answers otherwise.

    Raises:
        EvaluationError: They do not make a comparison.
    """
    if len({(one.base_url, one.name) for one in found}) < len(found):
        raise EvaluationError(
            f"The base and the tuned model would both be {found[0].name}: eval.server.base and eval.server.tuned name the same model."
        )
    if len({one.dialect for one in found}) > 1:
        raise EvaluationError(
            "One of the two servers takes stop_token_ids and the other does not: their answers would end at other tokens."
        )


def probe(served: Served, settings: Settings, tokenizer: PreTrainedTokenizerBase, path: str) -> Served:
    """Ask a served model whether it can answer as the evaluation needs.

    Args:
        served: From `find_served`.
        settings: Of the evaluation.
        tokenizer: What makes the prompts.
        path: The tuned model, whose tokenizer that is.

    Raises:
        EvaluationError: Its context is shorter, or it makes other tokens of a text.
    """
    wanted = settings.max_length
    if served.max_model_len is not None and wanted is not None and served.max_model_len < wanted:
        raise EvaluationError(
            f"{served.name} is served with a context of {served.max_model_len} tokens, and the evaluation asks for up to {wanted}. Serve "
            f"it with more (vLLM: --max-model-len {wanted}), or set eval.max_length={served.max_model_len}."
        )
    return (_probe_chat if served.api == "chat" else _probe_completions)(served, settings, tokenizer, path)


def _probe_completions(served: Served, settings: Settings, tokenizer: PreTrainedTokenizerBase, path: str) -> Served:
    if served.owner == OLLAMA:
        raise EvaluationError(
            f"{served.base_url} is Ollama, which puts every prompt into the model's template and takes no token ids. Ask it by "
            "eval.server.api=chat; tasks that score given answers need another server, such as vLLM."
        )
    own, bare = (list(tokenizer.encode(WORDS, add_special_tokens=special)) for special in (True, False))
    plain = {"model": served.name, "max_tokens": PROBE_TOKENS, "temperature": 0, "seed": settings.seed}
    try:
        answer = served.ask("/completions", plain | {"prompt": [bare]})
    except EvaluationError as error:
        raise EvaluationError(f"{error} (The prompts of eval.server.api=completions are token ids.)") from None
    choices_of(answer, 1, served.place)
    _check_count(served, answer, {len(bare)}, f"{len(bare)} token ids", "It does not take token ids as they are.")
    words = served.ask("/completions", plain | {"prompt": WORDS})
    another = f"It has another tokenizer than {path}: is it the right model?"
    compared = _check_count(served, words, {len(own), len(bare)}, f"the text {WORDS.strip()!r}", another)
    served = _find_dialect(replace(served, tokens_compared=compared), "/completions", plain | {"prompt": [bare]})
    try:
        scored = served.ask("/completions", likelihood_request(served.name, [bare], settings.seed))
        score_choice(choices_of(scored, 1, served.place)[0], bare, slice(1, len(bare)), served.place)
    except EvaluationError as error:
        return replace(served, no_likelihoods=str(error))
    return served


def _probe_chat(served: Served, settings: Settings, tokenizer: PreTrainedTokenizerBase, path: str) -> Served:
    chat = [{"role": "user", "content": WORDS.strip()}]
    plain = {"model": served.name, "messages": chat, "max_tokens": PROBE_TOKENS, "temperature": 0}
    plain |= {"seed": settings.seed} | chat_extras(served, settings)
    answer = served.ask("/chat/completions", plain)
    choices_of(answer, 1, served.place)
    expected = tokenizer.encode(render_chat(tokenizer, settings, chat), add_special_tokens=False)
    # The remedy is vLLM's; Ollama's is its Modelfile.
    remedy = (
        f"It has another tokenizer or chat template than {path}. Serve it with that template (vLLM: --chat-template; Ollama: "
        "TEMPLATE in the Modelfile), or use eval.server.api=completions."
    )
    compared = _check_count(served, answer, {len(expected)}, "a chat of one message", remedy)
    served = _find_dialect(replace(served, tokens_compared=compared), "/chat/completions", plain)
    return replace(served, no_likelihoods="chat requests give no log probabilities of a prompt")


def chat_extras(served: Served, settings: Settings) -> dict[str, Any]:
    """What a chat request carries so that the server renders the chat as training did: without reasoning."""
    if settings.enable_thinking is None:
        return {}
    if served.owner == OLLAMA:
        return {"reasoning_effort": "none"}
    return {"chat_template_kwargs": {"enable_thinking": settings.enable_thinking}}


def _check_count(served: Served, answer: dict[str, Any], expected: set[int], what: str, remedy: str) -> bool:
    """Whether the server has reported its count of the prompt's tokens, which must be one of those expected."""
    usage = answer.get("usage")
    count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    if not isinstance(count, int) or count <= 0:
        return False
    if count not in expected:
        raise EvaluationError(
            f"{served.place} reads {count} tokens in {what}, and the tokenizer of the evaluation makes "
            f"{' or '.join(map(str, sorted(expected)))} of it. {remedy}"
        )
    return True


def _find_dialect(served: Served, path: str, payload: dict[str, Any]) -> Served:
    """Find out whether the server takes vLLM's keys, by ending an answer at its own first token."""

    def generated(**more: Any) -> list[int]:
        try:
            answer = served.ask(path, payload | {"return_token_ids": True, "ignore_eos": True, **more})
            ids = choices_of(answer, 1, served.place)[0].get("token_ids")
        except EvaluationError:  # OpenAI's own server refuses unknown keys; it has answered the plain request
            return []
        return ids if isinstance(ids, list) else []

    first = generated()
    follows = len(generated(stop_token_ids=first[:1])) <= 1 < len(first) if first else served.owner in EXTENDED
    return replace(served, dialect="vllm") if follows else served


def choices_of(answer: object, count: int, place: str) -> list[dict[str, Any]]:
    """The choices in an answer, in the order of the prompts.

    Args:
        answer: JSON.
        count: Prompts that were sent.
        place: The server, for the message.

    Raises:
        EvaluationError: There are not as many.
    """
    listed = answer.get("choices") if isinstance(answer, dict) else None
    choices = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    if sorted(one.get("index", -1) for one in choices) != list(range(count)):
        raise EvaluationError(
            f"{place} was asked {count} prompts and answers {shortened(str(answer))!r}, which is not {count} choices."
        )
    return sorted(choices, key=lambda one: int(one["index"]))


def likelihood_request(name: str, prompts: list[list[int]], seed: int) -> dict[str, Any]:
    """A request for the log probabilities of prompts."""
    return {
        "model": name,
        "prompt": prompts,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "echo": True,
        "seed": seed,
        # Two tokens that decode to the same text would be one key in what vLLM answers.
        "return_tokens_as_token_ids": True,
    }


def score_choice(choice: dict[str, Any], prompt: Sequence[int], scored: slice, place: str) -> tuple[float, bool]:
    """The log probability of an answer within an echoed prompt.

    Args:
        choice: With `logprobs`.
        prompt: Token ids that were sent.
        scored: The tokens of the answer, within the prompt.
        place: The server, for the message.

    Returns:
        Sum of the log probabilities, and whether each was the likeliest token.

    Raises:
        EvaluationError: There is not one log probability for each token.
    """
    logprobs = choice.get("logprobs")
    logprobs = logprobs if isinstance(logprobs, dict) else {}
    values, tops = logprobs.get("token_logprobs"), logprobs.get("top_logprobs")
    if not isinstance(values, list) or not isinstance(tops, list):
        raise EvaluationError(f"{place} gives no log probabilities of the prompt (`echo` with `logprobs`)")
    # The prompt comes with the one generated token, unless that ends the text.
    if not len(prompt) <= len(values) <= len(prompt) + 1 or len(tops) != len(values):
        raise EvaluationError(
            f"{place} was sent {len(prompt)} tokens and one more to generate, and gives log probabilities of {len(values)}: it reads the "
            "prompt as other tokens, or does not echo it"
        )
    own, likeliest = values[scored], tops[scored]
    if not all(isinstance(value, (int, float)) for value in own) or not all(
        isinstance(top, dict) and top for top in likeliest
    ):
        raise EvaluationError(f"{place} leaves out log probabilities of tokens in the prompt")
    greedy = all(value == max(top.values()) for value, top in zip(own, likeliest, strict=True))
    return float(sum(own)), greedy


def served_problems(task: ConfigurableTask, settings: Settings, special: dict[str, int], served: Served) -> list[str]:
    """What a task asks that this server cannot do."""
    name = task.task_name
    if task.get_config("output_type") != "generate_until":
        if served.no_likelihoods is None:
            return []
        return [
            f"{name} scores given answers, and {served.no_likelihoods}. Use eval.backend=hf or vllm, or leave the task out."
        ]
    problems = []
    if served.api == "chat" and task.get_config("gen_prefix"):
        problems.append(
            f"{name} begins the answer itself, which a chat request cannot carry. Use eval.server.api=completions."
        )
    request = make_request(dict(task.get_config("generation_kwargs") or {}), settings, special)
    lost = carried_by_openai(request) if served.dialect == "openai" else None
    if lost is not None:
        problems.append(
            f"{name} is asked with {lost}, which {served.place} does not take: it follows none of vLLM's keys. Use eval.backend=hf or vllm."
        )
    return problems
