import json
import math
from collections.abc import Callable
from dataclasses import replace
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch

from sft.data.facts import inspect_data
from sft.data.prepare import prepare
from sft.errors import DataError, ModelError
from sft.hub.demo import Demo
from sft.hub.model_facts import ModelFacts
from sft.hub.names import model_path
from sft.plan.facts import inspect_model
from sft.recipe.schema import Recipe

MakeRecipe = Callable[..., Recipe]
ROW = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def write_rows(path: Path, count: int) -> Path:
    path.write_text((json.dumps(ROW) + "\n") * count)
    return path


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
    assert inspect_data(recipe, facts) is None


KINDS = {
    "one source": [],
    "a part of it": ["data.train=[{path: 'builtin:demo', split: 'train[:500]'}]"],
    "a number of rows": ["data.train=[{path: 'builtin:demo', rows: 500}]"],
    "less than a pass": ["data.train=[{path: 'builtin:demo', epochs: 0.5}]"],
    "repeated": ["data.train=[{path: 'builtin:demo', epochs: 3.0}]"],
    "without packing": ["data.packing=false"],
    "packs of many documents": ["data.pack_length=4096"],
    "all trained": ["data.loss_on=all"],
    "some held out": ["data.held_out=0.4"],
    "weighted": ["data.train=[{path: 'builtin:demo', weight: 1.0}, {path: SMALL, weight: 1.0}]"],
}


@pytest.mark.parametrize("overrides", KINDS.values(), ids=list(KINDS))
def test_the_estimate_is_near_the_count(
    overrides: list[str], make_recipe: MakeRecipe, demo: Demo, tmp_path: Path
) -> None:
    small = tmp_path / "small.jsonl"
    small.write_text("".join(demo.train.read_text().splitlines(keepends=True)[:300]))
    recipe = make_recipe(*(override.replace("SMALL", str(small)) for override in overrides))
    model = inspect_model(recipe)
    estimate, counted = inspect_data(recipe, model), prepare(recipe, model).facts()
    assert estimate is not None
    assert (estimate.exact, counted.exact) == (False, True)
    assert estimate.documents == pytest.approx(counted.documents, rel=0.05)
    assert estimate.trained_tokens == pytest.approx(counted.trained_tokens, rel=0.1)
    assert estimate.tokens == pytest.approx(counted.tokens, rel=0.1)
    assert estimate.sequences == pytest.approx(counted.sequences, rel=0.1)


def test_a_small_file_is_counted_and_sources_add_up(make_recipe: MakeRecipe, demo: Demo, tmp_path: Path) -> None:
    one, two = write_rows(tmp_path / "one.jsonl", 30), write_rows(tmp_path / "two.jsonl", 12)
    recipe = make_recipe(f"data.train=[{{path: {one}}}, {{path: {two}}}]")
    facts = inspect_data(recipe, inspect_model(recipe))
    assert facts is not None
    assert facts.documents == 42
    assert facts.trained_tokens == 42 * 2  # a letter and the end of its turn
    assert facts.tokens > 2 * facts.trained_tokens


def test_a_document_counts_for_no_more_than_max_length(make_recipe: MakeRecipe, demo: Demo, tmp_path: Path) -> None:
    row = {"prompt": "a" * 50, "completion": "b" * 500}
    (tmp_path / "long.jsonl").write_text((json.dumps(row) + "\n") * 5)
    recipe = make_recipe(f"data.train={tmp_path / 'long.jsonl'}", "data.max_length=64")
    facts = inspect_data(recipe, inspect_model(recipe))
    assert facts is not None
    assert facts.tokens == 5 * 64
    assert facts.trained_tokens <= facts.tokens


def test_useless_columns_are_named_before_anything_heavy(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "a", "reply": "b"}\n')
    with pytest.raises(DataError, match=r"no usable columns. Found: question, reply. Usable: .*`messages`"):
        inspect_data(make_recipe(f"data.train={tmp_path / 'rows.jsonl'}"), ModelFacts("some/model"))


def test_a_tokenizer_that_is_half_there_is_one_message(make_recipe: MakeRecipe, demo: Demo, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "trunc')
    with pytest.raises(ModelError, match=r"tokenizer.json"):
        inspect_data(make_recipe(), ModelFacts(str(tmp_path)))


def test_a_broken_file_behind_the_first_is_one_message(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([ROW]), tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_text("half a download")
    with pytest.raises(DataError, match=r"b.parquet"):
        inspect_data(make_recipe(f"data.train={tmp_path}"), ModelFacts("some/model"))


def test_all_rows_of_parquet_files_are_counted_without_reading_them(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    for name, count in (("a", 300), ("b", 45)):
        pq.write_table(pa.Table.from_pylist([ROW] * count), tmp_path / f"{name}.parquet")
    facts = inspect_data(make_recipe(f"data.train={tmp_path}"), ModelFacts("some/model"))
    assert facts is not None
    assert facts.documents == 345


def test_values_that_are_no_json_in_columns_beside_are_no_trouble(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    import datasets

    beside = {
        "at": datetime(2024, 1, 2),
        "day": date(1, 1, 1),
        "price": Decimal("0.10"),
        "raw": b"\xff",
        "nan": math.nan,
    }
    rows = datasets.Dataset.from_list([{"prompt": "Hi", "completion": "Hello"} | beside] * 3)
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "saved")
    recipe = make_recipe(f"data.train={tmp_path / 'saved'}", "data.packing=false", f"output_dir={tmp_path / 'out'}")
    model = inspect_model(recipe)
    assert inspect_data(recipe, model) is not None
    assert prepare(recipe, model).sequences == 3


def test_half_a_surrogate_pair_is_counted_as_some_character(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "Hi \ud83d", "completion": "Hello"}) + "\n")
    recipe = make_recipe(f"data.train={tmp_path / 'rows.jsonl'}")
    assert inspect_data(recipe, inspect_model(recipe)) is not None


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
