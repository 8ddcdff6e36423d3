"""A job that is asked to stop, wherever it is: what is left, what it says, and how it goes on."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sft.recipe.schema import REPOSITORY
from sft.run.directory import Run
from tests.slow.conftest import lines_of, until, write_recipe, write_task
from tests.slow.ranks import Ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SIGNALLED = REPOSITORY / "tests" / "slow" / "train_and_signal.py"

TASK = {
    "output_type": "generate_until",
    "doc_to_text": "{{text}}",
    "doc_to_target": "{{answer}}",
    "test_split": "test",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4},
    "metric_list": [{"metric": "exact_match"}],
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(
        tmp_path_factory.mktemp("interrupted") / "job.yaml",
        model={"name_or_path": "builtin:demo"},
        data={"train": "builtin:demo", "max_length": 128, "held_out": 0.02},
        train={
            "global_batch_size": 16,
            "micro_batch_size": 2,
            "learning_rate": 1e-3,
            "max_steps": 7,
            "save_steps": 5,
            "eval_steps": 4,
            "logging_steps": 1,
            "save_canary": False,
        },
    )


@pytest.fixture(scope="module")
def undisturbed(recipe: Path, ranks: Ranks) -> Run:
    ranks.run(2, ["sft.train", recipe, "tracking.run_name=undisturbed"])
    return Run(recipe.parent / "outputs" / "job" / "undisturbed")


def lines(run: Run) -> list[dict[str, Any]]:
    """What was measured at each step, but for times."""
    measured = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    return [{name: line.get(name) for name in ("step", "loss", "held_out_loss", "tokens_seen")} for line in measured]


def left(run: Run) -> Iterator[str]:
    """What a run's folder must not hold once nothing runs."""
    for pattern in ("stop", "save", ".final", ".adapter", "checkpoints/.*", "logs/failed.txt"):
        yield from (str(path.relative_to(run.path)) for path in run.path.glob(pattern))


POINTS = [
    # where, which rank hears the signal, the newest checkpoint afterwards
    ("import", "all", None),
    ("loading", "all", None),
    ("held out 0", "all", None),
    ("step 1, micro-batch 1", "1", "checkpoint-1"),
    ("step 3, micro-batch 2", "0", "checkpoint-3"),
    ("held out 4", "1", "checkpoint-4"),
    ("save 5", "1", "checkpoint-5"),
    ("held out 7", "0", "checkpoint-7"),
    ("final", "all", "checkpoint-7"),
]


def test_a_training_stopped_everywhere_once_ends_as_an_undisturbed_one(
    recipe: Path, undisturbed: Run, ranks: Ranks
) -> None:
    run = Run(recipe.parent / "outputs" / "job" / "stopped")
    words = [SIGNALLED, recipe, "tracking.run_name=stopped"]
    for point, rank, checkpoint in POINTS:
        told = ranks.run(2, words, expect=143, AT=point, ON=rank)
        assert "Traceback" not in told["stderr"], point
        assert told["stderr"].count("Interrupted by SIGTERM") == 1, (point, told)
        if point == "import":
            assert not run.path.exists()
            continue
        assert run.record["status"] == "interrupted", (point, told)
        saved = run.last_checkpoint()
        assert (saved and saved.name) == checkpoint, point
        assert f"resumes from {checkpoint}" in told["stderr"] or checkpoint is None
        assert not run.final.exists()
    ranks.run(2, words, AT="nowhere")
    assert (run.record["status"], run.record["error"]) == ("finished", None)
    assert list(left(run)) == []
    assert lines(run) == lines(undisturbed)
    assert run.record["held_out_loss_before"] == undisturbed.record["held_out_loss_before"]
    weights, expected = (load_file(each.final / "model.safetensors") for each in (run, undisturbed))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


ENTRY = """#!/usr/bin/env bash
trap 'exit 143' USR1
trap 'exit 143' TERM
touch started
for _ in $(seq ${TENTHS:-100}); do sleep 0.1; done
exit ${STATUS:-0}
"""


