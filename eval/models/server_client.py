"""Make lm_eval's clients of OpenAI-compatible servers ask what its `hf` model asks.

Unchanged, they silently differ from `hf`: no beginning-of-text token, a chat template without `enable_thinking`, a temperature
that `do_sample: false` should rule out, stop tokens only as texts and none at all where requests run at once, a prompt cut one token
earlier without a message, a score that leaves out an answer's last token where the server generates none, and an empty answer where the
response is none. Each has a test.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import aiohttp
import requests
from lm_eval.models.api_models import JsonChatStr
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

from eval.models.generation import (
    cut,
    encode_as_hf,
    extensions,
    make_request,
    render_chat,
    special_tokens,
    strips_leading_space,
)
from eval.models.server import (
    Served,
    authorization,
    chat_extras,
    choices_of,
    innermost,
    likelihood_request,
    score_choice,
    shortened,
)
from eval.tasks.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

RETRIES = 3
MOST_STOPS = 4
"""OpenAI's own API refuses a request with more `stop` texts; we cut the answers at the others."""


class NoAnswer(Exception):
    """The server did not answer, or its response is no answer."""


def load_served(served: Served, tokenizer: PreTrainedTokenizerBase, settings: Settings) -> ServedModel:
    """lm_eval's client of a served model."""
    return (ServedChat if served.api == "chat" else ServedCompletions)(served, tokenizer, settings)


class ServedModel:
    """What both kinds of request share; goes before lm_eval's class, whose methods it wraps."""

    path = ""

    def __init__(self, served: Served, tokenizer: PreTrainedTokenizerBase, settings: Settings) -> None:
        self.served, self.prompts, self.settings = served, tokenizer, settings
        self.special = special_tokens(tokenizer)
        self.strips_space = strips_leading_space(tokenizer)
        self.stop_texts = [str(tokenizer.decode([number])) for number in settings.stop_token_ids]
        batched = isinstance(settings.batch_size, int) and served.api == "completions"
        super().__init__(  # type: ignore[call-arg]
            base_url=f"{served.base_url}{self.path}",
            model=served.name,
            tokenizer_backend="None",  # ours is set afterwards: lm_eval would load one by its name
            num_concurrent=served.num_concurrent,
            max_retries=RETRIES,
            timeout=served.timeout,
            batch_size=settings.batch_size if batched else 1,
            seed=settings.seed,
            max_length=settings.max_length
            or 2048,  # lm_eval takes one off, for the token that a scoring request generates
            # Without a header of its own lm_eval sends the user's OPENAI_API_KEY to any server.
            header=authorization(served.api_key_env) or {"Accept": "application/json"},
        )

    def prompt_of(self, messages: Any) -> dict[str, Any]:
        """The part of a request that holds the prompt."""
        raise NotImplementedError

    def _create_payload(
        self,
        messages: Any,
        generate: bool = False,
        gen_kwargs: dict[str, Any] | None = None,
        seed: int = 0,
        eos: Any = None,
        **_: Any,
    ) -> dict[str, Any]:
        if not generate:
            return likelihood_request(self.served.name, messages, seed)
        request = make_request(gen_kwargs or {}, self.settings, self.special)
        payload = {"model": self.served.name, "max_tokens": request.max_tokens, "seed": seed, **request.sampling}
        if self.served.dialect == "vllm":
            stops: dict[str, Any] = {"stop": request.until, "return_token_ids": True} | extensions(request)
        else:  # a server that takes no ids and writes special tokens out stops at their texts
            stops = {"stop": list(dict.fromkeys([*request.until, *self.stop_texts]))[:MOST_STOPS]}
        return payload | stops | self.prompt_of(messages)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers, each cut where its own task says: a server may follow four such texts, or none."""
        texts = super().generate_until(requests, disable_tqdm)  # type: ignore[misc]
        ends = [make_request(request.args[1], self.settings, self.special).until for request in requests]
        return [cut(text, until) for text, until in zip(texts, ends, strict=True)]

    def parse_generations(self, outputs: Any, **_: Any) -> list[str]:
        """Texts in the order of the prompts: lm_eval's own gives an empty one where the response is no answer."""
        answers = outputs if isinstance(outputs, list) else [outputs]
        return [
            self.text_of(choice)
            for one in answers
            for choice in choices_of(one, len(one["choices"]), self.served.place)
        ]

    def text_of(self, choice: dict[str, Any]) -> str:
        """An answer as transformers would decode it, not yet cut."""
        ids = choice.get("token_ids")
        if self.served.dialect == "vllm" and isinstance(ids, list):
            return str(self.prompts.decode(ids, skip_special_tokens=True))
        message = choice.get("message")
        text = message.get("content", "") if isinstance(message, dict) else choice.get("text")
        if text is None and isinstance(message, dict) and choice.get("finish_reason"):
            text = ""  # all of it was reasoning, or nothing
        if not isinstance(text, str):
            raise NoAnswer(f"{self.served.place} answers without a text: {shortened(str(choice))!r}")
        # JSON can carry half a surrogate pair, a file in UTF-8 cannot.
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        text = cut(text, self.stop_texts)
        return text[1:] if self.strips_space and text.startswith(" ") else text

    async def get_batched_requests(self, *arguments: Any, **keys: Any) -> Any:
        """Several requests at once: the first that fails is raised, and asyncio must not print the others' tracebacks."""
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        return await super().get_batched_requests(*arguments, **keys)  # type: ignore[misc]

    def _count(self, messages: Any) -> int:
        return len(messages) if self.served.api == "completions" else 1

    def model_call(self, messages: Any, **keys: Any) -> Any:
        """One request, where they are sent one after another."""
        try:
            answer = super().model_call(messages, **keys)  # type: ignore[misc]
            choices_of(answer, self._count(messages), self.served.place)
        except Exception as error:
            raise self._no_answer(error) from error
        return answer

    async def amodel_call(self, session: Any, sem: Any, messages: Any, **keys: Any) -> Any:
        """One request of several at once."""
        try:
            answers = await super().amodel_call(session, sem, messages, **keys)  # type: ignore[misc]
            if len(answers) != self._count(messages):
                raise NoAnswer(
                    f"{self.served.place} answers {len(answers)}, which is not {self._count(messages)} choices"
                )
        except asyncio.CancelledError:
            raise
        except Exception as error:
            raise self._no_answer(error) from error
        return answers

    def _no_answer(self, error: Exception) -> NoAnswer:
        """An error of a client as one that names the server."""
        place = self.served.place
        if isinstance(error, NoAnswer):
            return error
        if isinstance(error, (requests.Timeout, TimeoutError)):
            return NoAnswer(f"{place} has not answered within {self.served.timeout} s (eval.server.timeout)")
        if isinstance(error, (aiohttp.ContentTypeError, json.JSONDecodeError, requests.JSONDecodeError)):
            return NoAnswer(f"{place} answers with something that is no JSON")
        status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
        if status:
            return NoAnswer(f"{place} answers {status}; the log says more")
        if isinstance(error, (aiohttp.ClientError, requests.RequestException)):
            return NoAnswer(f"{place} is gone: {innermost(error)}")
        return NoAnswer(f"{place}: {error}")


