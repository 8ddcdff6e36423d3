"""What was asked for is what runs: every known silent replacement is found in the live objects, altered by hand as a library would."""

from __future__ import annotations

import copy
import gc
import json
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


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runtime")
    talk = {"prompt": "Say the alphabet", "completion": "a b c d e f g h i j k l m n o p q r s t u v w x y z"}
    rows = [talk | {"prompt": f"Say the alphabet {number} times"} for number in range(16)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "job.yaml").write_text(
        "schema_version: 1\nversion: 1\nmodel: {name_or_path: 'builtin:demo'}\n"
        f"data: {{train: {folder / 'rows.jsonl'}, max_length: 128}}\ntrain: {{global_batch_size: 4, max_steps: 1}}\n"
    )
    return folder / "job.yaml"


@pytest.fixture
def read(recipe: Path, outputs: Path, trainer_of: Callable[..., Any]) -> Read:
    """Build what one job says, and read it back as another planned it."""

    def reading(
        *overrides: str, planned: Plan = lambda job: job, before: Alter = nothing, after: Alter = nothing
    ) -> dict[str, Reading]:
        job, look = open_job(recipe, [f"output_dir={outputs}", *overrides], CPU), list[_Look]()

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
        ["model.attn_implementation=eager", "train.gradient_checkpointing=true"],
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


def with_zero(stage: str) -> Plan:
    engine = as_planned(engine=f"ZeRO-{stage[4]}")
    return lambda job: replace(engine(job), deepspeed=load_deepspeed(stage))


def on_two_ranks(job: Job) -> Job:
    return replace(as_planned(engine="DDP")(job), hardware=replace(CPU, ranks=2, ranks_per_node=2))


ZERO_3 = {
    "engine": ("ZeRO-3", "one process"),
    "sharded": ("optimizer, gradients, parameters", "nothing"),
    "offloaded": ("optimizer on cpu, parameters on cpu", "nothing"),
}


NF4, STORED = ["model.lora={}", "model.quantization=nf4"], " quantization, stored as uint8, computed in float32"


@pytest.mark.parametrize(
    ("planned", "overrides", "expected"),
    [
        (with_zero("zero3_offload"), [], ZERO_3),
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
        (with_section("data", packing=True), ["data.packing=false"], {"packing": ("on", "off")}),
        (with_section("model", quantization=None), NF4, {"quantization": ("none", f"nf4, double{STORED} (21 layers)")}),
        (with_section("model", quantization="fp4"), NF4, {"quantization": (f"fp4, double{STORED}", "(21 layers)")}),
        (with_section("model", lora=Lora()), [], {"trained": ("adapters of rank 16, alpha 32", "0 adapters")}),
    ],
    ids=lambda value: None if callable(value) else str(value),
)
def test_a_plan_that_does_not_run_is_refused(
    planned: Plan, overrides: list[str], expected: dict[str, tuple[str, str]], read: Read
) -> None:
    differing = wrong(read(*overrides, planned=planned))
    assert differing.keys() >= expected.keys()
    for name, (was_planned, running) in expected.items():
        assert differing[name][0] == was_planned
        assert differing[name][1].endswith(running)


def use_eager(trainer: Any) -> None:
    trainer.model.set_attn_implementation("eager")


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


@pytest.mark.parametrize(
    ("alter", "expected"),
    [
        (use_eager, {"attention": ("varlen", "the model's own")}),
        (one_layer, {"attention": ("varlen", "varlen in 2 layers, sdpa in 1 layers")}),
        (keep_cache, {"use_cache": ("off", "on")}),
        (compute_all_logits, {"loss": ("TRL's fused head", "all logits, then cross-entropy")}),
    ],
)
def test_a_model_that_computes_in_another_way_is_refused(
    alter: Alter, expected: dict[str, tuple[str, str]], read: Read
) -> None:
    assert wrong(read(before=alter)) == expected


def swap_kernel(trainer: Any) -> None:
    norm = trainer.model.model.norm
    source = type(norm).forward
    forward = types.FunctionType(source.__code__, source.__globals__, "forward")
    forward.__module__ = "liger_kernel.transformers.rms_norm"
    norm.forward = types.MethodType(forward, norm)


