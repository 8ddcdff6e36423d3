"""The isolation probe on live trainers: correct ones pass, each known leak is caught, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BloomConfig,
    FalconConfig,
    Gemma3TextConfig,
    GPT2Config,
    GPTJConfig,
    MambaConfig,
    MistralConfig,
    MptConfig,
    OPTConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from trl import SFTConfig, SFTTrainer

from sft.errors import PlanError
from sft.hub.demo import Demo
from sft.model import attention
from sft.train.isolation_probe import DOCUMENTS, LONGEST, Probe, check_probe, probe, sample_documents

# transformers 5.23 renames the gradient checkpointing arguments; the range of versions knows only the old names.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning"),
]

TOKENS = 544
SMALL = {
    "vocab_size": TOKENS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "attention_dropout": 0.0,
}
SHAPE = {
    name: SMALL[name]
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "initializer_range")
}
GPT = {"vocab_size": TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "initializer_range": 0.1}
WINDOWED = {"sliding_window": 8}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, Any] = {
    "qwen2": partial(Qwen2Config, **SMALL),
    "mistral": partial(MistralConfig, **SMALL | WINDOWED),
    "gemma3": partial(Gemma3TextConfig, **SMALL | WINDOWED | LAYERS),
    "experts": partial(Qwen3MoeConfig, **SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "gpt2": partial(GPT2Config, **GPT),
    "gptj": partial(GPTJConfig, **GPT, rotary_dim=4),
    "opt": partial(OPTConfig, **SHAPE, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=256),
    "bloom": partial(BloomConfig, vocab_size=TOKENS, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.1),
    "mpt": partial(MptConfig, vocab_size=TOKENS, d_model=32, n_heads=4, n_layers=2, max_seq_len=256),
    "falcon": partial(FalconConfig, **SHAPE),
    "falcon, alibi": partial(FalconConfig, **SHAPE, alibi=True),
    "mamba": partial(MambaConfig, **SHAPE, state_size=4),
}
MakeTrainer = Callable[..., Any]


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    attention.register()


@pytest.fixture(scope="module")
def make_trainer(demo: Demo, tmp_path_factory: pytest.TempPathFactory) -> MakeTrainer:
    """A trainer as TRL builds it, on one process."""
    tokenizer, folder = AutoTokenizer.from_pretrained(demo.model), tmp_path_factory.mktemp("probe")

    def make(name: str = "qwen2", function: str = "varlen", packing: bool = True, **options: Any) -> Any:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(MODELS[name](), attn_implementation=function)
        row: dict[str, Any] = {"input_ids": [1, 2], "labels": [1, 2]}
        strategy = options.pop("packing_strategy", "bfd")
        if packing and strategy == "bfd":
            row["seq_lengths"] = [2]
        peft_config = options.pop("peft_config", None)
        arguments = SFTConfig(
            output_dir=str(folder),
            use_cpu=True,
            packing=packing,
            packing_strategy=strategy,
            max_length=64,
            report_to="none",
            dataset_kwargs={"skip_prepare_dataset": True},
            gradient_checkpointing=False,
            **{"bf16": False} | options,
        )
        dataset = Dataset.from_list([row])
        return SFTTrainer(model, arguments, train_dataset=dataset, processing_class=tokenizer, peft_config=peft_config)

    return make


def drawn(*lengths: int) -> list[np.ndarray]:
    generator = np.random.default_rng(1)
    return [generator.integers(5, 500, length) for length in lengths]


USUAL = drawn(20, 32, 7, 30)


def refused(found: Probe, function: str, packed: bool = True) -> str:
    with pytest.raises(PlanError) as error:
        check_probe(found, function, packed)
    return str(error.value)


PAIRS = [("qwen2", "varlen"), ("mistral", "varlen"), ("gemma3", "sdpa"), ("experts", "sdpa"), ("qwen2", "eager")]


@pytest.mark.parametrize(("name", "function"), PAIRS)
def test_packed_documents_pass(name: str, function: str, make_trainer: MakeTrainer) -> None:
    found = probe(make_trainer(name, function), USUAL, True)
    check_probe(found, function, True)
    assert found.moved < 1e-5
    assert found.differ < 1e-5
    assert found.attention_calls == ({} if function == "eager" else {function: 2})
    assert (found.use_cache, found.head_called, found.dtype) == (False, False, torch.float32)


@pytest.mark.parametrize(("name", "function"), PAIRS[:3])
def test_a_padded_batch_passes(name: str, function: str, make_trainer: MakeTrainer) -> None:
    found = probe(make_trainer(name, function, packing=False), USUAL, False)
    check_probe(found, function, False)
    assert max(found.moved, found.differ) < 1e-5


@pytest.mark.parametrize(("name", "function"), PAIRS[:4])
def test_packed_documents_pass_in_bf16(name: str, function: str, make_trainer: MakeTrainer) -> None:
    found = probe(make_trainer(name, function, bf16=True), USUAL, True)
    check_probe(found, function, True)
    assert found.dtype == torch.bfloat16


def test_padding_behind_the_last_document_is_no_document(make_trainer: MakeTrainer) -> None:
    found = probe(make_trainer(pad_to_multiple_of=64), USUAL, True)
    check_probe(found, "varlen", True)
    assert max(found.moved, found.differ) < 1e-5


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
LEAKS: dict[str, tuple[str, dict[str, Any]]] = {
    "a mask of ones": ("sdpa", {"attention_mask": lambda inputs: torch.ones_like(inputs["input_ids"])}),
    "a mask of ones, eager": ("eager", {"attention_mask": lambda inputs: torch.ones_like(inputs["input_ids"])}),
    "a cache left on": ("sdpa", {"use_cache": lambda _: True}),
    "position ids that do not restart": ("sdpa", {"position_ids": counted_on}),
    "position ids that do not restart, eager": ("eager", {"position_ids": counted_on}),
    "no boundaries at all": ("varlen", {"position_ids": counted_on, **NONE}),
}


# In a window of 8, what is before a document of more tokens is seen by its first ones only; still it is caught.
@pytest.mark.parametrize(("name", "options"), [("qwen2", {}), ("gemma3", {}), ("qwen2", {"bf16": True})])
@pytest.mark.parametrize("leak", LEAKS)
def test_each_known_leak_is_caught_and_named(
    leak: str, name: str, options: dict[str, Any], make_trainer: MakeTrainer
) -> None:
    function, changes = LEAKS[leak]
    found = probe(altered(make_trainer(name, function, **options), **changes), USUAL, True)
    message = refused(found, function)
    assert f"attn_implementation={function}" in message
    remedy = "Set model.attn_implementation=sdpa, or" if function == "varlen" else "Set data.packing=false"
    assert remedy in message
    assert "data.packing=false" in message
    assert message.endswith("Nothing was trained.")


@pytest.mark.parametrize(("name", "function"), PAIRS[:3])
def test_wrapped_packing_is_caught(name: str, function: str, make_trainer: MakeTrainer) -> None:
    """TRL's `wrapped` rows do not say where documents begin, and its collator does not flatten them."""
    trainer = make_trainer(name, function, packing_strategy="wrapped")
    collate = trainer.data_collator
    trainer.data_collator = lambda rows: collate([{k: v for k, v in row.items() if k != "seq_lengths"} for row in rows])
    assert "see each other" in refused(probe(trainer, USUAL, True), function)


