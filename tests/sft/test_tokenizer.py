import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sft.demo import Demo
from sft.errors import ModelError
from sft.recipe import Recipe
from sft.tokenizer import TEMPLATES, check_tokenizer_choice, end_of_turn, find_chat_template, load_tokenizer

MakeRecipe = Callable[..., Recipe]
RealModel = Callable[[str], Path]


@pytest.fixture
def changed(demo: Demo, tmp_path: Path) -> Callable[..., Path]:
    """The demo's model with another tokenizer_config.json; None leaves a key out."""

    def change(template: str | None = "", **values: object) -> Path:
        folder = tmp_path / "model"
        shutil.copytree(demo.model, folder)
        # For qwen2 transformers takes a class of its own, which brings a padding token.
        (folder / "config.json").write_text('{"model_type": "llama"}')
        file = folder / "tokenizer_config.json"
        settings = json.loads(file.read_text()) | values
        file.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))
        if template is None:
            (folder / "chat_template.jinja").unlink()
        elif template:
            (folder / "chat_template.jinja").write_text(template)
        return folder

    return change


def load(make_recipe: MakeRecipe, folder: Path, *overrides: str) -> Any:
    return load_tokenizer(make_recipe(f"model.name_or_path={folder}", *overrides))


def test_the_end_of_a_turn_is_the_eos_and_not_the_padding(make_recipe: MakeRecipe) -> None:
    tokenizer = load_tokenizer(make_recipe())
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.padding_side) == (
        "<|im_end|>",
        "<|endoftext|>",
        "right",
    )
    assert end_of_turn(tokenizer) == tokenizer.eos_token_id != tokenizer.pad_token_id


def test_an_eos_that_the_template_does_not_write_gives_way_to_the_one_it_does(
    make_recipe: MakeRecipe, changed: Callable[..., Path]
) -> None:
    """As in Qwen's base models: eos is <|endoftext|>, and turns end with <|im_end|>."""
    folder = changed(eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    tokenizer = load(make_recipe, folder)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


@pytest.mark.parametrize(
    ("name", "overrides", "eos"),
    [
        ("qwen3", [], "<|im_end|>"),
        ("minimind", [], "<|im_end|>"),
        ("stories260k_hf", ["model.chat_template=plain", "model.pad_token=<unk>"], "</s>"),
    ],
)
def test_the_real_tokenizers_learn_to_stop(
    name: str, overrides: list[str], eos: str, real_model: RealModel, make_recipe: MakeRecipe
) -> None:
    tokenizer = load(make_recipe, real_model(name), *overrides)
    assert tokenizer.eos_token == eos
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)


def test_without_a_chat_template_the_remedy_is_told(make_recipe: MakeRecipe, changed: Callable[..., Path]) -> None:
    folder = changed(template=None)
    with pytest.raises(ModelError, match=r"has no chat template. Set model.chat_template: `chatml`"):
        load(make_recipe, folder)
    assert load(make_recipe, folder, "model.chat_template=chatml").eos_token == "<|im_end|>"
    assert load(make_recipe, folder, "model.chat_template=plain").eos_token == "<|im_end|>"


@pytest.mark.parametrize("key", ["pad_token", "eos_token"])
def test_a_token_that_is_not_in_the_vocabulary_is_refused(key: str, make_recipe: MakeRecipe) -> None:
    with pytest.raises(ModelError) as error:
        load_tokenizer(make_recipe(f"model.{key}=<|padd|>"))
    assert f"model.{key}=<|padd|> is not in the tokenizer's vocabulary. Its special tokens: " in str(error.value)
    assert "<|im_end|>" in str(error.value)


@pytest.mark.parametrize(
    ("pad", "problem"),
    [
        (None, "has no padding token"),
        ("<|im_end|>", "pads with the end-of-turn token, which would then never be trained"),
    ],
)
def test_padding_that_would_hide_the_end_of_turn_is_refused(
    pad: str | None, problem: str, make_recipe: MakeRecipe, changed: Callable[..., Path]
) -> None:
    folder = changed(pad_token=pad)
    with pytest.raises(ModelError, match=problem) as error:
        load(make_recipe, folder)
    assert "Set model.pad_token to another token" in str(error.value)
    assert load(make_recipe, folder, "model.pad_token=<|endoftext|>").pad_token == "<|endoftext|>"


def test_a_padding_token_that_the_recipe_names_may_not_be_the_end_of_turn(make_recipe: MakeRecipe) -> None:
    with pytest.raises(ModelError, match="pads with the end-of-turn token"):
        load_tokenizer(make_recipe("model.pad_token=<|im_end|>"))


def test_a_turn_that_ends_with_no_token_to_stop_at_is_refused(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    template = tmp_path / "endless.jinja"
    template.write_text("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}")
    with pytest.raises(ModelError, match=r"ends the assistant's turn with '.*Blue', which is no special token"):
        load_tokenizer(make_recipe(f"model.chat_template={template}"))


def test_markers_that_leave_the_end_of_the_turn_out_are_refused(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    template = tmp_path / "outside.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
        "{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    )
    with pytest.raises(ModelError, match="no special token"):
        load_tokenizer(make_recipe(f"model.chat_template={template}"))


def test_a_chat_template_is_a_name_or_a_file(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own.jinja"
    own.write_text("mine")
    monkeypatch.chdir(tmp_path)
    assert find_chat_template("own.jinja") == find_chat_template(str(own)) == "mine"
    names = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
    assert names == ["chatml", "plain"]
    for name in names:
        assert find_chat_template(name) == (TEMPLATES / f"{name}.jinja").read_text()
    with pytest.raises(
        ModelError, match=r"model.chat_template=chatmll: .* did you mean `chatml`.* one of: chatml, plain"
    ):
        check_tokenizer_choice(make_recipe("model.chat_template=chatmll"))
    check_tokenizer_choice(make_recipe())


@pytest.mark.parametrize("broken", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizer_that_cannot_be_loaded_is_one_message(
    broken: str, make_recipe: MakeRecipe, changed: Callable[..., Path]
) -> None:
    folder = changed()
    (folder / broken).write_text("{")
    with pytest.raises(ModelError, match=r"The tokenizer of .* cannot be loaded from its folder") as error:
        load(make_recipe, folder)
    assert "\n" not in str(error.value)


def test_a_template_that_is_no_jinja_is_one_message(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    (tmp_path / "broken.jinja").write_text("{% for m in messages %}{{ m['content'] ")
    with pytest.raises(ModelError, match="chat template"):
        load_tokenizer(make_recipe(f"model.chat_template={tmp_path / 'broken.jinja'}"))


def test_a_template_that_refuses_a_plain_question_is_one_message(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    (tmp_path / "picky.jinja").write_text("{{ raise_exception('a system turn is needed') }}")
    with pytest.raises(ModelError, match="a system turn is needed"):
        load_tokenizer(make_recipe(f"model.chat_template={tmp_path / 'picky.jinja'}"))
