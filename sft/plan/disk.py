"""Estimates what a run writes to output_dir: checkpoints, final/ and the prepared data. Arithmetic; small files are not counted."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from sft.files import in_words
from sft.plan.case import Case
from sft.plan.plan import Decision
from sft.plan.precision import MASTER

_TOKEN, _DOCUMENT = 5, 60  # bytes: an id and its mask; a record and its places in the sequences. sft/data/store.py


@dataclass(frozen=True)
class DiskEstimate:
    """Bytes that a run still has to write."""

    checkpoint: float
    checkpoints: int
    final: float
    prepared: float
    """0 where the data is prepared, or its size is not known."""

    @property
    def total(self) -> float:
        """All of them, which are there at once at the end."""
        return self.checkpoints * self.checkpoint + self.final + self.prepared

    @property
    def words(self) -> str:
        """The parts: `3 checkpoints of 36.0 GB, final/ of 6.0 GB`."""
        plural = "s" if self.checkpoints != 1 else ""
        prepared = f", the prepared data of about {in_words(self.prepared)}" if self.prepared else ""
        return f"{self.checkpoints} checkpoint{plural} of {in_words(self.checkpoint)}, final/ of {in_words(self.final)}{prepared}"


def resolve_disk(case: Case) -> Decision[str | None]:
    """What a run from its start writes, in words; None where the model's size is not known."""
    found = estimate_disk(case)
    if found is None:
        return Decision(None, "the model's size is not known before it is downloaded")
    return Decision(in_words(found.total), f"about, in output_dir: {found.words}")


def estimate_disk(case: Case, there: int = 0) -> DiskEstimate | None:
    """What is still to be written beside the checkpoints that are there; None where the model's size is not known."""
    parameters, adapters, data = case.model.parameters, case.adapter_parameters, case.data
    if parameters is None or adapters is None:
        return None
    of_checkpoint, of_final = bytes_per_parameter(case)
    # With adapters, final/ is the merged model, and has the adapters beside it.
    final = parameters * of_final + 4 * adapters
    # What was counted is on the disk already.
    prepared = data.tokens * _TOKEN + data.documents * _DOCUMENT if data is not None and not data.exact else 0
    return DiskEstimate((adapters or parameters) * of_checkpoint, checkpoints_to_come(case, there), final, prepared)


def bytes_per_parameter(case: Case) -> tuple[int, int]:
    """What one trained parameter takes in a checkpoint, and one of the model in final/."""
    recipe, plan, file = case.recipe, case.plan, case.deepspeed
    # At most: some keep fewer bytes for some weights.
    moments = {"adafactor": 1, "lion": 4}.get(recipe.train.optim, 8)
    half, has_copy = plan.precision.value != "fp32", plan.weights.value == MASTER
    adapters, shards = recipe.model.lora is not None, case.fsdp is not None
    # Merged adapters, shards and DeepSpeed's weights are written in what the layers compute in.
    final = 2 if half and (has_copy or adapters or shards or file is not None) else 4
    weights = 4 if adapters else final
    if file is not None:
        # An fp32 copy; and below stage 3 DeepSpeed writes the weights a second time in its own format.
        return weights * (2 if file.stage < 3 else 1) + 4 + moments, final
    return (2 + 4 if has_copy and not adapters else 4) + moments, final


def checkpoints_to_come(case: Case, there: int) -> int:
    """Checkpoints that still need room: one more than are kept, since the oldest goes when the newest is complete, less those `there`."""
    train, plan = case.recipe.train, case.plan
    if train.save_strategy == "no":
        return 0
    written = train.save_total_limit + train.load_best_model_at_end + 1
    if plan.max_steps.value and (plan.steps_per_epoch.value or train.save_strategy == "steps"):
        written = min(written, ceil(plan.max_steps.value / case.save_steps))
    return max(1, written - there)
