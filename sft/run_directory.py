"""The folder of one run: where each file is, and the record of what happened.

Only the first rank writes here; every other part of the program asks this module for a path.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sft.errors import RunError
from sft.fsdp import ENGINE
from sft.recipe import REPOSITORY, Recipe
from sft.recipe_file import parse_recipe

if TYPE_CHECKING:
    from sft.job import Job

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


EVALUATION_LEFT = ("running", "interrupted")
"""What run.json says of an evaluation that did not come to its end: its process was killed, or asked to stop."""


def write_json(path: Path, value: object) -> None:
    """Write a JSON file so that a reader sees the old one or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n", encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        RunError: It is missing or is no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{path} is missing: {path.parent} is not the folder of a run of this project.") from None
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {error}.") from None


@dataclass(frozen=True)
class Run:
    """One run's folder; DESIGN of the files: see the README."""

    path: Path

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
    def record(self) -> dict[str, Any]:
        """run.json: status, command, overrides, versions, hardware, data, timings."""
        record: dict[str, Any] = read_json(self.path / "run.json")
        return record

    def update(self, **values: object) -> None:
        """Merge values into run.json."""
        record = self.record if (self.path / "run.json").exists() else {}
        write_json(self.path / "run.json", record | values)

    def recipe(self) -> Recipe:
        """The recipe as it was run, overrides applied."""
        return parse_recipe(
            self.recipe_file.read_text(encoding="utf-8"), self.record["overrides"], origin=str(self.recipe_file)
        )

    def last_checkpoint(self) -> Path | None:
        """The newest complete checkpoint. An incomplete one has another name until it is complete."""
        found = [path for path in self.checkpoints.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
        return max(found, key=lambda path: int(path.name.split("-")[1]), default=None)

    @property
    def after_an_end(self) -> str:
        """What the next start does, as a sentence without its full stop."""
        if self.record.get("evaluation") in EVALUATION_LEFT:
            return "The same command goes on with the evaluation"
        checkpoint = self.last_checkpoint()
        what = f"goes on from {checkpoint.name}" if checkpoint else "starts it again: there is no checkpoint yet"
        return f"The same command {what}"


def find_run(path: Path) -> Run:
    """The run in a folder that the user named.

    Raises:
        RunError: There is none.
    """
    path = path.expanduser().resolve()
    if not (path / "run.json").is_file():
        raise RunError(f"{path} is not the folder of a run: it holds no run.json.")
    return Run(path)


def installed_versions() -> dict[str, str]:
    """Versions of the packages that a result depends on."""
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def _git_state() -> dict[str, Any]:
    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(REPOSITORY), *arguments], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}


def _same_job(run: Run, recipe_text: str, overrides: Sequence[str]) -> bool:
    def lasting(words: Sequence[str]) -> list[str]:
        return [
            word
            for word in words
            if not word.startswith(("train.resume=", "train.max_time=", "train.profile=", "debug="))
        ]

    return run.recipe_file.read_text(encoding="utf-8") == recipe_text and lasting(run.record["overrides"]) == lasting(
        overrides
    )


