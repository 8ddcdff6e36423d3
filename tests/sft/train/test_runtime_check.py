"""What was asked for is what runs: every known silent replacement is found in the live objects, altered by hand as a library would."""

from __future__ import annotations

import copy
import gc
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.trainer_callback import TrainerCallback

from sft.errors import PlanError
from sft.launch.job import open_job
from sft.plan.deepspeed import load_deepspeed
from sft.plan.hardware import Hardware
from sft.plan.job import Job
from sft.plan.plan import Decision
from sft.recipe.schema import Lora
from sft.train.isolation_probe import probe, sample_documents
from sft.train.runtime_check import Reading, check_readings, offloaded, read_running

# transformers 5.23 renames the gradient checkpointing arguments; the range of versions knows only the old names.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning"),
]

CPU = Hardware(None, 1, 1, 2, 16.0)
Alter = Callable[[Any], Any]
Plan = Callable[[Job], Job]
Read = Callable[..., dict[str, Reading]]


@pytest.fixture(scope="module", autouse=True)
def _uncollected() -> Iterator[None]:
    """accelerate looks for garbage before each training, among all that was imported."""
    gc.freeze()
    yield
    gc.unfreeze()


class _Seen(Exception):
    """Everything was read; nothing is to be trained."""


class _Look(TrainerCallback):  # type: ignore[misc]
    """Alters the live objects where the check looks at them, and reads them."""

    def __init__(self, trainer: Any, planned: Job, before: Alter, after: Alter) -> None:
        self.trainer, self.planned, self.before, self.after = trainer, planned, before, after
        self.found: dict[str, Reading] = {}

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.before(self.trainer)
        documents = sample_documents(self.trainer.train_dataset)
        seen = probe(self.trainer, documents, self.trainer.padding_free)
        self.after(self.trainer)
        self.found = {reading.name: reading for reading in read_running(self.trainer, self.planned, seen)}
        raise _Seen


def nothing(trainer: Any) -> None:
    """As it was built."""


@pytest.fixture
def read(recipe_file: Path, outputs: Path, trainer_of: Callable[..., Any]) -> Read:
    """Build what one job says, and read it back as another planned it."""

    def reading(
        *overrides: str, planned: Plan = lambda job: job, before: Alter = nothing, after: Alter = nothing
    ) -> dict[str, Reading]:
        data = "data.train=[{path: 'builtin:demo', rows: 16}]"
        words = [f"output_dir={outputs}", data, "train.global_batch_size=4", "train.max_steps=1", *overrides]
        job, look = open_job(recipe_file, words, CPU), list[_Look]()

        def make(trainer: Any) -> _Look:
            look.append(_Look(trainer, planned(job), before, after))
            return look[0]

        trainer = trainer_of(job, make)
        with pytest.raises(_Seen):
            trainer.train()
        return look[0].found

    return reading


def wrong(found: dict[str, Reading]) -> dict[str, tuple[str, str]]:
    """What differs: planned, running. The run is refused for exactly these."""
    differing = {name: (reading.planned, reading.running) for name, reading in found.items() if reading.wrong}
    if not differing:
        check_readings(found.values())
        return differing
    with pytest.raises(PlanError, match="nothing was trained") as error:
        check_readings(found.values())
    for name, (planned, running) in differing.items():
        assert f"  {name}: planned {planned}, running {running}" in str(error.value)
    return differing


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["data.packing=false", "train.micro_batch_size=2", "model.attn_implementation=sdpa", "train.precision=bf16"],
        ["model.attn_implementation=eager", "train.gradient_checkpointing=true", "train.label_smoothing_factor=0.1"],
        ["model.lora={}", "model.quantization=nf4", "train.precision=bf16", "train.gradient_checkpointing=true"],
    ],
    ids=" ".join,
)
def test_what_runs_as_planned_is_not_refused(overrides: list[str], read: Read) -> None:
    found = read(*overrides)
    assert wrong(found) == {}
    assert len(found) >= 25
    assert found["engine"].running == "one process"
    assert found["loss"].running == "TRL's fused head"


