"""Between the engine's begin and step 1: the leak probe and the audit of what runs."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from transformers.trainer_callback import TrainerCallback

from sft.plan.job import Job
from sft.run.directory import Run
from sft.train.isolation_probe import check_probe, probe, sample_documents
from sft.train.runtime_check import Reading, check_readings, read_back


class BeforeTraining(TrainerCallback):  # type: ignore[misc]
    """Stops the run where documents see each other or something else runs than was planned.

    Must be called after the layers' checkpointing is set, and before what measures or trains.

    Args:
        job: The plan.
        run: Where what was found is recorded.
    """

    def __init__(self, job: Job, run: Run) -> None:
        self.job, self.run = job, run
        self.trainer: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Probe, read back, show, compare."""
        started = time.monotonic()
        packed = self.job.recipe.data.packing
        documents = sample_documents(self.trainer.train_dataset)
        found = probe(self.trainer, documents, packed) if documents else None
        readings = read_back(self.trainer, self.job, found)
        if state.is_world_process_zero:
            self.run.update(
                running={reading.name: reading.running for reading in readings},
                probe={"moved": found.moved, "differ": found.differ} if found else None,
            )
            if self.job.recipe.debug:
                print_table(readings)
        check_readings(readings)
        if found is not None:
            check_probe(found, self.job.plan.attention.value, packed)
        if state.is_world_process_zero:
            count, seconds = len(readings), time.monotonic() - started
            apart = (
                f"{len(documents)} documents in one batch do not see each other"
                if documents
                else "no two documents to probe"
            )
            print(f"Runtime check: {count} of {count} settings as planned; {apart} ({seconds:.1f} s).", flush=True)


def print_table(readings: list[Reading]) -> None:
    """Print each setting as planned and as it runs."""
    table = Table(box=SIMPLE, title="Runtime check", title_justify="left", title_style="bold")
    for column in ("", "planned", "running"):
        table.add_column(column, overflow="fold")
    for reading in readings:
        table.add_row(reading.name, reading.planned, reading.running, style="red" if reading.wrong else None)
    # A file or a pipe has no width of its own, and rich would take 80.
    (Console() if sys.stdout.isatty() else Console(width=140)).print(table)
