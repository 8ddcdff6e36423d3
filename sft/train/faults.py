"""Finds a loss or gradient that is NaN or infinite before the optimizer uses it, records the samples behind it, and stops or skips.

A loss that is not finite makes its gradients NaN (`finite`), and NaN passes through every reduction, so the norm that clipping takes shows
it to all ranks at the same step. The cost is that the norm is read from the device at each step. docs/debugging.md
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from sft.data.store import ROWS
from sft.errors import NonfiniteError
from sft.files import write_json
from sft.parallel import process_group as distributed
from sft.plan.job import Job
from sft.run.directory import Run
from sft.train.batches import Contents, Sequences

_TOKENS_SHOWN = 64


def finite(loss: torch.Tensor) -> torch.Tensor:
    """The loss unchanged where it is finite; else NaN, and so are its gradients: an infinite loss can have finite ones."""
    return loss * (loss.detach() * 0 + 1)


class _Account(NamedTuple):
    """What a rank knows of a step, by micro-batch."""

    rank: int
    losses: list[float]
    sequences: list[tuple[int, ...]]

    def bad(self) -> list[int]:
        return [number for number, loss in enumerate(self.losses) if not math.isfinite(loss)]


class Faults:
    """Watches the steps of one run, and records faults in nonfinite/ and run.json."""

    def __init__(self, job: Job, run: Run, sequences: Sequences, tokenizer: Any) -> None:
        self.run, self.sequences, self.tokenizer = run, sequences, tokenizer
        self.sources = [source.path for source in job.recipe.sources]
        self.skips, self.limit = job.recipe.train.on_nonfinite == "skip", job.recipe.train.max_nonfinite_steps
        # The loss scaler skips steps whose gradients overflow, as it should.
        self.scaled = job.plan.precision.value == "fp16"
        self._steps: set[int] = {fault["step"] for fault in run.record.get("nonfinite", [])}
        """Of the run's faults, on every rank."""
        self._contents: list[Contents] = []
        self._losses: list[torch.Tensor] = []

    def begin(self, contents: list[Contents]) -> None:
        """A step of these micro-batches begins."""
        self._contents, self._losses = contents, []

    def add(self, loss: torch.Tensor) -> None:
        """Remember the loss of a micro-batch."""
        self._losses.append(loss.detach())

    def must_skip(self, step: int, norm: Any, applied: bool) -> bool:
        """Whether a step (from 1) must change nothing, judged by the norm of its gradients over all ranks, each of which takes part.

        `applied`: the engine has made the step whatever the gradients are.

        Raises:
            NonfiniteError: The run stops here.
        """
        value = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if math.isfinite(value):
            return False
        mine = [one.sequences for one in self._contents]
        accounts = distributed.gather(_Account(distributed.rank(), list(map(float, self._losses)), mine))
        if self.scaled and not any(account.bad() for account in accounts):
            return False
        self._steps.add(step)
        skips = self.skips and not applied and len(self._steps) <= self.limit
        file = self.run.path / "nonfinite" / f"step-{step}.json"
        if distributed.is_rank_0():
            self._write(file, step, value, accounts, "skip" if skips else "stop")
        if not skips:
            raise NonfiniteError(self._words(step, _what(value, accounts), applied, file))
        if distributed.is_rank_0():
            print(f"step {step}: {_what(value, accounts)}. The step was skipped: {file}", flush=True)
        return True

    def _write(self, file: Path, step: int, norm: float, accounts: list[_Account], answer: str) -> None:
        ranks = [
            {
                "rank": account.rank,
                "losses": [loss if math.isfinite(loss) else str(loss) for loss in account.losses],
                "micro_batches": [
                    {"micro_batch": number + 1, "rows": self._rows(account.sequences[number])}
                    for number in account.bad()
                ],
            }
            for account in accounts
        ]
        of_step = sorted({number for account in accounts for some in account.sequences for number in some})
        found = {"step": step, "grad_norm": str(norm), "answer": answer, "ranks": ranks}
        file.parent.mkdir(exist_ok=True)
        write_json(file, found | {"rows_of_the_step": self._rows(of_step)})
        faults = [fault for fault in self.run.record.get("nonfinite", []) if fault["step"] != step]
        self.run.update(nonfinite=[*faults, {"step": step, "answer": answer, "file": f"nonfinite/{file.name}"}])

    def _rows(self, sequences: Iterable[int]) -> list[dict[str, Any]]:
        """Source, row, number of tokens and the beginning of each document, for a person who looks for the cause."""
        store, rows = self.sequences.store, []
        for document in (int(one) for number in sequences for one in self.sequences.index.of(number)):
            record, (ids, loss_mask) = store.documents[document], store.document(document)
            source = int(record["source"])
            rows.append(
                {
                    "source": self.sources[source] if source < len(self.sources) else source,
                    "row": int(record["row"]) % ROWS,
                    "tokens": len(ids),
                    "trained_tokens": int(loss_mask.sum()),
                    "begins": self.tokenizer.decode(ids[:_TOKENS_SHOWN].tolist()),
                }
            )
        return rows

    def _words(self, step: int, what: str, applied: bool, file: Path) -> str:
        checkpoint = self.run.last_checkpoint()
        good = f"{checkpoint.name} is good" if checkpoint else "there is no checkpoint yet"
        effect, remedy = "The step was not applied", "set train.on_nonfinite=skip"
        if applied:
            effect = "DeepSpeed applied the step nevertheless, as it does without ZeRO: set zero_optimization.stage to 1 or more"
        if len(self._steps) > self.limit and self.skips:
            remedy = f"raise train.max_nonfinite_steps={self.limit}, which is reached"
        return (
            f"step {step}: {what}. {effect}; {good}. Losses and samples: {file}. Look at these samples, lower train.learning_rate, or "
            f"{remedy}."
        )


def _what(norm: float, accounts: list[_Account]) -> str:
    for account in accounts:
        for number in account.bad():
            return f"the loss is not finite (rank {account.rank}, micro-batch {number + 1}: {account.losses[number]})"
    return f"the norm of the gradients is {norm}, while all losses are finite"
