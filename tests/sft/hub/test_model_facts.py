"""What is known of a model before its weights load, and what is refused then."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from sft import files
from sft.data.sources import source_files
from sft.errors import DataError, ModelError
from sft.hub import model_facts
from sft.hub.demo import Demo
from sft.hub.model_facts import Architecture, empty_model, inspect_model, read_architecture
from sft.hub.names import model_path
from sft.recipe.schema import REPOSITORY, Recipe

MakeRecipe = Callable[..., Recipe]


def architecture(kind: str, **settings: Any) -> Architecture:
    config = CONFIG_MAPPING[kind](**{"num_hidden_layers": 2, "vocab_size": 99, "pad_token_id": None} | settings)
    found = read_architecture(empty_model(config, False), config.get_text_config())
    assert found is not None
    return found


@pytest.fixture
def change(demo: Demo, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the demo's model with other values in its config.json."""

    def copy(**settings: Any) -> Path:
        folder = Path(shutil.copytree(demo.model, tmp_path / "model"))
        config = json.loads((folder / "config.json").read_text()) | settings
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return copy


def test_parameters_are_counted_on_an_empty_model(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    facts = inspect_model(make_recipe(f"output_dir={tmp_path}"))
    assert tmp_path in Path(facts.path).parents
    assert (facts.model_type, facts.dtype, facts.max_position_embeddings) == ("qwen2", "float32", 1024)
    layer = 4 * 128 * 128 + 3 * 128 + 3 * 128 * 256 + 2 * 128
    assert facts.parameters == 544 * 128 + 3 * layer + 128
    assert facts.layer_size == layer + 128 // 3


@pytest.mark.parametrize(
    ("missing", "told"),
    [("", "gone: the folder does not exist"), ("config.json", "no config.json"), ("tokenizer.json", "no tokenizer")],
)
def test_a_folder_without_a_model_is_refused(
    missing: str, told: str, change: Callable[..., Path], make_recipe: MakeRecipe
) -> None:
    folder = change()
    (folder / missing).unlink() if missing else folder.rename(folder.with_name("other"))
    name = folder if missing else folder.parent / "gone"
    with pytest.raises(ModelError, match=f"model.name_or_path=.*{told}"):
        model_path(make_recipe(f"model.name_or_path={name}"))


def test_adapters_are_not_taken_for_a_model(change: Callable[..., Path], make_recipe: MakeRecipe) -> None:
    folder = change()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "another/model"}')
    with pytest.raises(ModelError, match=r"holds adapter_config.json"):
        model_path(make_recipe(f"model.name_or_path={folder}"))


@pytest.mark.parametrize("text", ["[]", "\xff", '{"model_type": "no_such_type"}'])
def test_a_config_that_is_none_is_one_message(text: str, change: Callable[..., Path], make_recipe: MakeRecipe) -> None:
    folder = change()
    (folder / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ModelError, match=r"config.json|no_such_type"):
        inspect_model(make_recipe(f"model.name_or_path={folder}"))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"rope_scaling": {"rope_type": "ntk", "factor": 4.0}}, "ntk"),
        ({"model_type": "bert"}, "is an encoder"),
        ({"model_type": "bart"}, "is an encoder-decoder"),
    ],
)
def test_a_config_that_no_decoder_can_be_built_from_is_one_message(
    settings: dict[str, Any], told: str, change: Callable[..., Path], make_recipe: MakeRecipe
) -> None:
    with pytest.raises(ModelError, match=f"model.name_or_path=.*{told}"):
        inspect_model(make_recipe(f"model.name_or_path={change(**settings)}"))


def test_a_cached_hub_model_is_known_by_its_commit(
    change: Callable[..., Path], make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only config.json is there: nothing has to be downloaded to count."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    repository, commit = tmp_path / "cache" / "models--some--model", "a" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots" / commit).mkdir(parents=True)
    shutil.copy(change() / "config.json", repository / "snapshots" / commit)
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"), raising=False)
    for to_run in (True, False):
        facts = inspect_model(make_recipe("model.name_or_path=some/model"), to_run)
        assert (facts.commit, facts.parameters) == (commit, inspect_model(make_recipe()).parameters)


