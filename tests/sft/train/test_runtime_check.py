"""Law 3: every silent replacement that is known is read back from the live objects. They are altered by hand, as a library would."""

from __future__ import annotations

import copy
import gc
import json
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from sft.data.prepare import prepare
from sft.data.store import DocumentStore, SequenceIndex
from sft.data.tokenizer import load_tokenizer
from sft.errors import PlanError
from sft.launch.job import open_job
from sft.model.load import load_model
from sft.plan.decision import Decision
from sft.plan.deepspeed import load_deepspeed
from sft.plan.hardware import Hardware
from sft.plan.job import Job
from sft.run.directory import Run
from sft.train.arguments import build_trainer, engine_callbacks, training_arguments
from sft.train.batches import Sequences
from sft.train.isolation_probe import probe, sample_documents
from sft.train.metrics import StepClock
from sft.train.runtime_check import Reading, _offloaded, check_readings, read_running
from sft.train.trainer import NeedsTrainer

# transformers 5.23 renames the gradient checkpointing arguments; the range of versions knows only the old names.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning"),
]

ZERO_3 = partial(
    types.SimpleNamespace,
    offload_optimizer=False,
    swap_optimizer=False,
    offload_param=False,
    params_in_nvme_and_cpu=False,
)
CPU = Hardware(None, 1, 1, 2, 16.0)
Alter = Callable[[Any], None]
MakeJob = Callable[..., Job]
Read = Callable[..., dict[str, Reading]]


