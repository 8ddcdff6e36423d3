"""What is tried, what is chosen, and when a result is found again."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from sft.data.prepare import prepare
from sft.data.prepared import Prepared
from sft.errors import PlanError
from sft.files import write_json
from sft.launch import auto_tune
from sft.launch.auto_tune import EXIT_DID_NOT_FIT, PASSES, Measured, Trial, choices, choose, to_measure
from sft.launch.job import open_job
from sft.launch.tuning_result import find_result, is_tuned, result_file
from sft.plan.hardware import Gpu, Hardware
from sft.plan.job import Job
from sft.plan.plan import TuningResult
from sft.train.arguments import _planned_arguments

H100 = Hardware(Gpu("NVIDIA H100", 80.0, 9.0), 2, 2, 16, 128.0)
MakeJob = Callable[..., Job]


@pytest.fixture
def make_job(recipe_file: Path, tmp_path: Path) -> MakeJob:
    rows = tmp_path / "rows.jsonl"
    talks = [{"prompt": f"Count to {n}", "completion": " ".join(map(str, range(n)))} for n in range(3, 33)]
    rows.write_text("".join(json.dumps(talk) + "\n" for talk in talks))

    def make(*overrides: str, hardware: Hardware = H100) -> Job:
        return open_job(recipe_file, [f"output_dir={tmp_path / 'out'}", f"data.train={rows}", *overrides], hardware)

    return make


@pytest.fixture
def prepared(make_job: MakeJob) -> Prepared:
    job = make_job()
    return prepare(job.recipe, job.model)


def test_what_the_recipe_leaves_open_is_tried(make_job: MakeJob) -> None:
    def tried(*overrides: str) -> list[list[tuple[object, int]]]:
        found = choices(make_job(*overrides))
        return [[(one.gradient_checkpointing, one.micro_batch_size) for one in trials] for trials in found]

    assert tried() == [[(mode, size) for size in (4, 2, 1)] for mode in (True, 2, False)]
    assert tried("train.micro_batch_size=2") == [[(True, 2)], [(2, 2)], [(False, 2)]]
    assert tried("train.gradient_checkpointing=selective") == [[("selective", size) for size in (4, 2, 1)]]
    both = ["train.micro_batch_size=2", "train.gradient_checkpointing=true"]
    assert [is_tuned(make_job(*keys)) for keys in ([], both[:1], both[1:], both)] == [True, True, True, False]


def test_a_way_to_checkpoint_is_measured_at_the_largest_micro_batch_that_fits(
    make_job: MakeJob, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def measured(trial: Trial, job: Job) -> tuple[int, Measured | None]:
        tried.append(trial)
        fits = trial.gradient_checkpointing is True or (trial.gradient_checkpointing, trial.micro_batch_size) == (2, 1)
        speed = 2.0 if trial.gradient_checkpointing is True else 1.0
        return (0, Measured(speed, 1, 0.5)) if fits else (EXIT_DID_NOT_FIT, None)

    monkeypatch.setattr(auto_tune, "_measured", measured)
    job = make_job()
    auto_tune.auto_tune(job, prepared)
    assert tried == [Trial(True, 4), *(Trial(mode, size) for mode in (2, False) for size in (4, 2, 1))]
    found = find_result(job, prepared)
    assert found is not None
    assert (found.gradient_checkpointing, found.micro_batch_size) == (2, 1)


def test_one_that_leaves_little_memory_is_chosen_only_if_nothing_leaves_more(
    make_job: MakeJob, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        auto_tune,
        "_measured",
        lambda trial, job: (0, Measured(1.0, trial.micro_batch_size, 0.9 + trial.micro_batch_size / 30)),
    )
    job = make_job()
    auto_tune.auto_tune(job, prepared)
    found = find_result(job, prepared)
    assert found is not None and found.micro_batch_size == 1


def test_a_training_that_never_fits_is_refused_and_a_failure_leaves_arithmetic(
    make_job: MakeJob, prepared: Prepared, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(auto_tune, "_measured", lambda trial, job: (EXIT_DID_NOT_FIT, None))
    with pytest.raises(PlanError, match=r"train.micro_batch_size=auto, .*memory ran out in each trial.*--fit"):
        auto_tune.auto_tune(make_job(), prepared)
    monkeypatch.setattr(auto_tune, "_measured", lambda trial, job: (1, None))
    auto_tune.auto_tune(make_job(), prepared)
    assert "Auto-tuning failed: its processes ended with status 1" in capsys.readouterr().out
    assert find_result(make_job(), prepared) is None


def test_of_two_as_fast_the_smaller_is_chosen() -> None:
    found = {
        Trial(True, 1): Measured(1.0, 1, 0.5),
        Trial(2, 1): Measured(0.99, 8, 0.5),
        Trial(False, 1): Measured(1.1, 1, 0.5),
    }
    assert choose(found).gradient_checkpointing is True
    found[Trial(False, 1)] = Measured(0.5, 9, 0.5)
    assert choose(found).gradient_checkpointing is False


SAME = ["train.learning_rate=1.0", "train.seed=5", "train.num_train_epochs=3", "eval.limit=3", "train.save_steps=7"]
OTHER = [
    "train.global_batch_size=16",
    "train.micro_batch_size=2",
    "train.deepspeed=zero2",
    "train.trainer_args.use_liger_kernel=false",
    "model.lora={r: 8}",
    "model.kernels=none",
    "data.packing=false",
]


def test_a_result_is_found_again_by_all_that_moves_time_or_memory(make_job: MakeJob, prepared: Prepared) -> None:
    first = result_file(make_job(), prepared)
    assert {result_file(make_job(key), prepared) for key in SAME} == {first}
    machines = [replace(H100, gpu=Gpu("NVIDIA H200", 80.0, 9.0)), replace(H100, ranks=4, ranks_per_node=4)]
    files = [first, *(result_file(make_job(key), prepared) for key in OTHER)]
    files += [result_file(make_job(hardware=hardware), prepared) for hardware in machines]
    assert len(set(files)) == 1 + len(OTHER) + len(machines)


def test_the_plan_takes_the_result_and_a_file_that_cannot_be_read_is_none(
    make_job: MakeJob, prepared: Prepared
) -> None:
    job = make_job("train.global_batch_size=32")
    file = result_file(job, prepared)
    file.parent.mkdir()
    file.write_text('{"chosen": 3}')
    assert find_result(job, prepared) is None
    write_json(file, asdict(TuningResult(2, 2, "auto: measured on this machine")))
    plan = job.with_data(prepared.facts(), find_result(job, prepared)).plan
    assert (plan.micro_batch_size.value, plan.gradient_accumulation_steps.value) == (2, 8)
    assert plan.gradient_checkpointing.value == 2
    assert "measured on this machine" in plan.micro_batch_size.reason


@pytest.mark.parametrize("overrides", [[], ["train.deepspeed=zero2"], ["model.lora={}", "train.deepspeed=zero3"]])
def test_a_trial_is_the_training_but_for_what_it_writes_and_how_a_step_is_divided(
    overrides: list[str], make_job: MakeJob, tmp_path: Path
) -> None:
    words = [
        "train.max_steps=9",
        "train.save_steps=1",
        "tracking.report_to=[tensorboard]",
        "train.logging_steps=1",
        *overrides,
    ]
    job = make_job(*words, hardware=Hardware(None, 2, 2, 2, 16.0))
    training, trial = (_planned_arguments(one, tmp_path / "run") for one in (job, to_measure(job, Trial(2, 1))))
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


def test_gradients_are_measured_in_the_dtype_that_takes_most(make_job: MakeJob) -> None:
    # One micro-batch of 8 by arithmetic, whose gradients are bf16; measuring may find that several are faster.
    job = make_job("train.parallel=auto", hardware=Hardware(Gpu("H200", 140.0, 9.0), 1, 1, 2, 16.0))
    assert (job.plan.gradient_accumulation_steps.value, job.plan.gradients.value) == (1, "bf16")
    assert to_measure(job, Trial(True, 8)).plan.gradients.value == "fp32"
