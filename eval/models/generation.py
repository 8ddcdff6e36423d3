"""Works out for servers what transformers would do: sampling, what ends an answer, how a chat becomes a prompt. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eval.tasks.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# transformers' own defaults where neither the task nor the generation config sets one; with top_k=50 sampling is cut.
SAMPLING_DEFAULTS = {"top_p": 1.0, "top_k": 50, "min_p": 0.0}
CARRIED = {"do_sample", "temperature", "repetition_penalty", *SAMPLING_DEFAULTS}
"""Keys of a generation config that a request can carry."""

NO_EFFECT = {
    "use_cache",
    "bos_token_id",
    "cache_implementation",
    "output_attentions",
    "output_hidden_states",
    "return_dict_in_generate",
}
"""Keys of a generation config that change no answer."""


@dataclass(frozen=True)
class Request:
    """The generation arguments of one answer."""

    max_tokens: int
    until: list[str]
    """Texts that end the answer, without special tokens."""

    stop_token_ids: list[int]
    sampling: dict[str, Any]
    """temperature and, where the answer is sampled, top_p, top_k and min_p."""

    repetition_penalty: float

    @property
    def beyond_openai(self) -> dict[str, Any]:
        """The arguments that only vLLM's API can carry, where they have an effect."""
        effective = {key: self.sampling[key] for key in ("top_k", "min_p") if self.sampling.get(key)}
        return effective | ({"repetition_penalty": self.repetition_penalty} if self.repetition_penalty != 1.0 else {})


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """The ids of the tokens that are left out of an answer's text."""
    return {str(token): number for number, token in tokenizer.added_tokens_decoder.items() if token.special}


def make_request(gen_kwargs: dict[str, Any], settings: Settings, special: dict[str, int]) -> Request:
    """Read a task's generation_kwargs as transformers would beside the tuned model's generation config."""
    from lm_eval.models.utils import normalize_gen_kwargs

    given = dict(normalize_gen_kwargs(gen_kwargs, settings.default_max_gen_toks))
    until = [text for text in given["until"] if text]
    sampling: dict[str, Any] = {"temperature": 0.0}
    if given["do_sample"]:
        chosen = {key: given.get(key, settings.generation.get(key, value)) for key, value in SAMPLING_DEFAULTS.items()}
        sampling = {"temperature": float(given.get("temperature", 0.0)), **chosen}
    penalty = given.get("repetition_penalty", settings.generation.get("repetition_penalty", 1.0))
    return Request(
        max_tokens=int(given["max_gen_toks"]),
        until=[text for text in until if text not in special],
        # The text of such a token is not in the answer: only its id can end it.
        stop_token_ids=sorted({*settings.stop_token_ids, *(special[text] for text in until if text in special)}),
        sampling=sampling,
        repetition_penalty=float(penalty),
    )


def cut(text: str, until: Iterable[str]) -> str:
    """Cut an answer at the first of the texts that end it.

    >>> cut("4. Next: 5", ["Next", "."])
    '4'
    """
    return min((text.split(end)[0] for end in until), key=len, default=text)


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    settings: Settings,
    chat: list[dict[str, str]],
    add_generation_prompt: bool = True,
) -> str:
    """A chat as a prompt, as lm_eval's `hf` model renders it."""
    import jinja2

    switches = {} if settings.enable_thinking is None else {"enable_thinking": settings.enable_thinking}
    switches |= {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
    try:
        return str(tokenizer.apply_chat_template(chat, tokenize=False, **switches))
    except jinja2.exceptions.TemplateError:
        # resolve_settings has checked that the recipe's system prompt is rendered; `hf` too drops a task's own.
        without = [turn for turn in chat if turn["role"] != "system"]
        return str(tokenizer.apply_chat_template(without, tokenize=False, **switches))


def encode_as_hf(
    tokenizer: PreTrainedTokenizerBase, text: str, add_bos_token: bool | None, bos: str | None
) -> list[int]:
    """A prompt's token ids, with the beginning that lm_eval's `hf` model gives it; the prompt may already have the `bos`."""
    special = False if bos and text.startswith(bos) else add_bos_token
    own = {} if special is None else {"add_special_tokens": special}  # None: the tokenizer's default
    ids: list[int] = tokenizer(text, return_attention_mask=False, **own)["input_ids"]
    return ids
