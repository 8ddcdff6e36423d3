import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch

from sft.data.facts import inspect_data
from sft.errors import ModelError
from sft.hub.model_facts import ModelFacts
from sft.hub.names import model_path
from sft.plan.facts import inspect_model
from sft.recipe.schema import Recipe

MakeRecipe = Callable[..., Recipe]


def test_the_demos_model_is_made_where_it_is_asked_for(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    facts = inspect_model(make_recipe(f"output_dir={tmp_path}"))
    assert tmp_path in Path(facts.path).parents
    assert (facts.model_type, facts.dtype, facts.max_position_embeddings) == ("qwen2", "float32", 1024)
    assert facts.parameters == pytest.approx(0.56e6, rel=0.05)


def test_a_folder_without_a_model_is_refused(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model.name_or_path=.*: the folder holds no config.json"):
        model_path(make_recipe(f"model.name_or_path={tmp_path}"))
    with pytest.raises(ModelError, match=r"model.name_or_path=.*gone: the folder does not exist"):
        model_path(make_recipe(f"model.name_or_path={tmp_path / 'gone'}"))
    (tmp_path / "config.json").write_text("{}")
    adapter = tmp_path / "adapter_config.json"
    adapter.write_text('{"base_model_name_or_path": "another/model"}')
    with pytest.raises(ModelError, match=r"model.name_or_path=.*: the folder holds adapter_config.json"):
        model_path(make_recipe(f"model.name_or_path={tmp_path}"))
    adapter.unlink()
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"model.name_or_path=.*: the folder holds no tokenizer \(tokenizer.json"):
        model_path(make_recipe(f"model.name_or_path={tmp_path}"))


def test_what_the_plan_needs_is_read_from_the_config(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").touch()
    text = {"model_type": "gemma3_text", "torch_dtype": "bfloat16", "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    save_file({"w": np.zeros((1000, 100), np.float16)}, tmp_path / "model.safetensors")
    facts = inspect_model(make_recipe(f"model.name_or_path={tmp_path}"))
    assert replace(facts, parameters=None, architecture=None) == ModelFacts(
        str(tmp_path), "gemma3_text", "bfloat16", 4096
    )
    assert facts.parameters == pytest.approx(100_000, rel=0.01)


@pytest.mark.parametrize("text", ["{", "[]", "", "\xff", "{}"])
def test_a_config_that_is_none_is_one_message(text: str, make_recipe: MakeRecipe, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").touch()
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ModelError, match=r"config.json (cannot be read|has no model_type)"):
        inspect_model(make_recipe(f"model.name_or_path={tmp_path}"))


def test_what_the_hub_would_have_to_tell_is_left_open_for_a_plan(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe("model.name_or_path=some-owner/no-such-model", "data.train=some-owner/no-such-data")
    facts = inspect_model(recipe, download=False)
    assert facts == ModelFacts("some-owner/no-such-model")
    assert inspect_data(recipe, facts.path) is None


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A model of 1 MB in two files, with its maker's own file beside them."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "torch_dtype": "float16"}))
    for number in (1, 2):
        save_file({f"w{number}": np.zeros(250_000, np.float16)}, folder / f"model-{number}.safetensors")
    index = {"metadata": {"total_size": 10**6}, "weight_map": {f"w{n}": f"model-{n}.safetensors" for n in (1, 2)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "consolidated.safetensors").write_bytes(bytes(10**6))
    return folder


def test_only_the_files_that_are_loaded_count(make_recipe: MakeRecipe, model_folder: Path) -> None:
    recipe = make_recipe(f"model.name_or_path={model_folder}")
    assert inspect_model(recipe).parameters == pytest.approx(500_000, rel=0.01)
    save_file({"w": np.zeros(250_000, np.float16)}, model_folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"two sets of weights: model.safetensors, and model-1.safetensors"):
        inspect_model(recipe)
    for number in (1, 2):
        (model_folder / f"model-{number}.safetensors").unlink()
    assert inspect_model(recipe).parameters == pytest.approx(250_000, rel=0.01)


BROKEN: dict[str, tuple[str, Callable[[bytes], bytes | None]]] = {
    "missing": ("is missing", lambda whole: None),
    "empty": ("is empty", lambda whole: b""),
    "a pointer": ("Git LFS", lambda whole: b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 5\n"),
    "a web page": ("holds no weights: .*<!doctype", lambda whole: b"<!doctype html>" * 99),
    "cut off": ("was cut off", lambda whole: whole[: len(whole) // 2]),
    "cut off in its header": ("was cut off", lambda whole: whole[:30]),
    "bytes too many": ("damaged", lambda whole: whole + b"0"),
    "a header of something else": ("damaged", lambda whole: whole[:8] + b"{" * (len(whole) - 8)),
}


@pytest.mark.parametrize("words, change", BROKEN.values(), ids=list(BROKEN))
@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_broken_weights_are_refused(
    form: str, words: str, change: Callable[[bytes], bytes | None], make_recipe: MakeRecipe, model_folder: Path
) -> None:
    weights = model_folder / "model-2.safetensors"
    if form == "bin":
        if "damaged" in words:
            pytest.skip("a .bin file says nothing of its size")
        weights, older = model_folder / "pytorch_model-2.bin", weights
        torch.save({"w": torch.zeros(2500)}, weights)
        torch.save({"w": torch.zeros(2500)}, model_folder / "pytorch_model-1.bin", _use_new_zipfile_serialization=False)
        older.unlink()
        (model_folder / "model.safetensors.index.json").unlink()
        if words == "is missing":
            pytest.skip("there is no index")
    recipe = make_recipe(f"model.name_or_path={model_folder}")
    assert inspect_model(recipe).parameters
    content = change(weights.read_bytes())
    weights.unlink() if content is None else weights.write_bytes(content)
    with pytest.raises(ModelError, match=rf"{weights.name} .*{words}.*again"):
        inspect_model(recipe)


def test_float8_needs_its_scales(make_recipe: MakeRecipe, model_folder: Path) -> None:
    save_torch({"w2": torch.zeros(9, 9).to(torch.float8_e4m3fn)}, model_folder / "model-2.safetensors")
    recipe = make_recipe(f"model.name_or_path={model_folder}")
    with pytest.raises(ModelError, match=r"w2 is stored in F8_E4M3.*quantization_config"):
        inspect_model(recipe)
    config = json.loads((model_folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (model_folder / "config.json").write_text(json.dumps(config))
    assert inspect_model(recipe).parameters


def test_a_hub_model_in_one_file_has_a_size(
    make_recipe: MakeRecipe, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    repository = tmp_path / "cache" / "models--some--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("a" * 40)
    (repository / "snapshots").mkdir()
    (model_folder / "model.safetensors.index.json").unlink()
    save_file({"w": np.zeros(500_000, np.float16)}, model_folder / "model.safetensors")
    model_folder.rename(repository / "snapshots" / ("a" * 40))
    assert inspect_model(make_recipe("model.name_or_path=some/model")).parameters == pytest.approx(500_000, rel=0.01)
