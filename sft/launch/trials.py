"""Measure one rank's trials of auto-tuning: the real trainer, each of whose steps is a trial. sft/launch/auto_tune.py starts it."""

from __future__ import annotations

import gc
import json
import os
import resource
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
from transformers.trainer_callback import TrainerCallback

from sft.data.prepared import Prepared
from sft.data.store import DocumentStore, SequenceIndex
from sft.launch.tuning_result import (
    EXIT_DID_NOT_FIT,
    LARGEST_SHARE,
    PASSES,
    Trial,
    choices,
    longest_first,
    next_trial,
    read_journal,
)
from sft.model.gradient_checkpointing import checkpoint_every, has_layers_of_their_own
from sft.model.load import load_model
from sft.parallel import process_group as distributed
from sft.plan.job import Job
from sft.plan.plan import Decision
from sft.plan.precision import resolve_gradients
from sft.run.directory import Run
from sft.train.arguments import training_arguments
from sft.train.batches import Sequences
from sft.train.build import build_trainer, engine_callbacks
from sft.train.out_of_memory import is_out_of_memory


def to_measure(job: Job) -> Job:
    """The job as it is measured: no checkpoints, logs or trackers, and passes that follow one another without end."""
    train = job.recipe.train.model_copy(update={"save_steps": 10**9, "logging_steps": 10**9})
    tracking = job.recipe.tracking.model_copy(update={"report_to": ()})
    plan = replace(
        job.plan,
        micro_batch_size=Decision(1, "auto-tuning"),
        gradient_accumulation_steps=Decision(PASSES, "auto-tuning"),
        # A step of several micro-batches may need larger gradients than a step of one.
        gradients=resolve_gradients(
            job.recipe, job.hardware, job.model, job.deepspeed, job.plan.precision.value, PASSES
        ),
        gradient_checkpointing=Decision(choices(job)[0][0], "auto-tuning"),
        max_steps=Decision(10**6, "auto-tuning"),
    )
    deepspeed = job.deepspeed
    if deepspeed is not None:
        deepspeed = replace(deepspeed, config=deepspeed.config | {"train_batch_size": "auto"})
    recipe = job.recipe.model_copy(update={"train": train, "tracking": tracking})
    return replace(job, recipe=recipe, plan=plan, deepspeed=deepspeed)


def did_not_fit(error: BaseException) -> bool:
    """Whether memory ran out, on a GPU or on the machine."""
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error) or is_out_of_memory(error)


class _Memory:
    """Bytes that this rank uses of its device; without a GPU, of the machine."""

    def __init__(self) -> None:
        self.on_gpu = torch.cuda.is_available()

    def capacity(self) -> float:
        if self.on_gpu:
            return float(torch.cuda.mem_get_info()[1])
        return float(psutil.virtual_memory().total) / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def reset_peak(self) -> None:
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        else:
            with suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> float:
        if not self.on_gpu:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
        free, total = torch.cuda.mem_get_info()
        return float(max(total - free, torch.cuda.max_memory_reserved()))

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


class Trials(TrainerCallback):  # type: ignore[misc]
    """A training whose every step is a trial, on as many of the longest sequences as its micro-batch holds.

    The journal keeps the measurements for the processes that follow these.
    """

    def __init__(self, job: Job, prepared: Prepared, tokenizer: Any, journal: Path) -> None:
        self.job, self.tokenizer, self.journal = to_measure(job), tokenizer, journal
        self.modes, self.sizes = choices(job)
        self.order, self.tokens = longest_first(prepared.folder)
        index, store = SequenceIndex.load(prepared.folder / "train.npz"), DocumentStore.open(prepared.folder)
        per_step = job.plan.data_parallel_ranks.value * PASSES
        self.sequences = Sequences(store, index, per_step, tokenizer.pad_token_id, job.recipe.data.packing)
        self.memory = _Memory()
        self.limit = min(distributed.gather(self.memory.capacity())) * LARGEST_SHARE
        self.measured = read_journal(journal)
        self.times: list[float] = []
        self.began, self.warm = 0.0, False
        self.trial = self._next()

    def _next(self) -> Trial | None:
        return next_trial(self.modes, self.sizes, self.measured, self.limit)

    def run(self) -> None:
        """Measure until no trial is left."""
        if self.trial is None:
            return
        self.began = time.perf_counter()
        try:
            self._train()
        except (RuntimeError, MemoryError) as error:
            if not did_not_fit(error):
                raise
            self._write(replace(self.trial, seconds=time.perf_counter() - self.began))
            print(f"  {self.trial.name}: does not fit", flush=True)
            # The other ranks wait for this one inside the engine; the launcher ends them.
            os._exit(EXIT_DID_NOT_FIT)

    def _train(self) -> None:
        with TemporaryDirectory() as folder:
            arguments = training_arguments(self.job, Run(Path(folder) / "search" / "run"))
            model = load_model(self.job, self.tokenizer)
            self.trainer = build_trainer(self.job, arguments, model, self.tokenizer, self.sequences)
            for callback in (*engine_callbacks(self.job), self):
                self.trainer.add_callback(callback)
            if not has_layers_of_their_own(model):
                self.modes = [mode for mode in self.modes if isinstance(mode, bool | str)]
                self.trial = self._next()
            if self.trial is None:
                return
            self.one_pass = self.trainer.training_step
            self.trainer.training_step = self._measured_pass  # type: ignore[method-assign]
            self.trainer.train()

    def _measured_pass(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Replaces the trainer's: forward and backward of the trial, whatever the trainer has read."""
        assert self.trial is not None
        if not self.times:
            mode = self.trial.gradient_checkpointing
            if not isinstance(mode, str):
                checkpoint_every(self.trainer.model, int(mode))
            self.began = time.perf_counter()
            self.memory.reset_peak()
        batch = self.trainer.data_collator([self.sequences[int(number)] for number in self._first(self.order)])
        if num_items_in_batch is not None:
            count = int((batch["labels"] >= 0).sum()) * PASSES * self.job.plan.data_parallel_ranks.value
            num_items_in_batch = num_items_in_batch * 0 + count
        self.memory.synchronize()
        started = time.perf_counter()
        loss = self.one_pass(model, batch, num_items_in_batch)
        self.memory.synchronize()
        self.times.append(time.perf_counter() - started)
        return loss

    def _first(self, values: Any) -> Any:
        """As many of the first as the micro-batch holds, starting over if there are fewer."""
        assert self.trial is not None
        return values[[number % len(values) for number in range(self.trial.micro_batch_size)]]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep what was measured, and choose the next trial; the same on every rank."""
        assert self.trial is not None
        times, self.times = self.times, []
        if not self.warm:
            # The optimizer has made its state only now.
            self.warm = True
            return
        per_token = median(times[1:-1]) / int(self._first(self.tokens).sum())
        mine = time.perf_counter() - self.began, per_token, self.memory.peak()
        seconds, per_token, used = map(max, zip(*distributed.gather(mine), strict=True))
        measured = replace(self.trial, seconds=seconds, seconds_per_token=per_token, used=int(used))
        self.measured.append(measured)
        if distributed.is_rank_0():
            self._write(measured)
            print(f"  {measured.name}: {1 / per_token:.0f} tokens/s a rank, {used / 2**30:.1f} GiB", flush=True)
        self.trial = self._next()
        control.should_training_stop = self.trial is None

    def _write(self, trial: Trial) -> None:
        with self.journal.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(trial)) + "\n")
            file.flush()
            os.fsync(file.fileno())
