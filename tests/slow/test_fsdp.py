"""FSDP2 on real gloo ranks: the result of one process, what is shared by whom, and how a run goes on.

The runs of two ranks are trained once for all tests.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from sft.hub.demo import make_demo
from sft.recipe.schema import REPOSITORY
from sft.run.directory import Run
from tests.slow.conftest import decisions, losses, write_recipe
from tests.slow.ranks import Ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]
Runs = dict[str, list[str]]

TELL, LEAVE = (REPOSITORY / "tests" / "slow" / name for name in ("train_and_tell_shares.py", "train_and_leave.py"))
STEPS, HALF = 12, 6
LORA = ["model.lora={r: 4, lora_dropout: 0.1}", "train.learning_rate=5e-3"]
NO_DROPOUT = ["model.lora={r: 4}", "train.learning_rate=5e-3"]
PADDED, BF16 = ["data.packing=false"], ["train.precision=bf16"]
ALONE: Runs = {"packed": [], "padded": PADDED, "lora": NO_DROPOUT, "bf16": BF16}
SHARED: Runs = {
    "packed": ["train.fsdp={}"],
    "padded": ["train.fsdp={sharding_strategy: shard_grad_op, prefetch: 2}", *PADDED],
    "lora": ["train.fsdp={state_dict_type: full}", "train.gradient_checkpointing=true", *NO_DROPOUT],
    "packed-by-size": ["train.fsdp={min_num_params: 30000, offload_params: true}"],
    "bf16": ["train.fsdp={}", *BF16],
    "dropout": ["train.fsdp={}", *LORA],
}
GOES_ON: Runs = {
    "shares": ["train.fsdp={}", "train.micro_batch_size=1"],
    "whole": ["train.fsdp={state_dict_type: full}"],
    "dropout-stopped": ["train.fsdp={}", *LORA],
}
HYBRID: Runs = {"hybrid": ["train.fsdp={sharding_strategy: hybrid_shard}", "train.micro_batch_size=1"]}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps of 8 sequences over a set that does not divide by 8: they cross the uneven end of an epoch."""
    folder = tmp_path_factory.mktemp("fsdp")
    rows = make_demo(folder).train.read_text().splitlines()
    (folder / "rows.jsonl").write_text("\n".join(rows[:61]))
    return write_recipe(
        folder / "job.yaml",
        model={"name_or_path": "builtin:demo"},
        data={"train": str(folder / "rows.jsonl"), "max_length": 128, "held_out": 0.1},
        train={
            "global_batch_size": 8,
            "micro_batch_size": 2,
            "learning_rate": 1e-3,
            "weight_decay": 0.1,
            "max_steps": STEPS,
            "logging_steps": 1,
            "save_steps": HALF,
        },
    )


def train(ranks: Ranks, recipe: Path, name: str, runs: Runs, count: int, nodes: int = 1) -> dict[str, Run]:
    """Train the runs; what they are told by `tracking.run_name` goes before their names."""
    for run, overrides in runs.items():
        named = [f"tracking.run_name={name}-{run}", *overrides]
        ranks.run(count, [TELL, recipe, *named], nodes=nodes)
    return {run: run_of(recipe, f"{name}-{run}") for run in runs}


def run_of(recipe: Path, name: str) -> Run:
    return Run(recipe.parent / "outputs" / "job" / name)


@pytest.fixture(scope="module")
def alone(recipe: Path, ranks: Ranks) -> dict[str, Run]:
    return train(ranks, recipe, "alone", ALONE, 1)


@pytest.fixture(scope="module")
def two(recipe: Path, alone: dict[str, Run], ranks: Ranks) -> dict[str, Run]:
    for run, overrides in GOES_ON.items():
        ranks.run(2, [LEAVE, str(HALF), recipe, f"tracking.run_name=two-{run}", *overrides], expect=5)
    runs = train(ranks, recipe, "two", SHARED, 2)
    return runs | {run: run_of(recipe, f"two-{run}") for run in GOES_ON}


@pytest.fixture(scope="module")
def four(recipe: Path, two: dict[str, Run], ranks: Ranks) -> dict[str, Run]:
    """Two machines of two ranks, by what the launcher tells them; what two ranks have begun goes on there."""
    train(ranks, recipe, "two", {"shares": GOES_ON["shares"]}, 4, nodes=2)
    return train(ranks, recipe, "four", HYBRID, 4, nodes=2)


