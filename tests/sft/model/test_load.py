"""Weights that do not fit their config.json are refused before they load; weights that fit are not."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from sft.errors import ModelError
from sft.hub.demo import Demo
from sft.launch.job import open_job
from sft.launch.rank import check_with_frameworks
from sft.model.load import load_base, load_model
from sft.model.weight_checks import check_weights
from sft.parallel.pipeline import of_other_stages
from sft.plan.hardware import Hardware
from sft.recipe.schema import Model

Tensors = dict[str, torch.Tensor]
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}


def save(folder: Path, kind: str = "llama", **settings: Any) -> Path:
    config = CONFIG_MAPPING[kind](**SIZES | settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def change(folder: Path, tensors: Callable[[Tensors], Tensors] = dict, **config: Any) -> Path:
    """Rewrite a model's tensors and its config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    save_file(tensors(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})
    return folder


def check(folder: Path) -> None:
    check_weights(str(folder), None, False, "model.name_or_path=x")


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: value for key, value in tensors.items() if name not in key}


def renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key.replace(old, new): value for key, value in tensors.items()}


@pytest.mark.parametrize(
    ("tensors", "config", "named"),
    [
        (without("lm_head"), {}, "missing from the weights: lm_head.weight"),
        (without("layers.1."), {}, "missing from the weights: model.layers.1."),
        (dict, {"num_hidden_layers": 5}, "missing from the weights: model.layers.{3, 4}."),
        (dict, {"num_hidden_layers": 2}, "in the weights, but not in the model: model.layers.2."),
        (renamed("self_attn", "attention"), {}, "missing from the weights: model.layers.{0, 1, 2}.self_attn."),
        (dict, {"model_type": "qwen2"}, "self_attn.q_proj.bias"),
        (dict, {"model_type": "gemma"}, "architectures in config.json: LlamaForCausalLM; model_type=gemma"),
        (dict, {"vocab_size": 60}, "of another shape: lm_head.weight [64, 32] (by config.json [60, 32])"),
        (dict, {"num_key_value_heads": 4}, "k_proj.weight [16, 32] (by config.json [32, 32])"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(
    tensors: Callable[[Tensors], Tensors], config: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as refused:
        check(change(save(tmp_path), tensors, **config))
    assert named in str(refused.value)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text", "phi3", "gpt_oss", "qwen3_moe"])
@pytest.mark.parametrize("tied", [True, False])
def test_what_transformers_saves_fits(kind: str, tied: bool, tmp_path: Path) -> None:
    check(save(tmp_path / "good", kind, tie_word_embeddings=tied))
    with pytest.raises(ModelError, match=r"model.norm.weight"):
        check(change(save(tmp_path / "bad", kind, tie_word_embeddings=tied), without("model.norm.")))


def with_head(tensors: Tensors) -> Tensors:
    return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}


def with_extras(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: torch.ones(4) for name in names}


@pytest.mark.parametrize(
    ("tied", "tensors"),
    [
        pytest.param(True, with_head, id="a tied output embedding that is stored"),
        pytest.param(False, renamed("model.", ""), id="the base model's names"),
        pytest.param(False, with_extras("model.layers.0.self_attn.rotary_emb.inv_freq"), id="rotary buffers"),
        pytest.param(False, with_extras("vision_tower.patch.weight", "mm_projector.0.bias"), id="another modality"),
    ],
)
def test_what_is_harmless_is_not_refused(tied: bool, tensors: Callable[[Tensors], Tensors], tmp_path: Path) -> None:
    check(change(save(tmp_path, tie_word_embeddings=tied), tensors))


def test_a_job_with_such_weights_ends_before_its_data_is_read(
    recipe_file: Path, outputs: Path, demo: Demo, tmp_path: Path
) -> None:
    folder = change(Path(shutil.copytree(demo.model, tmp_path / "model")), num_hidden_layers=9, layer_types=None)
    overrides = [f"model.name_or_path={folder}", f"output_dir={outputs}"]
    job = open_job(recipe_file, overrides, Hardware(None, 1, 1, 2, 16.0))
    for refuse in (check_with_frameworks, lambda job: load_model(job, None)):
        with pytest.raises(
            ModelError, match=r"(?s)model.name_or_path=.*missing from the weights: model.layers.{.*, 8}"
        ):
            refuse(job)


def filled(name: str, value: float, row: Any = slice(None)) -> Callable[[Tensors], Tensors]:
    def fill(tensors: Tensors) -> Tensors:
        for key in tensors:
            if name in key:
                tensors[key][row] = value
        return tensors

    return fill


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        (filled("embed_tokens", float("inf"), 540), r"NaN or infinite values: model.embed_tokens.weight$"),
        (filled("1.mlp.up_proj", float("nan"), (3, 5)), r"NaN or infinite values: model.layers.1.mlp.up_proj.weight$"),
        (filled("layers.1.", 0.0), r"nothing but zeros: model.layers.1.\*$"),
        # Layers that were added to a model start so, and learn.
        (filled("1.self_attn.o_proj", 0.0), None),
        (filled("norm", 0.0), None),
    ],
)
def test_broken_tensors_are_refused_by_name(
    tensors: Callable[[Tensors], Tensors], named: str | None, demo: Demo, tmp_path: Path
) -> None:
    folder = change(Path(shutil.copytree(demo.model, tmp_path / "model")), tensors)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    load = partial(load_base, Model(name_or_path=str(folder)), str(folder), torch.float32, tokenizer)
    if named is None:
        load()
        return
    with pytest.raises(ModelError, match=rf"(?m){named}"):
        load()


@pytest.mark.parametrize(
    ("settings", "kept", "note"),
    [
        ({"temperature": 0.6, "top_p": 0.9}, {"do_sample": True, "temperature": 0.6}, "do_sample=true"),
        (
            {"temperature": 0.0, "top_p": 0.9},
            {"do_sample": None, "temperature": None, "top_p": None},
            "leaves them out where",
        ),
        ({"eos_token_id": [0, 10, 9999, -1]}, {"eos_token_id": [2, 0]}, "at 10 "),
        ({"eos_token_id": 9999}, {"eos_token_id": [2]}, None),
        ({"do_sample": True, "temperature": 0.6}, {"do_sample": True, "temperature": 0.6}, None),
        ({}, {"do_sample": None}, None),
    ],
)
def test_a_generation_config_can_be_saved_and_stops_at_special_tokens(
    settings: dict[str, Any], kept: dict[str, Any], note: str | None, demo: Demo, tmp_path: Path
) -> None:
    folder = shutil.copytree(demo.model, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps(settings))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = load_base(Model(name_or_path=str(folder)), str(folder), torch.float32, tokenizer)
    assert [note in line for line in model.generation_notes] == [True] if note else model.generation_notes == []
    model.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert {key: saved.get(key) for key in kept} == kept


@pytest.mark.parametrize(("tied", "prefix"), [(False, ""), (True, ""), (True, "model.")])
def test_a_stage_reads_its_own_tensors_alone(tied: bool, prefix: str, demo: Demo, tmp_path: Path) -> None:
    """Those of other stages are NaN in the file, and are what refuses the model when all of it is loaded."""
    folder, stages = tmp_path / "model", (range(1), range(1, 2), range(2, 3))
    AutoTokenizer.from_pretrained(demo.model).save_pretrained(folder)
    save(folder, "qwen3", vocab_size=544, tie_word_embeddings=tied)
    saved = load_file(folder / "model.safetensors")
    ends = ["model.embed_tokens.", *([] if tied else ["lm_head."])]
    held = [["layers.0.", ends[0]], ["layers.1."], ["layers.2.", "model.norm.", ends[-1]]]
    for index, names in enumerate(held):
        own = {name: one for name, one in saved.items() if any(part in name for part in names)}
        broken = {name: own.get(name, torch.full_like(one, float("nan"))) for name, one in saved.items()}
        named = {name.removeprefix(prefix): one for name, one in broken.items()}
        save_file(named, folder / "model.safetensors", {"format": "pt"})
        tokenizer = AutoTokenizer.from_pretrained(folder)
        load = partial(load_base, Model(name_or_path=str(folder)), str(folder), torch.float32, tokenizer)
        model = load(without=partial(of_other_stages, stages=stages, index=index))
        assert type(model) is Qwen3ForCausalLM
        loaded = {name: one for name, one in model.named_parameters() if not one.is_meta}
        assert loaded.keys() == own.keys()
        assert all(torch.equal(loaded[name], one) for name, one in own.items())
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == (tied and index != 1)
        with pytest.raises(ModelError, match="NaN"):
            load()
