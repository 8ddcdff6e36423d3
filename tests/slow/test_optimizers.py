"""Each optimizer and each schedule trains, is what runs, and resumes bit by bit: one training for each pair, on engines that take it."""

import json
from dataclasses import dataclass
from math import cos, pi

import pytest
import torch

from sft.run.directory import Run
from tests.slow.conftest import losses, rows
from tests.slow.engine_runs import SAVED, STEPS, EngineRuns, assert_identical, assert_same_weights, lines

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Pair:
    """An optimizer with a schedule on an engine; the first steps are the warmup's: 0, 1/3, 2/3 of the peak."""

    engine: str
    optimizer: str
    schedule: str
    rates: list[float]
    """Of the nine steps after the warmup, over the peak."""

    kind: str = "packed"

    @property
    def overrides(self) -> list[str]:
        return f"train.optim={self.optimizer} train.lr_scheduler_type={self.schedule}".split()


LINE = [1 - step / 9 for step in range(9)]
POLYNOMIAL, SQUARES = "polynomial train.lr_power=2 train.min_lr_ratio=0.1", [0.1 + 0.9 * one**2 for one in LINE]
COSINE = [0.2 + 0.8 * (1 + cos(pi * step / 9)) / 2 for step in range(9)]
NOISY = "train.neftune_noise_alpha=5 train.label_smoothing_factor=0.2"
YARN = "model.rope_scaling.rope_type=yarn model.rope_scaling.factor=4.0"
PAIRS = {
    "adamw_8bit": Pair(
        "1", "adamw_8bit", "warmup_stable_decay train.lr_decay_ratio=0.5 train.lr_decay_type=linear",
        [1, 1, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6],
    ),
    "adafactor": Pair(
        "1", "adafactor", "inverse_sqrt train.warmup_steps=0 train.warmup_ratio=0.2",
        [(1 + step / 3) ** -0.5 for step in range(9)],
    ),
    "lion": Pair("1", "lion", POLYNOMIAL, SQUARES),
    "muon": Pair("1", "muon", "cosine_with_min_lr train.min_lr_ratio=0.2", COSINE),
    "muon, adapters": Pair("2 DDP", "muon", "linear", LINE, "packed, adapters with dropout"),
    "adamw_8bit, bf16": Pair("1", "adamw_8bit", "constant_with_warmup", [1.0] * 9, "packed, bf16"),
    "lion, ZeRO-1": Pair("2 ZeRO-1", "lion", POLYNOMIAL, SQUARES),
    "lion, ZeRO-2": Pair("2 ZeRO-2", "lion", POLYNOMIAL, SQUARES),
    "lion, ZeRO-3": Pair("2 ZeRO-3", "lion", POLYNOMIAL, SQUARES),
    "noise and smoothing": Pair("1", "adamw", f"constant {NOISY}", [1.0] * 9),
    "noise and smoothing, ZeRO-3": Pair("2 ZeRO-3", "adamw", f"constant {NOISY}", [1.0] * 9, "padded"),
    "yarn, ZeRO-3": Pair("2 ZeRO-3", "adamw", f"constant {YARN}", [1.0] * 9, "packed, bf16"),
    "lion, FSDP2": Pair("2 FSDP2", "lion", POLYNOMIAL, SQUARES),
}  # fmt: skip

REPEATED = {"lion, ZeRO-1", "noise and smoothing, ZeRO-3", "adafactor"}
"""Whose law another row holds too."""
ON_SHARDS = ("lion, ZeRO-2", "lion, ZeRO-3", "lion, FSDP2")


def trained(name: str, runs: EngineRuns) -> Run:
    """The finished run of a pair, trained once."""
    pair, run = PAIRS[name], runs.named(PAIRS[name].kind, f"optim {name}")
    if not run.path.exists():
        runs.train(pair.engine, pair.kind, f"optim {name}", *pair.overrides)
    return run


