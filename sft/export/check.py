"""Whether what is handed over is what was trained: the logits of the finished folder against those of what it was made from."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from sft.errors import ExportError
from sft.model.live import logits_distance

_LONGEST = 256
_LIMITS = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""How far logits may be apart, in parts of their norm, where adapters were merged. The sum of weight and adapter is rounded once, to the
format of the weights: in fp32 that is nothing, in bf16 (8 bits) up to 0.4% of each weight, in fp16 (11 bits) an eighth of that, and
errors of layers add up."""

_OF_THE_UPDATE = 0.5
"""Share of what the adapters do to the logits that rounding may take. Adapters that were not merged at all take all of it."""

_COPY_LIMIT = 0.0
"""A copy computes the same numbers in the same order."""


@dataclass(frozen=True)
class Reference:
    """What the logits must be."""

    logits: list[torch.Tensor]
    """Of each row, fp32."""

    of: str
    """What they are of, for a person."""

    untrained: list[torch.Tensor] | None = None
    """Of the base without its adapters, where there are some."""

    merged_in: torch.dtype | None = None
    """The format that the sum was rounded to; None where nothing was added."""


@dataclass(frozen=True)
class Checked:
    """How far they were apart."""

    distance: float
    allowed: float
    of: str
    arithmetic: str

    def __str__(self) -> str:
        within = (
            "equal"
            if self.allowed == 0
            else f"apart by {self.distance:.1e} of their norm, of {self.allowed:.1e} allowed"
        )
        return f"loaded again by from_pretrained, its logits and those of {self.of} are {within} (computed in {self.arithmetic})"


def probe_rows(tokenizer: Any, new_tokens: tuple[str, ...]) -> list[list[int]]:
    """Token ids to compare the logits of: a conversation, texts in several scripts, and the new tokens.

    Args:
        tokenizer: Of the folder.
        new_tokens: The recipe's.
    """
    texts = [
        "What is the capital of France? Paris, the city of 1 + 1 = 2 lights.",
        "def f(x):\n    return x * 2  # größer 中文",
    ]
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": texts[0]}, {"role": "assistant", "content": texts[1]}]
        texts.append(tokenizer.apply_chat_template(turns, tokenize=False))
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"][:_LONGEST] for text in texts]
    if new_tokens:
        new = tokenizer.convert_tokens_to_ids(list(new_tokens))
        rows.append([token for pair in zip(rows[0], new * len(rows[0]), strict=False) for token in pair][:_LONGEST])
    return [row for row in rows if row]


def arithmetic_for(weights: int, dtype: torch.dtype) -> torch.dtype:
    """What to compute logits in: fp32, in which only what is on disk tells them apart, where the machine has the memory.

    Args:
        weights: Elements of the model.
        dtype: That they are saved in.
    """
    room: int = psutil.virtual_memory().available
    return torch.float32 if weights * 4 * 1.3 < room else dtype


def logits_of(model: Any, rows: list[list[int]]) -> list[torch.Tensor]:
    """Logits of each row by itself, fp32."""
    model.eval()
    with torch.no_grad():
        return [model(input_ids=torch.tensor([row]), use_cache=False).logits[0].float() for row in rows]


def load(folder: Path, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """A folder's model, as anybody loads it.

    Raises:
        ExportError: It cannot be loaded, or tensors of it are missing or left over.
    """
    from transformers import AutoModelForCausalLM

    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, ImportError, KeyError) as error:
        raise ExportError(f"{folder} cannot be loaded: {type(error).__name__}: {str(error).splitlines()[0]}") from None
    wrong = [f"{what.removesuffix('_keys')}: {sorted(map(str, info[what]))[0]}" for what in info if info[what]]
    if wrong:
        raise ExportError(f"{folder} does not hold the model of its config.json: {', '.join(wrong)}.")
    return model


def compare(folder: Path, rows: list[list[int]], reference: Reference, dtype: torch.dtype, remote: bool) -> Checked:
    """Load the finished folder, and compare.

    Args:
        folder: Complete.
        rows: From probe_rows.
        reference: Of what the folder was made from, computed in `dtype`.
        dtype: Of the arithmetic.
        remote: The recipe's trust_remote_code.

    Raises:
        ExportError: It is another model.
    """
    found = with_model(lambda: load(folder, dtype, remote), lambda model: logits_of(model, rows))
    return judge(found, reference, dtype)


def judge(found: list[torch.Tensor], reference: Reference, dtype: torch.dtype) -> Checked:
    """Whether logits are near enough to those they should be.

    Raises:
        ExportError: They are not, or are no numbers.
    """
    if not all(one.isfinite().all() for one in (*found, *reference.logits)):
        raise ExportError(
            f"The logits of {reference.of} are not all finite: the weights hold NaN or infinity, or overflow. It is not exported; export a "
            "checkpoint from before that: --checkpoint N."
        )
    apart = max(logits_distance(one, other) for one, other in zip(reference.logits, found, strict=True))
    allowed = _allowed(reference, dtype)
    words = str(dtype).removeprefix("torch.")
    if not apart <= allowed:
        raise ExportError(
            f"What would be handed over is not what was trained: its logits and those of {reference.of} differ by "
            f"{apart:.2%} of their norm, "
            f"and {allowed:.2%} is allowed (computed in {words}). Nothing was exported."
        )
    return Checked(apart, allowed, reference.of, words)


def _allowed(reference: Reference, dtype: torch.dtype) -> float:
    if reference.merged_in is None:
        return _COPY_LIMIT
    limit = max(_LIMITS[reference.merged_in], _LIMITS[dtype])
    if reference.untrained is None:
        return limit
    update = max(logits_distance(one, other) for one, other in zip(reference.logits, reference.untrained, strict=True))
    return min(limit, max(_OF_THE_UPDATE * update, _LIMITS[torch.float32]))


def with_model(make: Callable[[], Any], use: Callable[[Any], Any]) -> Any:
    """Use a model, and give its memory back: two would not fit beside each other."""
    model = make()
    try:
        return use(model)
    finally:
        del model
        gc.collect()