@pytest.fixture(scope="module", autouse=True)
def _uncollected() -> Iterator[None]:
    """accelerate looks for garbage before each training, among all that was imported."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def make_job(tmp_path_factory: pytest.TempPathFactory, outputs: Path) -> MakeJob:
    folder = tmp_path_factory.mktemp("readback")
    talk = {"prompt": "Say the alphabet", "completion": "a b c d e f g h i j k l m n o p q r s t u v w x y z"}
    rows = [talk | {"prompt": f"Say the alphabet {number} times"} for number in range(16)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "job.yaml").write_text(
        "schema_version: 1\nversion: 1\nmodel: {name_or_path: 'builtin:demo'}\n"
        f"data: {{train: {folder / 'rows.jsonl'}, max_length: 128}}\ntrain: {{global_batch_size: 4, max_steps: 1}}\n"
    )

    def make(*overrides: str) -> Job:
        return open_job(folder / "job.yaml", [f"output_dir={outputs}", *overrides], CPU)

    return make


class _Seen(Exception):
    """Everything was read; nothing is to be trained."""


class _Look(NeedsTrainer):
    """Alters the live objects where the check looks at them, and reads them."""

    def __init__(self, planned: Job, before: Alter, after: Alter) -> None:
        self.planned, self.before, self.after = planned, before, after
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
def read(make_job: MakeJob, tmp_path: Path) -> Read:
    """Build what one job says, and read it back as another planned it."""

    def reading(
        *overrides: str,
        planned: Callable[[Job], Job] = lambda job: job,
        before: Alter = nothing,
        after: Alter = nothing,
    ) -> dict[str, Reading]:
        job = make_job(*overrides)
        run = Run(tmp_path / "mine" / "first")
        run.checkpoints.mkdir(parents=True, exist_ok=True)
        tokenizer = load_tokenizer(job.recipe)
        folder = prepare(job.recipe, job.model).folder
        index = SequenceIndex.load(folder / "train.npz")
        store, packed = DocumentStore.open(folder), job.recipe.data.packing
        sequences = Sequences(store, index, 4, tokenizer.pad_token_id, packed)
        look = _Look(planned(job), before, after)
        order, clock = sequences.order(0), StepClock(on_gpu=False)
        model, callbacks = load_model(job, tokenizer), [clock, *engine_callbacks(job), look]
        trainer = build_trainer(job, training_arguments(job, run), model, tokenizer, sequences, order, callbacks, clock)
        with pytest.raises(_Seen):
            trainer.train()
        return look.found

    return reading


def wrong(found: dict[str, Reading]) -> dict[str, tuple[str, str]]:
    """What differs: planned, running. The run is refused for exactly these."""
    differing = {name: (reading.planned, reading.running) for name, reading in found.items() if reading.wrong}
    if differing:
        with pytest.raises(PlanError) as error:
            check_readings(found.values())
        message = str(error.value)
        assert "nothing was trained" in message
        for name, (planned, running) in differing.items():
            assert f"  {name}: planned {planned}, running {running}" in message
    else:
        check_readings(found.values())
    return differing


def as_planned(**decisions: object) -> Callable[[Job], Job]:
    def change(job: Job) -> Job:
        values: Any = {name: Decision(value, "the recipe") for name, value in decisions.items()}
        return replace(job, plan=replace(job.plan, **values))

    return change


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["data.packing=false", "train.micro_batch_size=2"],
        ["model.attn_implementation=sdpa", "train.precision=bf16"],
        ["model.attn_implementation=eager", "train.gradient_checkpointing=true"],
        ["model.lora={}", "train.precision=bf16", "train.gradient_checkpointing=true"],
    ],
    ids=" ".join,
)
def test_what_runs_as_planned_is_not_refused(overrides: list[str], read: Read) -> None:
    found = read(*overrides)
    assert wrong(found) == {}
    assert len(found) == 20
    assert found["engine"].running == "one process"
    assert found["loss"].running == "TRL's fused head"
    assert found["sharded"].running == "nothing"


def test_another_engine(read: Read) -> None:
    def zero(job: Job) -> Job:
        return replace(as_planned(engine="ZeRO-2")(job), deepspeed=load_deepspeed("zero2"))

    differing = wrong(read(planned=zero))
    assert differing["engine"] == ("ZeRO-2", "one process")
    assert differing["sharded"] == ("optimizer, gradients", "nothing")
    assert set(differing) == {"engine", "sharded"}


def test_an_offload_that_does_not_run(read: Read) -> None:
    def offloading(job: Job) -> Job:
        return replace(as_planned(engine="ZeRO-3")(job), deepspeed=load_deepspeed("zero3_offload"))

    assert wrong(read(planned=offloading))["offloaded"] == ("optimizer on cpu, parameters on cpu", "nothing")


@pytest.mark.parametrize(
    ("zero", "offloaded"),
    [
        (types.SimpleNamespace(cpu_offload=False), "nothing"),
        (types.SimpleNamespace(cpu_offload=True), "optimizer on cpu"),
        (ZERO_3(), "nothing"),
        (ZERO_3(offload_optimizer=True), "optimizer on cpu"),
        (ZERO_3(offload_optimizer=True, swap_optimizer=True), "optimizer on nvme"),
        (ZERO_3(offload_param=True), "parameters on cpu"),
        (ZERO_3(offload_param=True, params_in_nvme_and_cpu=True), "parameters on nvme"),
    ],
)
def test_where_deepspeeds_optimizer_says_that_it_keeps_things(zero: Any, offloaded: str) -> None:
    assert _offloaded(types.SimpleNamespace(optimizer=zero)) == offloaded


@pytest.mark.parametrize("engine", ["DDP", "FSDP"])
def test_one_process_where_two_were_planned(engine: str, read: Read) -> None:
    def two(job: Job) -> Job:
        return replace(as_planned(engine=engine)(job), hardware=replace(CPU, ranks=2, ranks_per_node=2))

    assert wrong(read(planned=two)) == {"engine": (engine, "one process"), "processes": ("2", "1")}


def test_processes_that_do_not_know_of_each_other(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun without `use_cpu`: accelerate counts two, and each trains a model of its own."""

    def two(trainer: Any) -> None:
        monkeypatch.setitem(trainer.accelerator.state.__dict__, "num_processes", 2)

    differing = wrong(read(planned=as_planned(engine="DDP"), after=two))
    assert differing["engine"] == ("DDP", "processes that do not know of each other")


@pytest.mark.parametrize("other", ["sdpa", "eager"])
def test_attention_swapped_after_loading(other: str, read: Read) -> None:
    differing = wrong(read(before=lambda trainer: trainer.model.set_attn_implementation(other)))
    assert set(differing) == {"attention"}
    planned, running = differing["attention"]
    assert planned == "varlen"
    assert running == {"sdpa": "sdpa in 3 layers", "eager": "the model's own"}[other]


def test_attention_that_the_model_ignores(read: Read) -> None:
    """The configuration says one thing, and the layers do another."""

    def ignore(trainer: Any) -> None:
        other = copy.deepcopy(trainer.model.config)
        other._attn_implementation = "sdpa"
        for layer in trainer.model.model.layers:
            layer.self_attn.config = other

    assert wrong(read(before=ignore)) == {"attention": ("varlen", "sdpa in 3 layers")}


def test_liger_planned_and_nothing_swapped_in(read: Read) -> None:
    assert wrong(read(planned=as_planned(kernels="liger"))) == {"kernels": ("liger", "none")}


