"""A job that is asked to stop, wherever it is: what is left, what it says, and how it goes on."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sft.recipe.schema import REPOSITORY
from sft.run.directory import Run
from tests.slow.conftest import Start, lines_of, plain, rows, until, write_recipe, write_task
from tests.slow.engine_runs import assert_same_weights
from tests.slow.ranks import Ranks

pytestmark = pytest.mark.slow
FAULTS = REPOSITORY / "tests" / "slow" / "faults.py"

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
    # where, which rank gets which signal, the newest checkpoint afterwards
    ("import", "all", "SIGTERM", None),
    ("loading", "all", "SIGTERM", None),
    ("eval loss after step 0", "all", "SIGTERM", None),
    ("step 1, micro-batch 1", "1", "SIGUSR1", "checkpoint-1"),
    ("step 3, micro-batch 2", "0", "SIGTERM", "checkpoint-3"),
    ("eval loss after step 4", "1", "SIGTERM", "checkpoint-4"),
    ("save 5", "1", "SIGINT", "checkpoint-5"),
    ("eval loss after step 7", "0", "SIGTERM", "checkpoint-7"),
    ("final", "all", "SIGTERM", "checkpoint-7"),
]


def test_a_training_stopped_everywhere_once_ends_as_an_undisturbed_one(
    recipe: Path, undisturbed: Run, ranks: Ranks
) -> None:
    run = Run(recipe.parent / "outputs" / "job" / "stopped")
    words = [FAULTS, recipe, "tracking.run_name=stopped"]
    for point, rank, number, checkpoint in POINTS:
        printed = ranks.run(2, words, expect=130 if number == "SIGINT" else 143, AT=point, ON=rank, DO=number)
        assert "Traceback" not in printed["stderr"], point
        assert printed["stderr"].count(f"Interrupted by {number}") == 1, (point, printed)
        if point == "import":
            assert not run.path.exists()
            continue
        assert run.record["status"] == "interrupted", (point, printed)
        saved = run.last_checkpoint()
        assert (saved and saved.name) == checkpoint, point
        assert f"resumes from {checkpoint}" in printed["stderr"] or checkpoint is None
        assert not run.final.exists()
    ranks.run(2, words)
    assert (run.record["status"], run.record["error"]) == ("finished", None)
    assert list(left(run)) == []
    assert lines(run) == lines(undisturbed)
    assert run.record["held_out_loss_before"] == undisturbed.record["held_out_loss_before"]
    assert_same_weights(run, undisturbed, 0)


ENTRY = """#!/usr/bin/env bash
trap 'exit 143' USR1
trap 'exit 143' TERM
for _ in $(seq ${TENTHS:-600}); do touch started; sleep 0.1; done
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
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    slurm = {"SLURM_NNODES": "1", "SLURM_JOB_ID": "17", "MASTER_ADDR": "127.0.0.1", "PATH": path} | environment
    words = ["bash", REPOSITORY / "scripts" / "slurm" / "sft.sbatch", "recipe.yaml"]
    job = subprocess.Popen(words, env=os.environ | slurm, stdout=subprocess.PIPE, text=True, cwd=folder)
    until(lambda: (folder / "started").exists(), job)
    if warns:
        job.send_signal(signal.SIGUSR1)
    elif "STATUS" not in environment:
        job.terminate()
    printed = job.communicate()[0]
    calls = folder / "requeued"
    return job.returncode, printed, calls.read_text().splitlines() if calls.exists() else []


