"""Writes run.json: what was run, on what, and its sessions.

A session is one start of a run, from step 1 or from a checkpoint, to its end, however that comes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from sft.credentials import redact
from sft.errors import Interrupted, UserError
from sft.files import remove
from sft.hub.model_facts import ModelFacts
from sft.hub.pins import hub_revisions
from sft.hub.remote_code import code_hash
from sft.recipe.changes import Change
from sft.recipe.schema import REPOSITORY, Recipe
from sft.run.directory import INCOMPLETE, Run, read_lines
from sft.run.training_warnings import eval_loss_course, loss_course
from sft.run.trust import base_checksums

PACKAGES = (
    "torch",
    "transformers",
    "trl",
    "deepspeed",
    "accelerate",
    "datasets",
    "peft",
    "liger-kernel",
    "lm-eval",
    "wandb",
)


def installed_versions() -> dict[str, str]:
    """Versions of the packages that a result depends on."""
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def git_state() -> dict[str, Any]:
    """The commit of this program, and whether files differ from it; None without git."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(REPOSITORY), *arguments], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


class StartedJob(Protocol):
    """What run.json records of a job."""

    @property
    def name(self) -> str:
        """Name of the recipe."""

    @property
    def recipe(self) -> Recipe:
        """As it runs."""

    @property
    def recipe_path(self) -> Path:
        """Its file."""

    @property
    def overrides(self) -> Sequence[str]:
        """`key=value` of the command line."""

    @property
    def model(self) -> ModelFacts:
        """Facts of the base model."""

    @property
    def hardware(self) -> Any:
        """sft.plan.hardware.Hardware, which this package does not import."""


def record_start(
    run: Run,
    job: StartedJob,
    timings: Mapping[str, float],
    data_fingerprint: str,
    checkpoint: str | None = None,
    passed_over: Mapping[str, str] | None = None,
    changes: Sequence[Change] = (),
) -> None:
    """Write what is known before training into run.json. It holds no environment, and so no token or key.

    Args:
        run: New, or one that resumes.
        job: What was requested, on what.
        timings: Seconds, by what took them.
        data_fingerprint: Of the prepared data.
        checkpoint: Name of the one to resume from.
        passed_over: Newer checkpoints that could not be used, and why.
        changes: Changes of the recipe since the last session.
    """
    earlier = run.record if (run.path / "run.json").exists() else {}
    status = earlier.get("status", "running")
    close_session(run, "killed" if status == "running" else status)
    earlier = run.record if earlier else {}
    versions, git, now = installed_versions(), git_state(), _now()
    session = {
        "started": now,
        "ended": None,
        "status": "running",
        "checkpoint": checkpoint,
        "passed_over": dict(passed_over or {}),
        "changes": {change.key: [change.old, change.new] for change in changes},
        "ranks": job.hardware.ranks,
        "device": job.hardware.device,
        "versions": versions,
        "git": git,
        "overrides": list(job.overrides),
        "last_step": None,
        "seconds": None,
    }
    run.update(
        status="running",
        error=None,
        recipe=job.name,
        **_origin(run, job.recipe_path.resolve(), earlier),
        recipe_version=job.recipe.version,
        # With all defaults: what the recipe means stays known when a default changes.
        recipe_values=job.recipe.model_dump(mode="json"),
        command=[redact(word) for word in (Path(sys.executable).name, *sys.orig_argv[1:])],
        overrides=list(job.overrides),
        # Relative paths in the recipe start here.
        working_directory=str(Path.cwd()),
        ranks=job.hardware.ranks,
        base_model={
            "name_or_path": job.recipe.model.name_or_path,
            # The commit, so that a later evaluation measures the same base.
            "revision": job.model.commit or job.recipe.model.revision,
            "path": job.model.path,
            "code_sha256": code_hash(job.recipe.model, job.model.path),
            # A run that resumes started from what was there then.
            "files": earlier.get("base_model", {}).get("files") if checkpoint else base_checksums(Path(job.model.path)),
        },
        hub_revisions=hub_revisions(job.recipe, job.model),
        data_fingerprint=data_fingerprint,
        git=git,
        versions=versions,
        hardware=asdict(job.hardware),
        timings=earlier.get("timings", {}) | timings,
        started=earlier.get("started", now),
        sessions=[*earlier.get("sessions", []), session],
    )


