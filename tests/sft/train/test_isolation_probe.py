"""The isolation probe on live trainers: correct ones pass, each known leak is caught, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sft.data.store import DOCUMENT, DocumentStore, SequenceIndex
from sft.errors import PlanError
from sft.launch.job import open_job
from sft.model.attention import register
from sft.plan.hardware import Hardware
from sft.train.isolation_probe import DOCUMENTS, LONGEST, Probe, check_probe, probe, sample_documents

# transformers 5.23 renames the gradient checkpointing arguments; the range of versions knows only the old names.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning"),
]

TOKENS = 544
SHAPE: dict[str, Any] = {
    "vocab_size": TOKENS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.1,
}
SMALL = SHAPE | {
    "intermediate_size": 48,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "attention_dropout": 0.0,
}
WINDOWED = {"sliding_window": 8}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": SMALL,
    "mistral": SMALL | WINDOWED,
    "gemma3_text": SMALL | WINDOWED | {"layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_moe": SMALL | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "opt": SHAPE | {"ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 256},
}
MakeTrainer = Callable[..., Any]
CPU = Hardware(None, 1, 1, 2, 16.0)


@pytest.fixture
def make_trainer(recipe_file: Path, outputs: Path, trainer_of: Callable[..., Any]) -> MakeTrainer:
    """The trainer of a job, with a small model of another architecture."""

    def make(name: str = "qwen2", function: str = "varlen", packing: bool = True, *overrides: str) -> Any:
        data = [f"output_dir={outputs}", "data.train=[{path: 'builtin:demo', rows: 16}]"]
        words = [*data, f"data.packing={packing}", f"model.attn_implementation={function}", *overrides]
        job = open_job(recipe_file, words, CPU)
        register()
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**MODELS[name]), attn_implementation=function)
        return trainer_of(job, model=model)

    return make


def drawn(*lengths: int) -> list[np.ndarray]:
    generator = np.random.default_rng(1)
    return [generator.integers(5, 500, length) for length in lengths]


USUAL = drawn(20, 32, 7, 30)


def passed(trainer: Any, function: str, documents: list[np.ndarray] = USUAL, packed: bool = True) -> Probe:
    found = probe(trainer, documents, packed)
    check_probe(found, function, packed)
    return found


def refused(found: Probe, function: str, packed: bool = True) -> str:
    with pytest.raises(PlanError) as error:
        check_probe(found, function, packed)
    assert str(error.value).endswith("Nothing was trained.")
    return str(error.value)


PAIRS = [("mistral", "varlen"), ("gemma3_text", "sdpa"), ("qwen3_moe", "sdpa"), ("qwen2", "eager")]


@pytest.mark.parametrize(("name", "function"), PAIRS)
def test_packed_documents_pass(name: str, function: str, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(name, function)
    found = passed(trainer, function)
    assert max(found.moved, found.differ) < 1e-5
    assert found.attention_calls == ({} if function == "eager" else {function: 2})
    assert (found.use_cache, found.head_called, found.dtype) == (False, False, torch.float32)
    trainer.model.to(torch.bfloat16)
    assert passed(trainer, function).dtype == torch.bfloat16


@pytest.mark.parametrize(("name", "function"), PAIRS[:2])
def test_padding_is_no_document(name: str, function: str, make_trainer: MakeTrainer) -> None:
    """In a padded batch, and behind the last document of a pack."""
    padded = passed(make_trainer(name, function, packing=False), function, packed=False)
    trainer = make_trainer(name, function)
    trainer.data_collator.pad_to_multiple_of = 64
    packed = passed(trainer, function)
    assert max(padded.moved, padded.differ, packed.moved, packed.differ) < 1e-5


def altered(trainer: Any, **changes: Callable[[dict[str, Any]], Any]) -> Any:
    """The trainer with the model's inputs changed; None leaves one out."""
    backbone = trainer.model.base_model
    forward = backbone.forward

    def changed(*args: Any, **inputs: Any) -> Any:
        new = {name: make(inputs) for name, make in changes.items()}
        return forward(*args, **{name: value for name, value in (inputs | new).items() if value is not None})

    backbone.forward = changed
    return trainer


def counted_on(inputs: dict[str, Any]) -> torch.Tensor:
    return torch.arange(inputs["input_ids"].shape[1])[None]


NONE: dict[str, Any] = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"), lambda _: None)
ONES = {"attention_mask": lambda inputs: torch.ones_like(inputs["input_ids"])}
ONES_LEAK = "a mask of ones"
LEAKS: dict[str, tuple[str, dict[str, Any]]] = {
    ONES_LEAK: ("sdpa", ONES),
    "a mask of ones, eager": ("eager", ONES),
    "a cache left on": ("sdpa", {"use_cache": lambda _: True}),
    "position ids that do not restart": ("sdpa", {"position_ids": counted_on}),
    "no boundaries at all": ("varlen", {"position_ids": counted_on, **NONE}),
}