def claim(run: Run) -> bool:
    """Claim the folder until this process ends, however it ends. False: another process has it."""
    descriptor = os.open(run.path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    except OSError:  # a file system without locks
        pass
    return True


def _point_latest_at(run: Run) -> None:
    link = run.path.parent / "latest"
    temporary = link.with_name(f".latest.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(run.path.name)
    temporary.replace(link)


_TAKEN = "exists already and is not written over. Choose another tracking.run_name, or remove the folder."


def _make(folder: Path, name: str | None) -> Run:
    """A new run's folder, empty but for checkpoints/."""
    started = time.strftime("%Y%m%d-%H%M%S")
    # Two jobs may start in one second.
    names = [name] if name else [started, *(f"{started}-{number}" for number in range(2, 100))]
    for candidate in names:
        run = Run(folder / candidate)
        try:
            run.checkpoints.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise RunError(
                f"The run's folder cannot be made: {error}. Set output_dir to a place that can be written."
            ) from None
        return run
    raise RunError(f"{folder / names[0]} {_TAKEN}")


def unfinished_run(job: Job) -> Run | None:
    """The run of the same job that a start goes on with, where there is one."""
    recipe = job.recipe
    run = Run(_folder(job) / (recipe.tracking.run_name or "latest"))
    if recipe.train.resume == "never" or not (run.path / "run.json").is_file():
        return None
    run = Run(run.path.resolve())
    same = _same_job(run, job.recipe_path.read_text(encoding="utf-8"), job.overrides)
    done = run.record["status"] == "finished" and run.record.get("evaluation") not in EVALUATION_LEFT
    return run if same and not done else None


def _folder(job: Job) -> Path:
    return Path(job.recipe.output_dir).expanduser().resolve() / job.recipe_path.stem


def _engine_as_written(recipe: Recipe) -> str:
    name = "parallel" if recipe.train.parallel else "fsdp" if recipe.train.fsdp else "deepspeed"
    return f"train.{name}={getattr(recipe.train, name) or 'null'}"


def _check_same_engine(run: Run, job: Job) -> None:
    # `auto` may stand for another one on another machine, whose checkpoints are of another kind.
    earlier = {row["name"]: row["value"] for row in read_json(run.plan_file).get("decisions", [])}
    for name in ("engine", "weights"):
        found = getattr(job.plan, name).value
        if earlier.get(name, found) != found:
            raise RunError(
                f"{run.path} is unfinished and was trained with {name}: {earlier[name]}; here "
                f"{_engine_as_written(job.recipe)} and train.precision={job.recipe.train.precision} give {found}, which cannot go on "
                "from its checkpoint. Go on on a machine like the first, or start anew with train.resume=never."
            )


def _goes_on_with_any_ranks(run: Run, job: Job) -> bool:
    """FSDP2's checkpoints hold each weight by its name and place, whoever wrote which share."""
    earlier = {row["name"]: row["value"] for row in read_json(run.plan_file).get("decisions", [])}
    return earlier.get("engine") == job.plan.engine.value == ENGINE


def check_start(job: Job) -> None:
    """Refuse, before the data is prepared, what open_run would refuse after.

    Raises:
        RunError: The name is taken, there is nothing to resume, or the unfinished run cannot go on like this.
    """
    run, name = unfinished_run(job), job.recipe.tracking.run_name
    if run is None:
        if job.recipe.train.resume == "must":
            raise RunError(f"train.resume=must, and {_folder(job)} has no unfinished run of this recipe.")
        if name is not None and (_folder(job) / name).exists():
            raise RunError(f"{_folder(job) / name} {_TAKEN}")
        return
    checkpoint = run.last_checkpoint()
    if checkpoint is None:
        return
    if run.record["ranks"] != job.hardware.ranks and not _goes_on_with_any_ranks(run, job):
        raise RunError(
            f"{run.path} is unfinished and was trained by {run.record['ranks']} processes; this start has {job.hardware.ranks}, and a "
            "checkpoint goes on with the same number. Start as many, or anew with train.resume=never."
        )
    _check_same_engine(run, job)
    config = job.deepspeed.config if job.deepspeed else None
    if read_json(run.plan_file).get("deepspeed") != config:
        raise RunError(
            f"The DeepSpeed file has changed since {run.path} was started. Change it back, or start anew with train.resume=never."
        )
    if job.deepspeed is not None and job.deepspeed.offload == "nvme":
        raise RunError(
            f"{checkpoint} cannot be resumed: with offload to NVMe DeepSpeed does not save the optimizer's state. Start anew with "
            "train.resume=never."
        )


def open_run(job: Job) -> Run:
    """Make the folder of a new run, or find the one to go on with, and claim it.

    An unfinished run of the same recipe and overrides goes on: the one named by tracking.run_name, else the latest. From its
    newest checkpoint, or from the start where it has none. A finished run is never written over, nor one that another process
    is training.

    Raises:
        RunError: The name is taken, the folder cannot be written, or there is nothing to resume where the recipe says
            it must be.
    """
    run = unfinished_run(job)
    if run is not None and claim(run):
        return run
    if job.recipe.train.resume == "must":
        raise RunError(f"train.resume=must, and another process is training {run.path if run else 'the run'}.")
    run = _make(_folder(job), job.recipe.tracking.run_name)
    claim(run)
    run.recipe_file.write_bytes(job.recipe_path.read_bytes())
    _point_latest_at(run)
    return run


def record_start(run: Run, job: Job, timings: dict[str, float], data_fingerprint: str) -> None:
    """Write what is known before training into run.json. Arguments only, no environment: so no token and no key."""
    run.update(
        status="running",
        error=None,
        recipe=job.recipe_path.stem,
        recipe_path=str(job.recipe_path.resolve()),
        recipe_version=job.recipe.version,
        command=[Path(sys.executable).name, *sys.orig_argv[1:]],
        overrides=list(job.overrides),
        # Relative paths in the recipe start here.
        working_directory=str(Path.cwd()),
        ranks=job.hardware.ranks,
        base_model={
            "name_or_path": job.recipe.model.name_or_path,
            # The commit, so that a later evaluation measures the same base.
            "revision": job.model.commit or job.recipe.model.revision,
            "path": job.model.path,
        },
        data_fingerprint=data_fingerprint,
        git=_git_state(),
        versions=installed_versions(),
        hardware=asdict(job.hardware),
        timings=timings,
        started=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    )
