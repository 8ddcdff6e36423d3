"""Laws 2 and 3 on real processes: packed equals separate on two ranks, and what is read back before the first step."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, OpenAIGPTConfig

from sft.hub.demo import make_demo
from sft.recipe.schema import REPOSITORY
from sft.run.directory import Run
from tests.slow.conftest import decisions, plain, write_recipe
from tests.slow.ranks import Ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
Command = Callable[..., subprocess.CompletedProcess[str]]

TWO = ["torchrun", "--standalone", "--nproc-per-node", "2"]
PROGRAM = str(REPOSITORY / "tests" / "slow" / "packed_and_separate.py")
SFT_SH = ["bash", str(REPOSITORY / "scripts" / "sft.sh")]


@pytest.mark.parametrize("engine", ["ddp", "zero2"])
def test_packed_equals_separate_on_two_ranks(engine: str, ranks: Ranks, tmp_path: Path) -> None:
    """Six architectures, three attention functions, with and without checkpointing: the loss and every gradient."""
    ranks.run(2, [PROGRAM, engine, tmp_path])
    differences = json.loads((tmp_path / "differences.json").read_text())
    assert len(differences) == 6 * 3 * 2
    for name, found in differences.items():
        assert found["parameters"] >= 15, name
        assert found["loss"] <= 1e-5, name
        assert found["gradient"] <= 1e-5, name


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(
        tmp_path_factory.mktemp("before") / "before.yaml",
        model={"name_or_path": "builtin:demo"},
        data={"train": "builtin:demo", "max_length": 128},
        train={"global_batch_size": 8, "max_steps": 1, "save_steps": 10},
    )


WAYS = {
    "one process": (1, [], {"engine": "one process", "processes": "1", "sharded": "nothing"}),
    "DDP": (2, [], {"engine": "DDP", "processes": "2", "sharded": "nothing"}),
    "ZeRO-1, bf16": (
        2,
        ["train.deepspeed=zero1", "train.precision=bf16"],
        {"engine": "ZeRO-1", "processes": "2", "sharded": "optimizer", "weights": "bf16"},
    ),
    "ZeRO-3, adapters": (
        2,
        ["train.deepspeed=zero3", "model.lora={}"],
        {"engine": "ZeRO-3", "processes": "2", "sharded": "optimizer, gradients, parameters"},
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_runs_is_printed_and_recorded(way: str, recipe: Path, ranks: Ranks) -> None:
    count, overrides, expected = WAYS[way]
    name = plain(way)
    told = ranks.run(count, ["sft.train", recipe, *overrides, f"tracking.run_name={name}"])
    run = Run(recipe.parent / "outputs" / "before" / name)
    running = run.record["running"]
    assert running.items() >= expected.items()
    assert running["attention"] == "varlen in 3 layers" == f"{decisions(run)['attention']} in 3 layers"
    assert running["loss"] == "TRL's fused head"
    assert ("adapters" in running["trained"]) == ("adapters" in way)
    assert 0 <= run.record["probe"]["moved"] < 1e-5
    assert 0 <= run.record["probe"]["differ"] < (5e-2 if "bf16" in way else 1e-5)
    assert told["stdout"].count(f"{len(running)} of {len(running)} settings as planned") == 1
    assert told["stdout"].count("documents in one batch do not see each other") == 1
    assert "use_cache" not in told["stdout"]  # the table is for debug=true


def test_nothing_is_told_as_leaked_when_the_ranks_end(recipe: Path, command: Command) -> None:
    """What a library's objects say that were not freed, at the end of processes that a launcher started."""
    done = command([*TWO, "-m", "sft.train", recipe, "train.deepspeed=zero3", "tracking.run_name=ends"])
    assert "leaked" not in done.stderr


@pytest.fixture(scope="module")
def leaking(recipe: Path) -> Path:
    """An old architecture that nothing in its source gives away: packed, its documents see each other."""
    folder, demo = recipe.parent / "leaking", make_demo(recipe.parent / "outputs").model
    configuration = OpenAIGPTConfig(
        vocab_size=544, n_embd=32, n_layer=2, n_head=4, n_positions=256, initializer_range=0.2
    )
    AutoModelForCausalLM.from_config(configuration).save_pretrained(folder)
    for file in demo.iterdir():
        if not (folder / file.name).exists() and file.suffix != ".safetensors":
            shutil.copyfile(file, folder / file.name)
    return folder


@pytest.mark.parametrize("processes", [1, 2])
def test_a_model_that_leaks_is_told_before_the_first_step(
    processes: int, recipe: Path, leaking: Path, command: Command, ranks: Ranks
) -> None:
    """Of two, the launcher shows one message."""
    name = f"leaking-{processes}"
    words = [recipe, f"model.name_or_path={leaking}", "model.attn_implementation=eager", f"tracking.run_name={name}"]
    if processes == 1:
        told = ranks.run(1, ["sft.train", *words], expect=2)
        out, errors = told["stdout"], told["stderr"]
    else:
        done = command([*SFT_SH, *words], expect=2, NPROC=str(processes))
        out, errors = done.stdout, done.stderr
    assert errors.count("The documents of a pack see each other") == 1
    assert "Set data.packing=false. Nothing was trained." in errors
    assert "Traceback" not in out + errors

    run = Run(recipe.parent / "outputs" / "before" / name)
    assert run.record["status"] == "failed"
    assert run.record["probe"]["moved"] > 1e-4
    assert run.record["running"]["attention"] == "eager"
    assert run.last_checkpoint() is None
    assert not run.final.exists()
    assert not run.metrics_file.exists() or run.metrics_file.read_text() == ""
