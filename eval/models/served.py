"""Finds a model on an OpenAI-compatible server, and probes before any task loads that it reads, stops and scores as `hf` would.

Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from eval.models.generation import CARRIED, make_request, render_chat, special_tokens
from eval.tasks.settings import Settings
from sft.errors import EvaluationError, did_you_mean
from sft.recipe.eval import Server

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask
    from transformers import PreTrainedTokenizerBase

SECONDS_TO_CONNECT = 10
WORDS = "The 3 quick brown foxes, née Müller, jump: 12 + 7 = 19.\n"
"""Sent to compare tokenizers: letters, digits, accents, punctuation."""

EXTENDED = ("vllm", "sglang")
"""`owned_by` of servers that take vLLM's keys."""

_ENDPOINTS = {"completions": "/completions", "chat": "/chat/completions"}


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
    dialect: Literal["vllm", "openai"] = "openai"
    """`vllm`: it follows stop_token_ids, repetition_penalty and others that OpenAI's own API does not have."""

    max_model_len: int | None = None
    no_likelihoods: str | None = None
    """Why it cannot score given answers; None: it can."""

    @property
    def place(self) -> str:
        """For messages."""
        return f"{self.name} at {self.base_url}"

    def complete(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Request a completion; errors as `send`."""
        path = _ENDPOINTS[self.api]
        return send(self.base_url, path, self.timeout, self.api_key_env, {"model": self.name, **payload})

    def prompt(self, prompt: Any, settings: Settings) -> dict[str, Any]:
        """The part of a request that holds one prompt: a text or token ids, or the messages of a chat."""
        if self.api == "completions":
            return {"prompt": prompt}
        if settings.enable_thinking is None:
            return {"messages": prompt}
        return {"messages": prompt, "chat_template_kwargs": {"enable_thinking": settings.enable_thinking}}


def send(
    base_url: str, path: str, timeout: int, api_key_env: str | None, payload: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Send a request by POST, or by GET without a payload, and return the answer: a JSON object.

    Raises:
        EvaluationError: There is no answer in `timeout` seconds, or one that is an error or no JSON object.
    """
    import requests

    url, method = base_url + path, "GET" if payload is None else "POST"
    seconds = SECONDS_TO_CONNECT if payload is None else timeout
    headers = {} if api_key_env is None else {"Authorization": f"Bearer {os.environ[api_key_env]}"}
    wait = (SECONDS_TO_CONNECT, seconds)
    try:
        # Send no key but the one that the recipe names: without an `auth` requests takes one from ~/.netrc.
        answer = requests.request(
            method, url, json=payload, headers=headers, timeout=wait, auth=lambda request: request
        )
    except requests.RequestException as error:
        raise EvaluationError(
            f"No server answers at {url} within {seconds} s ({type(error).__name__}). Start it and wait until it serves, set "
            "eval.server.base_url to its address, or raise eval.server.timeout."
        ) from None
    if not answer.ok:
        raise EvaluationError(
            f"{url} answers {answer.status_code}: {shortened(answer.text)!r}. Check eval.server.base_url, which ends in /v1, the key "
            "that eval.server.api_key_env names, and eval.server.api: a server that takes no token ids needs chat."
        )
    try:
        value = answer.json()
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise EvaluationError(
            f"{url} does not answer as an OpenAI-compatible server: {shortened(answer.text)!r} is no JSON object."
        )
    return value


def shortened(text: str) -> str:
    """The beginning of a server's text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= 200 else f"{line[:200]}..."


def find_served(server: Server, label: str, model: str, alone: bool) -> Served:
    """Find a model of the evaluation on its server, where it has the recipe's name or that of its folder or on the hub.

    Args:
        server: The recipe's section.
        label: base or tuned.
        model: Its folder, or its id on the hub.
        alone: Whether one model is measured, not a run's two.
    """
    key = "model" if alone else label
    unused = ("base", "tuned", "base_url_of_base") if alone else ("model",)
    if given := [other for other in unused if getattr(server, other) is not None]:
        raise EvaluationError(
            f"eval.server.{given[0]} is given. A single model is named by server.model, a run's two by server.base and server.tuned."
        )
    assert server.base_url is not None, "check_backend refuses that"
    base_url = ((server.base_url_of_base if key == "base" else None) or server.base_url).rstrip("/")
    name = getattr(server, key) or model
    listed = send(base_url, "/models", server.timeout, server.api_key_env).get("data")
    entries = {str(one["id"]): one for one in listed or () if isinstance(one, dict) and "id" in one}
    # Ollama lists `name:latest` and answers to `name`.
    entry = entries.get(name) or entries.get(f"{name}:latest")
    if entry is None and _answers_to(server, base_url, name):
        entry = {"id": name}
    if entry is None:
        known = ", ".join(f"`{one}`" for one in entries) or "none"
        raise EvaluationError(
            f"The server at {base_url} serves no model `{name}`{did_you_mean(name, list(entries), '.')} It serves {known}. Set "
            f"eval.server.{key} to one of them."
        )
    length = entry.get("max_model_len") or (entry.get("meta") or {}).get("n_ctx")  # vLLM, llama.cpp
    return Served(
        base_url=base_url,
        name=str(entry["id"]),
        api=server.api,
        num_concurrent=server.num_concurrent,
        timeout=server.timeout,
        api_key_env=server.api_key_env,
        dialect="vllm" if entry.get("owned_by") in EXTENDED else "openai",
        max_model_len=length if isinstance(length, int) else None,
    )


def _answers_to(server: Server, base_url: str, name: str) -> bool:
    """Whether a server answers to a model that it does not list, and to no other name: `transformers serve` lists no folders."""
    prompt = {"messages": [{"role": "user", "content": "Hi"}]} if server.api == "chat" else {"prompt": "Hi"}

    def answers(model: str) -> bool:
        request = {"model": model, "max_tokens": 1, **prompt}
        try:
            return bool(send(base_url, _ENDPOINTS[server.api], server.timeout, server.api_key_env, request))
        except EvaluationError:
            return False

    return answers(name) and not answers(f"not-{name}")


def check_two(found: list[Served]) -> None:
    """Refuse one served model as both base and tuned, and two servers of which one ends answers otherwise."""
    if len({(one.base_url, one.name) for one in found}) < len(found):
        raise EvaluationError(
            f"The base and the tuned model would both be {found[0].name}: eval.server.base and eval.server.tuned name the same model."
        )
    if len({one.dialect for one in found}) > 1:
        raise EvaluationError(
            "One of the two servers takes stop_token_ids and the other does not: their answers would end at other tokens."
        )


def probe(served: Served, settings: Settings, tokenizer: PreTrainedTokenizerBase, path: str) -> Served:
    """Find out whether a served model can answer as the evaluation needs; `path` is the model whose tokenizer makes the prompts.

    Raises:
        EvaluationError: Its context is shorter, or it makes other tokens of a text.
    """
    wanted = settings.max_length
    if served.max_model_len is not None and wanted is not None and served.max_model_len < wanted:
        raise EvaluationError(
            f"{served.name} is served with a context of {served.max_model_len} tokens, and the evaluation asks for up to {wanted}. Serve "
            f"it with more (vLLM: --max-model-len {wanted}; llama.cpp: -c {wanted}), or set eval.max_length={served.max_model_len}."
        )
    plain = {"max_tokens": 2, "temperature": 0, "seed": settings.seed}
    if served.api == "chat":
        chat = [{"role": "user", "content": WORDS.strip()}]
        expected = tokenizer.encode(render_chat(tokenizer, settings, chat), add_special_tokens=False)
        _check_count(served, plain | served.prompt(chat, settings), {len(expected)}, path)
        return replace(served, no_likelihoods="chat requests give no log probabilities of a prompt")
    own, bare = (list(tokenizer.encode(WORDS, add_special_tokens=special)) for special in (True, False))
    _check_count(served, plain | {"prompt": [bare]}, {len(bare)}, path)
    _check_count(served, plain | {"prompt": WORDS}, {len(own), len(bare)}, path)
    try:
        score_answer(served, bare, slice(1, len(bare)), settings.seed)
    except EvaluationError as error:
        return replace(served, no_likelihoods=str(error))
    return served


def _check_count(served: Served, request: dict[str, Any], expected: set[int], path: str) -> None:
    """Refuse a server that reads another number of tokens in a prompt, where it reports the number."""
    answer = served.complete(request)
    choice_of(answer, served.place)
    usage = answer.get("usage")
    count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    if count and count not in expected:
        raise EvaluationError(
            f"{served.place} reads {count} tokens in a prompt of which the tokenizer of {path} makes {min(expected)}. It has another "
            "tokenizer or chat template (vLLM: --chat-template), or does not take token ids as they are."
        )


def choice_of(answer: dict[str, Any], place: str) -> dict[str, Any]:
    """The one choice in an answer; an EvaluationError where there is none, or several."""
    listed = answer.get("choices")
    if not isinstance(listed, list) or len(listed) != 1 or not isinstance(listed[0], dict):
        raise EvaluationError(f"{place} answers {shortened(str(answer))!r}, which is not one choice.")
    return listed[0]


def score_answer(served: Served, prompt: Sequence[int], scored: slice, seed: int) -> tuple[float, bool]:
    """Request the log probability of an answer, `scored`, within a prompt's token ids, and whether each of its tokens was the likeliest.

    Raises:
        EvaluationError: There is not one log probability for each token.
    """
    request = {"prompt": [list(prompt)], "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True, "seed": seed}
    # Two tokens that decode to the same text would be one key in what vLLM answers.
    choice = choice_of(served.complete(request | {"return_tokens_as_token_ids": True}), served.place)
    return score_choice(choice, len(prompt), scored, served.place)


def score_choice(choice: dict[str, Any], tokens: int, scored: slice, place: str) -> tuple[float, bool]:
    """Read a score from a choice with `logprobs`, as `score_answer` gives it; `tokens` is the length of the prompt."""
    logprobs = choice.get("logprobs")
    logprobs = logprobs if isinstance(logprobs, dict) else {}
    values, tops = logprobs.get("token_logprobs"), logprobs.get("top_logprobs")
    if not isinstance(values, list) or not isinstance(tops, list):
        raise EvaluationError(f"{place} gives no log probabilities of the prompt (`echo` with `logprobs`)")
    # The prompt comes with the one generated token, unless that ends the text.
    if not tokens <= len(values) <= tokens + 1 or len(tops) != len(values):
        raise EvaluationError(
            f"{place} was sent {tokens} tokens and one more to generate, and gives log probabilities of {len(values)}: it reads the "
            "prompt as other tokens, or does not echo it"
        )
    own, likeliest = values[scored], tops[scored]
    if not all(isinstance(value, (int, float)) for value in own) or not all(likeliest):
        raise EvaluationError(f"{place} leaves out log probabilities of tokens in the prompt")
    greedy = all(value == max(top.values()) for value, top in zip(own, likeliest, strict=True))
    return float(sum(own)), greedy


def task_problems(
    task: ConfigurableTask, settings: Settings, tokenizer: PreTrainedTokenizerBase, served: Served
) -> Iterator[str]:
    """What a task asks that this server cannot do."""
    name = task.task_name
    if task.get_config("output_type") != "generate_until":
        if served.no_likelihoods is not None:
            yield f"{name} scores given answers, and {served.no_likelihoods}. Use eval.backend=hf, or leave the task out."
        return
    given, special = dict(task.get_config("generation_kwargs") or {}), special_tokens(tokenizer)
    if unknown := sorted(given.keys() - CARRIED - {"until", "max_gen_toks"}):
        yield (
            f"{name} generates with {', '.join(unknown)}, which eval.backend=server cannot follow. Use eval.backend=hf, or leave the task "
            "out."
        )
    until = given.get("until") or []
    for text in [until] if isinstance(until, str) else until:
        if inside := [token for token in special if token in text and token != text]:
            yield (
                f"{name} ends its answers at {text!r}, of which {inside[0]} is a special token: a server leaves those out of the text. Use "
                "eval.backend=hf."
            )
    if served.api == "chat" and task.get_config("gen_prefix"):
        yield f"{name} begins the answer itself, which a chat request cannot carry. Use eval.server.api=completions."
    beyond = make_request(given, settings, special).beyond_openai
    if served.dialect == "openai" and beyond:
        lost = ", ".join(f"{key}={value:g}" for key, value in beyond.items())
        yield f"{name} is asked with {lost}, which {served.place} does not take. Use eval.backend=hf."