def swap_optimizer(trainer: Any) -> None:
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=trainer.args.learning_rate)


def another_lion(trainer: Any) -> None:
    trainer.optimizer.optimizer.param_groups[0]["betas"] = (0.9, 0.999)


def change_learning_rate(trainer: Any) -> None:
    for group in trainer.optimizer.param_groups:
        group["initial_lr"] = group["lr"] = 0.5


LION = "{'betas': (0.9, 0.99), 'weight_decay': 0.0}"
COSINE = (
    "cosine_schedule_with_warmup_lr_lambda(min_lr_rate=0.0, num_cycles=0.5, num_training_steps=1, num_warmup_steps={})"
)


def change_schedule(trainer: Any) -> None:
    trainer.lr_scheduler.lr_lambdas[1].keywords["num_warmup_steps"] = 7


def set_argument(name: str, value: object) -> Alter:
    return lambda trainer: setattr(trainer.args, name, value)


def freeze_a_norm(trainer: Any) -> None:
    trainer.model.model.norm.weight.requires_grad = False


def train_the_base(trainer: Any) -> None:
    for parameter in trainer.model.parameters():
        parameter.requires_grad = True


@pytest.mark.parametrize(
    ("alter", "overrides", "expected"),
    [
        (swap_kernel, [], {"kernels": ("none", "liger: 1 Qwen2RMSNorm")}),
        (swap_optimizer, [], {"optimizer": ("AdamW on fp32", "SGD on fp32")}),
        (change_learning_rate, [], {"learning_rate": ("1e-05", "0.5")}),
        (swap_optimizer, ["train.optim=adamw_8bit"], {"optimizer": ("AdamW, 8-bit on fp32", "SGD on fp32")}),
        (another_lion, ["train.optim=lion"], {"optimizer_arguments": (LION, "(0.9, 0.999)")}),
        (change_schedule, [], {"lr_scheduler": (COSINE.format(0), "num_warmup_steps=7")}),
        (set_argument("per_device_train_batch_size", 3), [], {"micro_batch_size": ("4", "3")}),
        (set_argument("gradient_accumulation_steps", 2), [], {"gradient_accumulation_steps": ("1", "2")}),
        (
            lambda trainer: trainer.model.model.norm.float(),
            ["train.precision=bf16"],
            {"weights": ("bf16", "bf16, fp32")},
        ),
        (freeze_a_norm, [], {"trained": ("all parameters", " of ")}),
        (train_the_base, ["model.lora={}"], {"trained": ("adapters of rank 16, alpha 32", "")}),
    ],
)
def test_live_objects_that_are_not_as_planned_are_refused(
    alter: Alter, overrides: list[str], expected: dict[str, tuple[str, str]], read: Read
) -> None:
    differing = wrong(read(*overrides, after=alter))
    assert differing.keys() == expected.keys()
    for name, (planned, running) in expected.items():
        assert differing[name][0] == planned and running in differing[name][1]


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


def test_noise_and_smoothing_are_read_from_the_live_trainer(read: Read) -> None:
    words = ("train.neftune_noise_alpha=5", "train.label_smoothing_factor=0.1")
    found = read(*words)
    assert wrong(found) == {}
    assert (found["neftune_noise_alpha"].running, found["label_smoothing_factor"].running) == ("5.0", "0.1")
    removed = read(*words, after=lambda trainer: trainer.model.get_input_embeddings()._forward_hooks.clear())
    assert wrong(removed) == {"neftune_noise_alpha": ("5.0", "None")}


def test_what_deepspeeds_optimizer_keeps_off_the_gpu() -> None:
    zero_2 = types.SimpleNamespace(cpu_offload=True)
    zero_3 = types.SimpleNamespace(
        offload_optimizer=True, swap_optimizer=True, offload_param=True, params_in_nvme_and_cpu=False
    )
    assert offloaded(zero_2) == "optimizer on cpu"
    assert offloaded(zero_3) == "optimizer on nvme, parameters on cpu"
    assert offloaded(None) == "nothing"
