"""A chat template is a foreign program: it renders in a sandbox."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sft.data.tokenizer import load_tokenizer
from sft.errors import ModelError
from sft.hub.demo import Demo
from sft.recipe.schema import Recipe

ESCAPES = {
    "to the classes of Python": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "to a function's globals": "{{ cycler.__init__.__globals__['os'].system('touch MARK') }}",
    "of a global of transformers": "{{ strftime_now.__globals__['os'].system('touch MARK') }}",
    "by the names of a format": "{{ '{0.__class__.__mro__}'.format('') }}{{ ''.__class__.__base__.__subclasses__() }}",
    "by a filter": "{{ (messages|attr('__class__')).__mro__ }}",
    "by changing the messages": "{{ messages.append(messages) }}",
    "by a file": "{% include '/etc/passwd' %}",
    "by an import": "{% import 'os' as os %}",
}


@pytest.fixture
def load(demo: Demo, make_recipe: Callable[..., Recipe], tmp_path: Path) -> Callable[..., object]:
    """Load the demo's tokenizer with a template: named by the recipe, or brought by the model."""

    def with_template(text: str, of_the_model: bool) -> object:
        file = tmp_path / "evil.jinja"
        if not of_the_model:
            file.write_text(text)
            return load_tokenizer(make_recipe(f"model.chat_template={file}"))
        folder = tmp_path / "model"
        shutil.copytree(demo.model, folder)
        (folder / "chat_template.jinja").write_text(text)
        return load_tokenizer(make_recipe(f"model.name_or_path={folder}"))

    return with_template


@pytest.mark.parametrize("of_the_model", [True, False], ids=["the model's", "the recipe's"])
@pytest.mark.parametrize("escape", ESCAPES)
def test_a_template_does_not_get_out(
    escape: str, of_the_model: bool, load: Callable[..., object], demo: Demo, tmp_path: Path
) -> None:
    mark, plain = tmp_path / "ran", (demo.model / "chat_template.jinja").read_text()
    with pytest.raises(ModelError, match=r"cannot be rendered: the chat template refuses it"):
        load(ESCAPES[escape].replace("MARK", str(mark)) + plain, of_the_model)
    assert not mark.exists()


def test_a_text_that_no_memory_holds_is_a_refusal(load: Callable[..., object]) -> None:
    with pytest.raises(ModelError, match=r"the chat template refuses it"):
        load("{{ 'a' * 10 ** 17 }}", False)
