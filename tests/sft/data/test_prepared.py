import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sft.data.prepare import prepare
from sft.data.prepared import data_key, entry_folder, find_prepared
from sft.hub.demo import Demo
from sft.hub.model_facts import ModelFacts, inspect_model
from sft.recipe.schema import REPOSITORY, Data, Recipe

MakeRecipe = Callable[..., Recipe]
Key = Callable[..., str]
ROW = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
LIMITS = {
    "allow": "[placeholder]",
    "max_overlong_fraction": "0.5",
    "max_dropped_fraction": "0.5",
    "min_trained_fraction": "0.01",
}
CHANGES = {
    "function": f"{REPOSITORY}/sft/errors.py:UserError",
    "held_out": "0.1",
    "max_length": "64",
    "packing": "false",
    "pack_length": "256",
    "loss_on": "all",
    "reasoning": "drop",
    "special_tokens": "keep",
    "overlong": "truncate",
    "on_bad_row": "drop",
    "refuse": "[role_order]",
    "deduplicate": "true",
    "seed": "1",
}


@pytest.fixture
def model(tmp_path: Path, demo: Demo) -> Path:
    """A copy of the demo's model that may be changed."""
    return Path(shutil.copytree(demo.model, tmp_path / "model"))


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text((json.dumps(ROW) + "\n") * 3)
    return path


@pytest.fixture
def key(make_recipe: MakeRecipe, model: Path, rows: Path) -> Key:
    """The name of a recipe's entry."""

    def name(*overrides: str) -> str:
        recipe = make_recipe(f"model.name_or_path={model}", f"data.train={rows}", *overrides)
        return entry_folder(recipe, inspect_model(recipe)).name

    return name


def test_the_same_data_is_the_same_entry_whatever_is_trained_with_it(key: Key, tmp_path: Path) -> None:
    first = key()
    others = ["train.learning_rate=1.0", "train.seed=5", "train.global_batch_size=64", "eval.limit=3", "version=2"]
    others += ["tracking.run_name=x", "train.num_train_epochs=3", "model.attn_implementation=eager", "model.lora={}"]
    others += [f"output_dir={tmp_path / 'elsewhere'}"]
    assert {key(other) for other in others} == {first}


def test_every_other_key_of_data_is_another_entry(key: Key) -> None:
    assert set(CHANGES) | set(LIMITS) | {"train"} == set(Data.model_fields), "a key is not tested"
    keys = [key(f"data.{name}={value}") for name, value in CHANGES.items()]
    assert len({key(), *keys}) == len(CHANGES) + 1


def test_a_changed_row_is_another_entry_and_the_old_row_the_old_one(key: Key, rows: Path) -> None:
    first, text = key(), rows.read_text()
    rows.write_text(text.replace('"b"', '"c"', 1))
    assert key() != first
    rows.write_text(text)
    assert key() == first


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"])
def test_a_changed_file_of_the_tokenizer_is_another_entry(file: str, key: Key, model: Path) -> None:
    first = key()
    (model / file).write_text((model / file).read_text() + " ")
    assert key() != first


def test_another_chat_template_is_another_entry(key: Key, tmp_path: Path) -> None:
    mine = tmp_path / "mine.jinja"
    mine.write_text("{{ messages }}")
    keys = [key(), key("model.chat_template=chatml"), key(f"model.chat_template={mine}")]
    mine.write_text("{{ messages }} ")
    keys.append(key(f"model.chat_template={mine}"))
    assert len(set(keys)) == 4


def test_the_recipes_tokens_and_a_package_are_part_of_the_entry(key: Key, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["model.new_tokens=['<|x|>']", "model.eos_token=<|endoftext|>", "model.pad_token=a"]
    keys = [key(), *map(key, overrides)]
    monkeypatch.setattr("sft.data.prepared.version", lambda name: f"{name} 9")
    assert len({*keys, key()}) == 5


def test_any_change_of_the_code_that_prepares_is_another_entry(
    key: Key, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = Path(shutil.copytree(REPOSITORY / "sft", tmp_path / "sft"))
    keys = [key()]
    monkeypatch.setattr("sft.data.prepared.__file__", str(code / "data" / "prepared.py"))
    assert key() == keys[0]
    for name in ("data/render.py", "hub/names.py"):
        (code / name).write_text((code / name).read_text() + "\n")
        keys.append(key())
    assert len(set(keys)) == len(keys)


def test_what_nobody_can_tell_of_the_hub_is_found_by_the_same_start_only(
    make_recipe: MakeRecipe, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("SFT_START", "")
    monkeypatch.delenv("SFT_START")
    known = ModelFacts("owner/model", "qwen2", commit="0123abcd")
    on_hub = make_recipe("model.name_or_path=owner/model", f"data.train={rows}")
    assert entry_folder(on_hub, known) != entry_folder(on_hub, replace(known, commit="4567cdef"))
    cases = [
        (make_recipe("data.train=owner/data"), inspect_model(make_recipe())),
        (on_hub, replace(known, commit=None)),
    ]
    first = [entry_folder(*case) for case in cases]
    assert [entry_folder(*case) for case in cases] == first
    monkeypatch.delenv("SFT_START")
    assert not {entry_folder(*case) for case in cases} & set(first)


@pytest.fixture
def entry(make_recipe: MakeRecipe, model: Path, rows: Path, tmp_path: Path) -> Path:
    recipe = make_recipe(f"model.name_or_path={model}", f"data.train={rows}", f"output_dir={tmp_path / 'out'}")
    return prepare(recipe, inspect_model(recipe)).folder


def test_a_whole_entry_is_found_and_tells_the_plan_its_size(entry: Path) -> None:
    found = find_prepared(entry)
    assert found is not None
    facts = found.facts()
    assert (facts.documents, facts.sequences, facts.exact) == (3, 1, True)
    tokens = found.ledger["total"]["tokens"]
    assert (facts.tokens, facts.trained_tokens) == (tokens["trained"] + tokens["masked"], tokens["trained"])
    assert len(found.fingerprint) == 64


def test_an_entry_with_a_file_of_another_size_is_not_found(entry: Path) -> None:
    with (entry / "tokens.bin").open("ab") as file:
        file.write(b" ")
    assert find_prepared(entry) is None


def test_machines_compare_their_data_by_its_size(make_recipe: MakeRecipe, rows: Path) -> None:
    recipe = make_recipe(f"data.train={rows}")
    model = inspect_model(recipe)
    first, text = data_key(recipe, model), rows.read_bytes()
    rows.write_bytes(b" " + text[1:])  # what there is no time to read; the entry has
    assert data_key(recipe, model) == first
    rows.write_bytes(text + text)
    assert data_key(recipe, model) != first