def as_planned(**decisions: object) -> Plan:
    def change(job: Job) -> Job:
        values: Any = {name: Decision(value, "the recipe") for name, value in decisions.items()}
        return replace(job, plan=replace(job.plan, **values))

    return change


def with_section(section: str, **values: Any) -> Plan:
    """The job whose recipe has other values in a section."""

    def change(job: Job) -> Job:
        changed = getattr(job.recipe, section).model_copy(update=values)
        return replace(job, recipe=job.recipe.model_copy(update={section: changed}))

    return change


def with_zero_3(job: Job) -> Job:
    return replace(as_planned(engine="ZeRO-3")(job), deepspeed=load_deepspeed("zero3_offload"))


def on_two_ranks(job: Job) -> Job:
    return replace(as_planned(engine="DDP")(job), hardware=replace(CPU, ranks=2, ranks_per_node=2))


NF4, STORED = ["model.lora={}", "model.quantization=nf4"], " quantization, stored as uint8, computed in float32"
PLANS: list[tuple[Plan, list[str], dict[str, tuple[str, str]]]] = [
    (
        with_zero_3,
        [],
        {
            "engine": ("ZeRO-3", "one process"),
            "sharded": ("optimizer, gradients, parameters", "nothing"),
            "offloaded": ("optimizer on cpu, parameters on cpu", "nothing"),
        },
    ),
    (on_two_ranks, [], {"processes": ("2", "1"), "engine": ("DDP", "one process")}),
    (as_planned(kernels="liger"), [], {"kernels": ("liger", "none")}),
    (
        as_planned(attention="varlen_fa3"),
        [],
        {"attention": ("varlen_fa3", "varlen in 3 layers"), "flash_attention": ("FA3", "torch's own")},
    ),
    (as_planned(compile=True), [], {"compile": ("on", "off")}),
    (as_planned(gradient_checkpointing=True), [], {"gradient_checkpointing": ("3 of 3 layers, full", "off")}),
    (as_planned(precision="bf16"), [], {"precision": ("bf16", "fp32")}),
    (as_planned(micro_batch_size=3), [], {"micro_batch_size": ("3", "4")}),
    (with_section("data", packing=True), ["data.packing=false"], {"packing": ("on", "off")}),
    (
        with_section("model", quantization="fp4"),
        NF4,
        {"quantization": (f"fp4, double{STORED}", f"nf4, double{STORED}")},
    ),
    (with_section("model", lora=Lora()), [], {"trained": ("adapters of rank 16, alpha 32", "0 adapters")}),
]


def one_layer(trainer: Any) -> None:
    """The configuration says one thing, and a layer does another."""
    other = copy.deepcopy(trainer.model.config)
    other._attn_implementation = "sdpa"
    trainer.model.model.layers[1].self_attn.config = other


def keep_cache(trainer: Any) -> None:
    trainer.model.model.register_forward_pre_hook(
        lambda module, args, inputs: (args, inputs | {"use_cache": True}), with_kwargs=True
    )


def compute_all_logits(trainer: Any) -> None:
    trainer.compute_loss = lambda model, inputs: model(**inputs, use_cache=False).loss


def swap_kernel(trainer: Any) -> None:
    norm = trainer.model.model.norm
    source = type(norm).forward
    forward = types.FunctionType(source.__code__, source.__globals__, "forward")
    forward.__module__ = "liger_kernel.transformers.rms_norm"
    norm.forward = types.MethodType(forward, norm)


def swap_optimizer(trainer: Any) -> None:
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=trainer.args.learning_rate)


def change_betas(trainer: Any) -> None:
    trainer.optimizer.optimizer.param_groups[0]["betas"] = (0.9, 0.999)


def change_learning_rate(trainer: Any) -> None:
    for group in trainer.optimizer.param_groups:
        group["initial_lr"] = group["lr"] = 0.5


def change_schedule(trainer: Any) -> None:
    trainer.lr_scheduler.lr_lambdas[1].keywords["num_warmup_steps"] = 7


def change_dtype(trainer: Any) -> None:
    trainer.model.model.norm.float()


def train_the_base(trainer: Any) -> None:
    for parameter in trainer.model.parameters():
        parameter.requires_grad = True


