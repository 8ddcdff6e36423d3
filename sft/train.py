"""Train one recipe, from file to report. Started by scripts/sft.sh, or by hand:

python -m sft.train recipes/tiny.yaml train.learning_rate=1e-3
torchrun --nproc-per-node 2 -m sft.train recipes/tiny.yaml
accelerate launch --num_processes 2 -m sft.train recipes/tiny.yaml
deepspeed --module sft.train recipes/tiny.yaml
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sft import distributed
from sft.data import Documents, prepare_documents
from sft.errors import PlanError, RecipeError, RunError, run_main
from sft.facts import DataFacts
from sft.job import Job, open_job
from sft.plan import print_plan
from sft.run_directory import Run, open_run, record_start, write_json
from sft.tokenizer import load_tokenizer
from sft.tracking import set_up_trackers


def main(argv: Sequence[str]) -> None:
    """Train one recipe: the table of contents."""
    recipe_path, overrides = parse_command_line(argv)
    job = open_job(recipe_path, overrides, distributed.job_hardware())
    enter(job)
    tokenizer = load_tokenizer(job.recipe)
    check_with_frameworks(job)
    run, documents = open_run_with_data(job, tokenizer)
    with recorded(run):
        train(job, run, documents, tokenizer)
    distributed.leave_group()
    if distributed.is_first_rank():
        evaluate_and_report(job, run)


def parse_command_line(argv: Sequence[str]) -> tuple[Path, list[str]]:
    """The recipe's path and the overrides."""
    # The deepspeed launcher adds --local_rank=N; the environment says the same.
    words = [word for word in argv if not word.startswith("--local_rank")]
    if not words or words[0].startswith("-") or "=" in words[0]:
        raise RecipeError("usage: python -m sft.train RECIPE [key=value ...]")
    return Path(words[0]), words[1:]


def enter(job: Job) -> None:
    """Join the other ranks."""
    uses_gpu = job.hardware.gpu is not None
    distributed.settle_environment(job.deepspeed is not None, uses_gpu)
    distributed.quiet_frameworks()
    distributed.join_group(job.deepspeed is not None, uses_gpu)


def check_with_frameworks(job: Job) -> None:
    """The checks that need the frameworks imported, still before data and weights."""
    from sft.model import check_kernels
    from sft.trainer import check_trainer_args

    check_kernels(job)
    check_trainer_args(job)


def say(*lines: str) -> None:
    """Print on the first rank."""
    if distributed.is_first_rank():
        print(*lines, sep="\n", flush=True)


def open_run_with_data(job: Job, tokenizer: Any) -> tuple[Run, Documents]:
    """Prepare the documents, then make the run's folder: a mistake in the data leaves none behind."""
    result: tuple[Run, Documents] | None = None
    if distributed.is_first_rank():
        output = Path(job.recipe.output_dir).expanduser()
        try:
            output.mkdir(parents=True, exist_ok=True)
            work = Path(tempfile.mkdtemp(prefix=".preparing-", dir=output))
        except OSError as error:
            raise RunError(f"output_dir={job.recipe.output_dir} cannot be written: {error}.") from None
        try:
            started = time.monotonic()
            documents = prepare_documents(job.recipe, tokenizer, work / "documents.arrow", _progress)
            run = open_run(job.recipe, job.recipe_path, job.overrides, job.hardware.ranks)
            check_resumable(job, run)
            documents = keep_documents(run, documents)
            record_start(run, job, {"prepare_seconds": time.monotonic() - started}, documents.fingerprint)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        result = run, documents
    shared: tuple[Run, Documents] | None = distributed.from_first_rank(result)
    assert shared is not None
    return shared


def check_resumable(job: Job, run: Run) -> None:
    """Refuse to go on where the engine would lose its state in silence.

    Raises:
        RunError: The optimizer is offloaded to NVMe: DeepSpeed saves no state of it, and would start it anew.
    """
    checkpoint = run.last_checkpoint()
    if checkpoint and job.deepspeed is not None and job.deepspeed.offload == "nvme":
        raise RunError(
            f"{checkpoint} cannot be resumed: with offload to NVMe DeepSpeed does not save the optimizer's state. Start anew with "
            "train.resume=never."
        )


def keep_documents(run: Run, documents: Documents) -> Documents:
    """Move the documents into the run's folder.

    Raises:
        RunError: The run goes on after an interruption, and the data has changed since.
    """
    earlier = run.record.get("data_fingerprint") if (run.path / "run.json").exists() else None
    if earlier not in (None, documents.fingerprint) and run.last_checkpoint():
        raise RunError(
            f"The data, tokenizer or chat template has changed since {run.path} was started, so it cannot go on. Start anew with "
            "train.resume=never."
        )
    shutil.rmtree(run.data, ignore_errors=True)
    run.data.mkdir()
    return Documents(documents.file.rename(run.data / documents.file.name), documents.accounts, documents.fingerprint)


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text}", end="\r", file=sys.stderr, flush=True)


