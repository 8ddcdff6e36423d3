"""What an answer is asked of a server with, and how it is read: the same for completions and chats."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import aiohttp
import requests

from eval.models.answering import cut, extensions, make_request, special_tokens, strips_leading_space
from eval.models.server import Served, authorization, reason_of
from eval.models.server_answers import choices_of, shortened
from eval.tasks.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RETRIES = 3
MOST_STOPS = 4
"""Texts that OpenAI's own API takes as `stop`: it refuses a request with more. Answers are cut at the others here."""


class NoAnswer(Exception):
    """The server did not answer, or what it answered is none."""


def whole_characters(text: str) -> str:
    r"""A text in which half a surrogate pair, which JSON can carry and no file in UTF-8, is what transformers decodes it to.

    >>> whole_characters("a\ud83d b"), whole_characters("\ud83d\ude00") == chr(0x1F600)
    ('a\ufffd b', True)
    """
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


class Asking:
    """What an answer is asked with and how it is read, the same for both kinds of request."""

    def __init__(self, served: Served, tokenizer: PreTrainedTokenizerBase, settings: Settings) -> None:
        self.served, self.tokenizer, self.settings = served, tokenizer, settings
        self.special = special_tokens(tokenizer)
        self.whose = f"{served.name} at {served.base_url}"
        self.strips_space = strips_leading_space(tokenizer)
        self.stop_texts = [str(tokenizer.decode([number])) for number in settings.stop_token_ids]

    def arguments(self) -> dict[str, Any]:
        """For lm_eval's constructors."""
        batch_size = 1 if self.settings.batch_size == "auto" else self.settings.batch_size
        return {
            "model": self.served.name,
            "tokenizer_backend": "None",  # ours is given afterwards: lm_eval would load one by its name
            "num_concurrent": self.served.num_concurrent,
            "max_retries": RETRIES,
            "timeout": self.served.timeout,
            "batch_size": batch_size,
            "seed": self.settings.seed,
            # lm_eval takes one off, for the token that a request for scores generates.
            "max_length": self.settings.max_length or 2048,
            # Without a header of its own lm_eval sends the user's OPENAI_API_KEY to any server.
            "header": authorization(self.served.api_key_env) or {"Accept": "application/json"},
        }

    def generation(self, gen_kwargs: dict[str, Any], seed: int) -> dict[str, Any]:
        """The keys of a request but for its prompt."""
        request = make_request(gen_kwargs, self.settings, self.special)
        asked: dict[str, Any] = {
            "model": self.served.name,
            "max_tokens": request.max_tokens,
            "seed": seed,
            **request.sampling,
        }
        if self.served.dialect == "vllm":
            return asked | {"stop": request.until, "return_token_ids": True} | extensions(request)
        # Their ids cannot be told: a server that writes special tokens out stops at their texts.
        return asked | {"stop": list(dict.fromkeys([*request.until, *self.stop_texts]))[:MOST_STOPS]}

    def text_of(self, choice: dict[str, Any]) -> str:
        """An answer as transformers would decode it, not yet cut."""
        ids = choice.get("token_ids")
        if self.served.dialect == "vllm" and isinstance(ids, list):
            return str(self.tokenizer.decode(ids, skip_special_tokens=True))
        message = choice.get("message")
        text = message.get("content", "") if isinstance(message, dict) else choice.get("text")
        if text is None and isinstance(message, dict) and choice.get("finish_reason"):
            text = ""  # all of it was thoughts, or nothing
        if not isinstance(text, str):
            raise NoAnswer(f"{self.whose} answers without a text: {shortened(str(choice))!r}")
        text = cut(whole_characters(text), self.stop_texts)
        return text[1:] if self.strips_space and text.startswith(" ") else text

    def finish(self, text: str, gen_kwargs: dict[str, Any]) -> str:
        """An answer up to what ends it: servers may take four such texts, or none."""
        return cut(text, make_request(gen_kwargs, self.settings, self.special).until)

    def check(self, outputs: object, prompts: int) -> None:
        """Raise where an answer has not a choice for each prompt."""
        choices_of(outputs, prompts, self.whose)


def told(error: Exception, whose: str, timeout: int) -> NoAnswer:
    """An error of a client as one that names the server."""
    if isinstance(error, NoAnswer):
        return error
    if isinstance(error, (requests.Timeout, TimeoutError)):
        return NoAnswer(f"{whose} has not answered within {timeout} s (eval.server.timeout)")
    if isinstance(error, (aiohttp.ContentTypeError, json.JSONDecodeError, requests.JSONDecodeError)):
        return NoAnswer(f"{whose} answers with something that is no JSON")
    status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    if status:
        return NoAnswer(f"{whose} answers {status}; the log says more")
    if isinstance(error, (aiohttp.ClientError, requests.RequestException)):
        return NoAnswer(f"{whose} is gone: {reason_of(error)}")
    return NoAnswer(f"{whose}: {error}")
