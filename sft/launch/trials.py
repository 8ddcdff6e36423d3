"""One rank of the search: the real trainer, whose steps are the candidates."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers.trainer_callback import TrainerCallback

from sft.data.prepared import Prepared
from sft.data.store import DocumentStore, SequenceIndex
from sft.launch.tuning_result import (
    EXIT_DID_NOT_FIT,
    LARGEST_SHARE,
    PASSES,
    Measurement,
    longest_first,
    next_candidate,
    read_journal,
    worst,
)
from sft.model.gradient_checkpointing import checkpoint_every, has_layers_of_their_own
from sft.model.load import load_model
from sft.parallel import process_group as distributed
from sft.plan.job import Job
from sft.run.directory import Run
from sft.train.arguments import training_arguments
from sft.train.batches import Sequences
from sft.train.trainer import build_trainer, engine_callbacks


def did_not_fit(error: BaseException) -> bool:
    """Whether memory ran out, on a GPU or on the machine."""
    told = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(words in str(error) for words in told)


class DeviceMemory:
    """What this rank's device holds, in bytes; without a GPU, what the process does."""

    def __init__(self) -> None:
        self.on_gpu = torch.cuda.is_available()
        self.at_start = 0.0

    def capacity(self) -> float:
        """All of it that this rank may have."""
        if self.on_gpu:
            return float(torch.cuda.mem_get_info()[1])
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / ranks

    def start(self) -> float:
        """Forget the peak; returns what tensors hold now."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            return float(torch.cuda.memory_allocated())
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        self.at_start = _of_process("VmRSS")
        return self.at_start

    def peak(self) -> tuple[float, float]:
        """Since start: used on the device, by libraries and other processes too, and held by tensors."""
        if not self.on_gpu:
            # The kernel counts in batches, so that the peak can be told as less than what there was at the start.
            return (max(_of_process("VmHWM"), self.at_start),) * 2
        free, total = torch.cuda.mem_get_info()
        # What torch has reserved stays with it until the next start.
        used = max(total - free, torch.cuda.max_memory_reserved())
        return float(used), float(torch.cuda.max_memory_allocated())

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            torch.cuda.synchronize()


def _of_process(name: str) -> float:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1.0 if sys.platform == "darwin" else 1024.0)
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


class Steps(TrainerCallback):  # type: ignore[misc]
    """A training whose every step is a candidate, on as many of the longest sequences as its micro-batch holds.

    Args:
        job: From to_measure.
        prepared: Its data.
        tokenizer: From load_tokenizer.
        memory_gib: What one rank may use; None for LARGEST_SHARE of its device.
        journal: Where measurements are kept for a process that goes on behind this one.
        wanted: From candidates.
    """

    def __init__(
        self,
        job: Job,
        prepared: Prepared,
        tokenizer: Any,
        memory_gib: float | None,
        journal: Path,
        wanted: tuple[list[bool | int | str], list[int]],
    ) -> None:
        self.job, self.tokenizer, self.journal, self.wanted = job, tokenizer, journal, wanted
        self.folder = prepared.folder
        self.order, self.tokens = longest_first(prepared.folder)
        index, store = SequenceIndex.load(self.folder / "train.npz"), DocumentStore.open(self.folder)
        per_step = job.plan.data_parallel_ranks.value * PASSES
        self.sequences = Sequences(store, index, per_step, tokenizer.pad_token_id, job.recipe.data.packing)
        self.memory = DeviceMemory()
        capacity = self.memory.capacity() * LARGEST_SHARE if memory_gib is None else memory_gib * 2**30
        self.measured = worst(read_journal(journal))
        self.limit, self.warm = capacity, False
        self.times: list[float] = []
        self.at_rest = self.began = 0.0

    def run(self) -> None:
        """Measure until there is no candidate left."""
        self.limit = -self._most(-self.limit)  # the rank that has least
        self.candidate = next_candidate(*self.wanted, self.measured, self.limit)
        if self.candidate is None:
            return
        self.began = time.perf_counter()
        try:
            self.train()
        except (RuntimeError, MemoryError) as error:
            if not did_not_fit(error):
                raise
            self.write(Measurement(self.candidate, time.perf_counter() - self.began))
            print(f"  {self.candidate.words}: does not fit", flush=True)
            # The other ranks wait for this one inside the engine; the launcher ends them.
            os._exit(EXIT_DID_NOT_FIT)

    def train(self) -> None:
        """Load the model, and step from candidate to candidate."""
        with TemporaryDirectory() as folder:
            arguments = training_arguments(self.job, Run(Path(folder) / "search" / "run"))
            model = load_model(self.job, self.tokenizer)
            self.trainer = build_trainer(self.job, arguments, model, self.tokenizer, self.sequences)
            for callback in (*engine_callbacks(self.job), self):
                self.trainer.add_callback(callback)
            if not has_layers_of_their_own(model):
                modes, sizes = self.wanted
                self.wanted = [mode for mode in modes if isinstance(mode, bool | str)], sizes
                self.candidate = next_candidate(*self.wanted, self.measured, self.limit)
            if self.candidate is None:
                return
            self.one_pass = self.trainer.training_step
            self.trainer.training_step = self.measured_pass  # type: ignore[method-assign]
            self.trainer.train()

    def measured_pass(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """In the place of the trainer's: forward and backward of the candidate, whatever the trainer has read."""
        if not self.times:
            self.begin()
        batch = self.trainer.data_collator([self.sequences[int(number)] for number in self.of_candidate(self.order)])
        if num_items_in_batch is not None:
            count = int((batch["labels"] >= 0).sum()) * PASSES * self.job.plan.data_parallel_ranks.value
            num_items_in_batch = num_items_in_batch * 0 + count
        self.memory.synchronize()
        started = time.perf_counter()
        loss = self.one_pass(model, batch, num_items_in_batch)
        self.memory.synchronize()
        self.times.append(time.perf_counter() - started)
        return loss

    def begin(self) -> None:
        """Set the layers as the candidate has them, and the peak to now."""
        assert self.candidate is not None
        mode = self.candidate.gradient_checkpointing
        if not isinstance(mode, str):
            checkpoint_every(self.trainer.model, int(mode))
        self.began = time.perf_counter()
        self.at_rest = self.memory.start()

    def of_candidate(self, values: Any) -> Any:
        """The first as many as the micro-batch holds, from the start again where there are fewer."""
        assert self.candidate is not None
        return values[[number % len(values) for number in range(self.candidate.micro_batch_size)]]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep what was measured, and choose the next candidate; the same on every rank."""
        assert self.candidate is not None
        times, self.times = self.times, []
        if not self.warm:
            # The optimizer has made its state only now.
            self.warm = True
            return
        used, allocated = self.memory.peak()
        tokens = int(self.of_candidate(self.tokens).sum())
        values = [time.perf_counter() - self.began, median(times[1:-1]) / tokens, used, allocated, self.at_rest]
        seconds, a_token, used, allocated, at_rest = (self._most(value) for value in values)
        found = Measurement(self.candidate, seconds, a_token, int(used), int(allocated), int(at_rest))
        self.measured.append(found)
        if distributed.is_rank_0():
            self.write(found)
            print(f"  {self.candidate.words}: {1 / a_token:.0f} tokens/s a rank, {used / 2**30:.1f} GiB", flush=True)
        self.candidate = next_candidate(*self.wanted, self.measured, self.limit)
        control.should_training_stop = self.candidate is None

    def _most(self, value: float) -> float:
        """The largest of all ranks' values."""
        if not torch.distributed.is_initialized():
            return value
        device = "cuda" if self.memory.on_gpu else "cpu"
        box = torch.tensor([value], dtype=torch.float64, device=device)
        torch.distributed.all_reduce(box, op=torch.distributed.ReduceOp.MAX)
        return float(box.item())

    def write(self, found: Measurement) -> None:
        """Add a line to the journal."""
        with self.journal.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(found)) + "\n")
            file.flush()
            os.fsync(file.fileno())
