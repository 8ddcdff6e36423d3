"""Start a run from its own folder: `bash scripts/sft.sh outputs/tiny/RUN`. Imports no torch.

An unfinished run resumes. A finished one is repeated beside the first: the same text of the recipe, the same overrides, the same working
directory, and a list of what differs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sft.errors import RunError
from sft.plan.job import Job
from sft.program import shown_command
from sft.recipe.changes import Change, differences, recipe_differences
from sft.recipe.local_code import references
from sft.run.directory import EVALUATION_LEFT, Run, find_run
from sft.run.record import git_state, installed_versions
from sft.run.trust import check_consents

_REPLACED = ("tracking.run_name", "train.resume")  # a rerun sets them itself


def is_run(word: str) -> bool:
    """Whether a word on the command line is the folder of a run."""
    return (Path(word).expanduser() / "run.json").is_file()


def recipe_of(word: str, overrides: Sequence[str]) -> tuple[Path, list[str]]:
    """The recipe's path and all overrides of a recipe or a run's folder. Raises RunError as rerun_arguments."""
    return rerun_arguments(Path(word), overrides) if is_run(word) else (Path(word), list(overrides))


def is_unfinished(record: Mapping[str, Any]) -> bool:
    """Whether a run's record says that its training or its evaluation is not complete."""
    return record["status"] != "finished" or record.get("evaluation") in EVALUATION_LEFT


def _original_run(recipe_path: Path) -> Run | None:
    """The run that a recipe file lies in; None for a recipe of its own."""
    folder = recipe_path.resolve().parent
    return Run(folder) if (folder / "run.json").is_file() else None


def rerun_arguments(folder: Path, overrides: Sequence[str]) -> tuple[Path, list[str]]:
    """The recipe's path and all overrides that resume or repeat a run; changes to the directory that it was started in.

    Raises RunError if there is no run, its directory is gone, or code would run that only its recipe allows.
    """
    run = find_run(folder)
    record, recipe = run.record, run.recipe()
    flags = {
        "model.trust_remote_code": recipe.model.trust_remote_code,
        "eval.confirm_run_unsafe_code": recipe.eval.confirm_run_unsafe_code,
        "eval.confirm_run_task_code": recipe.eval.confirm_run_task_code,
    }
    consents = {key: "true" for key, given in flags.items() if given}
    values = recipe.model_dump(mode="json", exclude_defaults=True)
    for key in dict(references(recipe)):
        section, name = key.split(".")
        consents[key] = json.dumps(values[section][name]).strip('"')
    check_consents(run.path, consents, overrides)
    place = Path(record.get("working_directory") or Path.cwd())
    if not place.is_dir():
        raise RunError(
            f"{run.path} was started in {place}, where its relative paths begin, and there is no such folder here. Make it; or start "
            f"the recipe from another one: {shown_command('sft', str(run.recipe_file), *record['overrides'])}."
        )
    os.chdir(place)
    words = [word for word in record["overrides"] if word.partition("=")[0] not in _REPLACED]
    name = run.path.name if is_unfinished(record) else _free_name(run)
    words += [f"tracking.run_name={json.dumps(name)}", "train.resume=auto"]
    if Path(recipe.output_dir).expanduser().resolve() != run.output_dir:
        words.append(f"output_dir={run.output_dir}")
    return run.recipe_file, [*words, *overrides]


def _free_name(run: Run) -> str:
    names = [f"{run.path.name}-again", *(f"{run.path.name}-again-{number}" for number in range(2, 1000))]
    return next(name for name in names if not (run.path.parent / name).exists())


def differences_to_report(job: Job) -> list[str]:
    """Lines for the user before a run resumes or is repeated; none for a recipe of its own."""
    run = _original_run(job.recipe_path)
    if run is None:
        return []
    record, hardware = run.record, job.hardware
    now = {"git": git_state(), "versions": installed_versions(), "hardware": asdict(hardware)}
    changes = [*_recipe_changes(run, job), *differences({key: record.get(key) for key in now}, now)]
    what = "Resumes" if is_unfinished(record) else "Repeats"
    if not changes:
        return [f"{what} {run.path}: recipe, versions, commit and hardware are as they were."]
    return [f"{what} {run.path}. Differs from then:", *(f"  {change}" for change in changes)]


def _recipe_changes(run: Run, job: Job) -> list[Change]:
    return [change for change in recipe_differences(run.recipe(), job.recipe) if change.key not in _REPLACED]


def check_same_data(job: Job, fingerprint: str) -> None:
    """Refuse to repeat a finished run on other data (RunError), unless the command line requests other data."""
    run = _original_run(job.recipe_path)
    if run is None or run.record["status"] != "finished":
        return
    then = run.record.get("data_fingerprint")
    requested = any(change.key.startswith(("data.", "model.")) for change in _recipe_changes(run, job))
    if then in (None, fingerprint) or requested:
        return
    raise RunError(
        f"{run.path} was trained on other data than there is now (fingerprint {then[:12]}, now {fingerprint[:12]}): the rows, the "
        "tokenizer, the chat template or a package that reads them have changed, so this would not be the same run. To train on what there "
        f"is now: {shown_command('sft', run.record['recipe_path'], *run.record['overrides'])}."
    )
