"""Names the files of a run's folder, finds runs, and refuses names and places that lead elsewhere.

Only rank 0 writes here; every other part of the program takes its paths from this module. sft/run/record.py says what run.json holds,
sft/launch/open_run.py makes a folder or finds the one to resume.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sft.errors import RecipeError, RunError
from sft.files import disk_was_full, read_json, write_json
from sft.program import shown_command
from sft.recipe.load import parse_recipe
from sft.recipe.schema import Recipe
from sft.terminal import is_plain_name, visible_line

INCOMPLETE = ".incomplete"  # in <run>/checkpoints: being written, or its process was killed
LATEST = "latest"  # the link to the newest run, beside the runs
EVALUATION_LEFT = ("running", "interrupted")  # of `evaluation` in run.json: its process was killed or interrupted


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without any that is cut off."""
    lines = []
    for text in file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else []:
        with suppress(ValueError):
            line = json.loads(text)
            if isinstance(line, dict) and isinstance(line.get("step"), int):
                lines.append(line)
    return lines


class Run:
    """One run's folder. Two are equal where their paths are."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.output_dir = path.parent.parent  # of all recipes' runs, absolute; the recipe's own may be relative
        self.recipe_file = path / "recipe.yaml"  # byte for byte as it was read
        self.plan_file = path / "plan.json"
        self.ledger_file = path / "ledger.json"
        self.metrics_file = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.final = path / "final"  # the tuned model: loads with `from_pretrained` alone
        self.unverified = path / "unverified"  # the tuned model if the verification of final/ failed
        self.base_evaluation = path / "eval" / "base"
        self.tuned_evaluation = path / "eval" / "tuned"
        self.comparison_file = path / "eval" / "comparison.json"
        self.report_file = path / "report.md"
        self.page_file = path / "report.html"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and other.path == self.path

    def __hash__(self) -> int:
        return hash(self.path)

    def __repr__(self) -> str:
        return f"Run({self.path})"

    @property
    def recipe_name(self) -> str:
        """The name of its recipe, which files and folders are named after. Raises RunError if it cannot be a file's."""
        name = self.record.get("recipe") or self.path.parent.name
        if not isinstance(name, str) or not is_plain_name(name):
            raise RunError(
                f"{self.path / 'run.json'}: recipe: {name!r} cannot be the name of a recipe's file, which other files are named after. "
                "Correct it, or remove the line."
            )
        return name

    @property
    def record(self) -> dict[str, Any]:
        """run.json: status, command, overrides, versions, hardware, data, timings."""
        record: dict[str, Any] = read_json(self.path / "run.json")
        return record

    @property
    def record_if_any(self) -> dict[str, Any]:
        """run.json; empty if there is none yet."""
        return self.record if (self.path / "run.json").exists() else {}

    def update(self, **values: object) -> None:
        """Merge values into run.json."""
        write_json(self.path / "run.json", self.record_if_any | values)

    def warn(self, key: str, *messages: str | None) -> None:
        """Keep warnings about one subject in run.json, for the end of the terminal output and the report; they replace earlier ones.

        A message is a sentence or two for the user with a remedy; none, or None, if there is nothing to warn about.
        """
        before: dict[str, list[str]] = self.record_if_any.get("warnings", {})
        after = before | {key: [message for message in messages if message]}
        if not after[key]:
            del after[key]
        if after != before:
            self.update(warnings=after)

    def recipe(self) -> Recipe:
        """The recipe as it was run, overrides applied."""
        text = self.recipe_file.read_text(encoding="utf-8")
        return parse_recipe(text, self.record["overrides"], origin=str(self.recipe_file))

    def all_checkpoints(self) -> list[Path]:
        """All complete checkpoints, the newest first. Reads none of them."""
        names = ((_CHECKPOINT.fullmatch(path.name), path) for path in self.checkpoints.glob("*"))
        return [path for _, path in sorted(((int(name[1]), path) for name, path in names if name), reverse=True)]

    def last_checkpoint(self) -> Path | None:
        """The newest complete checkpoint; None if there is none."""
        return next(iter(self.all_checkpoints()), None)

    @property
    def next_start(self) -> str:
        """What the next start does, as a sentence without its full stop."""
        who = "The same command" if self._is_found_again() else f"`{shown_command('sft', str(self.path))}`"
        if self.record.get("evaluation") in EVALUATION_LEFT:
            return f"{who} resumes the evaluation"
        checkpoint = self.last_checkpoint()
        return f"{who} {f'resumes from {checkpoint.name}' if checkpoint else 'starts it again: there is no checkpoint yet'}"

    def _is_found_again(self) -> bool:
        """Whether the command that started this run resumes it: it is the recipe's newest, and neither a repetition nor always anew."""
        resume = self.record.get("recipe_values", {}).get("train", {}).get("resume")
        latest = self.path.parent / LATEST
        is_latest = not latest.exists() or latest.resolve() == self.path.resolve()
        return is_latest and resume != "never" and "repeats" not in self.record


_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def find_run(path: Path) -> Run:
    """The run in a folder that the user named. Raises RunError if there is none, or its name has invisible characters."""
    path = path.expanduser().resolve()
    if not (path / "run.json").is_file():
        raise RunError(f"{path} is not the folder of a run: it holds no run.json.")
    for name in (path.name, path.parent.name):
        if name and visible_line(name) != name:
            raise RunError(f"The folder {visible_line(str(path))} has invisible characters in its name. Rename it.")
    return Run(path)


def check_names(recipe_path: Path, run_name: str | None) -> None:
    """Refuse names that would not be folders of their own under output_dir (RecipeError)."""
    if recipe_path.stem.startswith("."):
        raise RecipeError(
            f"{recipe_path.name}: runs go to a folder named after the recipe's file, and {recipe_path.stem!r} is hidden or leads "
            "elsewhere. Give the file a name that does not begin with a dot."
        )
    if run_name == LATEST:
        raise RecipeError(f"tracking.run_name={LATEST} is the name of the link to the newest run. Choose another name.")


def folder_fault(folder: Path) -> str | None:
    """Why nothing can be written to <run>/checkpoints; None if it can, or if only the disk is full."""
    if not folder.is_dir():
        return (
            f"{folder} is gone: it was moved or removed, or its disk is no longer mounted. Restore it, and start again."
        )
    probe = folder / ".probe"
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        remedy = "Make it writable, and start again: the run resumes from its newest checkpoint."
        return None if disk_was_full(error) else f"{folder} cannot be written: {error.strerror}. {remedy}"
    return None


@contextmanager
def lost_folder_reported(folder: Path) -> Iterator[None]:
    """Turn an error of writing any file of the run into one RunError, if <run>/checkpoints is gone or cannot be written."""
    try:
        yield
    except OSError as error:
        fault = folder_fault(folder)
        if fault is None:
            raise
        raise RunError(fault) from error
