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
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sft import signals
from sft.credentials import redact
from sft.errors import Interrupted, UserError
from sft.files import remove
from sft.hub.pins import hub_revisions
from sft.hub.remote_code import code_hash
from sft.recipe.changes import Change
from sft.recipe.local_code import code_hashes
from sft.recipe.schema import REPOSITORY
from sft.recipe.train import EVAL_LOSS
from sft.run.directory import INCOMPLETE, Run, read_lines
from sft.run.training_warnings import eval_loss_course, loss_course
from sft.run.trust import base_checksums

PACKAGES = "sft-recipes torch transformers trl deepspeed accelerate datasets peft liger-kernel lm-eval wandb".split()


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
        words = ["git", "-C", str(REPOSITORY), *arguments]
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    if not (REPOSITORY / ".git").exists():  # a wheel in an environment inside somebody's own repository
        return {"commit": None, "dirty": None}
    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}


_TIME = "%Y-%m-%dT%H:%M:%S%z"


def _now() -> str:
    return time.strftime(_TIME)


def record_start(
    run: Run,
    job: Any,
    timings: Mapping[str, float],
    data_fingerprint: str,
    checkpoint: str | None = None,
    skipped: Mapping[str, str] | None = None,
    changes: Sequence[Change] = (),
) -> None:
    """Write what is known before training into run.json. It holds no environment, and so no token or key.

    The job is a sft.plan.job.Job, which this package does not import.
    """
    status = run.record_if_any.get("status", "running")
    close_session(run, "killed" if status == "running" else status)
    earlier = run.record_if_any
    # These are the session's, and the run's where they are not the session's own.
    common = {"ranks": job.hardware.ranks, "versions": installed_versions(), "git": git_state()}
    common["overrides"], common["code"] = list(job.overrides), code_hashes(job.recipe)
    session = common | {
        "started": _now(),
        "ended": None,
        "status": "running",
        "checkpoint": checkpoint,
        "passed_over": dict(skipped or {}),
        "changes": {change.key: [change.old, change.new] for change in changes},
        "device": job.hardware.device,
        "last_step": None,
        "seconds": None,
    }
    run.update(
        **common,
        **_origin(run, job.recipe_path.resolve(), earlier),
        status="running",
        error=None,
        recipe=job.name,
        recipe_version=job.recipe.version,
        # With all defaults: what the recipe means stays known when a default changes.
        recipe_values=job.recipe.model_dump(mode="json"),
        command=[redact(word) for word in (Path(sys.executable).name, *sys.orig_argv[1:])],
        # Relative paths in the recipe start here.
        working_directory=str(Path.cwd()),
        base_model=_base_model(job, earlier if checkpoint else {}),
        hub_revisions=hub_revisions(job.recipe, job.model),
        data_fingerprint=data_fingerprint,
        hardware=asdict(job.hardware),
        timings=earlier.get("timings", {}) | timings,
        started=earlier.get("started", session["started"]),
        sessions=[*earlier.get("sessions", []), session],
    )


def _base_model(job: Any, resumed: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name_or_path": job.recipe.model.name_or_path,
        # The commit, so that a later evaluation measures the same base.
        "revision": job.model.commit or job.recipe.model.revision,
        "path": job.model.path,
        "code_sha256": code_hash(job.recipe.model, job.model.path),
        # A run that resumes started from what was there then.
        "files": resumed.get("base_model", {}).get("files") if resumed else base_checksums(Path(job.model.path)),
    }


def _origin(run: Run, recipe_path: Path, earlier: Mapping[str, Any]) -> dict[str, Any]:
    """Where the recipe came from: the user's file, or another run that this one repeats."""
    if recipe_path == run.recipe_file.resolve():
        return {"recipe_path": earlier.get("recipe_path", str(recipe_path))}
    if (recipe_path.parent / "run.json").is_file():
        original = Run(recipe_path.parent)
        return {"recipe_path": original.record.get("recipe_path", str(recipe_path)), "repeats": str(original.path)}
    return {"recipe_path": str(recipe_path)}


def close_session(run: Run, status: str, seconds: float | None = None) -> None:
    """Write how the newest session ended (`killed` if it could write nothing itself), unless that is written already.

    Without the seconds that it trained, its last line in metrics.jsonl says them.
    """
    record = run.record_if_any
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
    lines = read_lines(run.metrics_file)
    if not lines:
        return {}
    # Before it trains, the lines after its checkpoint are still there, of the session before.
    written = time.strftime(_TIME, time.localtime(run.metrics_file.stat().st_mtime))
    step = int(session["checkpoint"].rpartition("-")[2]) if session["checkpoint"] else 0
    return lines[-1] if lines[-1]["step"] > step and written >= session["started"] else {}


def record_end(run: Run, seconds: float, evaluates: bool) -> None:
    """Write what is known after training into run.json."""
    lines = read_lines(run.metrics_file)
    close_session(run, "finished", seconds)
    evaluation = {"evaluation": "running"} if evaluates else {}
    run.update(status="finished", finished=_now(), train_loss=_mean_loss(lines), **evaluation)
    eval_losses = [line["held_out_loss"] for line in lines if line.get("held_out_loss") is not None]
    run.warn("loss", loss_course(lines))
    # With the best checkpoint in final/ it does no harm that the loss rose again.
    chosen = run.record.get("best", {}).get("metric") == EVAL_LOSS
    run.warn("eval_loss", None if chosen else eval_loss_course(run.record.get("held_out_loss_before"), eval_losses))


def _mean_loss(lines: Sequence[Mapping[str, Any]]) -> float | None:
    """Mean loss of a step. Each line is the mean since the line before, over the steps that were not skipped."""
    total, steps, before = 0.0, 0, 0
    for line in lines:
        trained = line["step"] - before - line.get("skipped_steps", 0)
        before = line["step"]
        if line["loss"] is not None:
            total, steps = total + line["loss"] * trained, steps + trained
    return total / steps if steps else None


def record_interruptions(run: Run) -> None:
    """From here on a stop request interrupts this run."""
    signals.interrupts(lambda interrupted: _interrupted(run, interrupted), lambda: _clean_up(run))


def _interrupted(run: Run, interrupted: Interrupted) -> str:
    if _is_rank_0():
        with suppress(OSError, UserError):
            close_session(run, "interrupted")
            run.update(status="interrupted", error=str(interrupted))
    return f"{run.next_start}."


def _clean_up(run: Run) -> None:
    # A checkpoint that is half written: gigabytes that nothing would read.
    if _is_rank_0():
        remove(run.checkpoints / INCOMPLETE)


def _is_rank_0() -> bool:
    return os.environ.get("RANK", "0") == "0"