# In a window of 8, what is before a document of more tokens is seen by its first ones only; still it is caught.
@pytest.mark.parametrize(("leak", "name"), [*((leak, "qwen2") for leak in LEAKS), (ONES_LEAK, "gemma3_text")])
def test_each_known_leak_is_caught_and_named(leak: str, name: str, make_trainer: MakeTrainer) -> None:
    function, changes = LEAKS[leak]
    message = refused(probe(altered(make_trainer(name, function), **changes), USUAL, True), function)
    assert f"attn_implementation={function}" in message
    assert "Set data.packing=false" in message


def test_a_padded_batch_whose_padding_is_seen_is_caught(make_trainer: MakeTrainer) -> None:
    trainer = altered(make_trainer("qwen2", "sdpa", packing=False), attention_mask=lambda _: None)

    def left_padded(collate: Any, rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = collate(rows)
        batch["input_ids"] = batch["input_ids"].roll(1, 1)
        return batch

    trainer.data_collator = partial(left_padded, trainer.data_collator)
    message = refused(probe(trainer, USUAL, False), "sdpa", False)
    assert "A document in a padded batch is not what it is alone" in message
    assert "Set another model.attn_implementation" in message


@pytest.mark.parametrize(("name", "function", "leaks"), [("opt", "varlen", False), ("opt", "sdpa", True)])
def test_an_old_architecture_is_caught_where_it_leaks_and_passes_where_it_does_not(
    name: str, function: str, leaks: bool, make_trainer: MakeTrainer
) -> None:
    trainer = make_trainer(name, function)
    if leaks:
        assert "see each other" in refused(probe(trainer, USUAL, True), function)
    else:
        passed(trainer, function)


def state_of(trainer: Any) -> dict[str, Any]:
    model = trainer.model_wrapped
    return {
        "training": [module.training for module in model.modules()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        "functions": {name: ALL_ATTENTION_FUNCTIONS[name] for name in sorted(ALL_ATTENTION_FUNCTIONS.valid_keys())},
        "attention": [getattr(m.config, "_attn_implementation", None) for m in model.modules() if hasattr(m, "config")],
        "metrics": {mode: {key: list(v) for key, v in seen.items()} for mode, seen in trainer._metrics.items() if seen},
        "random": torch.get_rng_state().tolist(),
        "gradients": [parameter.grad for parameter in model.parameters() if parameter.grad is not None],
    }


@pytest.mark.parametrize(("function", "training"), [("varlen", True), ("sdpa", False)])
def test_nothing_is_left_behind(function: str, training: bool, make_trainer: MakeTrainer) -> None:
    """Also where the model fails."""
    trainer = make_trainer("qwen2", function)
    trainer.model.train(training)
    before = state_of(trainer)
    probe(trainer, USUAL, True)
    assert state_of(trainer) == before

    def fails(inputs: dict[str, Any]) -> Any:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        probe(altered(trainer, use_cache=fails), USUAL, True)
    assert state_of(trainer) == before


@pytest.mark.parametrize(
    "documents",
    [drawn(2, 2), [np.array([9] * 20)] * DOCUMENTS],
    ids=["two", "one token"],
)
def test_few_and_equal_documents_are_enough(documents: list[np.ndarray], make_trainer: MakeTrainer) -> None:
    """Where all hold one token only, another is taken, so that a leak has something to show."""
    passed(make_trainer("qwen2", "varlen"), "varlen", documents)
    refused(probe(altered(make_trainer("qwen2", "sdpa"), position_ids=counted_on), documents, True), "sdpa")


def test_a_state_that_is_not_a_number_is_refused(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer("qwen2", "varlen")
    with torch.no_grad():
        trainer.model.model.norm.weight.fill_(float("nan"))
    assert "The initial weights" in refused(probe(trainer, USUAL, True), "varlen")


def test_the_limits_refuse_what_is_no_number_and_allow_experts_more_than_a_dense_model() -> None:
    for number in (float("nan"), float("inf")):
        for moved, differ in ((number, 0.0), (0.0, number)):
            refused(Probe(moved, differ, {}, False, False, torch.float32, False), "sdpa")
    check_probe(Probe(0.02, 0.0, {}, False, False, torch.bfloat16, True), "varlen", packed=True)
    refused(Probe(0.02, 0.0, {}, False, False, torch.bfloat16, False), "varlen")


@pytest.mark.parametrize(
    ("lengths", "each", "expected"),
    [
        ((10, 11, 12, 13, 14), 3, [10, 11, 12, 13]),
        ((100, 1, 2, 33), 2, [LONGEST, 2, LONGEST]),
        ((1, 7, 1), 1, [7, 7, 7, 7]),
        ((1, 1, 1), 2, []),
    ],
)
def test_which_documents_are_sampled(lengths: tuple[int, ...], each: int, expected: list[int]) -> None:
    records, count = np.zeros(len(lengths), DOCUMENT), len(lengths)
    records["length"] = lengths
    zeros = np.zeros(sum(lengths), np.int32)
    starts = np.cumsum(lengths, dtype=np.int64) - np.array(lengths, np.int64)
    store = DocumentStore(zeros, zeros, records, starts)
    index = SequenceIndex(np.arange(count), np.array([*range(each, count, each), count][: -(-count // each)], np.int64))
    sequences: Any = SimpleNamespace(store=store, index=index)
    assert [len(document) for document in sample_documents(sequences)] == expected
