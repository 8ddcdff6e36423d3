import json
from collections.abc import Callable
from dataclasses import fields
from math import sqrt
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from transformers import AutoModelForCausalLM, SchedulerType
from trl import SFTConfig

from sft.checkpoint.final import save_weights
from sft.errors import RecipeError
from sft.launch.job import open_job
from sft.plan.hardware import Gpu, Hardware
from sft.plan.job import Job
from sft.recipe.train import Train
from sft.run.directory import Run
from sft.train.arguments import (
    SCHEDULES,
    _planned_arguments,
    check_trainer_args,
    planned_schedule,
    training_arguments,
)
from sft.train.metrics import Metrics

# transformers 5.23 renames the gradient checkpointing arguments; the range of versions knows only the old names.
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")

CPU = Hardware(None, 1, 1, 2, 16.0)
MakeJob = Callable[..., Job]


@pytest.fixture
def make_job(recipe_file: Path, outputs: Path) -> MakeJob:
    def make(*overrides: str, hardware: Hardware = CPU) -> Job:
        return open_job(recipe_file, [f"output_dir={outputs}", *overrides], hardware)

    return make


def test_the_installed_sftconfig_has_every_name_that_is_passed(make_job: MakeJob, tmp_path: Path) -> None:
    """Fails when an upgrade renames one."""
    known = {field.name for field in fields(SFTConfig) if field.init}
    for overrides in ([], ["train.deepspeed=zero2"], ["data.packing=false", "tracking.report_to=[wandb]"]):
        hardware = Hardware(Gpu("NVIDIA H100", 80.0, 9.0), 1, 1, 16, 128.0)
        for machine in (CPU, hardware):
            passed = _planned_arguments(make_job(*overrides, hardware=machine), tmp_path / "recipe" / "run")
            assert set(passed) - known == set()
            assert len(passed) > 30


def test_the_plan_arrives_in_the_trainers_configuration(make_job: MakeJob, tmp_path: Path) -> None:
    overrides = ["train.global_batch_size=24", "train.micro_batch_size=3", "train.learning_rate=2e-5", "train.seed=7"]
    overrides += ["train.warmup_steps=4", "train.max_steps=9", "train.adam_beta2=0.99", "train.max_grad_norm=0.3"]
    arguments = training_arguments(make_job(*overrides), Run(tmp_path / "mine" / "first"))
    assert arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps == 24
    assert (arguments.per_device_train_batch_size, arguments.max_steps, arguments.warmup_steps) == (3, 9, 4)
    assert (arguments.learning_rate, arguments.adam_beta2, arguments.max_grad_norm) == (2e-5, 0.99, 0.3)
    assert (arguments.seed, arguments.bf16, arguments.fp16, arguments.use_cpu) == (7, False, False, True)
    assert (arguments.packing, arguments.packing_strategy, arguments.max_length) == (True, "bfd", 128)
    assert arguments.report_to == []
    assert arguments.output_dir == str(tmp_path / "mine" / "first" / "checkpoints")


def rates_of(job: Job, steps: int) -> list[float]:
    shape = planned_schedule(job, steps).lr_lambdas[0]
    return [1e-3 * shape(step) for step in range(steps + 1)]


@pytest.mark.parametrize(
    ("overrides", "middle", "end"),
    [
        ("cosine train.min_lr_ratio=0.1", 5.5e-4, 1e-4),
        ("linear", 5e-4, 0.0),
        ("constant", 1e-3, 1e-3),
        ("warmup_stable_decay train.lr_decay_steps=20", 1e-3, 0.0),
        ("warmup_stable_decay train.lr_decay_ratio=0.6 train.lr_decay_type=1-sqrt", 1e-3 * (1 - sqrt(16 / 66)), 0.0),
        ("inverse_sqrt", 1e-3 / sqrt(6), 1e-3 / sqrt(11)),  # the time scale is the warmup's 10 steps
        ("polynomial train.min_lr_ratio=0.2 train.lr_power=2", 4e-4, 2e-4),
    ],
)
def test_the_learning_rate_rises_and_then_has_the_recipes_shape(
    overrides: str, middle: float, end: float, make_job: MakeJob
) -> None:
    job = make_job(
        *f"train.lr_scheduler_type={overrides}".split(),
        "train.warmup_steps=10",
        "train.learning_rate=1e-3",
        "train.max_steps=110",
    )
    rates = rates_of(job, 110)
    assert rates[:11] == pytest.approx([1e-4 * step for step in range(11)])
    assert max(rates) == pytest.approx(1e-3)
    assert rates[60] == pytest.approx(middle)
    assert rates[-1] == pytest.approx(end, abs=1e-9)


