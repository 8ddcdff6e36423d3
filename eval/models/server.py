"""A server with an OpenAI-compatible API: is it there, which models has it, and does it answer as the evaluation needs.

All of it is asked before tasks are loaded. Imports no torch.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from eval.models.server_answers import shortened
from sft.errors import EvaluationError, did_you_mean
from sft.recipe.eval import Server

if TYPE_CHECKING:
    from eval.tasks.settings import Settings

SECONDS_TO_CONNECT = 10
Api = Literal["completions", "chat"]
Dialect = Literal["vllm", "openai"]


@dataclass(frozen=True)
class Served:
    """A model on a server, as the server described it."""

    base_url: str
    """Address with its /v1."""

    name: str
    api: Api
    num_concurrent: int
    timeout: int
    """Seconds."""

    api_key_env: str | None
    owner: str | None
    """`owned_by` of the model: vLLM, SGLang and llama.cpp name themselves there, Ollama says `library`."""

    root: str | None = None
    """What the model was loaded from, where the server says so."""

    max_model_len: int | None = None
    dialect: Dialect = "openai"
    """`vllm`: it follows stop_token_ids, repetition_penalty and the like, which OpenAI's own API does not have."""

    no_likelihoods: str | None = None
    """Why it cannot score given answers; None: it can."""

    tokens_compared: bool = False
    """Whether it has told how many tokens it makes of a text."""

    def record(self) -> dict[str, Any]:
        """What results.json keeps; the key is not among it."""
        return asdict(self)


@dataclass(frozen=True)
class Address:
    """Where requests go and how."""

    base_url: str
    timeout: int
    api_key_env: str | None = None
    headers: dict[str, str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "headers", authorization(self.api_key_env))

    def ask(self, path: str, payload: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send a request, and return what is answered.

        Args:
            path: After the /v1, such as `/models`.
            payload: Sent by POST; None for GET.

        Raises:
            EvaluationError: There is no answer, or one that is an error or not JSON.
        """
        import requests

        url = self.base_url + path
        try:
            answer = requests.request(
                "GET" if payload is None else "POST",
                url,
                json=payload,
                headers=self.headers,
                timeout=(SECONDS_TO_CONNECT, SECONDS_TO_CONNECT if payload is None else self.timeout),
            )
        except requests.Timeout:
            waited = SECONDS_TO_CONNECT if payload is None else self.timeout
            raise EvaluationError(
                f"{url} has not answered within {waited} s. Is the server still loading its model? "
                + (
                    "Wait until it serves."
                    if payload is None
                    else "Wait until it serves, or set eval.server.timeout to more seconds."
                )
            ) from None
        except requests.RequestException as error:
            raise EvaluationError(
                f"No server can be reached at {url} ({reason_of(error)}). Start it, or set eval.server.base_url to its address."
            ) from None
        if not answer.ok:
            raise EvaluationError(self._refused(url, answer.status_code, answer.text))
        try:
            value = answer.json()
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise EvaluationError(
                f"{url} does not answer as an OpenAI-compatible server: {shortened(answer.text)!r} is no JSON object."
            )
        return value

    def _refused(self, url: str, status: int, text: str) -> str:
        told = f"{url} answers {status}: {shortened(text)!r}."
        if status in (401, 403):
            if self.api_key_env is None:
                return (
                    f"{told} The server wants a key: put it into an environment variable and name that one, "
                    "server.api_key_env=MY_KEY."
                )
            return f"{told} It does not take the key in {self.api_key_env}."
        if status == 404 and not self.base_url.endswith("/v1"):
            return f"{told} Servers of this kind answer under /v1: set eval.server.base_url={self.base_url}/v1"
        if status == 404:
            return f"{told} The server has no such path: is eval.server.base_url right?"
        return told + (" The server's own log says more." if status >= 500 else "")


def authorization(api_key_env: str | None) -> dict[str, str]:
    """The header with the server's key."""
    return {} if api_key_env is None else {"Authorization": f"Bearer {os.environ[api_key_env]}"}


def reason_of(error: BaseException) -> str:
    """What lies under an error of a client, in a few words: refused, unknown host."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, OSError) and inner.strerror:
            return inner.strerror
        if type(inner).__name__ == "NameResolutionError":
            return "there is no host of that name"
        reason = getattr(inner, "reason", None) or next(
            (one for one in inner.args if isinstance(one, BaseException)), None
        )
        inner = reason if isinstance(reason, BaseException) else inner.__cause__
    return type(error).__name__


def _entries(address: Address) -> dict[str, dict[str, Any]]:
    """What the server serves, by name."""
    listed = address.ask("/models").get("data")
    if not isinstance(listed, list):
        raise EvaluationError(
            f"{address.base_url}/models does not answer as an OpenAI-compatible server: it lists no models."
        )
    entries = {str(one["id"]): one for one in listed if isinstance(one, dict) and "id" in one}
    if not entries:
        raise EvaluationError(f"The server at {address.base_url} serves no model.")
    return entries


def find_served(server: Server, base_url: str, name: str, key: str) -> Served:
    """A model by the name it is served under.

    Args:
        server: The recipe's section.
        base_url: Address of the server that should have it.
        name: The name.
        key: The key of `eval.server` that names it, for the message.

    Raises:
        EvaluationError: The server cannot be reached, or has no such model.
    """
    address = Address(base_url.rstrip("/"), server.timeout, server.api_key_env)
    entries = _entries(address)
    # Ollama lists `name:latest` and answers to `name`.
    found = name if name in entries else f"{name}:latest"
    if found not in entries:
        known = ", ".join(f"`{one}`" for one in entries)
        raise EvaluationError(
            f"The server at {address.base_url} serves no model `{name}`{did_you_mean(name, list(entries), '.')} It serves {known}. Set "
            f"eval.server.{key} to one of them."
        )
    entry = entries[found]
    length = entry.get("max_model_len")
    return Served(
        base_url=address.base_url,
        name=found,
        api=server.api,
        num_concurrent=server.num_concurrent,
        timeout=server.timeout,
        api_key_env=server.api_key_env,
        owner=str(entry["owned_by"]) if entry.get("owned_by") else None,
        root=str(entry["root"]) if entry.get("root") else None,
        max_model_len=length if isinstance(length, int) else None,
    )


def is_ollama(served: Served) -> bool:
    """Whether it is Ollama, which puts every prompt through a model's own template."""
    if served.owner == "library":
        return True
    try:
        answer = Address(served.base_url.removesuffix("/v1"), served.timeout, served.api_key_env).ask("/api/version")
    except EvaluationError:
        return False
    return isinstance(answer.get("version"), str)


def check_length(served: Served, settings: Settings) -> None:
    """Refuse a server that takes less at once than the evaluation asks.

    Raises:
        EvaluationError: Its context is shorter.
    """
    wanted = settings.max_length
    if served.max_model_len is not None and wanted is not None and served.max_model_len < wanted:
        raise EvaluationError(
            f"{served.name} is served with a context of {served.max_model_len} tokens, and the evaluation asks for up to {wanted}. Serve "
            f"it with more (vLLM: --max-model-len {wanted}), or set eval.max_length={served.max_model_len}."
        )
