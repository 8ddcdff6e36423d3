"""lm_eval's clients of OpenAI-compatible servers, made to ask what its `hf` model asks.

As they are, they differ from `hf` without a word: no beginning-of-text token, a chat template without `enable_thinking`, a temperature
that `do_sample: false` should rule out, stop tokens only as texts and none at all where requests run at once, a prompt cut one token
earlier and not told, a score that leaves out an answer's last token where the server generates none, and an empty answer where what
comes back is no answer. Each has a test.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lm_eval.models.api_models import JsonChatStr
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

from eval.models.answering import encode_as_hf, render_chat
from eval.models.server import Served
from eval.models.server_answers import choices_of, likelihood_request, score_choice
from eval.models.server_probe import chat_extras
from eval.models.server_requests import Asking, NoAnswer, told
from eval.tasks.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


def tell_one_failure() -> None:
    """Of requests that fail at once the first is raised; asyncio would print the others with their tracebacks when they are collected."""
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)


class ServedCompletions(LocalCompletionsAPI):  # type: ignore[misc]  # lm_eval ships no types
    """Prompts as token ids."""

    def __init__(self, served: Served, tokenizer: PreTrainedTokenizerBase, settings: Settings) -> None:
        self.asking = Asking(served, tokenizer, settings)
        super().__init__(base_url=f"{served.base_url}/completions", **self.asking.arguments())
        self.max_length: int  # lm_eval has taken one off already
        self.tokenizer, self.tokenizer_backend, self.tokenized_requests = tokenizer, "huggingface", True

    def tok_encode(
        self,
        string: str | Sequence[str],
        left_truncate_len: int | None = None,
        add_special_tokens: bool | None = None,
        **_: Any,
    ) -> Any:
        """As lm_eval's `hf` model does: a prompt that begins with the beginning-of-text token gets no second."""
        own = self.asking.settings.add_bos_token if add_special_tokens is None else add_special_tokens
        if isinstance(string, str):
            bos = None if add_special_tokens is not None else str(self.tokenizer.decode(self.prefix_token_id))
            return encode_as_hf(self.tokenizer, string, own, bos)
        return [
            encode_as_hf(self.tokenizer, one, self.asking.settings.add_bos_token, self.tokenizer.bos_token)
            for one in string
        ]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A chat as a prompt."""
        return render_chat(self.tokenizer, self.asking.settings, chat_history, add_generation_prompt)

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
            return likelihood_request(self.asking.served.name, messages, seed)
        return self.asking.generation(gen_kwargs or {}, seed) | {"prompt": messages}

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers, each cut where its own task says."""
        length: int = self.max_length
        self.max_length = length + 1  # a prompt and its answer may fill the context
        try:
            room = min(self.max_length - int(request.args[1]["max_gen_toks"]) for request in requests)
            longest = max(map(len, self.tok_encode([request.args[0] for request in requests])))
            if longest > room:
                logger.warning(
                    "Left truncation applied. A prompt has %d tokens, and there is room for %d.", longest, room
                )
            texts = super().generate_until(requests, disable_tqdm)
        finally:
            self.max_length = length
        return [self.asking.finish(text, request.args[1]) for text, request in zip(texts, requests, strict=True)]

    def parse_generations(self, outputs: Any, **_: Any) -> list[str]:
        """Texts in the order of the prompts."""
        answers = outputs if isinstance(outputs, list) else [outputs]
        return [
            self.asking.text_of(choice)
            for one in answers
            for choice in choices_of(one, len(one["choices"]), self.asking.whose)
        ]

    def parse_logprobs(
        self, outputs: Any, tokens: list[list[int]] | None = None, ctxlens: list[int] | None = None, **_: Any
    ) -> list[tuple[float, bool]]:
        """Scores of the answers within the prompts."""
        assert tokens is not None and ctxlens is not None
        (answer,) = outputs if isinstance(outputs, list) else [outputs]
        whose = self.asking.whose
        return [
            score_choice(choice, prompt, slice(start, len(prompt)), whose)
            for choice, prompt, start in zip(choices_of(answer, len(tokens), whose), tokens, ctxlens, strict=True)
        ]

    async def get_batched_requests(self, *requests: Any, **kwargs: Any) -> Any:
        """Several requests at once."""
        tell_one_failure()
        return await super().get_batched_requests(*requests, **kwargs)

    def model_call(self, messages: Any, **kwargs: Any) -> Any:
        """One request, where they are sent one after another."""
        try:
            answer = super().model_call(messages, **kwargs)
            self.asking.check(answer, len(messages))
        except Exception as error:
            raise told(error, self.asking.whose, self.timeout) from error
        return answer

    async def amodel_call(self, session: Any, sem: Any, messages: Any, **kwargs: Any) -> Any:
        """One request of several at once."""
        try:
            answers = await super().amodel_call(session, sem, messages, **kwargs)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            raise told(error, self.asking.whose, self.timeout) from error
        if len(answers) != len(messages):
            raise NoAnswer(
                f"{self.asking.whose} was asked {len(messages)} prompts and answers {len(answers)}, which is not {len(messages)} choices"
            )
        return answers