class ServedCompletions(ServedModel, LocalCompletionsAPI):  # type: ignore[misc]  # lm_eval ships no types
    """Prompts as token ids."""

    path = "/completions"

    def __init__(self, served: Served, tokenizer: PreTrainedTokenizerBase, settings: Settings) -> None:
        super().__init__(served, tokenizer, settings)
        self.max_length: int  # lm_eval has taken one off already
        self.tokenizer, self.tokenizer_backend, self.tokenized_requests = tokenizer, "huggingface", True

    def prompt_of(self, messages: Any) -> dict[str, Any]:
        """Token ids."""
        return {"prompt": messages}

    def tok_encode(
        self,
        string: str | Sequence[str],
        left_truncate_len: int | None = None,
        add_special_tokens: bool | None = None,
        **_: Any,
    ) -> Any:
        """As lm_eval's `hf` model does: a prompt that begins with the beginning-of-text token gets no second."""
        default = self.settings.add_bos_token
        if isinstance(string, str):
            own = default if add_special_tokens is None else add_special_tokens
            bos = None if add_special_tokens is not None else str(self.prompts.decode(self.prefix_token_id))
            return encode_as_hf(self.prompts, string, own, bos)
        return [encode_as_hf(self.prompts, one, default, self.prompts.bos_token) for one in string]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A chat as a prompt."""
        return render_chat(self.prompts, self.settings, chat_history, add_generation_prompt)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """As above; and logs which prompts lose their beginning."""
        length: int = self.max_length
        self.max_length = length + 1  # a prompt and its answer may fill the context
        try:
            room = min(self.max_length - int(request.args[1]["max_gen_toks"]) for request in requests)
            longest = max(map(len, self.tok_encode([request.args[0] for request in requests])))
            if longest > room:
                logger.warning(
                    "Left truncation applied. A prompt has %d tokens, and there is room for %d.", longest, room
                )
            return super().generate_until(requests, disable_tqdm)
        finally:
            self.max_length = length

    def parse_logprobs(
        self, outputs: Any, tokens: list[list[int]] | None = None, ctxlens: list[int] | None = None, **_: Any
    ) -> list[tuple[float, bool]]:
        """Scores of the answers within the prompts."""
        assert tokens is not None and ctxlens is not None
        (answer,) = outputs if isinstance(outputs, list) else [outputs]
        choices = choices_of(answer, len(tokens), self.served.place)
        return [
            score_choice(choice, prompt, slice(start, len(prompt)), self.served.place)
            for choice, prompt, start in zip(choices, tokens, ctxlens, strict=True)
        ]


class ServedChat(ServedModel, LocalChatCompletion):  # type: ignore[misc]
    """Messages, which the server puts into its own template."""

    path = "/chat/completions"

    def prompt_of(self, messages: Any) -> dict[str, Any]:
        """The messages, and how to render them."""
        return {"messages": messages, **chat_extras(self.served, self.settings)}

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> JsonChatStr:
        """A chat as text, to be sent as messages."""
        assert add_generation_prompt, "check_requests refuses tasks that begin the answer"
        return JsonChatStr(json.dumps(chat_history, ensure_ascii=False))