@pytest.mark.parametrize("name", rows(PAIRS, PAIRS.keys() - REPEATED))
def test_an_optimizer_and_a_schedule_train_are_read_back_and_resume_bit_by_bit(name: str, runs: EngineRuns) -> None:
    pair, run = PAIRS[name], trained(name, runs)
    peak = 5e-3 if "adapters" in pair.kind else 1e-3
    rates = [0, 1 / 3, 2 / 3, *pair.rates]
    assert [line["learning_rate"] / peak for line in lines(run)] == pytest.approx(rates, abs=1e-6)
    assert losses(run)[-1] < losses(run)[0] - 0.5
    kinds = {
        "adamw": "AdamW on fp32, fused",
        "adamw_8bit": "AdamW, 8-bit on fp32",
        "adafactor": "Adafactor on fp32",
        "lion": "Lion on fp32",
    }
    assert run.record["running"]["optimizer"] == kinds.get(pair.optimizer, "MuonAdamW on fp32")
    killed = runs.killed_after_step(SAVED, run, f"optim {name} killed")
    runs.train(pair.engine, pair.kind, killed.path.name, *pair.overrides)
    assert_identical(killed, run)


@pytest.mark.parametrize("name", rows([name for name in PAIRS if name.startswith("lion, ")], ON_SHARDS))
def test_lion_steps_on_shards_as_on_full_tensors(name: str, runs: EngineRuns) -> None:
    alone, run = trained("lion", runs), trained(name, runs)
    # The sign of a gradient that is zero but for rounding is chance.
    assert losses(run) == pytest.approx(losses(alone), abs=2e-3)


def test_noise_and_smoothing_change_the_training_and_leave_the_eval_loss_plain(runs: EngineRuns) -> None:
    noisy, plain = trained("noise and smoothing", runs), trained("lion", runs)
    assert noisy.record["held_out_loss_before"] == plain.record["held_out_loss_before"]
    # A fifth of the loss is taken over the vocabulary, whose tokens are all as likely in the beginning as later unlikely.
    assert losses(noisy)[-1] > lines(noisy)[-1]["held_out_loss"] + 0.3
    assert losses(noisy)[0] != losses(plain)[0]


def test_extended_positions_are_those_of_the_live_layers_and_of_final(runs: EngineRuns) -> None:
    run = trained("yarn, ZeRO-3", runs)
    assert run.record["running"]["rope_scaling"] == "yarn, factor 4"
    config = json.loads((run.final / "config.json").read_text())
    assert (config["max_position_embeddings"], config["rope_parameters"]["rope_type"]) == (4096, "yarn")


def test_what_the_optimizers_keep_is_what_the_plan_counts(runs: EngineRuns) -> None:
    """In the checkpoint, whose tensors are those of the live optimizer."""

    def states(name: str) -> dict[str, set[torch.dtype]]:
        file = trained(name, runs).checkpoints / f"checkpoint-{SAVED}" / "optimizer.pt"
        found: dict[str, set[torch.dtype]] = {}
        for entries in torch.load(file, weights_only=True)["state"].values():
            entries |= entries.pop("__bnb_optimizer_quant_state__", {})
            for key, value in entries.items():
                if isinstance(value, torch.Tensor) and value.ndim > 1:
                    found.setdefault(key, set()).add(value.dtype)
        return found

    eight = states("adamw_8bit")
    assert eight["state1"] == eight["state2"] == {torch.uint8, torch.float32}  # fp32 for the embedding
    assert states("adafactor") == {}  # rows and columns
    assert states("lion") == {"exp_avg": {torch.float32}}
    assert set(states("muon")) == {"momentum_buffer", "exp_avg", "exp_avg_sq"}  # the last two of the embedding


def test_one_process_and_ddp_resume_each_others_state_and_other_engines_refuse_by_name(runs: EngineRuns) -> None:
    pair = PAIRS["muon"]
    alone = trained("muon", runs)
    run = runs.killed_after_step(SAVED, alone, "optim muon to DDP")
    runs.train("2 DDP", pair.kind, run.path.name, *pair.overrides)
    assert len(losses(run)) == STEPS
    assert losses(run) == pytest.approx(losses(alone), abs=2e-3)
    assert_same_weights(run, alone, 2e-3)
    sharded = runs.killed_after_step(SAVED, trained("lion, ZeRO-2", runs), "optim lion to one")
    printed = runs.train("1", "packed", sharded.path.name, *PAIRS["lion, ZeRO-2"].overrides, expect=2)
    assert "with train.optim=lion the optimizer's state is not resharded" in printed["stderr"]