def test_weights_in_another_format(read: Read) -> None:
    differing = wrong(read(after=lambda trainer: trainer.model.to(torch.bfloat16)))
    assert differing["weights"] == ("fp32", "bf16")
    assert differing["optimizer"][1].startswith("AdamW on bf16")


def test_weights_that_the_model_keeps_in_fp32_are_no_mismatch(read: Read) -> None:
    def keep(trainer: Any) -> None:
        trainer.model.model.norm.float()

    def declare(trainer: Any) -> None:
        keep(trainer)
        trainer.model._keep_in_fp32_modules_strict = {"norm.weight"}

    assert wrong(read("train.precision=bf16", after=keep)) == {"weights": ("bf16", "bf16, fp32")}
    assert wrong(read("train.precision=bf16", after=declare)) == {}


def test_frozen_parameters(read: Read) -> None:
    def freeze(trainer: Any) -> None:
        trainer.model.model.norm.weight.requires_grad = False

    differing = wrong(read(after=freeze))
    assert set(differing) == {"trained"}
    trained, total = differing["trained"][1].removesuffix(" parameters").replace(",", "").split(" of ")
    assert int(total) - int(trained) == 128


def with_lora(job: Job) -> Job:
    from sft.recipe.schema import Lora

    return replace(
        job, recipe=job.recipe.model_copy(update={"model": job.recipe.model.model_copy(update={"lora": Lora()})})
    )


def test_adapters_that_are_missing(read: Read) -> None:
    differing = wrong(read(planned=with_lora))
    assert differing["trained"][0] == "adapters of rank 16"
    assert differing["trained"][1].endswith(" 0 adapters")


def test_adapters_beside_a_trained_base(read: Read) -> None:
    def thaw(trainer: Any) -> None:
        trainer.model.requires_grad_(True)

    assert set(wrong(read("model.lora={}", after=thaw))) == {"trained"}


def test_another_optimizer(read: Read) -> None:
    def exchange(trainer: Any) -> None:
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=trainer.args.learning_rate)

    assert wrong(read(after=exchange)) == {"optimizer": ("AdamW on fp32", "SGD on fp32")}


def test_another_learning_rate(read: Read) -> None:
    def exchange(trainer: Any) -> None:
        for group in trainer.optimizer.param_groups:
            group["initial_lr"] = group["lr"] = 0.5

    assert wrong(read(after=exchange)) == {"learning_rate": ("1e-05", "0.5")}


def test_checkpointing_that_does_not_run(read: Read) -> None:
    differing = wrong(read(planned=as_planned(gradient_checkpointing=True)))
    assert differing == {"gradient_checkpointing": ("every layer", "off")}


def test_another_micro_batch(read: Read) -> None:
    def halve(trainer: Any) -> None:
        trainer.args.per_device_train_batch_size = 3

    assert wrong(read(after=halve)) == {"micro_batch_size": ("4", "3")}


def test_another_precision(read: Read) -> None:
    assert wrong(read(planned=as_planned(precision="bf16")))["precision"] == ("bf16", "fp32")
    assert wrong(read("train.precision=bf16", planned=as_planned(precision="fp32")))["precision"] == ("fp32", "bf16")


def test_a_cache_left_on(read: Read) -> None:
    def switched(module: Any, args: Any, inputs: dict[str, Any]) -> Any:
        return args, inputs | {"use_cache": True}

    def keep(trainer: Any) -> None:
        trainer.model.model.register_forward_pre_hook(switched, with_kwargs=True)

    assert wrong(read(before=keep)) == {"use_cache": ("off", "on")}


def test_all_logits_instead_of_the_fused_head(read: Read) -> None:
    def compute(trainer: Any) -> None:
        trainer.compute_loss = lambda model, inputs: model(**inputs, use_cache=False).loss

    assert wrong(read(before=compute)) == {"loss": ("TRL's fused head", "all logits, then cross-entropy")}


@pytest.mark.filterwarnings("ignore:`label_smoothing_factor` is deprecated:FutureWarning")
def test_smoothed_labels_need_all_logits_and_are_not_refused(read: Read) -> None:
    found = read("train.trainer_args={label_smoothing_factor: 0.1}")
    assert wrong(found) == {}
    assert found["loss"].running == "all logits, then cross-entropy"


def test_padding_where_packing_was_planned(read: Read) -> None:
    def packed(job: Job) -> Job:
        return replace(
            job, recipe=job.recipe.model_copy(update={"data": job.recipe.data.model_copy(update={"packing": True})})
        )

    assert wrong(read("data.packing=false", planned=packed))["packing"] == ("on", "off")
