"""Adapters of each kind: what is refused, what is read from the live layers, and that what is saved is what was trained."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

from sft.errors import ModelError, RecipeError
from sft.hub.demo import Demo
from sft.hub.model_facts import empty_model, load_config
from sft.model.adapters import check_adapters, differing_adapters, lora_config, merge_adapters, start_adapters
from sft.model.frozen import check_frozen, freeze
from sft.recipe.schema import Lora, Model
from tests.recipe_models import MODELS
from tests.slow.conftest import untie

pytestmark = [
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning"),
]
IDS = torch.arange(3, 43)[None]


def empty(demo: Demo) -> Any:
    return empty_model(load_config(str(demo.model), None, False), False)


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "DoRA": {"use_dora": True},
    "rsLoRA": {"use_rslora": True},
    "DoRA, rsLoRA": {"use_dora": True, "use_rslora": True},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "pissa": {"init_lora_weights": "pissa"},
    "pissa, approximated": {"init_lora_weights": "pissa_niter_2"},
    "pissa, rsLoRA": {"init_lora_weights": "pissa", "use_rslora": True},
    "olora": {"init_lora_weights": "olora", "rank_pattern": {"down_proj": 6}},
    "by name": {"target_modules": ("q_proj", "down_proj"), "rank_pattern": {"down_proj": 8}, "alpha_pattern": {"q_proj": 2}},
    "by pattern": {"target_modules": r".*layers\.[01]\..*(q|v)_proj"},
    "by layer": {"layers_to_transform": (0, 2)},
    "with layers": {"modules_to_save": ("norm", "lm_head", "embed_tokens")},
}  # fmt: skip


def trained(lora: Lora, base: Path) -> Any:
    """Live adapters that something was learned with: each of their weights has moved."""
    model = AutoModelForCausalLM.from_pretrained(base)
    live = start_adapters(lora, model, lora_config(lora, model, []), seed=1)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in live.parameters():
            if parameter.requires_grad:
                parameter.mul_(1 + 0.2 * torch.rand_like(parameter)).add_(torch.randn_like(parameter) * 0.02)
    return live.eval()


REPEATED = ("DoRA, rsLoRA", "rsLoRA", "gaussian", "orthogonal", "pissa", "pissa, approximated", "by layer")
"""Whose law another row holds too."""


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind in REPEATED else ()) for kind in KINDS]
)
def test_merged_adapters_are_those_that_were_trained_and_so_are_the_saved_ones_on_the_base(
    kind: str, demo: Demo, tmp_path: Path
) -> None:
    lora, base = Lora(r=4, **KINDS[kind]), untie(demo.model, tmp_path / "base")
    live = trained(lora, base)
    live.save_pretrained(tmp_path / "adapter")
    torch.manual_seed(3)  # whatever is drawn before
    merged = merge_adapters(lora, AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter").eval()
    # As anyone loads an adapter, at any time.
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter").eval()
    with torch.no_grad():
        expected = live(IDS).logits
        assert (AutoModelForCausalLM.from_pretrained(base)(IDS).logits - expected).abs().max() > 0.05, "not trained"
        for model in (merged, loaded):
            torch.testing.assert_close(model(IDS).logits, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("kind", ["plain", "pissa", "olora", "gaussian"])
def test_adapters_leave_the_model_as_it_is_before_the_first_step(kind: str, demo: Demo) -> None:
    model, lora = AutoModelForCausalLM.from_pretrained(demo.model), Lora(r=4, **KINDS[kind])
    with torch.no_grad():
        before = model(IDS).logits
        torch.testing.assert_close(start_adapters(lora, model, lora_config(lora, model, []))(IDS).logits, before)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"target_modules": ("q_porj",)}, r"target_modules: q_porj matches no layer.*did you mean `q_proj`"),
    ({"target_modules": r".*\.attention\..*"}, r"target_modules: .*attention.* matches no layer"),
    ({"target_modules": ("q_proj", "embed_tokens")}, r"embed_tokens shares its weight with the output embedding"),
    ({"target_modules": ("q_proj", "lm_head")}, r"lm_head cannot have an adapter"),
    ({"rank_pattern": {"down_porj": 8}}, r"rank_pattern: down_porj matches no layer"),
    ({"layers_to_transform": (1, 3)}, r"layers_to_transform: the model has 3 layers, numbered from 0"),
    ({"layers_to_transform": (1,), "layers_pattern": "blocks"}, r"model.lora"),
    ({"modules_to_save": ("lm_haed",)}, r"modules_to_save: lm_haed is no layer.*did you mean `lm_head`"),
    ({"modules_to_save": ("lm_head",)}, r"lm_head shares its weight with the other embedding"),
    ({"modules_to_save": ("down_proj",), "target_modules": ("down_proj",)}, r"down_proj is also in target_modules"),
]  # fmt: skip


@pytest.mark.parametrize(("section", "message"), WRONG)
def test_names_that_match_nothing_are_refused(section: dict[str, Any], message: str, demo: Demo) -> None:
    with pytest.raises(ModelError, match=message):
        check_adapters(Model(name_or_path="x", lora=Lora(**section)), empty(demo))


@pytest.mark.parametrize("kind", KINDS)
def test_names_that_match_are_not_refused(kind: str, demo: Demo, tmp_path: Path) -> None:
    base = untie(demo.model, tmp_path / "base")
    model = empty_model(load_config(str(base), None, False), False)
    check_adapters(Model(name_or_path="x", lora=Lora(r=4, **KINDS[kind])), model)


def test_a_quantized_layer_cannot_be_trained_whole(demo: Demo) -> None:
    lora = Lora(modules_to_save=("down_proj",), target_modules=("q_proj",))
    with pytest.raises(ModelError, match=r"down_proj is quantized .model.quantization=nf4."):
        check_adapters(Model(name_or_path="x", lora=lora, quantization="nf4"), empty(demo))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("{init_lora_weights: eva}", "init_lora_weights: .*got 'eva': it starts from activations"),
        ("{init_lora_weights: pissa, use_dora: true}", "does not work with use_dora"),
        ("{init_lora_weights: olora, use_rslora: true, rank_pattern: {q: 2}}", "does not work with use_rslora with"),
        ("{layers_to_transform: [1], target_modules: '.*q'}", "not with a regular expression"),
        ("{rank_pattern: {'(q': 2}}", "rank_pattern: '.q' is no regular expression"),
        ("{rank_pattern: {q: 0}}", "rank_pattern.q: must be greater than 0"),
    ],
)
def test_sections_that_make_no_sense_are_one_message(words: str, message: str, make_recipe: Callable[..., Any]) -> None:
    with pytest.raises(RecipeError, match=f"model.lora.*{message}"):
        make_recipe(f"model.lora={words}")


def test_each_layers_adapter_has_the_recipes_rank_scale_dropout_and_kind(demo: Demo) -> None:
    sizes = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 9}, "layers_to_transform": (1,)}
    lora = Lora(
        r=4,
        lora_alpha=8,
        lora_dropout=0.5,
        use_dora=True,
        use_rslora=True,
        target_modules=("q_proj", "v_proj"),
        **sizes,
    )
    model = AutoModelForCausalLM.from_pretrained(demo.model)
    live = start_adapters(lora, model, lora_config(lora, model, []))
    found = {name.rpartition(".")[2]: one for name, one in live.named_modules() if hasattr(one, "lora_A")}
    assert {name: (one.r["default"], one.scaling["default"]) for name, one in found.items()} == {
        "q_proj": (2, 8 / 2**0.5), "v_proj": (4, 9 / 4**0.5)
    }  # fmt: skip
    assert all(len(one.lora_magnitude_vector) == 1 and one.lora_dropout["default"].p == 0.5 for one in found.values())


@pytest.mark.parametrize(
    "change",
    [
        {"r": 5},
        {"lora_alpha": 5},
        {"lora_dropout": 0.5},
        {"use_dora": True},
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 2}},
        {"modules_to_save": ("norm",)},
    ],
    ids=str,
)
def test_live_adapters_that_differ_from_the_recipe_are_found(change: dict[str, Any], demo: Demo) -> None:
    model, lora = AutoModelForCausalLM.from_pretrained(demo.model), Lora(r=4)
    live = start_adapters(lora, model, lora_config(lora, model, []))
    assert [*differing_adapters(live, lora)] == []
    assert [*differing_adapters(live, lora.model_copy(update=change))]


def test_frozen_parameters_are_those_that_a_pattern_is_found_in(demo: Demo) -> None:
    model = AutoModelForCausalLM.from_pretrained(demo.model)
    freeze(model, ["embed_tokens", r"layers\.[01]\.", "norm"])
    left = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(left) == 10 and all(".layers.2." in name for name in left)
    check_frozen(["embed_tokens"], empty(demo))
    with pytest.raises(ModelError, match=r"model.freeze: embedding is found in no parameter's name.*embed_tokens"):
        check_frozen(["embed_tokens", "embedding"], empty(demo))
    with pytest.raises(ModelError, match=r"model.freeze leaves all parameters as they are"):
        check_frozen(["."], empty(demo))


def test_experts_are_refused_as_targets_in_one_line_that_names_them() -> None:
    settings = MODELS["Qwen/Qwen3-30B-A3B-Base"].config(small=True)
    model = Model(name_or_path="experts", lora=Lora(target_modules=("experts",)))
    with pytest.raises(
        ModelError, match=r"^model.lora: Target module Qwen3MoeExperts.* is not supported.*torch.nn.Linear"
    ):
        check_adapters(model, empty_model(AutoConfig.for_model(**settings), False))