def test_a_warmup_ratio_becomes_steps_and_warmup_stable_decay_rises_from_its_end(
    make_job: MakeJob,
) -> None:
    words = "train.lr_scheduler_type=warmup_stable_decay train.lr_decay_ratio=0.1 train.min_lr_ratio=0.5 train.warmup_ratio=0.095"
    job = make_job(*words.split(), "train.learning_rate=1e-3", "train.max_steps=100")
    assert job.plan.warmup_steps.value == 10
    rates = rates_of(job, 100)
    assert rates[0] == pytest.approx(5e-4)
    assert rates[10:91] == pytest.approx([1e-3] * 81)
    assert rates[95] == pytest.approx(7.5e-4)


def test_every_schedule_of_the_recipe_is_one_of_transformers() -> None:
    assert set(get_args(Train.model_fields["lr_scheduler_type"].annotation)) == set(SCHEDULES)
    assert set(SCHEDULES.values()) <= {schedule.value for schedule in SchedulerType}


def test_other_fields_of_sftconfig_go_through(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job("train.trainer_args={torch_empty_cache_steps: 5}")
    check_trainer_args(job)
    arguments = training_arguments(job, Run(tmp_path / "mine" / "first"))
    assert arguments.torch_empty_cache_steps == 5


def refused(job: Job) -> str:
    """By the plan already, which builds no trainer."""
    with pytest.raises(RecipeError) as error:
        check_trainer_args(job)
    assert str(error.value).startswith("train.trainer_args:")
    return str(error.value)


def test_mistakes_in_trainer_args_come_in_one_message(make_job: MakeJob) -> None:
    values = "{neftune_noise_alhpa: 5, learning_rate: 1.0, hub_token: hf_secret}"
    message = refused(make_job(f"train.trainer_args={values}"))
    assert "neftune_noise_alhpa: unknown to trl.SFTConfig; did you mean `neftune_noise_alpha`?" in message
    assert "learning_rate: decided by the recipe's own keys" in message
    assert "hub_token: a secret does not belong in a recipe" in message and "hf_secret" not in message


def test_everything_that_the_plan_decides_is_refused(make_job: MakeJob, tmp_path: Path) -> None:
    names = {*_planned_arguments(make_job(), tmp_path), "use_liger_kernel", "ignore_data_skip", "push_to_hub"}
    message = refused(make_job(f"train.trainer_args={{{', '.join(f'{name}: 1' for name in names)}}}"))
    for name in names:
        assert f"\n  {name}: decided by" in message


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("loss_type", "mse", "must be `nll` or `dft`, got 'mse'"),  # else refused after the weights load
        ("router_aux_loss_coef", ".nan", "router_aux_loss_coef: Input should be a finite number"),
        ("dataloader_num_workers", "two", "dataloader_num_workers: Input should be a valid integer"),
        ("dataloader_prefetch_factor", "2", "prefetch_factor"),  # by SFTConfig's constructor
        ("torch_empty_cache_steps", "0", "torch_empty_cache_steps"),
        ("debug", "everything", "everything"),
    ],
)
def test_a_wrong_value_is_refused(name: str, value: str, words: str, make_job: MakeJob) -> None:
    assert words in refused(make_job(f"train.trainer_args.{name}={value}"))


def test_a_few_steps_train_and_leave_whole_checkpoints_and_a_model(
    make_job: MakeJob, trainer_of: Callable[..., Any], tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    talk = {"prompt": "Say the alphabet", "completion": "a b c d e f g h i j k l m n o p q r s t u v w x y z"}
    rows.write_text((json.dumps(talk) + "\n") * 40)
    job = make_job(
        f"data.train={rows}", "train.max_steps=5", "train.save_steps=2", "train.save_total_limit=1", "train.learning_rate=1e-3",
        "train.logging_steps=1",
    )  # fmt: skip
    run = Run(tmp_path / "mine" / "first")
    trainer = trainer_of(job, lambda trainer: Metrics(trainer, run, job.hardware, {}))
    trainer.train()
    losses = [json.loads(line)["loss"] for line in run.metrics_file.read_text().splitlines()]
    assert len(losses) == 5
    state = json.loads((run.checkpoints / "checkpoint-5" / "trainer_state.json").read_text())
    assert state["num_input_tokens_seen"] > 0
    assert losses[-1] < losses[0]
    assert [path.name for path in run.checkpoints.iterdir()] == ["checkpoint-5"]
    assert run.last_checkpoint() == run.checkpoints / "checkpoint-5"
    save_weights(trainer, job, run.final)
    saved, trained = AutoModelForCausalLM.from_pretrained(run.final).state_dict(), trainer.model.state_dict()
    assert saved.keys() == trained.keys()
    assert all(torch.equal(value, trained[name]) for name, value in saved.items())
    assert not {path.name for path in run.final.iterdir()} & {"training_args.bin", "README.md"}
