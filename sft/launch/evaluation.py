"""After training: score base and tuned, and write the report. `python -m sft.launch.evaluation RUN`

Rank 0 becomes this program, so that nothing of the training is left in memory or on the GPU beside the evaluation.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from sft.checkpoint.load_again import Load, exchange_of
from sft.errors import EXIT_CRASHED, EXIT_GATE, EXIT_TERMINATED, Interrupted, RunError
from sft.files import remove
from sft.launch.open_run import claim, unfinished_run
from sft.parallel.environment import environment_without_launcher
from sft.plan.job import Job
from sft.program import report_result, run_main, shown_command
from sft.recipe.schema import Evaluation
from sft.run.directory import EVALUATION_LEFT, Run, find_run
from sft.run.record import record_interruptions
from sft.run.requests import STOP, began, forget_stale
from sft.run.trust import OWN_RUN
from sft.signals import held_back


def become_evaluation(run: Run) -> NoReturn:
    """Replace this process; the launcher keeps waiting for it."""
    report_result(run.path)
    environment = environment_without_launcher() | {OWN_RUN: str(run.path.resolve())}
    sys.stdout.flush()
    sys.stderr.flush()
    with held_back():
        os.execve(sys.executable, [sys.executable, "-m", "sft.launch.evaluation", str(run.path)], environment)


def unfinished_evaluation(job: Job) -> Run | None:
    """The run of this job that is trained, and whose evaluation was interrupted; a start then evaluates only, as the recipe now says."""
    run = unfinished_run(job)
    if run is None or run.record.get("evaluation") not in EVALUATION_LEFT or not (run.final / "config.json").is_file():
        return None
    if os.environ.get("RANK", "0") == "0":
        run.recipe_file.write_bytes(job.recipe_path.read_bytes())
        run.update(overrides=list(job.overrides), recipe_values=job.recipe.model_dump(mode="json"))
    return run


_BEGINNINGS = {
    "eval.chat": "Chat: base and tuned model answer the prompts of eval.chat.",
    "eval.run": "Evaluation: base and tuned model are loaded and measured.",
}


def programs(evaluation: Evaluation) -> list[str]:
    """What runs after the training, the quick one first."""
    measures = bool(evaluation.tasks or evaluation.suite)
    return [*(["eval.chat"] if evaluation.chat else []), *(["eval.run"] if measures else [])]


def main(argv: Sequence[str]) -> None:
    """Evaluate as the recipe says, and write the report. The exit status is that of the evaluation, or of its gate."""
    from eval.report.main import write_report

    run = find_run(Path(argv[0]))
    record_interruptions(run)
    recipe, exchange, status = run.recipe(), exchange_of(run), 0
    parts = programs(recipe.eval)
    unfinished = bool(parts) or run.record.get("evaluation") in EVALUATION_LEFT
    if unfinished and claim(run) is None:
        raise RunError(f"Another process evaluates {run.path}: wait until it is done, or stop it.")
    if unfinished:
        forget_stale(run.path, began())
        if not recipe.train.save_canary:  # any more
            remove(exchange)
        started, load = time.monotonic(), Load(run) if exchange.is_dir() else None
        # All of them: answers that cannot be had must not cost the scores.
        status = next(filter(None, [_evaluate(run, program) for program in parts]), 0)
        if load is not None:
            load.check()
        timings = run.record["timings"] | {"evaluate_seconds": time.monotonic() - started}
        finished = "finished" if status in (0, EXIT_GATE) else "failed"
        run.update(status="finished", error=None, timings=timings, evaluation=finished)
    write_report(run)
    if status:
        ending = "its gate has failed" if status == EXIT_GATE else "its evaluation is not complete"
        print(f"The model is trained; {ending}.", file=sys.stderr, flush=True)
    print("\n".join(closing_lines(run)), flush=True)
    if status:
        raise SystemExit(status)


def _evaluate(run: Run, program: str) -> int:
    """Exit status of a part of the evaluation, which ends with this process."""
    print(_BEGINNINGS[program], flush=True)
    environment = os.environ | {"SFT_PARENT": str(os.getpid())}
    process = None
    try:
        # Until it is complete, the same command resumes it, and trains nothing.
        run.update(status="finished", evaluation="running", error=None)
        with held_back():
            process = subprocess.Popen([sys.executable, "-m", program, str(run.path)], env=environment)
        while process.poll() is None:
            if (run.path / STOP).exists():
                (run.path / STOP).unlink(missing_ok=True)
                raise Interrupted("the file `stop`", EXIT_TERMINATED)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=1)
    except BaseException:
        if process is not None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
            process.kill()
            process.wait()
        run.update(evaluation="interrupted")
        raise
    if process.returncode >= 0:
        return process.returncode
    ended = f"was ended by signal {-process.returncode}; the kernel sends 9 when memory runs out."
    print(f"{program} {ended}", file=sys.stderr, flush=True)
    return EXIT_CRASHED


def closing_lines(run: Run) -> list[str]:
    """The last lines in the terminal: the warnings, the next commands, and the report."""
    warnings = [f"  - {message}" for messages in run.record.get("warnings", {}).values() for message in messages]
    # As the user would type it.
    path, page = (
        os.path.relpath(one) if one.is_relative_to(Path.cwd()) else str(one) for one in (run.path, run.page_file)
    )
    return [
        *(["Worth knowing:", *warnings] if warnings else []),
        "Next:",
        f"  {shown_command('chat', path)}",
        f"  {shown_command('eval', path)}",
        f"  {shown_command('export', path, '--to', 'merged')}",
        f"Report: {page}",
    ]


if __name__ == "__main__":
    run_main(main)