@contextmanager
def recorded(run: Run) -> Iterator[None]:
    """Keep run.json's status true however the training ends."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except BaseException as error:
        status = "interrupted" if isinstance(error, KeyboardInterrupt | SystemExit) else "failed"
        if distributed.is_first_rank():
            with suppress(OSError):  # on a full disk the error itself matters more than its record
                run.update(status=status, error=f"{type(error).__name__}: {error}"[:2000])
        if isinstance(error, KeyboardInterrupt):
            raise SystemExit(130) from None
        raise


def train(job: Job, run: Run, documents: Documents, tokenizer: Any) -> None:
    """Train, and write final/."""
    from sft import batches, metrics
    from sft.model import load_model
    from sft.trainer import build_trainer, training_arguments, what_runs

    sequences = batches.documents_dataset(documents.file)
    if job.recipe.data.packing:
        sequences = batches.pack_documents(sequences, job.recipe.data.max_length)
    real = len(sequences)
    sequences, fillers = batches.fill_last_step(sequences, job.recipe.sequences_per_step, tokenizer.pad_token_id)
    job = job.with_data(count(documents, real))
    if distributed.is_first_rank():
        show_start(job, run, documents, real)
    arguments = training_arguments(job, run)
    model = load_model(job, tokenizer)
    order = batches.StepOrder(real, fillers, job.recipe.train.seed)
    callback = metrics.Metrics(run.metrics_file, job.hardware, job.recipe.model.lora is None)
    trainer = build_trainer(job, arguments, model, tokenizer, sequences, order, callback)
    if (running := what_runs(trainer)) != job.plan.engine.value:
        raise PlanError(
            f"The plan's engine is {job.plan.engine.value}, and {running} is running. Report this with plan.json."
        )
    checkpoint = run.last_checkpoint()
    started = time.monotonic()
    result = trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    seconds = time.monotonic() - started
    write_final(trainer, job, run, tokenizer)
    if distributed.is_first_rank():
        shutil.rmtree(run.data, ignore_errors=True)
        timings = run.record["timings"] | {"train_seconds": seconds}
        run.update(
            status="finished",
            finished=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            timings=timings,
            train_loss=result.training_loss,
        )
    say(f"Trained {trainer.state.global_step} steps in {seconds:.0f} s: {run.final}")


def count(documents: Documents, sequences: int) -> DataFacts:
    """The data as the plan counts it."""
    total = documents.total()
    return DataFacts(total.rows_used, total.trained + total.masked, total.trained, sequences, exact=True)


def show_start(job: Job, run: Run, documents: Documents, sequences: int) -> None:
    """Write plan.json and ledger.json, and print what is about to happen."""
    total = documents.total()
    used = total.trained + total.masked
    padding = sequences * job.recipe.data.max_length - used
    packing = (
        {"packs": sequences, "fill": used / (used + padding), "padding": padding} if job.recipe.data.packing else None
    )
    accounts = [account.as_json() for account in documents.accounts]
    write_json(run.ledger_file, {"sources": accounts, "total": total.as_json(), "packing": packing})
    write_json(run.plan_file, {"decisions": job.plan.decisions()})
    notes = [
        f"Data: {total.rows_used} of {total.rows_in} rows used"
        + "".join(f", {number} dropped ({reason})" for reason, number in total.rows_dropped.items())
        + f"; {used} tokens, {total.trained} of them trained, {total.truncated} truncated, {total.dropped} dropped"
        + (f"; {sequences} packs, {packing['fill']:.1%} full." if packing else "."),
        *set_up_trackers(job.recipe.tracking, run),
        f"Run: {run.path}",
    ]
    checkpoint = run.last_checkpoint()
    if checkpoint:
        notes.append(
            f"This run was not finished: it goes on from {checkpoint.name}. train.resume=never starts another."
        )
    print_plan(job.plan, f"{job.recipe_path.stem}: {job.recipe.model.name_or_path} on {job.hardware.device}", notes)


def write_final(trainer: Any, job: Job, run: Run, tokenizer: Any) -> None:
    """final/: complete or absent."""
    from sft.model import merge_adapter
    from sft.trainer import save_final

    work = run.path / ".final"
    if distributed.is_first_rank():
        shutil.rmtree(work, ignore_errors=True)
    distributed.wait_for_all()
    save_final(trainer, job, work)
    distributed.wait_for_all()
    if not distributed.is_first_rank():
        return
    if job.recipe.model.lora is not None:
        adapter = work.rename(run.path / ".adapter")
        merge_adapter(job, tokenizer, adapter, work)
        shutil.rmtree(work / "adapter", ignore_errors=True)
        adapter.rename(work / "adapter")
    tokenizer.save_pretrained(work)
    shutil.rmtree(run.final, ignore_errors=True)
    work.rename(run.final)


def evaluate_and_report(job: Job, run: Run) -> None:
    """Score base and tuned in a process of their own, which has the whole machine, and write the report.

    Raises:
        SystemExit: The evaluation failed; the training is finished all the same.
    """
    status = 0
    if job.recipe.eval.tasks or job.recipe.eval.suite:
        started = time.monotonic()
        launched = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in launched and not name.startswith("TORCHELASTIC")
        }
        status = subprocess.run(
            [sys.executable, "-m", "eval.run", str(run.path)], env=environment, check=False
        ).returncode
        timings = run.record["timings"] | {"evaluate_seconds": time.monotonic() - started}
        run.update(timings=timings, evaluation="finished" if status == 0 else "failed")
    from eval.report import write_report

    report = write_report(run)  # once more after an evaluation, whose own has not its duration
    if "evaluation" not in run.record or status:
        print(f"Report: {report}", flush=True)
    if status:
        print(
            f"The model is trained; its evaluation is not complete. Again: bash scripts/eval.sh {run.path}",
            file=sys.stderr,
        )
        raise SystemExit(status)


if __name__ == "__main__":
    run_main(main)
