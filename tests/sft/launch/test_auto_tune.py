import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from sft.launch.auto_tune import to_measure
from sft.launch.job import open_job
from sft.launch.trials import did_not_fit
from sft.launch.tuning_result import PASSES, Candidate, Measurement, candidates, read_journal
from sft.plan.hardware import Gpu, Hardware
from sft.plan.job import Job
from sft.train.arguments import _planned_arguments

MakeJob = Callable[..., Job]


@pytest.fixture
def make_job(recipe_file: Path, outputs: Path) -> MakeJob:
    def make(*overrides: str) -> Job:
        return open_job(recipe_file, [f"output_dir={outputs}", *overrides], Hardware(None, 2, 2, 2, 16.0))

    return make


def test_a_process_reads_what_those_before_it_have_measured(tmp_path: Path) -> None:
    found = [
        Measurement(Candidate(True, 1), 1.5, 0.25, 5, 4, 3),
        Measurement(Candidate(2, 8), 2.0),
        Measurement(Candidate("selective", 1), 1.0, 0.5, 5, 4, 3),
    ]
    journal = tmp_path / "journal.jsonl"
    assert read_journal(journal) == []
    lines = [json.dumps(asdict(one)) + "\n" for one in found]
    journal.write_text("".join(lines) + lines[0][:20])
    read = read_journal(journal)
    assert read == found
    assert [type(one.candidate.gradient_checkpointing) for one in read] == [bool, int, str]


@pytest.mark.parametrize("overrides", [[], ["train.deepspeed=zero2"], ["model.lora={}", "train.deepspeed=zero3"]])
def test_what_is_measured_is_the_training_but_for_what_it_writes_and_how_a_step_is_cut(
    overrides: list[str], make_job: MakeJob, tmp_path: Path
) -> None:
    job = make_job("train.save_steps=1", "tracking.report_to=[tensorboard]", "train.logging_steps=1", *overrides)
    theirs, ours = (_planned_arguments(one, tmp_path / "recipe" / "run") for one in (job, to_measure(job)))
    assert {name for name in theirs if theirs[name] != ours[name]} == {
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "gradient_checkpointing",
        "gradient_checkpointing_kwargs",
        "max_steps",
        "save_steps",
        "logging_steps",
        "report_to",
    }
    assert (ours["per_device_train_batch_size"], ours["gradient_accumulation_steps"]) == (1, PASSES)
    assert candidates(to_measure(job)) == candidates(job)


def test_gradients_are_measured_in_the_format_that_takes_most(recipe_file: Path, outputs: Path) -> None:
    # One micro-batch of 8 by arithmetic, whose gradients are bf16; the search may find that several are faster.
    words = [f"output_dir={outputs}", "train.parallel=auto"]
    job = open_job(recipe_file, words, Hardware(Gpu("H200", 140.0, 9.0), 1, 1, 2, 16.0))
    assert (job.plan.gradient_accumulation_steps.value, job.plan.gradients.value) == (1, "bf16")
    assert to_measure(job).plan.gradients.value == "fp32"


def test_only_memory_that_ran_out_is_an_answer() -> None:
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**52)
    assert did_not_fit(error.value)
    assert did_not_fit(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert did_not_fit(MemoryError())
    assert not did_not_fit(RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"))
