"""Finds a loss or gradient that is NaN or infinite before the optimizer uses it, records the samples behind it, and stops or skips.

Every engine takes the norm of the gradients over all ranks for clipping. A loss that is not finite makes its gradients NaN (`finite`),
and NaN passes through every reduction, so all ranks find the fault at the same step, without a collective of its own. The cost is that
the norm is read from the device at each step. docs/faults.md
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from sft.errors import NonfiniteError
from sft.files import write_json
from sft.parallel import process_group as distributed
from sft.run.directory import Run
from sft.train.batches import Sequences, StepOrder

_TOKENS_SHOWN = 64


def finite(loss: torch.Tensor) -> torch.Tensor:
    """The loss unchanged where it is finite; else NaN, and so are its gradients.

    An infinite loss can have finite gradients, such as those of a token to which the model gives no probability. This way the norm of
    the gradients shows both, on all ranks, and nothing is read from the device.
    """
    return loss * (loss.detach() * 0 + 1)


class Samples:
    """The documents of a step, described for a person who looks for the cause of a fault.

    Args:
        sequences: What the trainer sees.
        order: Their order.
        sources: Path of each source, in the recipe's order.
        tokenizer: Decodes the beginning of each document.
    """

    def __init__(self, sequences: Sequences, order: StepOrder, sources: Sequence[str], tokenizer: Any) -> None:
        self.sequences, self.order, self.sources, self.tokenizer = sequences, order, sources, tokenizer

    def of_step(self, step: int) -> list[int]:
        """Documents of an optimizer step, counted from 1."""
        numbers = self.order.sequences_of(step)
        return [int(document) for number in numbers for document in self.sequences.index.of(number)]

    def of_batch(self, batch: dict[str, Any], step: int) -> list[int]:
        """Documents of a step that a micro-batch holds, by their token ids; none where a rank holds a shard of each sequence."""
        held = set(documents_in(batch))
        return [one for one in self.of_step(step) if tuple(self.sequences.store.document(one)[0].tolist()) in held]

    def described(self, documents: Sequence[int]) -> list[dict[str, Any]]:
        """Source, row, number of tokens and the beginning of each."""
        store, rows = self.sequences.store, []
        for document in documents:
            record, (ids, loss_mask) = store.documents[document], store.document(document)
            source = int(record["source"])
            rows.append(
                {
                    "source": self.sources[source] if source < len(self.sources) else source,
                    "row": int(record["row"]),
                    "tokens": len(ids),
                    "trained_tokens": int(loss_mask.sum()),
                    "begins": self.tokenizer.decode(ids[:_TOKENS_SHOWN].tolist()),
                }
            )
        return rows


def documents_in(batch: dict[str, Any]) -> list[tuple[int, ...]]:
    """Token ids of each document of a collated batch."""
    ids = batch["input_ids"].cpu().numpy()
    if "cu_seq_lens_q" in batch:
        pieces = np.split(ids[0], batch["cu_seq_lens_q"].cpu().numpy()[1:-1])
    elif "attention_mask" in batch:
        pieces = [row[real] for row, real in zip(ids, batch["attention_mask"].cpu().numpy().astype(bool), strict=True)]
    else:
        return []
    return [tuple(piece.tolist()) for piece in pieces]


class Faults:
    """Watches the steps of one run.

    Args:
        run: Faults are recorded in nonfinite/ and run.json.
        samples: Describes the documents of a step.
        policy: What a fault does to the run.
        limit: Steps that may be skipped over the whole run.
        scaled: fp16, where the loss scaler skips steps whose gradients overflow, as it should.
    """

    def __init__(self, run: Run, samples: Samples, policy: Literal["stop", "skip"], limit: int, scaled: bool) -> None:
        self.run, self.samples, self.policy, self.limit, self.scaled = run, samples, policy, limit, scaled
        self.skipped = 0
        """Steps skipped since the last logged line."""
        self._batches: list[dict[str, Any]] = []
        self._losses: list[torch.Tensor] = []
        self._sum: torch.Tensor | None = None

    def begin(self, batches: list[dict[str, Any]], loss_sum: torch.Tensor) -> None:
        """A step begins.

        Args:
            batches: Its micro-batches.
            loss_sum: The trainer's sum of losses since the last line, without this step.
        """
        self._batches, self._losses, self._sum = batches, [], loss_sum.clone()

    def add(self, loss: torch.Tensor) -> None:
        """Remember the loss of a micro-batch."""
        self._losses.append(loss.detach())

    def check(self, trainer: Any, norm: Any) -> None:
        """Called before the optimizer steps; under DeepSpeed right after, which itself discards gradients that are not finite.

        Args:
            trainer: RecipeTrainer.
            norm: Of the gradients, over all ranks.

        Raises:
            NonfiniteError: The run stops here.
        """
        value = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if math.isfinite(value):
            return
        step = trainer.state.global_step + 1
        accounts = distributed.gather(self._account(step))
        if self.scaled and all(math.isfinite(loss) for account in accounts for loss in account["losses"]):
            return
        # Without ZeRO, DeepSpeed applies the step.
        applied = trainer.is_deepspeed_enabled and not getattr(trainer.model_wrapped.optimizer, "overflow", False)
        before = accounts[0]["faults_before"]
        stops = self.policy == "stop" or applied or before >= self.limit
        file = self.run.path / "nonfinite" / f"step-{step}.json"
        if trainer.is_world_process_zero():
            self._write(file, step, value, accounts, "stop" if stops else "skip")
        if stops:
            raise NonfiniteError(self._message(file, step, value, accounts, before, applied))
        if trainer.is_world_process_zero():
            print(f"step {step}: {_what(value, accounts)}. The step was skipped: {file}", flush=True)
        self._skip(trainer)

    def take(self) -> int:
        """Steps skipped since the last call."""
        skipped, self.skipped = self.skipped, 0
        return skipped

    def _skip(self, trainer: Any) -> None:
        """The step counts, moves the schedule, and changes nothing else."""
        if trainer.is_deepspeed_enabled:
            # It has discarded the step. If the trainer knew, it would hold back the schedule too.
            trainer.model_wrapped.optimizer.overflow = False
        else:
            # AdamW passes over weights without gradients.
            trainer.optimizer.zero_grad(set_to_none=True)
        trainer._tr_loss.copy_(self._sum)
        self.skipped += 1

    def _account(self, step: int) -> dict[str, Any]:
        """What this rank knows of the step."""
        losses = [float(loss) for loss in self._losses]
        return {
            "rank": distributed.rank(),
            "losses": losses,
            "documents": {
                number: self.samples.of_batch(self._batches[number], step)
                for number, loss in enumerate(losses)
                if not math.isfinite(loss)
            },
            "faults_before": len({fault["step"] for fault in self.run.record.get("nonfinite", [])} - {step}),
        }

    def _write(self, file: Path, step: int, norm: float, accounts: list[dict[str, Any]], answer: str) -> None:
        ranks = [
            {
                "rank": account["rank"],
                "losses": [loss if math.isfinite(loss) else str(loss) for loss in account["losses"]],
                "micro_batches": [
                    {"micro_batch": number + 1, "rows": self.samples.described(documents)}
                    for number, documents in account["documents"].items()
                ],
            }
            for account in accounts
        ]
        rows = self.samples.described(self.samples.of_step(step))
        file.parent.mkdir(exist_ok=True)
        write_json(
            file, {"step": step, "grad_norm": str(norm), "answer": answer, "ranks": ranks, "rows_of_the_step": rows}
        )
        faults = [fault for fault in self.run.record.get("nonfinite", []) if fault["step"] != step]
        self.run.update(nonfinite=[*faults, {"step": step, "answer": answer, "file": f"nonfinite/{file.name}"}])

    def _message(
        self, file: Path, step: int, norm: float, accounts: list[dict[str, Any]], before: int, applied: bool
    ) -> str:
        checkpoint = self.run.last_checkpoint()
        good = f"{checkpoint.name} is good" if checkpoint else "there is no checkpoint yet"
        effect = (
            "DeepSpeed applied the step nevertheless, as it does without ZeRO: set zero_optimization.stage to 1 or more"
            if applied
            else "The step was not applied"
        )
        remedy, reached = "set train.on_nonfinite=skip", ""
        if self.policy == "skip" and before >= self.limit:
            remedy = "raise train.max_nonfinite_steps"
            reached = f" {before} steps had such a fault before; train.max_nonfinite_steps={self.limit}."
        return (
            f"step {step}: {_what(norm, accounts)}. {effect}; {good}.{reached} Losses and samples: {file}. "
            f"Look at these samples, lower train.learning_rate, or {remedy}."
        )


def _what(norm: float, accounts: list[dict[str, Any]]) -> str:
    bad = [
        f"rank {account['rank']}, micro-batch {number + 1}: {loss}"
        for account in accounts
        for number, loss in enumerate(account["losses"])
        if not math.isfinite(loss)
    ]
    if bad:
        more = f" and {len(bad) - 4} more" if len(bad) > 4 else ""
        return f"the loss is not finite ({'; '.join(bad[:4])}{more})"
    return f"the norm of the gradients is {norm}, while all losses are finite"
