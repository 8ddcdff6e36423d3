"""What a trial trains, and which errors mean that memory ran out."""

from pathlib import Path

import pytest
import torch

from sft.launch.job import open_job
from sft.launch.trials import did_not_fit, to_measure
from sft.launch.tuning_result import PASSES
from sft.plan.hardware import Gpu, Hardware
from sft.train.arguments import _planned_arguments


@pytest.mark.parametrize("overrides", [[], ["train.deepspeed=zero2"], ["model.lora={}", "train.deepspeed=zero3"]])
def test_a_trial_is_the_training_but_for_what_it_writes_and_how_a_step_is_divided(
    overrides: list[str], recipe_file: Path, outputs: Path, tmp_path: Path
) -> None:
    words = [f"output_dir={outputs}", "train.save_steps=1", "tracking.report_to=[tensorboard]", "train.logging_steps=1"]
    job = open_job(recipe_file, [*words, *overrides], Hardware(None, 2, 2, 2, 16.0))
    training, trial = (_planned_arguments(one, tmp_path / "recipe" / "run") for one in (job, to_measure(job)))
    assert {name for name in training if training[name] != trial[name]} == {
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "gradient_checkpointing",
        "gradient_checkpointing_kwargs",
        "max_steps",
        "save_steps",
        "logging_steps",
        "report_to",
    }
    assert (trial["per_device_train_batch_size"], trial["gradient_accumulation_steps"]) == (1, PASSES)


def test_gradients_are_measured_in_the_dtype_that_takes_most(recipe_file: Path, outputs: Path) -> None:
    # One micro-batch of 8 by arithmetic, whose gradients are bf16; measuring may find that several are faster.
    words = [f"output_dir={outputs}", "train.parallel=auto"]
    job = open_job(recipe_file, words, Hardware(Gpu("H200", 140.0, 9.0), 1, 1, 2, 16.0))
    assert (job.plan.gradient_accumulation_steps.value, job.plan.gradients.value) == (1, "bf16")
    assert to_measure(job).plan.gradients.value == "fp32"


def test_only_memory_that_ran_out_is_a_result() -> None:
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**52)
    assert did_not_fit(error.value)
    assert did_not_fit(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert did_not_fit(MemoryError())
    assert not did_not_fit(RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"))
