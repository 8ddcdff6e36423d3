"""The folder of one run: where each file is.

Only the first rank writes here; every other part of the program asks this module for a path. sft/run/record.py says what run.json
holds, sft/launch/opening.py makes a folder or finds the one to go on in.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from shlex import join
from typing import Any

from sft.errors import RunError
from sft.files import read_json, write_json
from sft.recipe.load import parse_recipe
from sft.recipe.schema import Recipe
from sft.run.inside import check_inside
from sft.visible import is_plain_name, visible_line

INCOMPLETE = ".incomplete"
"""In <run>/checkpoints: one that is being written, or was when its process was killed."""

EVALUATION_LEFT = ("running", "interrupted")
"""What run.json says of an evaluation that did not come to its end: its process was killed, or asked to stop."""


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; what is no line of ours is passed over: the last may have been cut off."""
    lines = []
    for text in file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else []:
        with suppress(ValueError):
            line = json.loads(text)
            if isinstance(line, dict) and isinstance(line.get("step"), int):
                lines.append(line)
    return lines


@dataclass(frozen=True)
class Run:
    """One run's folder; DESIGN of the files: see the README."""

    path: Path

    @property
    def output_dir(self) -> Path:
        """The folder that this recipe's runs and others lie in, wherever one stands: the recipe's own may be relative."""
        return self.path.parent.parent

    @property
    def recipe_file(self) -> Path:
        """The recipe, byte for byte as it was read."""
        return self.path / "recipe.yaml"

    @property
    def plan_file(self) -> Path:
        """Every resolved value with its reason."""
        return self.path / "plan.json"

    @property
    def ledger_file(self) -> Path:
        """Where every token went."""
        return self.path / "ledger.json"

    @property
    def metrics_file(self) -> Path:
        """One JSON line a logging step."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoint-N folders."""
        return self.path / "checkpoints"

    @property
    def final(self) -> Path:
        """The tuned model: loads with `from_pretrained` alone."""
        return self.path / "final"

    @property
    def unverified(self) -> Path:
        """The tuned model where the check of final/ failed."""
        return self.path / "unverified"

    @property
    def base_evaluation(self) -> Path:
        """lm_eval's output for the base model."""
        return self.path / "eval" / "base"

    @property
    def tuned_evaluation(self) -> Path:
        """lm_eval's output for the tuned model."""
        return self.path / "eval" / "tuned"

    @property
    def comparison_file(self) -> Path:
        """Base against tuned."""
        return self.path / "eval" / "comparison.json"

    @property
    def report_file(self) -> Path:
        """What a person reads."""
        return self.path / "report.md"

    @property
    def page_file(self) -> Path:
        """The same for a browser: one file."""
        return self.path / "report.html"

    @property
    def recipe_name(self) -> str:
        """Of the recipe that it came from: files and folders are named after it.

        Raises:
            RunError: run.json has one that cannot be the name of a recipe's file.
        """
        name = self.record.get("recipe") or self.path.parent.name
        if not isinstance(name, str) or not is_plain_name(name):
            raise RunError(
                f"{self.path / 'run.json'}: recipe: {name!r} cannot be the name of a recipe's file, which other files are named after. "
                "Correct it, or take the line out."
            )
        return name

    @property
    def record(self) -> dict[str, Any]:
        """run.json: status, command, overrides, versions, hardware, data, timings."""
        record: dict[str, Any] = read_json(self.path / "run.json")
        return record

    def update(self, **values: object) -> None:
        """Merge values into run.json."""
        record = self.record if (self.path / "run.json").exists() else {}
        write_json(self.path / "run.json", record | values)

    def warn(self, key: str, *messages: str | None) -> None:
        """Keep warnings about this run in run.json; the last lines of the terminal and the report show them.

        Args:
            key: What they are about; earlier ones with this key are replaced.
            messages: Sentences for the user, each with its remedy. None of them, or None: there is nothing to warn of.
        """
        before: dict[str, list[str]] = self.record.get("warnings", {}) if (self.path / "run.json").exists() else {}
        kept = [message for message in messages if message]
        after = {name: texts for name, texts in before.items() if name != key} | ({key: kept} if kept else {})
        if after != before:
            self.update(warnings=after)

    def recipe(self) -> Recipe:
        """The recipe as it was run, overrides applied."""
        return parse_recipe(
            self.recipe_file.read_text(encoding="utf-8"), self.record["overrides"], origin=str(self.recipe_file)
        )

    def last_checkpoint(self) -> Path | None:
        """The newest complete checkpoint. An incomplete one has another name until it is complete.

        Reads none: one that the newest start found damaged and passed over counts again once it is written anew.
        """
        found = [path for path in self.checkpoints.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
        good = [path for path in found if not self.was_passed_over(path)]
        return max(good, key=lambda path: int(path.name.split("-")[1]), default=None)

    @property
    def _sessions(self) -> list[dict[str, Any]]:
        return self.record.get("sessions", []) if (self.path / "run.json").exists() else []

    def was_passed_over(self, checkpoint: Path) -> bool:
        """Whether the newest start could not use a checkpoint, and it is as it was then."""
        for session in self._sessions[-1:]:
            if checkpoint.name in session.get("passed_over", {}):
                manifest = checkpoint / "manifest.json"
                started = datetime.strptime(session["started"], "%Y-%m-%dT%H:%M:%S%z").timestamp()
                return not manifest.is_file() or manifest.stat().st_mtime < started
        return False

    @property
    def after_an_end(self) -> str:
        """What the next start does, as a sentence without its full stop."""
        who, own = "The same command", join(["bash", "scripts/sft.sh", str(self.path)])
        if not self._is_reached():
            who = f"`{own}`"
        if self._was_asked_to_start_anew():
            who = f"The same command starts another run (train.resume=never); `{own}`"
        elif "repeats" in self.record:  # the same command may repeat the first run once more
            who = f"`{own}`"
        if self.record.get("evaluation") in EVALUATION_LEFT:
            return f"{who} goes on with the evaluation"
        checkpoint = self.last_checkpoint()
        what = f"goes on from {checkpoint.name}" if checkpoint else "starts it again: there is no checkpoint yet"
        return f"{who} {what}"

    def _is_reached(self) -> bool:
        """Whether the command that started this run reaches it again: by its name, or since no other start has come after it."""
        named = self.record.get("recipe_values", {}).get("tracking", {}).get("run_name") is not None
        latest = self.path.parent / "latest"
        return named or not latest.exists() or latest.resolve() == self.path.resolve()

    def _was_asked_to_start_anew(self) -> bool:
        """Whether train.resume=never stands in a command of it; going back and going on from the folder have replaced it since."""
        values = [self.record.get("recipe_values", {}).get("train", {}).get("resume")]
        for session in self._sessions:
            values += session.get("changes", {}).get("train.resume", [])
        return "never" in values


def find_run(path: Path) -> Run:
    """The run in a folder that the user named.

    Raises:
        RunError: There is none, it holds links that lead out of it, or its name has hidden characters.
    """
    path = path.expanduser().resolve()
    if not (path / "run.json").is_file():
        raise RunError(f"{path} is not the folder of a run: it holds no run.json.")
    for name in (path.name, path.parent.name):
        if name and visible_line(name) != name:
            raise RunError(
                f"The folder {visible_line(str(path))} has characters in its name that nobody sees. Rename it."
            )
    check_inside(path)
    return Run(path)
