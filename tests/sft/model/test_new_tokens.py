"""model.new_tokens in the model: rows that start as the mean of the others, and that adapters train too."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import get_peft_model
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from sft.data.prepare import prepare
from sft.data.store import DOCUMENT, DocumentStore
from sft.data.tokenizer import check_vocabulary, load_tokenizer, new_token_ids
from sft.errors import ModelError, PlanError
from sft.hub.demo import Demo
from sft.launch.job import open_job
from sft.launch.rank import check_with_frameworks
from sft.model.adapters import lora_config
from sft.model.new_tokens import check_untrained, embed_new_tokens, untrained_tokens
from sft.plan.hardware import Hardware
from sft.plan.job import Job
from sft.recipe.schema import Lora

# transformers 5.23 renames what peft 0.21 still asks for.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning")

NEW = ["<|begin|>", "<|tool|>"]
OWN = 541  # tokens of the demo's tokenizer
NO_ROWS, ONE_ROW, MANY_ROWS = OWN, OWN + 1, OWN + 19
CPU = Hardware(None, 1, 1, 2, 16.0)
MakeJob = Callable[..., Job]


@pytest.fixture
def tokenizer(demo: Demo) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(demo.model)
    assert len(tokenizer) == OWN
    tokenizer.add_special_tokens({"additional_special_tokens": NEW}, replace_extra_special_tokens=False)
    return tokenizer


@pytest.fixture
def make_job(recipe_file: Path, outputs: Path) -> MakeJob:
    def make(*overrides: str) -> Job:
        hardware = replace(CPU, ranks=2, ranks_per_node=2) if "train.pipeline_parallel_size=2" in overrides else CPU
        return open_job(recipe_file, [f"output_dir={outputs}", *overrides], hardware)

    return make


def qwen(rows: int, tied: bool, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = Qwen2Config(vocab_size=rows, num_hidden_layers=2, tie_word_embeddings=tied, **sizes)
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():  # or the mean is near zero, where much would pass for it
        for weight in {model.get_input_embeddings().weight, model.get_output_embeddings().weight}:
            weight.add_(torch.linspace(-1, 1, 32))
    return model.to(dtype)


def weights(model: Any) -> list[torch.Tensor]:
    """Input and output embedding, as they are now."""
    return [layer.weight.detach().clone() for layer in (model.get_input_embeddings(), model.get_output_embeddings())]


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor) -> Any:
    return model(input_ids=ids).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [NO_ROWS, ONE_ROW, MANY_ROWS])
@pytest.mark.parametrize("tied", [True, False])
def test_new_rows_are_the_mean_of_the_tokens_rows_and_nothing_else_changes(
    tied: bool, rows: int, dtype: torch.dtype, tokenizer: Any
) -> None:
    model, old_ids = qwen(rows, tied, dtype), torch.arange(40).reshape(2, 20)
    before, logits_before = weights(model), logits(model, old_ids)
    embed_new_tokens(model, tokenizer, NEW, "tiny")
    expected_rows = max(rows, len(tokenizer))
    assert model.config.vocab_size == model.get_input_embeddings().num_embeddings == expected_rows
    for old, now in zip(before, weights(model), strict=True):
        assert now.shape[0] == expected_rows
        # The spare rows are no tokens': they hold whatever the model was padded with.
        mean = old[:OWN].double().mean(0).to(dtype)
        assert torch.equal(now[OWN : OWN + 2], torch.stack([mean, mean]))
        kept = torch.ones(rows, dtype=torch.bool)
        kept[OWN : OWN + 2] = False
        assert torch.equal(now[:rows][kept], old[kept])
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert torch.equal(logits(model, old_ids)[..., :OWN], logits_before[..., :OWN])
    assert logits(model, torch.tensor([new_token_ids(tokenizer, NEW)])).shape == (1, 2, expected_rows)


def test_only_a_tokenizer_that_is_larger_by_itself_is_refused(make_job: MakeJob) -> None:
    job = make_job("model.new_tokens=[<|begin|>, <|a|>, <|b|>, <|c|>, <|d|>]")
    tokenizer = load_tokenizer(job.recipe)
    assert job.model.vocab_size is not None
    assert len(tokenizer) > job.model.vocab_size
    with pytest.raises(ModelError, match="builtin:demo has 541 tokens, and the model's embedding 540 rows"):
        prepare(job.recipe, replace(job.model, vocab_size=OWN - 1))
    with pytest.raises(ModelError, match="541 tokens, and the model's embedding 540 rows"):
        embed_new_tokens(qwen(OWN - 1, tied=True), tokenizer, job.recipe.model.new_tokens, "tiny")
    check_vocabulary(tokenizer, job.recipe.model.new_tokens, OWN, "tiny")


def test_adapters_under_zero_3_cannot_train_new_tokens(make_job: MakeJob) -> None:
    overrides = ["model.new_tokens=[<|begin|>]", "model.lora={}", "train.deepspeed=zero3"]
    job = make_job(*overrides)
    with pytest.raises(PlanError, match=r"Set train.deepspeed=zero2, or train all weights: model.lora=null"):
        check_with_frameworks(job)
    for dropped in overrides:
        other = make_job(*(override for override in overrides if override != dropped))
        check_with_frameworks(other)


def with_adapters(model: Any, tokenizer: Any, **lora: Any) -> Any:
    embed_new_tokens(model, tokenizer, NEW, "tiny")
    return get_peft_model(model, lora_config(Lora(**lora), model, new_token_ids(tokenizer, NEW)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_beside_adapters_the_new_rows_alone_are_trained(tied: bool, dtype: torch.dtype, tokenizer: Any) -> None:
    model = with_adapters(qwen(NO_ROWS, tied, dtype), tokenizer)
    rows = [weight for name, weight in model.named_parameters() if weight.requires_grad and "lora_" not in name]
    assert [tuple(weight.shape) for weight in rows] == [(2, 32)] * (1 if tied else 2)
    assert {weight.dtype for weight in rows} == {torch.float32}, "bf16 would round small steps away"
    ids = torch.tensor([[5, OWN, 6, OWN + 1, 7]])
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(weight.grad is not None and weight.grad.abs().min(1).values.gt(0).any() for weight in rows)


@pytest.mark.parametrize("target_modules", [("q_proj", "embed_tokens"), ("lm_head",), r".*(q_proj|embed_tokens)"])
def test_an_embedding_is_not_trained_in_two_ways(target_modules: Any, tokenizer: Any) -> None:
    with pytest.raises(ModelError, match=r"target_modules names .*(embed_tokens|lm_head).*Leave it out"):
        with_adapters(qwen(NO_ROWS, tied=False), tokenizer, target_modules=target_modules)


def documents(*tokens: int) -> DocumentStore:
    """One document."""
    mask = np.ones(len(tokens), np.uint8)
    return DocumentStore(np.array(tokens, np.int32), mask, np.zeros(0, DOCUMENT), np.zeros(1, np.int64))


@pytest.mark.parametrize("made", ["as the mean", "as one another", "as a spare row", "as zeros"])
def test_special_tokens_whose_rows_were_never_trained_are_found(made: str, demo: Demo) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(demo.model), qwen(MANY_ROWS, tied=True)
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    text = [5, 6, 7]
    conversation = documents(start, *text, end, start, *text, end)
    assert untrained_tokens(model, tokenizer, conversation, ()) == []
    with torch.no_grad():
        for weight in {model.get_input_embeddings().weight, model.get_output_embeddings().weight}:
            spare, mean = weight[OWN].clone(), weight[:OWN].mean(0)
            row = {"as the mean": mean, "as a spare row": spare, "as one another": weight[start].clone()}.get(
                made, mean * 0
            )
            weight[[start, end]] = row + 1e-4 * torch.randn(2, 32)
    assert untrained_tokens(model, tokenizer, conversation, ()) == sorted([start, end])
    assert untrained_tokens(model, tokenizer, documents(*text), ()) == [], "no token of the data"


@pytest.mark.parametrize(
    ("override", "refused"),
    [
        ("train.deepspeed=zero3", True),
        ("train.pipeline_parallel_size=2", True),
        ("train.deepspeed=zero2", False),
        (None, False),
    ],
)
def test_untrained_rows_of_a_sharded_embedding_are_refused(
    override: str | None, refused: bool, make_job: MakeJob, tokenizer: Any
) -> None:
    job = make_job("model.lora={}", *filter(None, [override]))
    check_untrained(job, tokenizer, [])
    if refused:
        with pytest.raises(PlanError, match=r"<\|endoftext\|>.*model.lora=null"):
            check_untrained(job, tokenizer, tokenizer.convert_tokens_to_ids(["<|endoftext|>"]))
    else:
        check_untrained(job, tokenizer, [0])
