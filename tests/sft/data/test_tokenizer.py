import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from sft.data.template_checks import end_of_turn
from sft.data.tokenizer import TEMPLATES, find_chat_template, load_tokenizer
from sft.errors import ModelError
from sft.hub.demo import Demo
from sft.recipe.schema import Recipe

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


def test_without_a_chat_template_the_eos_ends_what_is_trained(
    make_recipe: MakeRecipe, changed: Callable[..., Path]
) -> None:
    folder = changed(template=None, eos_token="<|endoftext|>", pad_token="<|im_start|>")
    tokenizer = load(make_recipe, folder)
    assert tokenizer.chat_template is None
    assert tokenizer.eos_token == "<|endoftext|>"
    assert load(make_recipe, folder, "model.eos_token=<|im_end|>").eos_token == "<|im_end|>"
    assert load(make_recipe, folder, "model.chat_template=chatml").eos_token == "<|im_end|>"
    assert load(make_recipe, folder, "model.chat_template=plain").eos_token == "<|endoftext|>"


@pytest.mark.parametrize("key", ["pad_token", "eos_token"])
def test_a_token_that_is_not_in_the_vocabulary_is_refused(key: str, make_recipe: MakeRecipe) -> None:
    with pytest.raises(ModelError) as error:
        load_tokenizer(make_recipe(f"model.{key}=<|padd|>"))
    assert f"model.{key}=<|padd|> is not in the tokenizer's vocabulary. Its special tokens: " in str(error.value)
    assert "<|im_end|>" in str(error.value)


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["<s>", "<|extra_1|>", "<|vision_pad|>", "<|fim_pad|>"], "<|fim_pad|>"),
        (["<s>", "<|fim_pad|>", "<pad>"], "<pad>"),
        (["<s>", "<notepad>", "<\uff5c\u2581pad\u2581\uff5c>"], "<\uff5c\u2581pad\u2581\uff5c>"),
        (["<s>", "<|finetune_right_pad_id|>"], "<|finetune_right_pad_id|>"),
        (["<s>", "<|tool|>", "<|reserved_special_token_0|>"], "<|reserved_special_token_0|>"),
        (["<s>", "<|tool|>"], "<|tool|>"),
        (["<s>"], None),
    ],
)
@pytest.mark.parametrize("pad", [None, "</s>"])
def test_padding_is_never_what_begins_or_ends_a_turn(
    pad: str | None, names: list[str], chosen: str | None, make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    """One that is named for padding is preferred; where the tokenizer has none at all, the recipe must name it."""
    inner = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    special = {"bos_token": "<s>", "eos_token": "</s>", **({"pad_token": pad} if pad else {})}
    own = PreTrainedTokenizerFast(tokenizer_object=inner, additional_special_tokens=names, **special)
    own.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    overrides = ["eval.apply_chat_template=false"]
    if pad is None or chosen is None:
        with pytest.raises(
            ModelError, match=re.escape(f"example {chosen}." if chosen else "model.new_tokens=[<|pad|>]")
        ):
            load(make_recipe, tmp_path, *overrides)
        return
    tokenizer = load(make_recipe, tmp_path, *overrides)
    assert (tokenizer.pad_token, tokenizer.eos_token) == (chosen, "</s>")
    assert "model.pad_token" in tokenizer.padding_note


def test_a_padding_token_that_the_recipe_names_may_not_be_the_end_of_turn(make_recipe: MakeRecipe) -> None:
    with pytest.raises(ModelError, match="pads with the end-of-turn token"):
        load_tokenizer(make_recipe("model.pad_token=<|im_end|>"))


TURNS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def with_turns(make_recipe: MakeRecipe, tmp_path: Path, template: str, *overrides: str) -> Any:
    (tmp_path / "mine.jinja").write_text(template)
    return load_tokenizer(make_recipe(f"model.chat_template={tmp_path / 'mine.jinja'}", *overrides))


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}", "turns are not its answers"),
        (
            TURNS.replace("<|im_end|>", "</turn>"),
            "</turn>', which is not a special token of this tokenizer: .* never learn to stop",
        ),
        (TURNS.replace("<|im_end|>{% endg", ".{% endg"), "which is not a special token"),
        ("{{ bos_token }}{{ bos_token }}" + TURNS, "begins a conversation with <|endoftext|> twice"),
    ],
)
def test_a_turn_without_a_trained_end_is_one_message(
    template: str, told: str, make_recipe: MakeRecipe, changed: Callable[..., Path], tmp_path: Path
) -> None:
    folder = changed(bos_token="<|endoftext|>")
    assert with_turns(make_recipe, tmp_path, "{{ bos_token }}" + TURNS, f"model.name_or_path={folder}").eos_token
    with pytest.raises(ModelError) as error:
        with_turns(make_recipe, tmp_path, template, f"model.name_or_path={folder}")
    assert re.search(told.replace("|", r"\|"), str(error.value))
    assert "model.chat_template" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_chat_template_is_a_name_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        find_chat_template("chatmll")


def test_a_tokenizers_templates_are_not_written_by_the_names_they_give_themselves(
    make_recipe: MakeRecipe, demo: Demo, tmp_path: Path
) -> None:
    """transformers writes a template of the name `../../x` to that place; of ours there is one, without a name."""
    model = tmp_path / "deep" / "model"
    shutil.copytree(demo.model, model)
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").unlink()
    config = json.loads((model / "tokenizer_config.json").read_text())
    named = [{"name": "default", "template": template}, {"name": "../../../evil", "template": template}]
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
    tokenizer = load_tokenizer(make_recipe(f"model.name_or_path={model}"))
    tokenizer.save_pretrained(tmp_path / "deep" / "final")
    assert not list(tmp_path.rglob("evil*"))
    assert (tmp_path / "deep" / "final" / "chat_template.jinja").read_text() == template


@pytest.mark.parametrize(
    "escape",
    [
        "{{ cycler.__init__.__globals__['os'].system('touch MARK') }}",
    ],
)
def test_a_template_is_a_foreign_program_and_renders_in_a_sandbox(
    escape: str, make_recipe: MakeRecipe, changed: Callable[..., Path], demo: Demo, tmp_path: Path
) -> None:
    mark, plain = tmp_path / "ran", (demo.model / "chat_template.jinja").read_text()
    folder = changed(template=escape.replace("MARK", str(mark)) + plain)
    for override in ([], [f"model.chat_template={folder / 'chat_template.jinja'}"]):
        with pytest.raises(ModelError, match=r"cannot be rendered: the chat template refuses it"):
            load(make_recipe, folder, *override)
    assert not mark.exists()
