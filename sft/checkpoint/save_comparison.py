"""The first rank's part in comparing a saved model with the live one: what it asks the process that loads it, and what it makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sft.checkpoint.loader_process import Checker, Ended
from sft.errors import RunError
from sft.parallel.full_tensors import Whole

_SHOWN = 6


@dataclass
class Found:
    """What a check came to."""

    problems: list[str]
    tensors: int = 0
    distance: float = 0.0
    seconds: float = 0.0


class Comparison:
    """One saved folder, being loaded.

    Args:
        checker: The process.
        folder: What it loads.
        rows: Token ids, all of one length.
        tokenizer: The training's.
        trust_remote_code: The recipe's.

    Raises:
        RunError: The process has ended.
    """

    def __init__(
        self, checker: Checker, folder: Path, rows: list[list[int]], tokenizer: Any, trust_remote_code: bool
    ) -> None:
        self.checker, self.folder = checker, folder
        self.text: str = tokenizer.decode([token for row in rows for token in row])
        self._ended: Ended | None = None
        self._loaded: dict[str, Any] = {}
        self._distance = 0.0
        checker.begin()
        self._tell(None, load=str(folder), ids=rows, text=self.text, trust_remote_code=trust_remote_code)

    def _tell(self, values: Any, **request: Any) -> None:
        # Other ranks gather with this one: it goes on beside them, and says at the end what happened.
        if self._ended is None:
            try:
                self.checker.tell(values, **request)
            except Ended as ended:
                self._ended = ended

    def _answer(self) -> dict[str, Any]:
        try:
            if self._ended is not None:
                raise self._ended
            return self.checker.answer()
        except Ended as ended:
            raise RunError(
                f"What was saved could not be checked: {self.folder} is loaded by another process, on the CPU, and {ended}. It takes the "
                "machine's memory for one copy of the weights. Give the job more memory, or leave the check out: train.save_canary=false."
            ) from None

    def loads(self, logits: torch.Tensor) -> bool:
        """Wait until it is loaded; whether it could be.

        Args:
            logits: Of the rows, the live model's, fp32.

        Raises:
            RunError: The process has ended.
        """
        self._loaded = self._answer()
        if "error" in self._loaded:
            return False
        self._tell(logits, logits=list(logits.shape))
        self._distance = float(self._answer()["distance"])
        return True

    def send(self, tensor: Whole) -> None:
        """Have a tensor compared."""
        dtype = str(tensor.value.dtype).removeprefix("torch.")
        shape = list(tensor.value.shape)
        self._tell(tensor.value, tensor=tensor.name, shape=shape, dtype=dtype, allowed=tensor.allowed)

    def result(self, expected: dict[str, Any], limit: float) -> Found:
        """Everything that is wrong.

        Args:
            expected: From facts.
            limit: How far logits may be apart.

        Raises:
            RunError: The process has ended.
        """
        if "error" in self._loaded:
            return Found([f"it cannot be loaded: {self._loaded['error']}"])
        self._tell(None, end=True)
        answer = self._answer()
        if "error" in answer:
            return Found([f"it cannot be compared: {answer['error']}"])
        problems = [*_tensors(answer["wrong"], self._loaded), *_facts(expected, self._loaded)]
        if self._loaded["failure"]:
            problems.append(f"it gives no logits: {self._loaded['failure']}")
        elif not self._distance <= limit:
            problems.append(
                f"logits differ by {self._distance:.2%} of their norm; other kernels alone make less than {limit:.1%}"
            )
        return Found(problems, answer["compared"], self._distance)


def facts(model: Any, tokenizer: Any, text: str, dtype: torch.dtype | None) -> dict[str, Any]:
    """What a saved model must say of itself, in the words of sft/checkpoint/load_saved.py.

    Args:
        model: Without engine and adapters' wrapper.
        tokenizer: The training's.
        text: Tokens of which are compared.
        dtype: Of the saved weights; None: the live ones'.
    """
    return {
        "dtype": str(dtype or model.dtype).removeprefix("torch."),
        "stops_at": model.generation_config.eos_token_id,
        "tokens": max(tokenizer.get_vocab().values()) + 1,
        "eos_token": tokenizer.eos_token,
        "pad_token": tokenizer.pad_token,
        "chat_template": tokenizer.chat_template,
        "text_ids": tokenizer(text, add_special_tokens=False)["input_ids"],
    }


_NAMES = {
    "dtype": "the format of the weights",
    "stops_at": "generation_config.json's eos_token_id",
    "tokens": "the tokenizer's number of tokens",
    "eos_token": "the end-of-turn token",
    "pad_token": "the padding token",
    "chat_template": "the chat template",
    "text_ids": "the tokens of a text",
}


def _facts(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    problems = [
        f"{_NAMES[name]} is {_short(found[name])}, in memory {_short(value)}"
        for name, value in expected.items()
        if found[name] != value
    ]
    if found["tokens"] > found["rows"]:
        problems.append(f"the tokenizer has {found['tokens']} tokens, and the embedding {found['rows']} rows")
    return problems


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _tensors(wrong: Sequence[dict[str, Any]], loaded: dict[str, Any]) -> list[str]:
    """What is wrong with the tensors, the largest difference first."""
    lines = [f"{name}: from_pretrained did not find it, and made it up" for name in loaded["missing"]]
    lines += [f"{name}: from_pretrained has no use for it" for name in loaded["unexpected"]]
    lines += [
        f"{name}: has shape {saved}, by config.json {own}, and was made up" for name, saved, own in loaded["mismatched"]
    ]
    made_up = {*loaded["missing"], *(name for name, _, _ in loaded["mismatched"])}
    lines += [f"{one['name']}: {one['why']}" for one in wrong if "why" in one]
    values = sorted((one for one in wrong if "why" not in one), key=lambda one: -one["largest"])
    lines += [
        f"{one['name']}: {one['elements']} of {one['of']} elements differ, by {one['largest']:.3g} at most"
        for one in values
        if one["name"] not in made_up
    ]
    return [*lines[:_SHOWN], *([f"and {len(lines) - _SHOWN} tensors more"] if len(lines) > _SHOWN else [])]


def message(problems: Sequence[str], folder: Path, step: int, last: bool) -> str:
    """What the user reads.

    Args:
        problems: From Found.
        folder: That is kept.
        step: Optimizer steps trained.
        last: Whether there are no more to train.
    """
    lines = "\n".join(f"  {problem}" for problem in problems)
    stopped = (
        ""
        if last
        else "The training is stopped, since what it would leave at its end is wrong as well; the folder is kept. "
    )
    return (
        f"What was saved after step {step} is not the model in memory. Loaded by from_pretrained alone, {folder}:\n{lines}\n"
        f"{stopped}This is a mistake of this project or of a library, not of the recipe: report it with plan.json and run.json."
    )