def submit(folder: Path, warns: bool, **environment: str) -> tuple[int, str, list[str]]:
    """Run the Slurm script over a program that takes a while: exit status, what it says, and calls of scontrol."""
    programs = {
        "bin/srun": 'while [[ "$1" == --* ]]; do shift; done\nexec "$@"',
        "bin/scontrol": 'echo "$@" >> requeued',
    }
    for name, text in {**programs, "scripts/setup.sh": "", "scripts/sft.sh": ENTRY}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text if text.startswith("#!") else f"#!/usr/bin/env bash\n{text}\n")
        (folder / name).chmod(0o755)
    slurm = {"SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_ID": "17", "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    script = REPOSITORY / "scripts" / "slurm" / "sft.sbatch"
    job = subprocess.Popen(["bash", script], env=os.environ | slurm | environment, stdout=subprocess.PIPE, text=True)
    until(lambda: (folder / "started").exists(), job)
    if warns:
        job.send_signal(signal.SIGUSR1)
    elif "STATUS" not in environment:
        job.terminate()
    told = job.communicate(timeout=30)[0]
    calls = folder / "requeued"
    return job.returncode, told, calls.read_text().splitlines() if calls.exists() else []


def test_a_slurm_job_whose_time_is_up_is_queued_again_so_many_times(tmp_path: Path) -> None:
    assert submit(tmp_path / "first", True) == (143, "The time is up: requeued, 1 of 20.\n", ["requeue 17"])
    status, told, calls = submit(tmp_path / "last", True, SLURM_RESTART_COUNT="3", REQUEUES="3")
    assert (status, calls) == (143, []) and "submit it again" in told


@pytest.mark.parametrize(
    ("environment", "expected"), [({}, 143), ({"STATUS": "0", "TENTHS": "1"}, 0), ({"STATUS": "2", "TENTHS": "1"}, 2)]
)
def test_a_slurm_job_that_was_cancelled_is_done_or_has_failed_is_not_queued_again(
    environment: dict[str, str], expected: int, tmp_path: Path
) -> None:
    status, _, calls = submit(tmp_path, False, **environment)
    assert (status, calls) == (expected, [])


def test_a_second_signal_and_a_hang_end_a_process_whose_main_thread_cannot(recipe: Path, ranks: Ranks) -> None:
    """The first in C where no handler of Python's runs, the second where nothing is ever heard of again."""
    at, run = "step 5, micro-batch 1", Run(recipe.parent / "outputs" / "job" / "hangs")
    words = [SIGNALLED, recipe, "tracking.run_name=hangs", "train.save_steps=2", "train.ddp_timeout=4"]
    told = ranks.run(1, words, expect=143, AT=at, TWICE="1")
    assert (run.record["status"], run.record["error"]) == ("interrupted", "Interrupted by SIGTERM")
    assert "Interrupted by SIGTERM. The same command resumes from checkpoint-4." in told["stderr"]
    told = ranks.run(1, words, expect=1, AT="step 7, micro-batch 1", SIGNAL="none")
    assert run.record["status"] == "failed"
    assert run.record["error"].startswith("Rank 0 (") and "has not moved for " in run.record["error"]
    assert "it is ended: step 7, " in told["stderr"]
    assert told["stderr"].rstrip().endswith("The same command resumes from checkpoint-6.")
    assert "in send" in (run.path / "logs" / "rank-0.stacks.txt").read_text()


def test_the_clock_and_a_file_stop_a_run_as_a_signal_does(recipe: Path, ranks: Ranks) -> None:
    run = Run(recipe.parent / "outputs" / "job" / "clock")
    words = ["sft.train", recipe, "tracking.run_name=clock"]
    told = ranks.run(1, [*words, "train.max_time=1s"], expect=143)
    assert "Interrupted by train.max_time after step 1. The same command resumes from checkpoint-1." in told["stderr"]
    for name in ("stop", "save"):  # as if made once the next start is on its way
        (run.path / name).touch()
        os.utime(run.path / name, (time.time() + 600,) * 2)
    told = ranks.run(1, words, expect=143)
    assert "Interrupted by the file `stop` after step 2. The same command resumes from checkpoint-2." in told["stderr"]
    assert list(left(run)) == []
    (run.path / "stop").touch()
    os.utime(run.path / "stop", (time.time() - 60,) * 2)
    ranks.run(1, words)  # the file is older than this start, and so was meant for an earlier one
    assert run.record["status"] == "finished"
    assert list(left(run)) == []


@pytest.fixture
def launch(recipe: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Start two ranks with our launcher, and end them with the test."""
    started: list[subprocess.Popen[str]] = []

    def begin(*words: str, **environment: str) -> "subprocess.Popen[str]":
        settings = {"NPROC": "2", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)} | environment
        command = [sys.executable, "-m", "sft.launch", str(recipe), *words]
        process = subprocess.Popen(
            command, env=os.environ | settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        for pid in [*ranks_of(process), process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def ranks_of(launcher: "subprocess.Popen[str]") -> list[int]:
    """Process ids, the first rank's first."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    return sorted(int(pid) for pid in children.read_text().split()) if children.exists() else []


def ended(launcher: "subprocess.Popen[str]", run: Run, by: str) -> str:
    """What it has said; it must have ended as a job does that was interrupted."""
    pids = ranks_of(launcher)
    told = launcher.communicate(timeout=60)[0]
    assert launcher.returncode == (130 if by == "SIGINT" else 143), told
    assert told.count(f"Interrupted by {by}") == 1 and "Traceback" not in told, told
    assert "Restarting all" not in told and "Rank " not in told
    assert run.record["status"] == "interrupted"
    assert list(left(run)) == [] and not list(Path(tempfile.gettempdir()).glob(f"sft-*-{launcher.pid}-*"))
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    return told


def test_the_launcher_passes_signals_on_and_waits_for_the_checkpoint(
    recipe: Path, launch: Callable[..., "subprocess.Popen[str]"]
) -> None:
    """To the launcher alone; to one rank alone; and a second one, while a rank is stopped."""
    words = ["tracking.run_name=launched", "train.max_steps=100000", "--max-restarts", "2"]
    run = Run(recipe.parent / "outputs" / "job" / "launched")

    def trained(launcher: "subprocess.Popen[str]") -> None:
        before = lines_of(run)
        until(lambda: lines_of(run) > before, launcher)

    launcher = launch(*words)
    trained(launcher)
    (run.path / "save").touch()
    until(lambda: not (run.path / "save").exists(), launcher)
    saved = run.last_checkpoint()
    assert saved is not None
    launcher.send_signal(signal.SIGINT)
    told = ended(launcher, run, "SIGINT")
    step = lines(run)[-1]["step"]
    assert f"Interrupted by SIGINT after step {step}. The same command resumes from checkpoint-{step}." in told

    launcher = launch(*words)
    trained(launcher)
    os.kill(ranks_of(launcher)[1], signal.SIGUSR1)
    told = ended(launcher, run, "SIGUSR1")
    assert f"after step {lines(run)[-1]['step']}. " in told

    launcher = launch(*words)
    trained(launcher)
    os.kill(ranks_of(launcher)[1], signal.SIGSTOP)
    launcher.send_signal(signal.SIGTERM)
    time.sleep(0.7)
    launcher.send_signal(signal.SIGTERM)
    ended(launcher, run, "SIGTERM")


def test_an_evaluation_that_was_stopped_goes_on_alone(recipe: Path, ranks: Ranks) -> None:
    tasks = write_task(recipe.parent / "copy.yaml", recipe.parent / "rows.jsonl", **TASK)
    (recipe.parent / "rows.jsonl").write_text('{"text": "a b", "answer": "b"}\n' * 40)
    words = [str(recipe), "tracking.run_name=evaluated", f'eval.tasks=["{tasks}"]', "train.max_steps=1"]
    run = Run(recipe.parent / "outputs" / "job" / "evaluated")
    ranks.run(1, ["sft.train", *words])
    weights = (run.final / "model.safetensors").stat().st_mtime_ns

    def start(*command: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    assert run.record["evaluation"] == "running"  # nothing between the training and its evaluation is lost
    run.update(evaluation=None)
    process = start("sft.launch.evaluation", str(run.path))
    until(lambda: run.record.get("evaluation") == "running", process)
    process.terminate()
    told = process.communicate(timeout=30)[0]
    assert (process.returncode, run.record["status"], run.record["evaluation"]) == (143, "interrupted", "interrupted")
    assert told.count("Interrupted by SIGTERM. The same command resumes the evaluation.") == 1
    process = start("sft.launch", *words)
    told = process.communicate(timeout=200)[0]
    assert (process.returncode, run.record["status"], run.record["evaluation"]) == (0, "finished", "finished"), told
    assert (run.final / "model.safetensors").stat().st_mtime_ns == weights
    assert "Comparison" in told or run.comparison_file.is_file()
