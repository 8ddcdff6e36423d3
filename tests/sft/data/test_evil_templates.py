"""A chat template is a program of somebody else's: it renders in a sandbox, and for a limited time."""

import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sft.data import chat
from sft.data.processor_time import TookTooLong, limited_time
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


def test_a_template_without_end_is_ended(load: Callable[..., object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "RENDERING_SECONDS", 0.2)
    loop = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
    with pytest.raises(ModelError, match=r"it was not done after 0.2 s"):
        load(loop, False)


def test_a_text_that_no_memory_holds_is_a_refusal(load: Callable[..., object]) -> None:
    with pytest.raises(ModelError, match=r"the chat template refuses it"):
        load("{{ 'a' * 10 ** 17 }}", False)


def test_the_limit_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGVTALRM)
    with limited_time(60):
        pass
    with pytest.raises(TookTooLong), limited_time(0.01):
        while True:
            sum(range(1000))
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)
    assert signal.getsignal(signal.SIGVTALRM) == before


def test_waiting_is_no_work() -> None:
    with limited_time(0.02):
        time.sleep(0.05)


def test_another_thread_has_no_limit_and_no_error() -> None:
    """Signals reach the main thread alone; nothing renders elsewhere."""
    done: list[bool] = []

    def work() -> None:
        with limited_time(0.01):
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]
