import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig, LlamaForCausalLM, TrainerControl, TrainerState

from sft.data.store import DOCUMENT, DocumentStore, SequenceIndex
from sft.plan.hardware import Gpu, Hardware
from sft.run.directory import Run
from sft.train.batches import Fingerprint, Sequences, StepWork
from sft.train.metrics import PEAK_FLOPS, Metrics, StepClock, peak_flops

CPU = Hardware(None, 1, 1, 2, 16.0)
KEYS = (
    "step epoch loss grad_norm learning_rate batch tokens_seen tokens_per_second labelled_tokens_per_second mfu "
    "step_seconds_p50 step_seconds_p90 data_seconds peak_memory_gib seconds"
).split()
LENGTHS = np.array([3, 5, 4, 8, 6, 7, 2, 9] * 5)
"""Of the documents: 40 sequences of one each, two a step, half of their tokens trained."""


def h100(ranks: int = 1, name: str = "NVIDIA H100 80GB HBM3") -> Hardware:
    return Hardware(Gpu(name, 80.0, 9.0), ranks, ranks, 16, 128.0)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-PCIE-40GB", 312e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA A10", None),
        ("NVIDIA H20", None),
    ],
)
def test_the_peak_is_that_of_the_gpu_or_unknown(name: str, peak: float | None) -> None:
    assert peak_flops(h100(1, name)) == peak
    assert peak_flops(h100(8, name)) == (None if peak is None else 8 * peak)
    assert peak_flops(CPU) is None


def test_the_peaks_are_in_flops_and_not_in_teraflops() -> None:
    assert all(5e13 < peak < 5e15 for peak in PEAK_FLOPS.values())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def tick(seconds: float) -> None:
        now[0] += seconds

    return tick


