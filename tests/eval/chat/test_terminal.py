"""A conversation, without the terminal: tests/slow/test_chat_terminal.py has one."""

import io
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from eval.chat.model import ChatFormat, Messages, find_model, load_format
from eval.chat.terminal import Conversation, Streamer, converse, generation_config, parse
from eval.tasks.reference import Reference, load_reference
from sft.errors import EvaluationError
from sft.run.directory import Run


@pytest.fixture
def chat_format(reference: Reference) -> ChatFormat:
    return load_format(reference)


def streamed(chat_format: ChatFormat, ids: list[int]) -> Iterator[str]:
    """What is shown as each token comes."""
    pieces: list[str] = []
    streamer = Streamer(chat_format, pieces.append)
    streamer.put(torch.tensor([[5, 6, 7]]))
    for token in ids:
        pieces.clear()
        streamer.put(torch.tensor([token]))
        yield "".join(pieces)
    pieces.clear()
    streamer.end()
    yield "".join(pieces)


def test_half_a_character_is_shown_when_the_other_half_has_come(chat_format: ChatFormat) -> None:
    text = "é 长城 🚀🚀 ok\n  x"
    ids = chat_format.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) > len(text), "this vocabulary has no such characters, but their bytes"
    pieces = list(streamed(chat_format, ids))
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    assert pieces.count("🚀") == 2, "each as soon as it is whole"


def test_the_end_of_the_turn_is_not_shown_and_other_special_tokens_are(chat_format: ChatFormat) -> None:
    start = chat_format.tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert "".join(streamed(chat_format, [start, chat_format.tokenizer.eos_token_id])) == "<|im_start|>"


def test_a_tokenizer_that_begins_words_with_a_space_keeps_spaces_and_indentation(shared: Path) -> None:
    """By SentencePiece, where a token by itself loses the space that it begins with."""
    reference = load_reference(str(shared / "models" / "stories260k_hf"), None, False)
    reference.tokenizer.chat_template = "{{ messages }}"
    chat_format, text = load_format(reference), "Once upon a time\n    there was a girl"
    ids = chat_format.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert "".join(streamed(chat_format, ids)) == chat_format.text(ids)


def turns(count: int, system: bool = False) -> Messages:
    said = [{"role": ("user", "assistant")[n % 2], "content": str(n)} for n in range(count)]
    return [{"role": "system", "content": "S"}, *said] if system else said


class Echo(Conversation):
    """A model that says what it is told."""

    def answer(self, question: str, show: Callable[[str], None]) -> Iterator[str]:
        show(question)
        yield from ()


def test_a_terminal_gets_what_was_said_and_nothing_to_obey(
    chat_format: ChatFormat, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "\u3000\u3000中文\u00a0: n\u2019est\u202fpas\t\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645 \U0001f469\u200d\U0001f467"
    monkeypatch.setattr("sys.stdin", io.StringIO(said + "\n\x1b]0;title\x07\x85\u202etxt\n"))
    converse(Echo(None, chat_format, None))
    assert capsys.readouterr().out == said + "⟨U+001B⟩]0;title⟨U+0007⟩⟨U+0085⟩⟨U+202E⟩txt"


@pytest.fixture
def conversation(chat_format: ChatFormat) -> Conversation:
    """Four turns, and room for 500 tokens beside an answer."""
    return Conversation(None, chat_format, generation_config(chat_format, 524, None), turns(4))


def test_a_conversation_that_fills_the_context_is_refused(conversation: Conversation) -> None:
    messages, ids = conversation.fit("now")
    assert messages[:-1] == conversation.messages
    assert ids == conversation.chat_format.render(messages)
    with pytest.raises(EvaluationError, match=r"context of 1024 tokens is full\. /reset starts over"):
        conversation.fit("y" * 600)


def test_commands_change_the_conversation(conversation: Conversation) -> None:
    conversation.command("/system Be brief.")
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]
    conversation.messages += turns(2)
    conversation.command("/reset")
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]
    conversation.command("/system")
    assert conversation.messages == []
    assert conversation.command("/sytem x").startswith("(/sytem is not a command)\n/system")


def test_the_command_line_changes_the_saved_generation_config(chat_format: ChatFormat) -> None:
    chat_format.generation_config.do_sample = True
    assert generation_config(chat_format, None, None).do_sample
    assert generation_config(chat_format, None, None).max_new_tokens == 512, "half of the context of 1024"
    greedy = generation_config(chat_format, 7, 0.0)
    assert (greedy.do_sample, greedy.max_new_tokens) == (False, 7)
    assert generation_config(chat_format, None, 0.5).temperature == 0.5
    with pytest.raises(EvaluationError, match="leaves no room for a question in a context of 1024"):
        generation_config(chat_format, 1024, None)


@pytest.mark.parametrize("words", [[], ["a", "--temperature", "-1"]])
def test_a_wrong_command_line_ends_with_status_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(words)
    assert ended.value.code == 2
    assert "usage: sft chat" in capsys.readouterr().err


def test_a_run_is_its_tuned_model_its_base_or_a_checkpoint(run: Run) -> None:
    path = str(run.path)
    assert find_model(path).target.model == str(run.final)
    base = find_model(path, base=True)
    assert base.target.model == run.record["base_model"]["path"]
    assert base.reference.path == str(run.final), "prompted as the tuned one is"
    with pytest.raises(EvaluationError, match=r"no checkpoint of step 3. There are: none"):
        find_model(path, checkpoint=3)
    run.final.rename(run.checkpoints / "checkpoint-3")
    assert find_model(path, checkpoint=3).target.model == str(run.checkpoints / "checkpoint-3")
    with pytest.raises(EvaluationError, match=r"has no final model .* --checkpoint 3"):
        find_model(path)
    (run.checkpoints / "checkpoint-3" / "model.safetensors").unlink()
    with pytest.raises(EvaluationError, match="holds a shard per process"):
        find_model(path, checkpoint=3)


def test_the_base_model_is_not_run_with_code_that_has_changed_since_the_training(run: Run) -> None:
    run.update(base_model=run.record["base_model"] | {"code_sha256": "of the code that it was trained with"})
    assert find_model(str(run.path)).target.model == str(run.final)
    with pytest.raises(EvaluationError, match="have changed since"):
        find_model(str(run.path), base=True)


def test_what_is_no_model_is_refused_in_one_message(run: Run, tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="There is no folder"):
        find_model(str(tmp_path / "nothing"))
    with pytest.raises(EvaluationError, match="are for a run's folder"):
        find_model(str(run.final), base=True)
    (run.final / "chat_template.jinja").unlink()
    with pytest.raises(EvaluationError, match="has no chat template"):
        find_model(str(run.path)).load()
