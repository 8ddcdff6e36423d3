"""After training: score base and tuned, and write the report. `python -m sft.launch.evaluation RUN`

The first rank becomes this program, so that nothing of the training is left in memory or on the GPU beside the evaluation.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from sft import signals
from sft.errors import EXIT_CRASHED, EXIT_GATE, EXIT_TERMINATED, Interrupted, RunError
from sft.launch.run_directory import claim, keep_recipe, unfinished_run
from sft.parallel.process_group import environment_without_launcher
from sft.plan.job import Job
from sft.processes import report_result
from sft.program import run_main
from sft.recipe.schema import Evaluation
from sft.run.directory import EVALUATION_LEFT, Run, find_run
from sft.run.record import InterruptibleRun
from sft.run.requests import began, forget_stale
from sft.run.trust import OWN_RUN
from sft.signals import held_back


def become_evaluation(run: Run) -> NoReturn:
    """Replace this process; the launcher goes on waiting for it."""
    report_result(run.path)
    environment = environment_without_launcher() | {OWN_RUN: str(run.path.resolve())}
    sys.stdout.flush()
    sys.stderr.flush()
    with held_back():
        os.execve(sys.executable, [sys.executable, "-m", "sft.launch.evaluation", str(run.path)], environment)


def unfinished_evaluation(job: Job) -> Run | None:
    """The run of this job that is trained, and whose evaluation was interrupted; a start goes on with that alone, as it now asks for."""
    run = unfinished_run(job)
    if run is None or run.record.get("evaluation") not in EVALUATION_LEFT or not (run.final / "config.json").is_file():
        return None
    if os.environ.get("RANK", "0") == "0":
        keep_recipe(run, job)
        run.update(overrides=list(job.overrides), recipe_values=job.recipe.model_dump(mode="json"))
    return run


def programs(evaluation: Evaluation) -> list[str]:
    """What is to be run after the training, the quick one first."""
    measures = bool(evaluation.tasks or evaluation.suite)
    return [*(["eval.chat"] if evaluation.chat else []), *(["eval.run"] if measures else [])]


def _status(ended: int, program: str) -> int:
    """Exit status for how a part has ended; one that was killed has none of its own, and is told."""
    if ended >= 0:
        return ended
    why = ", as the kernel does where memory runs out" if ended == -signal.SIGKILL else ""
    print(f"{program} was ended by {signal.Signals(-ended).name}{why}.", file=sys.stderr, flush=True)
    return EXIT_CRASHED


def _evaluate(run: Run, program: str) -> int:
    """Exit status of a part of the evaluation, which ends with this process."""
    environment = os.environ | {"SFT_PARENT": str(os.getpid())}
    process = None
    try:
        # Until it is through, the same command goes on with it, and trains nothing.
        run.update(status="finished", evaluation="running", error=None)
        with held_back():
            process = subprocess.Popen([sys.executable, "-m", program, str(run.path)], env=environment)
        while True:
            with suppress(subprocess.TimeoutExpired):
                return _status(process.wait(timeout=1), program)
            if (run.path / "stop").exists():
                (run.path / "stop").unlink(missing_ok=True)
                raise Interrupted("the file `stop`", EXIT_TERMINATED)
    except BaseException:
        if process is not None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
            process.kill()
            process.wait()
        run.update(evaluation="interrupted")
        raise


def main(argv: Sequence[str]) -> None:
    """Evaluate where the recipe asks for it, and write the report.

    Raises:
        SystemExit: The evaluation or its gate failed; the training is finished all the same.
        RunError: Another process evaluates the run.
    """
    from eval.report.main import write_report

    run = find_run(Path(argv[0]))
    signals.interrupts(InterruptibleRun(run))
    evaluation = run.recipe().eval
    if not programs(evaluation):
        write_report(run)
        print("\n".join(closing_lines(run)), flush=True)
        return
    if claim(run) is None:
        raise RunError(f"Another process evaluates {run.path}: wait until it is done, or stop it.")
    forget_stale(run.path, began())
    started = time.monotonic()
    # Answers that cannot be had must not cost the scores.
    status = next(filter(None, [_evaluate(run, program) for program in programs(evaluation)]), 0)
    timings = run.record["timings"] | {"evaluate_seconds": time.monotonic() - started}
    run.update(timings=timings, evaluation="finished" if status in (0, EXIT_GATE) else "failed")
    write_report(run)  # once more: eval.run has written it without its own duration
    if status:
        ending = " and evaluated; its gate has failed" if status == EXIT_GATE else "; its evaluation is not complete"
        print(f"The model is trained{ending}.", file=sys.stderr, flush=True)
    print("\n".join(closing_lines(run)), flush=True)
    if status:
        raise SystemExit(status)


def closing_lines(run: Run) -> list[str]:
    """What stands last in the terminal: the warnings, the report, and the next commands."""
    warnings = [f"  - {message}" for messages in run.record.get("warnings", {}).values() for message in messages]
    path = shlex.quote(_shortest(run.path))
    return [
        *(["Worth knowing:", *warnings] if warnings else []),
        "Next:",
        f"  bash scripts/chat.sh {path}",
        f"  bash scripts/eval.sh {path}",
        f"  bash scripts/export.sh {path} --to merged",
        f"Report: {_shortest(run.page_file)}",
    ]


def _shortest(path: Path) -> str:
    """A path as the user would type it: relative where it lies below the working directory."""
    with suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)


if __name__ == "__main__":
    run_main(main)