def step_work() -> StepWork:
    count, records = len(LENGTHS), np.zeros(len(LENGTHS), DOCUMENT)
    records["length"], records["trained"] = LENGTHS, LENGTHS // 2
    trained = np.concatenate([np.arange(length) >= length - length // 2 for length in LENGTHS]).astype(np.uint8)
    starts = np.cumsum(LENGTHS) - LENGTHS
    store = DocumentStore(np.zeros(LENGTHS.sum(), np.int32), trained, records, starts)
    index = SequenceIndex(np.arange(count), np.arange(1, count + 1))
    sequences = Sequences(store, index, per_step=2, pad_token_id=0, packed=False)
    return StepWork(sequences, sequences.order(seed=0))


class Steps:
    """Drives the callbacks as the trainer does."""

    def __init__(
        self,
        folder: Path,
        first: bool = True,
        start: int = 0,
        hardware: Hardware = CPU,
        tick: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self.tick, self.clock = tick, StepClock(on_gpu=False)
        self.fingerprint = Fingerprint()
        self.metrics = Metrics(Run(folder), hardware, step_work(), self.clock, self.fingerprint, {})
        self.state = TrainerState(global_step=start, max_steps=20, save_steps=0, is_world_process_zero=first)
        config = LlamaConfig(
            vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
        )
        self.model = LlamaForCausalLM(config)
        for callback in (self.clock, self.metrics):
            callback.on_train_begin(None, self.state, TrainerControl(), model=self.model)

    def step(self, seconds: float = 1.0, data_seconds: float = 0.0, after: float = 0.0) -> None:
        """One optimizer step of two micro-batches; `after` goes by between it and the next."""

        def batches() -> Iterator[int]:
            for number in range(2):
                self.tick(data_seconds / 2)
                yield number

        self.clock.start()
        assert list(self.clock.timed(batches())) == [0, 1]
        self.tick(seconds - data_seconds)
        self.state.global_step += 1
        for callback in (self.clock, self.metrics):
            callback.on_step_end(None, self.state, TrainerControl())
        self.tick(after)

    def log(self, step: int, **values: Any) -> None:
        """Take the steps up to this one, of a second each, and log there."""
        while self.state.global_step < step:
            self.step()
        self.state.epoch = step / 20
        self.fingerprint.line = f"{step:016x}"
        logs = {"loss": 1 / step, "grad_norm": 0.5, "learning_rate": 2e-5} | values
        self.metrics.on_log(None, self.state, TrainerControl(), logs=logs)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_line_holds_what_was_measured(tmp_path: Path, clock: Callable[[float], None]) -> None:
    steps = Steps(tmp_path, hardware=h100(2), tick=clock)
    steps.step(seconds=2, data_seconds=1)
    steps.log(1)
    for seconds in (1, 2, 3, 4):
        steps.step(seconds=seconds, data_seconds=0.5, after=100)
    steps.log(5)
    first, second = lines(tmp_path)
    assert list(first) == list(second) == KEYS
    assert (first["step"], first["loss"], first["learning_rate"], first["seconds"]) == (1, 1.0, 2e-5, 2)
    alone, four = steps.metrics.work.between(0, 1), steps.metrics.work.between(1, 5)
    assert (first["tokens_seen"], second["tokens_seen"]) == (alone.tokens, alone.tokens + four.tokens)
    assert (first["tokens_per_second"], second["tokens_per_second"]) == (alone.tokens / 2, four.tokens / 10)
    assert second["labelled_tokens_per_second"] == four.target_tokens / 10
    assert (second["step_seconds_p50"], second["step_seconds_p90"]) == (2.5, pytest.approx(3.7))
    assert (first["data_seconds"], second["data_seconds"]) == (1, 2)
    assert second["seconds"] == 2 + 10 + 400


def test_the_share_of_the_peak_is_of_all_gpus_and_counts_attention(
    tmp_path: Path, clock: Callable[[float], None]
) -> None:
    steps = Steps(tmp_path, hardware=h100(2), tick=clock)
    steps.step(seconds=4)
    steps.log(1)
    work = steps.metrics.work.between(0, 1)
    body, head = 2 * (4 * 16 * 16 + 3 * 16 * 32), 50 * 16
    flops = 6 * body * work.tokens + 6 * head * work.target_tokens + 6 * 2 * 16 * int((work.lengths**2).sum())
    assert lines(tmp_path)[0]["mfu"] == pytest.approx(flops / 4 / (2 * 989e12))


def test_what_is_printed_is_what_is_written(
    tmp_path: Path, clock: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    steps = Steps(tmp_path, tick=clock)
    for _ in range(5):
        steps.step(seconds=0.001, after=5.999)
    steps.log(5)
    rate = steps.metrics.work.between(0, 5).tokens / 0.005
    assert capsys.readouterr().out == f"step  5/20  loss 0.2000  lr 2.00e-05  {rate:,.0f} tokens/s  ETA 0:01:30\n"


@pytest.mark.parametrize("first", [True, False])
def test_batches_go_on_after_a_step_has_taken_its_own(first: bool) -> None:
    """The trainer takes those of one step at a time from the iterator of the epoch."""
    clock, batches = StepClock(on_gpu=False), iter(range(6))
    epoch = (number for number in batches)
    clock.on_train_begin(None, TrainerState(is_world_process_zero=first), TrainerControl())
    for step in range(3):
        clock.start()
        some = clock.timed(epoch)
        assert [next(some), next(some)] == [2 * step, 2 * step + 1]
        del some
        clock.on_step_end(None, TrainerState(), TrainerControl())
    assert next(clock.timed(epoch), None) is None
    assert len(clock.take().seconds) == (3 if first else 0)


def test_other_ranks_write_and_say_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Steps(tmp_path, first=False).log(1)
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().out == ""


def test_a_resumed_run_goes_on_where_the_checkpoint_was(tmp_path: Path) -> None:
    steps = Steps(tmp_path)
    for step in (1, 5, 10, 15):
        steps.log(step)
    before = [line["tokens_seen"] for line in lines(tmp_path)]
    resumed = Steps(tmp_path, start=10)
    resumed.log(15)
    assert [line["step"] for line in lines(tmp_path)] == [1, 5, 10, 15]
    assert [line["tokens_seen"] for line in lines(tmp_path)] == before


def test_a_fingerprint_is_not_told_where_some_of_the_lines_steps_were_taken_by_another_process(tmp_path: Path) -> None:
    """Steps 11 to 14 are in the weights of the checkpoint, and in no line."""
    steps = Steps(tmp_path)
    for step in (5, 10):
        steps.log(step)
    resumed = Steps(tmp_path, start=14)
    for step in (15, 20):
        resumed.log(step)
    told = {line["step"]: line["batch"] for line in lines(tmp_path)}
    assert told == {5: f"{5:016x}", 10: f"{10:016x}", 15: None, 20: f"{20:016x}"}


def test_a_line_that_was_cut_off_does_not_stop_a_resume(tmp_path: Path) -> None:
    """The machine went down, or the disk was full, while it was written."""
    Steps(tmp_path).log(5)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 10, "lo')
    Steps(tmp_path, start=5).log(10)
    assert [line["step"] for line in lines(tmp_path)] == [5, 10]


def test_the_last_step_is_logged_wherever_it_falls(tmp_path: Path) -> None:
    steps, control = Steps(tmp_path), TrainerControl()
    for step, logged in ((19, False), (20, True)):
        steps.state.global_step = step
        steps.metrics.on_step_end(None, steps.state, control)
        assert control.should_log is logged


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.125, [1, 9, 17, 20]),  # eight logging steps a second
        (100.0, [*range(1, 21)]),
    ],
)
def test_lines_on_the_terminal_keep_a_pace(
    seconds: float, shown: list[int], tmp_path: Path, clock: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """metrics.jsonl has every logging step at any pace: each step where they are fast, each tenth where they are slow."""
    steps, every = Steps(tmp_path, tick=clock), 1 if seconds < 1 else 10
    for step in range(1, 21):
        steps.step(seconds=seconds)
        if step % every == 0 or step == 1:
            steps.log(step)
    printed = [int(line.split()[1].split("/")[0]) for line in capsys.readouterr().out.splitlines()]
    assert sorted(set(printed)) == shown
    assert [line["step"] for line in lines(tmp_path)] == [
        step for step in range(1, 21) if step % every == 0 or step == 1
    ]
