"""Paths from a recipe, a dataset or a folder that somebody else has packed do not lead out of the run's folder."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sft.errors import PlanError, RecipeError, RunError, UserError
from sft.files import remove, write_json
from sft.hub.demo import Demo
from sft.launch.job import open_job
from sft.launch.opening import open_run, unfinished_run
from sft.plan.deepspeed import load_deepspeed
from sft.plan.hardware import Hardware
from sft.plan.job import Job
from sft.recipe.load import parse_recipe
from sft.recipe.schema import Recipe
from sft.run.directory import Run, find_run
from sft.run.inside import check_inside, check_names
from tests.conftest import DEMO_RECIPE

ONE_CPU = Hardware(None, 1, 1, 2, 8.0)


@pytest.fixture
def job(recipe_file: Path, demo: Demo, tmp_path: Path) -> Job:
    words = [f"model.name_or_path={demo.model}", f"data.train={demo.train}", f"output_dir={tmp_path / 'outputs'}"]
    return open_job(recipe_file, words, ONE_CPU)


@pytest.fixture
def run(job: Job) -> Run:
    """A run that was interrupted."""
    run = open_run(job)
    write_json(run.path / "run.json", {"status": "interrupted", "overrides": list(job.overrides), "ranks": 1})
    return run


@pytest.mark.parametrize("name", ["../up", "a/b", "/tmp/x", "..", ".hidden", "", "name\n", "a\\b", "naïve"])
def test_a_run_is_not_named_like_a_path(name: str) -> None:
    with pytest.raises(RecipeError, match=r"tracking.run_name"):
        parse_recipe(DEMO_RECIPE, [f"tracking.run_name={name!r}"])


def test_a_run_is_not_called_like_the_link_to_the_newest() -> None:
    with pytest.raises(RecipeError, match=r"run_name=latest is the name of the link"):
        check_names(Path("mine.yaml"), "latest")


@pytest.mark.parametrize("name", ["..yaml", "...yaml", ".yaml", ".prepared.yaml"])
def test_a_recipes_file_is_not_called_so_that_its_runs_go_elsewhere(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(DEMO_RECIPE)
    with pytest.raises(RecipeError, match=r"Give the file a name that does not begin with a dot"):
        open_job(tmp_path / name, [], ONE_CPU)


@pytest.mark.parametrize(
    "name", ["checkpoints", "final", ".final", "eval", "logs", "metrics.jsonl", "run.json", "report.md"]
)
def test_a_link_out_of_a_run_ends_its_resume(name: str, job: Job, run: Run, tmp_path: Path) -> None:
    elsewhere = tmp_path / "home"
    elsewhere.mkdir()
    (elsewhere / "run.json").write_text((run.path / "run.json").read_text())
    place = run.path / name
    if place.is_dir():
        place.rmdir()
    place.unlink(missing_ok=True)
    place.symlink_to(elsewhere / "run.json" if "." in name[1:] else elsewhere)
    with pytest.raises(RunError, match=rf"{name} is a link to .*home.*outside of the run's folder"):
        unfinished_run(job)
    with pytest.raises(RunError, match=r"outside of the run's folder"):
        find_run(run.path)


def test_links_inside_a_run_stay(run: Run) -> None:
    (run.path / "wandb").mkdir()
    (run.path / "wandb" / "latest-run").symlink_to("offline-run-1")
    (run.path / "final").symlink_to("checkpoints")
    check_inside(run.path)


def test_what_wandb_links_stays_and_wandb_itself_is_no_link(run: Run, tmp_path: Path) -> None:
    logs = run.path / "wandb" / "offline-run-1" / "logs"
    logs.mkdir(parents=True)
    (logs / "debug-core.log").symlink_to(tmp_path / "cache.log")
    check_inside(run.path)
    (run.path / "wandb").rename(tmp_path / "wandb")
    (run.path / "wandb").symlink_to(tmp_path / "wandb")
    with pytest.raises(RunError, match=r"wandb is a link"):
        check_inside(run.path)


def test_a_link_below_a_folder_of_the_run_is_found_too(run: Run) -> None:
    (run.checkpoints / "checkpoint-2").symlink_to(os.sep)
    with pytest.raises(RunError, match=r"checkpoint-2 is a link to /"):
        check_inside(run.path)


def test_the_newest_run_lies_beside_its_link(job: Job, run: Run, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    run.path.rename(moved)
    link = run.path.parent / "latest"
    link.unlink()
    link.symlink_to(moved)
    with pytest.raises(RunError, match=r"latest leads to .*elsewhere, which is not in"):
        unfinished_run(job)
    anew = open_run(replace(job, recipe=parse_recipe(DEMO_RECIPE, [*job.overrides, "train.resume=never"])))
    assert anew.path.parent == run.path.parent
    assert link.resolve() == anew.path
    assert sorted(path.name for path in moved.iterdir()) == [".lock", "checkpoints", "recipe.yaml", "run.json"]


def test_removing_a_link_leaves_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    (tmp_path / "final").symlink_to("kept")
    remove(tmp_path / "final")
    assert not (tmp_path / "final").is_symlink()
    assert (tmp_path / "kept" / "file").exists()
    remove(tmp_path / "kept")
    remove(tmp_path / "never was")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "section",
    [
        '"tensorboard": {"enabled": true, "output_path": "/"}',
        '"csv_monitor": {"enabled": true}',
        '"flops_profiler": {"output_file": "/x"}',
    ],
)
def test_a_deepspeed_file_does_not_say_where_files_are_written(section: str, tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(f'{{"zero_optimization": {{"stage": 2}}, {section}}}')
    with pytest.raises(PlanError, match=r"would write outside of the run's folder"):
        load_deepspeed(str(tmp_path / "mine.json"))


@pytest.mark.parametrize("field", ["output_dir", "run_name"])
def test_no_argument_of_the_trainer_says_where_files_are_written(field: str, recipe_file: Path, outputs: Path) -> None:
    from sft.train.arguments import check_trainer_args

    job = open_job(recipe_file, [f"output_dir={outputs}", f"train.trainer_args.{field}=/tmp/elsewhere"], ONE_CPU)
    with pytest.raises(UserError, match=rf"{field}: decided by"):
        check_trainer_args(job)


def test_the_trainer_has_no_other_argument_that_is_a_place() -> None:
    """An upgrade that brings one is noticed."""
    from dataclasses import fields

    from trl import SFTConfig

    words = ("dir", "path", "file", "folder")
    places = {field.name for field in fields(SFTConfig) if field.init and any(word in field.name for word in words)}
    assert places - {"profile"} == {"output_dir", "chat_template_path"}


def test_a_tokenizers_templates_are_not_written_by_the_names_they_give_themselves(
    make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    """transformers writes a template of the name `../../x` to that place; of ours there is one, without a name."""
    import json
    import shutil

    from sft.data.tokenizer import load_tokenizer
    from sft.hub.demo import make_demo

    demo = make_demo(Path(make_recipe().output_dir))
    model = tmp_path / "deep" / "model"
    shutil.copytree(demo.model, model)
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").unlink()
    config = json.loads((model / "tokenizer_config.json").read_text())
    named = [{"name": "default", "template": template}, {"name": "../../../evil", "template": template}]
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
    tokenizer = load_tokenizer(make_recipe(f"model.name_or_path={model}"))
    tokenizer.save_pretrained(tmp_path / "deep" / "final")
    assert not list(tmp_path.rglob("evil*"))
    assert (tmp_path / "deep" / "final" / "chat_template.jinja").read_text() == template
