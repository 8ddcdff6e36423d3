"""Answers lm_eval's requests through an OpenAI-compatible server, as its `hf` model would answer them.

lm_eval's own clients silently differ from `hf` in ten ways (docs/evaluation-backends.md), so this one is written from its base class.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from eval.models.generation import cut, encode_as_hf, make_request, render_chat, special_tokens
from eval.models.served import Served, choice_of, score_answer, shortened
from eval.tasks.settings import Settings
from sft.errors import EvaluationError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

TRIES = 3
SECONDS_BETWEEN_TRIES = 2.0
MOST_STOPS = 4
"""OpenAI's own API refuses a request with more `stop` texts; we cut the answers at the others."""

Work = TypeVar("Work")
Answer = TypeVar("Answer")
Pair = tuple[tuple[str, str], list[int], list[int]]
"""Texts of context and answer, and their token ids."""


class ServedModel(TemplateLM):  # type: ignore[misc]  # lm_eval ships no types
    """A served model."""

    def __init__(self, served: Served, tokenizer: PreTrainedTokenizerBase, settings: Settings) -> None:
        super().__init__()
        self.served, self.tokenizer, self.settings = served, tokenizer, settings
        self.special = special_tokens(tokenizer)
        self.max_length = settings.max_length or served.max_model_len or 2048
        self.stop_texts = [str(tokenizer.decode([number])) for number in settings.stop_token_ids]
        # SentencePiece: an answer that is decoded alone, as transformers does, loses its leading space.
        last = tokenizer.encode("a a", add_special_tokens=False)[-1:]
        self.strips_space = not str(tokenizer.decode(last)).startswith(" ")

    @property
    def eot_token_id(self) -> int:
        """As lm_eval's `hf` model."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """As lm_eval's `hf` model: the token before a text that is scored from its beginning."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        """For lm_eval's cache of requests, which is not used."""
        return str(self.tokenizer.name_or_path)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids as lm_eval's `hf` model makes them."""
        own = self.settings.add_bos_token if add_special_tokens is None else add_special_tokens
        bos = None if add_special_tokens is not None else str(self.tokenizer.decode(self.prefix_token_id))
        return encode_as_hf(self.tokenizer, string, own, bos)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A chat as a prompt; as JSON where it is sent as messages."""
        if self.served.api == "chat":
            return json.dumps(chat_history, ensure_ascii=False)
        return render_chat(self.tokenizer, self.settings, chat_history, add_generation_prompt)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log probabilities of whole texts, in windows of the context."""
        length = self.max_length - 1  # one is for the token that a request generates
        windows = [
            [
                (("", ""), *make_disjoint_window(window))
                for window in get_rolling_token_windows(
                    self.tok_encode(request.args[0]), self.prefix_token_id, max_seq_len=length, context_len=1
                )
            ]
            for request in requests
        ]
        flat = iter(self._loglikelihood_tokens([one for text in windows for one in text], disable_tqdm))
        return [sum(next(flat)[0] for _ in text) for text in windows]

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        def score(request: Pair) -> tuple[float, bool]:
            ids = request[1] + request[2]
            kept = ids[-(self.max_length - 1) :]
            if len(kept) < len(ids):
                logger.warning("Left truncation applied. A prompt and its answer have %d tokens.", len(ids))
            return score_answer(self.served, kept, slice(len(kept) - len(request[2]), len(kept)), self.settings.seed)

        return self._all(score, requests, "Running loglikelihood requests", disable_tqdm)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers, each cut where its task says: a server may follow four such texts, or none."""

        def answer(request: Any) -> str:
            prompt, gen_kwargs = request.args
            wanted = make_request(gen_kwargs, self.settings, self.special)
            payload = {"max_tokens": wanted.max_tokens, "seed": self.settings.seed, **wanted.sampling}
            if self.served.dialect == "vllm":
                # The served model's own generation config decides nothing.
                payload |= {"stop": wanted.until, "stop_token_ids": wanted.stop_token_ids, "ignore_eos": True}
                payload |= {"repetition_penalty": wanted.repetition_penalty, "return_token_ids": True}
            else:  # a server that takes no ids and writes special tokens out stops at their texts
                payload["stop"] = list(dict.fromkeys([*wanted.until, *self.stop_texts]))[:MOST_STOPS]
            sent = self.served.prompt(self._prompt(prompt, self.max_length - wanted.max_tokens), self.settings)
            choice = choice_of(self.served.complete(payload | sent), self.served.place)
            return cut(self.text_of(choice), wanted.until)

        return self._all(answer, requests, "Running generate_until requests", disable_tqdm)

    def _prompt(self, prompt: str, room: int) -> Any:
        """What is sent of a prompt: token ids that leave room for the answer, or the messages."""
        if self.served.api == "chat":
            return json.loads(prompt)
        ids = encode_as_hf(self.tokenizer, prompt, self.settings.add_bos_token, self.tokenizer.bos_token)
        if len(ids) > room:
            logger.warning("Left truncation applied. A prompt has %d tokens, and there is room for %d.", len(ids), room)
        return [ids[-room:]]

    def text_of(self, choice: dict[str, Any]) -> str:
        """An answer as transformers would decode it, not yet cut."""
        ids, message = choice.get("token_ids"), choice.get("message")
        if self.served.dialect == "vllm" and isinstance(ids, list):
            return str(self.tokenizer.decode(ids, skip_special_tokens=True))
        text = message.get("content", "") if isinstance(message, dict) else choice.get("text")
        if text is None and isinstance(message, dict) and choice.get("finish_reason"):
            text = ""  # all of it was reasoning, or nothing
        if not isinstance(text, str):
            raise EvaluationError(f"{self.served.place} answers without a text: {shortened(str(choice))!r}")
        text = cut(
            text.encode(errors="replace").decode(), self.stop_texts
        )  # a file in UTF-8 takes no half surrogate pair
        return text.removeprefix(" ") if self.strips_space else text

    def _all(
        self, ask: Callable[[Work], Answer], requests: Sequence[Work], title: str, disable_tqdm: bool
    ) -> list[Answer]:
        """Send several requests at a time; the first that fails ends all."""

        def ask_again(request: Work) -> Answer:
            for attempt in range(1, TRIES):
                try:
                    return ask(request)
                except EvaluationError as error:
                    logger.warning("Attempt %d: %s", attempt, error)
                    time.sleep(SECONDS_BETWEEN_TRIES)
            return ask(request)

        pool = ThreadPoolExecutor(self.served.num_concurrent)
        try:
            return list(tqdm(pool.map(ask_again, requests), title, len(requests), disable=disable_tqdm))
        finally:
            pool.shutdown(cancel_futures=True)
