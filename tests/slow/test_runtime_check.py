"""What was asked for is what runs: read back from the live objects before the first step, or an error that trains nothing."""

import json
import re
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, OpenAIGPTConfig

from sft.hub.demo import make_demo
from sft.recipe.schema import REPOSITORY
from tests.slow.conftest import decisions, write_recipe
from tests.slow.engine_runs import ENGINES, EngineRuns
from tests.slow.ranks import Ranks

pytestmark = pytest.mark.slow

RUNS = [
    ("1", "packed"),
    ("2 DDP", "packed"),
    ("2 ZeRO-2", "packed, bf16"),
    ("2 ZeRO-3", "padded, adapters"),
    ("2 FSDP2", "padded, adapters"),
]


@pytest.mark.parametrize(("name", "kind"), RUNS)
def test_what_runs_is_printed_and_recorded(name: str, kind: str, runs: EngineRuns) -> None:
    run = runs(name, kind)
    running, printed = run.record["running"], runs.printed(run)
    assert running["attention"] == f"{decisions(run)['attention']} in 3 layers"
    assert running["loss"] == "TRL's fused head"
    assert running["weights"] == ("bf16" if "bf16" in kind else "fp32")
    assert ("adapters" in running["trained"]) == ("adapters" in kind)
    assert 0 <= run.record["probe"]["moved"] < 1e-5
    assert 0 <= run.record["probe"]["differ"] < (5e-2 if "bf16" in kind else 1e-5)
    assert printed.count(f"{len(running)} of {len(running)} settings as planned") == 1
    assert printed.count("documents in one batch do not see each other") == 1


def test_deepspeeds_live_engine_has_the_planned_stage_and_buckets(runs: EngineRuns) -> None:
    for name, stage in (("2 ZeRO-2", 2), ("2 ZeRO-3", 3)):
        run = runs(name)
        live = json.loads((run.path / "observed" / "live.json").read_text())
        planned = json.loads(run.plan_file.read_text())["deepspeed"]["zero_optimization"]
        assert live["stage"] == stage
        compared = {key for key in planned if key in live}
        assert "reduce_bucket_size" in compared and ("stage3_prefetch_bucket_size" in compared) == (stage == 3)
        assert {key: live[key] for key in compared} == {key: planned[key] for key in compared}


def test_fsdp2_shards_the_live_model_over_the_ranks_of_a_node(runs: EngineRuns) -> None:
    for name, mesh in (("2 FSDP2", [2]), ("4 FSDP2, hybrid", [2, 2])):
        live = json.loads((runs(name).path / "observed" / "live.json").read_text())
        assert live["local"] * 2 == live["total"]
        assert live["mesh"] == mesh
        assert live["moments"] == live["trained"] == ["torch.float32"]
    size = (runs("1").final / "model.safetensors").stat().st_size
    assert (runs("2 FSDP2").final / "model.safetensors").stat().st_size == pytest.approx(size, rel=0.01)


@pytest.mark.parametrize("count", [1, 2])
def test_a_model_that_leaks_is_refused_before_the_first_step(
    count: int, runs: EngineRuns, tmp_path: Path, ranks: Ranks
) -> None:
    """An old architecture that nothing in its source gives away: packed, its documents see each other."""
    model, demo = tmp_path / "leaking", make_demo(tmp_path / "outputs").model
    sizes = {"vocab_size": 544, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "initializer_range": 0.2}
    shutil.copytree(
        demo, model, ignore=shutil.ignore_patterns("*.safetensors", "config.json", "generation_config.json")
    )
    AutoModelForCausalLM.from_config(OpenAIGPTConfig(**sizes)).save_pretrained(model)
    name = f"leaking-{count}"
    words = [f"model.name_or_path={model}", "model.attn_implementation=eager", f"tracking.run_name={name}"]
    printed = ranks.run(count, ["sft.train", runs.recipe("packed"), *words], expect=2)
    assert "The documents of a pack see each other" in printed["stderr"]
    assert "Set data.packing=false, or another model.attn_implementation. Nothing was trained." in printed["stderr"]
    assert "Traceback" not in printed["stdout"] + printed["stderr"]
    run = runs.named("packed", name)
    assert run.record["status"] == "failed"
    assert run.record["probe"]["moved"] > 1e-4
    assert run.record["running"]["attention"] == "eager"
    assert run.last_checkpoint() is None
    assert not run.final.exists()
    assert not run.metrics_file.exists() or run.metrics_file.read_text() == ""


@pytest.mark.parametrize("name", ["1", "2 DDP", "2 FSDP2"])
def test_a_step_reads_nothing_from_the_device_but_the_norm(name: str, own_recipe: Path, ranks: Ranks) -> None:
    train = {"global_batch_size": 8, "micro_batch_size": 2, "max_steps": 4, "logging_steps": 10}
    recipe = write_recipe(own_recipe, train=train)
    program = REPOSITORY / "tests" / "slow" / "host_waits.py"
    printed = ranks.run(ENGINES[name].ranks, [program, recipe, *ENGINES[name].overrides])["stdout"]
    reads = set(re.findall("^read .*", printed, re.MULTILINE))
    assert len(reads) == 1 and "1 x" in (read := reads.pop()) and "faults.py: value = float(norm" in read, reads
