import re
from pathlib import Path

import pytest

from sft.hub.names import is_commit
from sft.launch.job import open_job
from sft.plan.hardware import Gpu, Hardware, described_hardware
from sft.recipe.load import load_recipe
from sft.recipe.schema import REPOSITORY
from tests.recipe_models import DATASETS, MODELS, model_folder

RECIPES = sorted((REPOSITORY / "recipes").glob("**/*.y*ml"))
SHIPPED = [path for path in RECIPES if path.stem != "tiny"]
NAMED = pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)


@NAMED
def test_every_recipe_plans_the_same_batch_on_any_number_of_gpus(path: Path, outputs: Path) -> None:
    assert {"tiny", "qwen3b", "smollm3_3b"} <= {one.stem for one in RECIPES}
    for gpus in (1, 2, 4, 8):
        hardware = Hardware(Gpu("NVIDIA H100 80GB HBM3", 80.0, 9.0), gpus, gpus, 16, 128.0)
        job = open_job(path, [f"output_dir={outputs}"], hardware, to_run=False)
        parts = job.plan.micro_batch_size.value * job.plan.gradient_accumulation_steps.value * gpus
        assert parts == job.plan.global_batch_size.value == job.recipe.sequences_per_step


def test_the_flagship_trains_528_sequences_a_step_on_8_x_80_gb(outputs: Path) -> None:
    job = open_job(Path("recipes/qwen3b.yaml"), [f"output_dir={outputs}"], described_hardware("8x80GB"), to_run=False)
    plan, train, data = job.plan, job.recipe.train, job.recipe.data
    assert plan.micro_batch_size.value * plan.gradient_accumulation_steps.value * 8 == 528
    assert (plan.engine.value, plan.precision.value, plan.kernels.value) == ("ZeRO-2", "bf16", "liger")
    schedule = (train.learning_rate, train.lr_scheduler_type, train.min_lr_ratio, train.warmup_steps)
    assert schedule == (1e-5, "cosine", 0, 40)
    assert (train.weight_decay, train.adam_beta1, train.adam_beta2, train.max_grad_norm) == (0.0, 0.9, 0.95, 1.0)
    assert (train.num_train_epochs, data.packing, job.recipe.eval.suite) == (3, True, "leaderboard")


@pytest.mark.parametrize("path", [path for path in SHIPPED if path.stem != "qwen3b"], ids=lambda path: path.stem)
def test_a_recipe_fits_the_machine_that_it_is_made_for(path: Path, tmp_path: Path) -> None:
    [(machine, needed, memory)] = re.findall(r"# Planned for (\w+): ([\d.]+) of (\d+) GiB", path.read_text())
    model = model_folder(load_recipe(path).model.name_or_path, tmp_path / "model", small=False)
    overrides = [f"model.name_or_path={model}", "model.revision=null", f"output_dir={tmp_path}"]
    job = open_job(path, overrides, described_hardware(machine), to_run=False)
    assert float(needed) == pytest.approx(job.plan.memory.value, abs=1), (
        "the recipe's first lines name the memory that the plan computes"
    )
    assert job.plan.memory.value <= float(memory)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_recipe_names_commits_and_what_is_known_of_its_model_and_data(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.model.name_or_path in MODELS
    assert is_commit(recipe.model.revision)
    for source in (*recipe.sources, *recipe.held_out_sources):
        assert source.path in DATASETS
        assert is_commit(source.revision)
    assert f"| {path.stem} |" in (REPOSITORY / "recipes" / "README.md").read_text()