class ServedChat(LocalChatCompletion):  # type: ignore[misc]
    """Messages, which the server puts into its own template."""

    def __init__(self, served: Served, tokenizer: PreTrainedTokenizerBase, settings: Settings) -> None:
        self.asking = Asking(served, tokenizer, settings)
        super().__init__(base_url=f"{served.base_url}/chat/completions", **self.asking.arguments() | {"batch_size": 1})

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> JsonChatStr:
        """A chat as text, to be sent as messages."""
        assert add_generation_prompt, "check_requests refuses tasks that begin the answer"
        return JsonChatStr(json.dumps(chat_history, ensure_ascii=False))

    def _create_payload(
        self,
        messages: Any,
        generate: bool = False,
        gen_kwargs: dict[str, Any] | None = None,
        seed: int = 0,
        eos: Any = None,
        **_: Any,
    ) -> dict[str, Any]:
        asked = self.asking.generation(gen_kwargs or {}, seed) | {"messages": messages}
        return asked | chat_extras(self.asking.served, self.asking.settings)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers, each cut where its own task says."""
        texts = super().generate_until(requests, disable_tqdm)
        return [self.asking.finish(text, request.args[1]) for text, request in zip(texts, requests, strict=True)]

    def parse_generations(self, outputs: Any, **_: Any) -> list[str]:
        """The one text: lm_eval's own gives an empty one where what comes back is no answer."""
        answers = outputs if isinstance(outputs, list) else [outputs]
        return [self.asking.text_of(choice) for one in answers for choice in choices_of(one, 1, self.asking.whose)]

    async def get_batched_requests(self, *requests: Any, **kwargs: Any) -> Any:
        """Several requests at once."""
        tell_one_failure()
        return await super().get_batched_requests(*requests, **kwargs)

    def model_call(self, messages: Any, **kwargs: Any) -> Any:
        """One request, where they are sent one after another."""
        try:
            answer = super().model_call(messages, **kwargs)
            self.asking.check(answer, 1)
        except Exception as error:
            raise told(error, self.asking.whose, self.timeout) from error
        return answer

    async def amodel_call(self, session: Any, sem: Any, messages: Any, **kwargs: Any) -> Any:
        """One request of several at once."""
        try:
            return await super().amodel_call(session, sem, messages, **kwargs)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            raise told(error, self.asking.whose, self.timeout) from error


def load_served(
    served: Served, tokenizer: PreTrainedTokenizerBase, settings: Settings
) -> ServedCompletions | ServedChat:
    """lm_eval's client of a served model."""
    return (ServedChat if served.api == "chat" else ServedCompletions)(served, tokenizer, settings)