def told(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run.path / "told.json").read_text())
    return found


def check_same(run: Run, other: Run, loss: float, weight: float) -> None:
    assert len(losses(run)) == STEPS
    assert losses(run) == pytest.approx(losses(other), abs=loss)
    trained, expected = (AutoModelForCausalLM.from_pretrained(one.final).state_dict() for one in (run, other))
    for name, tensor in trained.items():
        torch.testing.assert_close(tensor, expected[name], atol=weight, rtol=0, msg=name)


@pytest.mark.parametrize("run", ["packed", "padded", "lora", "packed-by-size"])
def test_two_ranks_that_share_the_model_train_as_one_process(
    run: str, alone: dict[str, Run], two: dict[str, Run]
) -> None:
    assert decisions(two[run])["engine"] == "FSDP2"
    assert 1 < decisions(two[run])["steps_per_epoch"] < STEPS
    check_same(two[run], alone[run.removesuffix("-by-size")], 1e-5, 1e-4)
    before = [one.record["held_out_loss_before"] for one in (two[run], alone[run.removesuffix("-by-size")])]
    assert before[0] == pytest.approx(before[1], abs=1e-5)


def test_the_live_model_is_shared_as_the_recipe_says(two: dict[str, Run]) -> None:
    for name in ("packed", "padded", "lora", "packed-by-size", "bf16"):
        found = told(two[name])
        assert found["distributed_type"] == "DistributedType.FSDP"
        assert found["share"] * 2 == found["total"]
        assert found["moments_shared"] is True
        assert found["moments"] == found["trained"] == ["torch.float32"]
        assert found["mesh"] == [1, 2]
    # Three layers, the tied embedding with norm and head, norm and all but the adapters; and the model itself.
    assert told(two["packed"])["reshard"] is True
    assert told(two["padded"])["reshard"] is False
    assert told(two["padded"])["ahead"] == [2, 2]
    assert told(two["packed-by-size"])["offload"] is True
    assert told(two["packed-by-size"])["units"] > told(two["packed"])["units"]


def test_bf16_computes_on_shares_in_fp32_and_reduces_in_fp32(alone: dict[str, Run], two: dict[str, Run]) -> None:
    found = told(two["bf16"])
    assert (found["computes_in"], found["reduces_in"]) == ("torch.bfloat16", "torch.float32")
    assert found["weights"] == ["torch.float32"]
    check_same(two["bf16"], alone["bf16"], 0.03, 0.05)
    saved = AutoModelForCausalLM.from_pretrained(two["bf16"].final)
    assert {tensor.dtype for tensor in saved.state_dict().values()} == {torch.bfloat16}


def test_the_final_model_holds_each_weight_once(alone: dict[str, Run], two: dict[str, Run]) -> None:
    size = (alone["packed"].final / "model.safetensors").stat().st_size
    assert (two["packed"].final / "model.safetensors").stat().st_size == pytest.approx(size, rel=0.01)


def test_a_stopped_run_goes_on_as_if_it_had_not_been(recipe: Path, two: dict[str, Run], ranks: Ranks) -> None:
    train(ranks, recipe, "two", {run: GOES_ON[run] for run in ("whole", "dropout-stopped")}, 2)
    assert losses(two["whole"]) == losses(two["packed"])
    check_same(two["dropout-stopped"], two["dropout"], 0, 0)


def test_machines_that_each_share_a_copy_train_as_one_process(alone: dict[str, Run], four: dict[str, Run]) -> None:
    assert told(four["hybrid"])["mesh"] == [2, 2]
    assert told(four["hybrid"])["share"] * 2 == told(four["hybrid"])["total"]
    check_same(four["hybrid"], alone["packed"], 1e-5, 1e-4)


def test_shares_of_two_ranks_go_on_with_four(alone: dict[str, Run], two: dict[str, Run], four: dict[str, Run]) -> None:
    assert two["shares"].record["ranks"] == 4
    check_same(two["shares"], alone["packed"], 1e-5, 1e-4)


def test_a_finished_run_is_not_resumed_and_says_so(recipe: Path, two: dict[str, Run], ranks: Ranks) -> None:
    words = ["sft.train", recipe, *SHARED["packed"], "train.resume=must", "tracking.run_name=two-packed"]
    said = ranks.run(1, words, expect=2)["stderr"]
    assert "train.resume=must" in said
    assert "Traceback" not in said
