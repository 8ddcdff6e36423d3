"""Tokens that a recipe adds: their embeddings train on every engine and beside adapters, and are in final/.

The evaluation with tokens that find spare rows is `extra`.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from sft.hub.demo import make_demo
from sft.recipe.schema import REPOSITORY
from sft.run.directory import Run
from tests.slow.conftest import untie, write_recipe
from tests.slow.ranks import Ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAM = str(REPOSITORY / "tests" / "slow" / "train_new_tokens.py")
OWN = 541  # tokens of the demo's tokenizer, in an embedding of 544 rows
PROBE = torch.arange(OWN - 39, OWN + 1).reshape(2, 20)  # what train_new_tokens.py asks: the last is <|begin|>
FIVE = "model.new_tokens=[<|begin|>, <|a|>, <|b|>, <|c|>, <|d|>]"
CASES = {
    "one process": (1, [], 544),
    "one process, a larger embedding": (1, [FIVE], 546),
    "ZeRO-3": (2, ["train.deepspeed=zero3"], 544),
    "ZeRO-3, a larger embedding": (2, ["train.deepspeed=zero3", FIVE], 546),
    "LoRA": (1, ["model.lora={}"], 544),
    "LoRA, a larger embedding, DDP": (2, ["model.lora={}", FIVE], 546),
    "LoRA, untied, ZeRO-2": (2, ["model.lora={}", "train.deepspeed=zero2", "untied"], 544),
}
TEMPLATE = """\
{%- for message in messages -%}
{{- '<|begin|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}{% generation %}{{- message['content'] + '<|im_end|>' -}}{% endgeneration %}
{%- else -%}{{- message['content'] + '<|im_end|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|begin|>assistant\\n' -}}{%- endif -%}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("new")
    (folder / "begin.jinja").write_text(TEMPLATE)
    return write_recipe(
        folder / "new.yaml",
        model={
            "name_or_path": "builtin:demo",
            "chat_template": str(folder / "begin.jinja"),
            "new_tokens": ["<|begin|>"],
        },
        data={"train": "builtin:demo", "max_length": 128},
        train={"global_batch_size": 8, "learning_rate": 2e-3, "max_steps": 6, "save_steps": 4, "logging_steps": 2},
    )


@pytest.fixture(scope="module")
def untied(recipe: Path) -> Path:
    """The demo's model with an output embedding of its own."""
    return untie(make_demo(recipe.parent / "outputs").model, recipe.parent / "untied")


@pytest.mark.parametrize("case", CASES)
def test_new_tokens_are_trained_and_saved(case: str, recipe: Path, untied: Path, ranks: Ranks) -> None:
    count, overrides, rows = CASES[case]
    overrides = [f"model.name_or_path={untied}" if word == "untied" else word for word in overrides]
    name = "".join(letter if letter.isalnum() else "-" for letter in case)
    ranks.run(count, [PROGRAM, recipe, *overrides, f"tracking.run_name={name}"])
    run = Run(recipe.parent / "outputs" / "new" / name)
    tokenizer = AutoTokenizer.from_pretrained(run.final)
    assert tokenizer("<|begin|>", add_special_tokens=False)["input_ids"] == [OWN]
    assert "<|begin|>" in tokenizer.all_special_tokens

    model = AutoModelForCausalLM.from_pretrained(run.final).eval()
    live = torch.load(run.path / "probe.pt", weights_only=True)["logits"]
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=PROBE).logits, live, atol=2e-4, rtol=0)
    is_tied = "untied" not in case
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == is_tied
    assert model.config.vocab_size == model.model.embed_tokens.weight.shape[0] == rows

    base = AutoModelForCausalLM.from_pretrained(run.record["base_model"]["path"])
    for layer in ("model.embed_tokens", "lm_head"):
        before, now = (one.get_submodule(layer).weight.detach() for one in (base, model))
        moved = (now[OWN] - before[:OWN].double().mean(0).float()).abs()
        # Six steps of Adam at 2e-3 and below: more would mean that it started elsewhere.
        assert 1e-3 < moved.max() < 6 * 2e-3
        if "LoRA" in case:
            assert torch.equal(now[:OWN], before[:OWN])


@pytest.mark.parametrize("case", ["ZeRO-3, a larger embedding", "LoRA, a larger embedding, DDP"])
def test_a_stopped_run_with_new_tokens_ends_as_an_undisturbed_one(case: str, recipe: Path, ranks: Ranks) -> None:
    count, overrides, _ = CASES[case]
    runs = []
    for name in ("undisturbed", "stopped"):
        run = Run(recipe.parent / "outputs" / "new" / f"{case[:4]}-{name}")
        runs.append(run)
        words = [PROGRAM, recipe, *overrides, f"tracking.run_name={run.path.name}"]
        if name == "stopped":
            ranks.run(count, words, expect=1, STOP_AT_CHECKPOINT="1")
            assert not run.final.exists()
            assert run.last_checkpoint() == run.checkpoints / "checkpoint-4"
        ranks.run(count, words)
    expected, resumed = (load_file(run.final / "model.safetensors") for run in runs)
    assert expected.keys() == resumed.keys()
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "new",
    [
        pytest.param("model.new_tokens=[<|begin|>]", id="spare rows", marks=pytest.mark.extra),
        pytest.param(FIVE, id="a larger embedding"),
    ],
)
def test_base_and_tuned_are_both_asked_with_the_new_tokens(new: str, recipe: Path, ranks: Ranks) -> None:
    name = f"asked-{len(new)}"
    evaluation = ["eval.tasks=[builtin:demo]", "eval.limit=4", f"tracking.run_name={name}"]
    ranks.run(1, ["sft.train", recipe, new, *evaluation], finish=True)
    run = Run(recipe.parent / "outputs" / "new" / name)
    comparison = json.loads(run.comparison_file.read_text())
    assert comparison["not_measured"] == {}
    assert run.record["evaluation"] == "finished"
    for model in ("base", "tuned"):
        samples = list((run.comparison_file.parent / model).glob("samples_*.jsonl"))
        assert len(samples) == 1
        prompts = [json.loads(line)["arguments"] for line in samples[0].read_text().splitlines()]
        assert all("<|begin|>assistant" in json.dumps(prompt) for prompt in prompts)


def test_tokens_that_the_base_never_trained_are_trained_beside_adapters(recipe: Path, ranks: Ranks) -> None:
    """Special tokens that the tokenizer has, and whose rows are what they were made as."""
    folder = recipe.parent / "unused"
    shutil.copytree(make_demo(recipe.parent / "outputs").model, folder)
    ids = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    tensors = load_file(folder / "model.safetensors")
    rows = tensors["model.embed_tokens.weight"]
    rows[ids] = rows[:OWN].mean(0)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    overrides = [f"model.name_or_path={folder}", "model.chat_template=null", "model.new_tokens=[]", "model.lora={}"]
    ranks.run(2, ["sft.train", recipe, *overrides, "train.max_steps=2", "tracking.run_name=unused"])
    tuned = load_file(recipe.parent / "outputs" / "new" / "unused" / "final" / "model.safetensors")
    changed = (tuned["model.embed_tokens.weight"] - rows).abs().amax(1).gt(1e-4).nonzero().flatten().tolist()
    assert changed == sorted(ids)