def test_a_slurm_job_whose_time_is_up_is_queued_again_so_many_times(tmp_path: Path) -> None:
    assert submit(tmp_path / "first", True) == (143, "The time is up: requeued, 1 of 20.\n", ["requeue 17"])
    status, printed, calls = submit(tmp_path / "last", True, SLURM_RESTART_COUNT="3", REQUEUES="3")
    assert (status, calls) == (143, []) and "submit it again" in printed
    # The last task of an array has the number of the array as its job's.
    of_array = {"SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "1"}
    assert submit(tmp_path / "array", True, **of_array)[2] == ["requeue 17_1"]


@pytest.mark.parametrize(
    ("environment", "expected"), [({}, 143), ({"STATUS": "0", "TENTHS": "1"}, 0), ({"STATUS": "2", "TENTHS": "1"}, 2)]
)
def test_a_slurm_job_that_was_cancelled_is_done_or_has_failed_is_not_queued_again(
    environment: dict[str, str], expected: int, tmp_path: Path
) -> None:
    status, _, calls = submit(tmp_path, False, **environment)
    assert (status, calls) == (expected, [])


def test_a_second_signal_ends_a_process_whose_main_thread_cannot(recipe: Path, ranks: Ranks) -> None:
    """The first one comes in C, where no handler of Python's runs."""
    run = Run(recipe.parent / "outputs" / "job" / "twice")
    words = [FAULTS, recipe, "tracking.run_name=twice", "train.save_steps=2"]
    printed = ranks.run(1, words, expect=143, AT="step 5, micro-batch 1", DO="signals")
    assert (run.record["status"], run.record["error"]) == ("interrupted", "Interrupted by SIGTERM")
    assert "Interrupted by SIGTERM. The same command resumes from checkpoint-4." in printed["stderr"]


HANGS = {
    "one process in C": (1, "step 5, micro-batch 1", "hang in C", "4"),
    "a rank in its data": (2, "data of step 5", "hang", "8"),
    "a stopped rank": (2, "data of step 5", "SIGSTOP", "8"),
}


@pytest.mark.parametrize("name", rows(HANGS, ["one process in C", "a stopped rank"]))
def test_a_job_that_hangs_ends_within_ddp_timeout_with_its_stacks(name: str, recipe: Path, ranks: Ranks) -> None:
    """Stacks are written after half of it, where the hanging process can."""
    count, at, action, timeout = HANGS[name]
    run = Run(recipe.parent / "outputs" / "job" / plain(name))
    words = [FAULTS, recipe, f"tracking.run_name={run.path.name}", "train.save_steps=2", f"train.ddp_timeout={timeout}"]
    printed = ranks.run(count, words, expect=1, grace=5, AT=at, DO=action, ON=str(count - 1), STARTS="1")
    stacks = {rank: run.path / "logs" / f"rank-{rank}.stacks.txt" for rank in range(count)}
    assert run.record["status"] == "failed"
    if count == 1:
        assert "has not moved for " in run.record["error"]
        assert "resumes from checkpoint-4." in printed["stderr"]
    else:
        assert f"train.ddp_timeout={timeout} s" in printed["stderr"] and "while step 5 was trained" in printed["stderr"]
        assert "in all_gather" in stacks[0].read_text()
    assert ("None from rank 1: stopped" in printed["stderr"]) == (action == "SIGSTOP")
    if action != "SIGSTOP":
        assert ("in hang_in_c" if count == 1 else "in hang_in_python") in stacks[count - 1].read_text()
    ranks.run(count, words, SFT_RESTARTS="1")
    assert run.record["status"] == "finished"


def test_the_clock_and_a_file_stop_a_run_as_a_signal_does(recipe: Path, ranks: Ranks) -> None:
    run = Run(recipe.parent / "outputs" / "job" / "clock")
    words = ["sft.train", recipe, "tracking.run_name=clock"]
    printed = ranks.run(1, [*words, "train.max_time=1s"], expect=143)
    assert (
        "Interrupted by train.max_time after step 1. The same command resumes from checkpoint-1." in printed["stderr"]
    )
    for name in ("stop", "save"):  # as if made once the next start is on its way
        (run.path / name).touch()
        os.utime(run.path / name, (time.time() + 600,) * 2)
    printed = ranks.run(1, words, expect=143)
    assert (
        "Interrupted by the file `stop` after step 2. The same command resumes from checkpoint-2." in printed["stderr"]
    )
    assert list(left(run)) == []
    (run.path / "stop").touch()
    os.utime(run.path / "stop", (time.time() - 60,) * 2)
    ranks.run(1, words)  # the file is older than this start, and so was meant for an earlier one
    assert run.record["status"] == "finished"
    assert list(left(run)) == []


def ranks_of(launcher: "subprocess.Popen[str]") -> list[int]:
    """Process ids of a launcher's children."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    return [int(pid) for pid in children.read_text().split()] if children.exists() else []


def rank_of(launcher: "subprocess.Popen[str]", rank: int) -> int:
    """The process id of a rank, by its environment."""
    variable = f"RANK={rank}".encode()
    (found,) = [pid for pid in ranks_of(launcher) if variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")]
    return found


def interrupted(launcher: "subprocess.Popen[str]", run: Run, by: str) -> str:
    """What it has printed; it must have ended as a job does that was interrupted, with all its processes."""
    pids = ranks_of(launcher)
    printed = launcher.communicate()[0]
    assert launcher.returncode == (130 if by == "SIGINT" else 143), printed
    assert printed.count(f"Interrupted by {by}") == 1 and "Traceback" not in printed, printed
    assert "Restarting all" not in printed
    assert run.record["status"] == "interrupted"
    assert list(left(run)) == [] and not list(Path(tempfile.gettempdir()).glob(f"sft-*-{launcher.pid}-*"))
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    return printed


def launched(recipe: Path, start: Start, name: str) -> tuple["subprocess.Popen[str]", Run]:
    """Our launcher, whose two ranks have begun to train."""
    words = [sys.executable, "-m", "sft.launch", recipe, f"tracking.run_name={name}", "train.max_steps=100000"]
    run, launcher = Run(recipe.parent / "outputs" / "job" / name), start([*words, "--max-restarts", "2"], NPROC="2")
    until(lambda: lines_of(run) > 0, launcher)
    return launcher, run


def test_the_launcher_passes_a_signal_on_and_waits_for_the_checkpoint(recipe: Path, start: Start) -> None:
    """To the launcher alone, after a save that a file has asked for."""
    launcher, run = launched(recipe, start, "launched")
    (run.path / "save").touch()
    until(lambda: not (run.path / "save").exists(), launcher)
    assert run.last_checkpoint() is not None
    launcher.send_signal(signal.SIGINT)
    printed = interrupted(launcher, run, "SIGINT")
    step = lines(run)[-1]["step"]
    assert f"Interrupted by SIGINT after step {step}. The same command resumes from checkpoint-{step}." in printed


@pytest.mark.extra
def test_a_second_signal_to_the_launcher_ends_a_job_of_which_a_rank_is_stopped(recipe: Path, start: Start) -> None:
    launcher, run = launched(recipe, start, "stopped-rank")
    stopped = rank_of(launcher, 1)
    os.kill(stopped, signal.SIGSTOP)
    launcher.send_signal(signal.SIGTERM)
    # Two signals within half a second are one: the second comes when the first has reached the ranks, and later.
    pending = Path(f"/proc/{stopped}/status")
    until(lambda: int(re.findall(r"ShdPnd:\s*(\w+)", pending.read_text())[0], 16), launcher)
    time.sleep(1)
    launcher.send_signal(signal.SIGTERM)
    interrupted(launcher, run, "SIGTERM")


def test_an_evaluation_that_was_stopped_resumes_alone(recipe: Path, ranks: Ranks, start: Start) -> None:
    tasks = write_task(recipe.parent / "copy.yaml", recipe.parent / "rows.jsonl", **TASK)
    (recipe.parent / "rows.jsonl").write_text('{"text": "a b", "answer": "b"}\n' * 40)
    words = [str(recipe), "tracking.run_name=evaluated", f'eval.tasks=["{tasks}"]', "train.max_steps=1"]
    run = Run(recipe.parent / "outputs" / "job" / "evaluated")
    ranks.run(1, ["sft.train", *words])
    weights = (run.final / "model.safetensors").stat().st_mtime_ns
    assert run.record["evaluation"] == "running"  # nothing between the training and its evaluation is lost
    run.update(evaluation=None)
    process = start([sys.executable, "-m", "sft.launch.evaluation", run.path])
    until(lambda: run.record.get("evaluation") == "running", process)
    process.terminate()
    printed = process.communicate()[0]
    assert (process.returncode, run.record["status"], run.record["evaluation"]) == (143, "interrupted", "interrupted")
    assert printed.count("Interrupted by SIGTERM. The same command resumes the evaluation.") == 1
    ranks.run(1, ["sft.train", *words], finish=True)
    assert (run.record["status"], run.record["evaluation"]) == ("finished", "finished")
    assert (run.final / "model.safetensors").stat().st_mtime_ns == weights
    assert run.comparison_file.is_file()
