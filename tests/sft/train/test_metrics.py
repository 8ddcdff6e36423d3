import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig, LlamaForCausalLM, TrainerControl, TrainerState

from sft.plan.hardware import Gpu, Hardware
from sft.run.directory import Run
from sft.train.batches import Contents, WorkSum
from sft.train.metrics import Metrics
from sft.train.speed import StepClock

CPU = Hardware(None, 1, 1, 2, 16.0)
H100 = Hardware(Gpu("NVIDIA H100 80GB HBM3", 80.0, 9.0), 2, 2, 16, 128.0)
KEYS = (
    "step epoch loss grad_norm learning_rate batch tokens_seen tokens_per_second labelled_tokens_per_second mfu "
    "step_seconds_p50 step_seconds_p90 data_seconds peak_memory_gib peak_reserved_gib seconds"
).split()
TOKENS = 30
"""Of a step."""


@pytest.fixture
def tick(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Makes seconds go by on the monotonic clock."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def advance(seconds: float) -> None:
        now[0] += seconds

    return advance


class Steps:
    """Drives the callback as the trainer does."""

    def __init__(
        self, folder: Path, start: int = 0, tick: Callable[[float], None] = time.sleep, hardware: Hardware = CPU
    ) -> None:
        self.tick, self.clock, self.work = tick, StepClock(on_gpu=False), WorkSum()
        trainer: Any = SimpleNamespace(clock=self.clock, work=self.work, of_engine=dict)
        self.metrics = Metrics(trainer, Run(folder), hardware, {})
        self.state = TrainerState(global_step=start, max_steps=20, save_steps=0, is_world_process_zero=True)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes))
        self.metrics.on_train_begin(None, self.state, TrainerControl(), model=model)

    def step(self, seconds: float = 0.001, after: float = 0.0) -> None:
        """One optimizer step; `after` goes by between it and the next."""
        self.clock.start()
        self.work.add([Contents((), np.array([TOKENS]), TOKENS // 2, 1)])
        self.tick(seconds)
        self.state.global_step += 1
        for callback in (self.clock, self.metrics):
            callback.on_step_end(None, self.state, TrainerControl())
        self.tick(after)

    def log(self, step: int, **values: Any) -> None:
        """Take the steps up to this one, and log there."""
        while self.state.global_step < step:
            self.step()
        self.state.epoch = step / 20
        work = self.work.gather(1.5, 2.5)
        assert work is not None
        self.state.num_input_tokens_seen += work.tokens  # as RecipeTrainer does
        logs = {"loss": 1 / step, "grad_norm": 0.5, "learning_rate": 2e-5} | values
        self.metrics.on_log(None, self.state, TrainerControl(), logs=logs)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_line_holds_what_was_measured_since_the_last_one(tmp_path: Path, tick: Callable[[float], None]) -> None:
    steps = Steps(tmp_path, tick=tick)
    steps.step(seconds=2)
    steps.log(1)
    for seconds in (1, 2, 3, 4):
        steps.step(seconds=seconds, after=100)
    steps.log(5, loss=float("nan"))
    first, second = lines(tmp_path)
    assert list(first) == list(second) == KEYS
    assert (first["step"], first["loss"], first["learning_rate"], first["seconds"]) == (1, 1.0, 2e-5, 2)
    assert (second["loss"], second["batch"], second["tokens_seen"]) == (None, f"{4:016x}", 5 * TOKENS)
    assert (second["tokens_per_second"], second["seconds"]) == (4 * TOKENS / 10, 2 + 10 + 400)


def test_what_is_printed_is_what_is_written(
    tmp_path: Path, tick: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    steps = Steps(tmp_path, tick=tick, hardware=H100)
    for _ in range(5):
        steps.step(seconds=0.5, after=5.5)
    steps.log(5)
    assert capsys.readouterr().out == f"step  5/20  loss 0.2000  lr 2.00e-05  {2 * TOKENS} tokens/s  ETA 0:01:30\n"


def test_a_resumed_run_goes_on_where_the_checkpoint_was(tmp_path: Path) -> None:
    steps = Steps(tmp_path)
    for step in (1, 5, 10, 15):
        steps.log(step)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 20, "lo')  # the machine went down, or the disk was full
    resumed = Steps(tmp_path, start=10)
    resumed.state.num_input_tokens_seen = 10 * TOKENS  # as the checkpoint has it
    resumed.log(15)
    assert [line["step"] for line in lines(tmp_path)] == [1, 5, 10, 15]
    assert [line["tokens_seen"] for line in lines(tmp_path)] == [TOKENS * step for step in (1, 5, 10, 15)]


def test_lines_on_the_terminal_keep_a_pace(
    tmp_path: Path, tick: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight logging steps a second: metrics.jsonl has every one."""
    steps = Steps(tmp_path, tick=tick)
    for step in range(1, 21):
        steps.step(seconds=0.125)
        steps.log(step)
    printed = [int(line.split()[1].split("/")[0]) for line in capsys.readouterr().out.splitlines() if "loss" in line]
    assert printed == [1, 9, 17, 20]
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 21))