def _origin(run: Run, recipe_path: Path, earlier: Mapping[str, Any]) -> dict[str, Any]:
    """Where the recipe came from: the user's file, or another run that this one repeats."""
    if recipe_path == run.recipe_file.resolve():
        return {"recipe_path": earlier.get("recipe_path", str(recipe_path))}
    if (recipe_path.parent / "run.json").is_file():
        original = Run(recipe_path.parent)
        return {"recipe_path": original.record.get("recipe_path", str(recipe_path)), "repeats": str(original.path)}
    return {"recipe_path": str(recipe_path)}


def close_session(run: Run, status: str, seconds: float | None = None) -> None:
    """Write how the newest session ended, unless that is written already.

    Args:
        run: The run.
        status: `finished`, `failed`, `interrupted`, or `killed` if the session itself could write nothing.
        seconds: Training time; None: up to its last line in metrics.jsonl.
    """
    record = run.record if (run.path / "run.json").exists() else {}
    sessions = record.get("sessions") or []
    if not sessions or sessions[-1]["ended"] is not None:
        return
    session = sessions[-1]
    line = _last_line(run, session)
    session["status"], session["last_step"] = status, line.get("step")
    session["seconds"] = seconds if seconds is not None else line.get("seconds")
    # The next start closes a killed session, and nothing says when that ended.
    session["ended"] = _now() if record["status"] == "running" and status != "killed" else "unknown"
    total = sum(one["seconds"] or 0.0 for one in sessions)
    run.update(sessions=sessions, timings=record["timings"] | {"train_seconds": total})


def _last_line(run: Run, session: dict[str, Any]) -> dict[str, Any]:
    """The last line of metrics.jsonl that a session wrote; empty if it wrote none."""
    try:
        written = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(run.metrics_file.stat().st_mtime))
    except OSError:
        return {}
    step = int(session["checkpoint"].rpartition("-")[2]) if session["checkpoint"] else 0
    line: dict[str, Any] = next(reversed(read_lines(run.metrics_file)), {})
    return line if line.get("step", 0) > step and written >= session["started"] else {}


def record_end(run: Run, seconds: float, evaluates: bool) -> None:
    """Write what is known after training into run.json.

    Args:
        run: The run.
        seconds: Training time of this session.
        evaluates: An evaluation follows; until it is complete, the same command resumes it.
    """
    lines = read_lines(run.metrics_file)
    # Each line is the mean since the line before, over the steps that were not skipped.
    steps = [
        line["step"] - before - line.get("skipped_steps", 0)
        for line, before in zip(lines, [0, *(line["step"] for line in lines)], strict=False)
    ]
    known = [(line["loss"], count) for line, count in zip(lines, steps, strict=True) if line["loss"] is not None]
    trained = sum(count for _, count in known)
    loss = sum(loss * count for loss, count in known) / trained if trained else None
    close_session(run, "finished", seconds)
    evaluation = {"evaluation": "running"} if evaluates else {}
    run.update(status="finished", finished=_now(), train_loss=loss, **evaluation)
    eval_losses = [line["held_out_loss"] for line in lines if line.get("held_out_loss") is not None]
    run.warn("loss", loss_course(lines))
    run.warn("eval_loss", eval_loss_course(run.record.get("held_out_loss_before"), eval_losses))


@dataclass(frozen=True)
class InterruptibleRun:
    """Records that a stop request has interrupted a run; sft/signals.py calls it."""

    run: Run

    def record(self, interrupted: Interrupted) -> str:
        """Write it into run.json, on rank 0, and return what the next start does, as a sentence."""
        if _is_rank_0():
            with suppress(OSError, UserError):
                close_session(self.run, "interrupted")
                self.run.update(status="interrupted", error=str(interrupted))
        return f"{self.run.next_start}."

    def clean_up(self) -> None:
        """Remove the checkpoint that is half written: gigabytes that nothing would read."""
        if _is_rank_0():
            remove(self.run.checkpoints / INCOMPLETE)


def _is_rank_0() -> bool:
    return os.environ.get("RANK", "0") == "0"