def test_what_is_known_of_a_model_is_kept_and_torch_imported_once(
    change: Callable[..., Path], make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "_made", {})
    name = f"model.name_or_path={change(num_hidden_layers=1)}"
    program = (
        "import sys; from sft.recipe.load import load_recipe; from pathlib import Path;"
        "from sft.hub.model_facts import inspect_model;"
        "inspect_model(load_recipe(Path('recipes/tiny.yaml'), sys.argv[1:])); print('torch' in sys.modules)"
    )
    freeze = "model.freeze=[embed]"
    assert inspect_model(make_recipe(name, freeze)).frozen_parameters == 544 * 128
    assert inspect_model(make_recipe(name)).frozen_parameters == 0
    words = [sys.executable, "-c", program, name, freeze]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize("kind", ["gemma3n_text", "deepseek_v3", "gpt_oss", "gpt2"])
def test_what_is_kept_of_any_model_is_what_was_found(
    kind: str, change: Callable[..., Path], make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = change()
    CONFIG_MAPPING[kind](pad_token_id=None).save_pretrained(folder)
    recipe = make_recipe(f"model.name_or_path={folder}")
    found, settings = inspect_model(recipe, to_run=False), json.loads((folder / "config.json").read_text())
    assert found == model_facts._inspected(recipe, str(folder), None, settings)
    assert found.config == settings


@pytest.mark.parametrize("kind", ["qwen2", "llama", "phi3"])
def test_an_ordinary_decoder_has_nothing_special(kind: str) -> None:
    found = architecture(kind)
    assert found == Architecture(head_dim=found.head_dim, tensor_plan=found.tensor_plan)


@pytest.mark.parametrize(
    ("kind", "settings", "found"),
    [
        ("mamba", {}, {"recurrent": True}),
        ("qwen2_moe", {}, {"mask_only": True}),
        # tests/sft/train/test_isolation_probe.py measures that opt and falcon leak, and that gpt2 does not.
        ("opt", {}, {"blind_mask": True}),
        ("falcon", {}, {"blind_mask": True, "has_interface": False}),
        ("gpt2", {"attn_pdrop": 0.1}, {"blind_mask": False, "has_interface": True, "tensor_plan": set(), "dropout": 0.1}),
        ("gpt_oss", {}, {"sinks": True, "softcap": False}),
        ("gemma2", {}, {"sinks": False, "softcap": True}),
        ("gptj", {}, {"has_interface": False}),
        ("llama", {"hidden_size": 64, "num_attention_heads": 4}, {"head_dim": 16, "tensor_plan": {"colwise", "rowwise"}}),
        ("deepseek_v3", {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}, {"head_dim": 192, "value_head_dim": 128}),
        ("qwen3", {}, {"tensor_plan": {"colwise", "rowwise", "replicated_with_grad_allreduce"}}),
    ],
)  # fmt: skip
def test_how_a_model_attends_is_read_from_its_class_and_configuration(
    kind: str, settings: dict[str, Any], found: dict[str, Any]
) -> None:
    read = architecture(kind, **settings)
    assert {name: getattr(read, name) for name in found} == found


@pytest.mark.parametrize(
    ("kind", "settings", "window"),
    [
        ("qwen2", {"sliding_window": 64}, None),  # unless use_sliding_window is set
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}, 64),
    ],
)
def test_a_window_counts_where_layers_have_it(
    kind: str, settings: dict[str, Any], window: int | None, change: Callable[..., Path], make_recipe: MakeRecipe
) -> None:
    assert (
        inspect_model(make_recipe(f"model.name_or_path={change(model_type=kind, **settings)}")).sliding_window == window
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [("builtin:nope", "`builtin:demo` is the only built-in"), ("a b", "no hub id"), ("foo..bar", "no hub id")],
)
def test_a_name_that_can_be_nothing_is_refused_without_the_hub(name: str, words: str, make_recipe: MakeRecipe) -> None:
    recipe = make_recipe(f"model.name_or_path={name}", f"data.train={name}")
    with pytest.raises(ModelError, match=words):
        model_path(recipe)
    with pytest.raises(DataError, match=words):
        source_files(recipe.sources[0], recipe.output_dir)


@pytest.mark.parametrize(("kind", "expected"), [("qwen2", True), ("gpt2", False)])
def test_types_that_liger_has_kernels_for(
    kind: str, expected: bool, change: Callable[..., Path], make_recipe: MakeRecipe
) -> None:
    facts = inspect_model(make_recipe(f"model.name_or_path={change(model_type=kind)}"))
    assert facts.has_liger is expected