def remove_noise(trainer: Any) -> None:
    trainer.model.get_input_embeddings()._forward_hooks.clear()


LION = "{'betas': (0.9, 0.99), 'weight_decay': 0.0}"
COSINE = (
    "cosine_schedule_with_warmup_lr_lambda(min_lr_rate=0.0, num_cycles=0.5, num_training_steps=1, num_warmup_steps=0)"
)
LIVE: list[tuple[str, Alter, list[str], dict[str, tuple[str, str]]]] = [
    ("before", one_layer, [], {"attention": ("varlen", "varlen in 2 layers, sdpa in 1 layers")}),
    ("before", keep_cache, [], {"use_cache": ("off", "on")}),
    ("before", compute_all_logits, [], {"loss": ("TRL's fused head", "all logits, then cross-entropy")}),
    ("after", swap_kernel, [], {"kernels": ("none", "liger: 1 Qwen2RMSNorm")}),
    ("after", swap_optimizer, [], {"optimizer": ("AdamW on fp32", "SGD on fp32")}),
    ("after", change_learning_rate, [], {"learning_rate": ("1e-05", "0.5")}),
    ("after", swap_optimizer, ["train.optim=adamw_8bit"], {"optimizer": ("AdamW, 8-bit on fp32", "SGD on fp32")}),
    ("after", change_betas, ["train.optim=lion"], {"optimizer_arguments": (LION, "(0.9, 0.999)")}),
    ("after", change_schedule, [], {"lr_scheduler": (COSINE, "num_warmup_steps=7")}),
    ("after", change_dtype, ["train.precision=bf16"], {"weights": ("bf16", "bf16, fp32")}),
    ("after", train_the_base, ["model.lora={}"], {"trained": ("adapters of rank 16, alpha 32", "")}),
    ("after", remove_noise, ["train.neftune_noise_alpha=5"], {"neftune_noise_alpha": ("5.0", "None")}),
]


def check_differing(found: dict[str, tuple[str, str]], expected: dict[str, tuple[str, str]]) -> None:
    for name, (planned, running) in expected.items():
        assert found[name][0] == planned and running in found[name][1]


@pytest.mark.parametrize(("planned", "overrides", "expected"), PLANS, ids=range(len(PLANS)))
def test_a_plan_that_does_not_run_is_refused(
    planned: Plan, overrides: list[str], expected: dict[str, tuple[str, str]], read: Read
) -> None:
    check_differing(wrong(read(*overrides, planned=planned)), expected)


@pytest.mark.parametrize(("when", "alter", "overrides", "expected"), LIVE)
def test_live_objects_that_are_not_as_planned_are_refused(
    when: str, alter: Alter, overrides: list[str], expected: dict[str, tuple[str, str]], read: Read
) -> None:
    differing = wrong(read(*overrides, **{when: alter}))
    assert differing.keys() == expected.keys()
    check_differing(differing, expected)


def test_weights_that_the_model_keeps_in_fp32_are_no_mismatch(read: Read) -> None:
    def keep(trainer: Any) -> None:
        trainer.model.model.norm.float()
        trainer.model._keep_in_fp32_modules_strict = {"norm.weight"}

    assert wrong(read("train.precision=bf16", after=keep)) == {}


def test_processes_that_do_not_know_of_each_other(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun without `use_cpu`: accelerate counts two, and each trains a model of its own."""

    def two(trainer: Any) -> None:
        monkeypatch.setitem(trainer.accelerator.state.__dict__, "num_processes", 2)

    differing = wrong(read(planned=as_planned(engine="DDP"), after=two))
    assert differing["engine"] == ("DDP", "processes that do not know of each other")


def test_what_deepspeeds_optimizer_keeps_off_the_gpu() -> None:
    zero_2 = types.SimpleNamespace(cpu_offload=True)
    zero_3 = types.SimpleNamespace(
        offload_optimizer=True, swap_optimizer=True, offload_param=True, params_in_nvme_and_cpu=False
    )
    assert offloaded(zero_2) == "optimizer on cpu"
    assert offloaded(zero_3) == "optimizer on nvme, parameters on cpu"
    assert offloaded(None) == "nothing"