def test_a_padded_batch_whose_padding_is_seen_is_caught(make_trainer: MakeTrainer) -> None:
    trainer = altered(make_trainer("qwen2", "sdpa", packing=False), attention_mask=lambda _: None)
    trainer.data_collator = partial(left_padded, trainer.data_collator)
    message = refused(probe(trainer, USUAL, False), "sdpa", False)
    assert "A document in a padded batch is not what it is alone" in message
    assert "Set model.attn_implementation=eager. Nothing was trained." in message


def left_padded(collate: Any, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What each row has is rolled by the padding of another, so that it begins with it."""
    batch: dict[str, Any] = collate(rows)
    batch["input_ids"] = batch["input_ids"].roll(1, 1)
    return batch


def by_hand(trainer: Any) -> float:
    """How far packed logits are from those of each document alone, without the probe."""
    lengths = [len(document) for document in USUAL]
    batch = trainer.data_collator([{"input_ids": np.concatenate(USUAL), "seq_lengths": lengths}])
    batch.pop("labels")
    model = trainer.model.eval()
    with torch.no_grad():
        together = model(**batch, use_cache=False).logits[0].split(lengths)
        alone = [model(input_ids=torch.tensor(one)[None], use_cache=False).logits[0] for one in USUAL]
    return max(float((one - other).norm() / other.norm()) for one, other in zip(together, alone, strict=True))


@pytest.mark.parametrize(
    ("name", "function", "leaks"),
    [
        ("gpt2", "sdpa", False),
        ("gptj", "eager", False),
        ("opt", "varlen", False),
        ("opt", "sdpa", True),
        ("bloom", "eager", True),
        ("mpt", "eager", True),
        ("falcon", "sdpa", True),
        ("falcon", "eager", True),
        ("falcon, alibi", "eager", True),
        ("mamba", "eager", True),
    ],
)
def test_old_architectures_are_caught_where_they_leak_and_pass_where_they_do_not(
    name: str, function: str, leaks: bool, make_trainer: MakeTrainer
) -> None:
    trainer = make_trainer(name, function)
    assert (by_hand(trainer) > 1e-3) == leaks
    found = probe(trainer, USUAL, True)
    if leaks:
        assert "see each other" in refused(found, function)
    else:
        check_probe(found, function, True)


def state_of(trainer: Any) -> dict[str, Any]:
    model = trainer.model_wrapped
    return {
        "training": [module.training for module in model.modules()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        "functions": {name: ALL_ATTENTION_FUNCTIONS[name] for name in sorted(ALL_ATTENTION_FUNCTIONS.valid_keys())},
        "local": dict(ALL_ATTENTION_FUNCTIONS._local_mapping),
        "attention": [getattr(m.config, "_attn_implementation", None) for m in model.modules() if hasattr(m, "config")],
        "metrics": {mode: {key: list(v) for key, v in seen.items()} for mode, seen in trainer._metrics.items() if seen},
        "tokens": trainer._total_train_tokens,
        "random": torch.get_rng_state().tolist(),
        "numpy": np.random.get_state()[1].tolist(),  # type: ignore[index]
        "gradients": [parameter.grad for parameter in model.parameters() if parameter.grad is not None],
        "weights": [parameter.sum().item() for parameter in model.parameters()],
    }


@pytest.mark.parametrize(("function", "training"), [("varlen", True), ("sdpa", False), ("eager", True)])
def test_nothing_is_left_behind(function: str, training: bool, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer("qwen2", function)
    trainer.model.train(training)
    before = state_of(trainer)
    probe(trainer, USUAL, True)
    assert state_of(trainer) == before


def test_nothing_is_left_behind_where_the_model_fails(make_trainer: MakeTrainer) -> None:
    def fails(inputs: dict[str, Any]) -> Any:
        raise RuntimeError("out of memory")

    trainer = make_trainer("qwen2", "varlen")
    before = state_of(trainer)
    with pytest.raises(RuntimeError, match="out of memory"):
        probe(altered(trainer, use_cache=fails), USUAL, True)
    assert state_of(trainer) == before


def test_models_with_adapters_are_probed_without_their_dropout(make_trainer: MakeTrainer) -> None:
    from peft import LoraConfig

    lora = LoraConfig(
        r=4, target_modules="all-linear", lora_dropout=0.5, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    trainer = make_trainer("qwen2", "varlen", peft_config=lora)
    before = state_of(trainer)
    found = probe(trainer, USUAL, True)
    check_probe(found, "varlen", True)
    assert max(found.moved, found.differ) < 1e-5
    assert state_of(trainer) == before


@pytest.mark.parametrize(("lengths", "function"), [((2, 2), "varlen"), ((32, 2), "sdpa"), ((2, 32, 2), "varlen")])
def test_short_and_few_documents_are_enough(lengths: tuple[int, ...], function: str, make_trainer: MakeTrainer) -> None:
    check_probe(probe(make_trainer("qwen2", function), drawn(*lengths), True), function, True)
    leaking = altered(make_trainer("qwen2", "sdpa"), position_ids=counted_on)
    refused(probe(leaking, drawn(*lengths), True), "sdpa")


@pytest.mark.parametrize("document", [[7, 8], [9] * 20])
def test_equal_documents_are_told_apart(document: list[int], make_trainer: MakeTrainer) -> None:
    """Also where all hold one token only: another is taken, so that a leak has something to show."""
    documents = [np.array(document)] * DOCUMENTS
    check_probe(probe(make_trainer("qwen2", "varlen"), documents, True), "varlen", True)
    refused(probe(altered(make_trainer("qwen2", "sdpa"), position_ids=counted_on), documents, True), "sdpa")


def test_a_state_that_is_not_a_number_is_refused(make_trainer: MakeTrainer) -> None:
    for function in ("varlen", "sdpa"):
        trainer = make_trainer("qwen2", function)
        with torch.no_grad():
            trainer.model.model.norm.weight.fill_(float("nan"))
        assert "The initial weights" in refused(probe(trainer, USUAL, True), function)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_not_a_number_is_no_pass(number: float) -> None:
    for moved, differ in ((number, 0.0), (0.0, number)):
        refused(Probe(moved, differ, {}, False, False, torch.float32, False), "sdpa")


class Store:
    """Documents by number."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths

    def document(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        return np.full(self.lengths[number], number + 5), np.ones(self.lengths[number])


class Index:
    """So many documents to a sequence."""

    def __init__(self, documents: int, each: int) -> None:
        self.documents, self.each = documents, each

    def __len__(self) -> int:
        return -(-self.documents // self.each)

    def of(self, sequence: int) -> Iterator[int]:
        return iter(range(sequence * self.each, min(self.documents, (sequence + 1) * self.each)))


@pytest.mark.parametrize(
    ("lengths", "each", "expected"),
    [
        ((10, 11, 12, 13, 14), 3, [10, 11, 12, 13]),
        ((100, 1, 2, 33), 2, [LONGEST, 2, LONGEST]),
        ((5, 6), 1, [5, 6]),
        ((7,), 1, [7, 7, 7, 7]),
        ((1, 7, 1), 1, [7, 7, 7, 7]),
        ((1, 1, 1), 2, []),
        ((), 1, []),
    ],
)
def test_which_documents_are_sampled(lengths: tuple[int, ...], each: int, expected: list[int]) -> None:
    sequences = SimpleNamespace(store=Store(*lengths), index=Index(len(lengths), each))
    assert [len(document) for document in sample_documents(sequences)] == expected


def test_what_rounding_may_do_to_experts_it_may_not_do_to_a_dense_model() -> None:
    check_probe(Probe(0.02, 0.0, {}, False, False, torch.bfloat16, True), "varlen", packed=True)
    refused(Probe(0.02, 0.0, {}, False, False, torch.bfloat16, False), "varlen")
