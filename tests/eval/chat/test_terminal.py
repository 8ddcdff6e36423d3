"""A conversation, without the terminal: tests/slow/test_chat_terminal.py has one."""

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from eval.chat.model import Asker, Messages, choose, load_asker
from eval.chat.terminal import Conversation, Streamer, command, converse, fit, generation_config, parse
from eval.tasks.reference import Reference, load_reference
from sft.errors import EvaluationError
from sft.run.directory import Run


@pytest.fixture
def asker(reference: Reference) -> Asker:
    return load_asker(reference)


def streamed(asker: Asker, ids: list[int]) -> Iterator[str]:
    """What is shown as each token comes."""
    pieces: list[str] = []
    streamer = Streamer(asker, pieces.append)
    streamer.put(torch.tensor([[5, 6, 7]]))
    for token in ids:
        pieces.clear()
        streamer.put(torch.tensor([token]))
        yield "".join(pieces)
    pieces.clear()
    streamer.end()
    yield "".join(pieces)


def test_half_a_character_is_shown_when_the_other_half_has_come(asker: Asker) -> None:
    text = "é 长城 🚀🚀 ok\n  x"
    ids = asker.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) > len(text), "this vocabulary has no such characters, but their bytes"
    pieces = list(streamed(asker, ids))
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    assert pieces.count("🚀") == 2, "each as soon as it is whole"


def test_the_end_of_the_turn_is_not_shown_and_other_special_tokens_are(asker: Asker) -> None:
    start = asker.tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert "".join(streamed(asker, [start, asker.tokenizer.eos_token_id])) == "<|im_start|>"


def test_a_tokenizer_that_begins_words_with_a_space_keeps_spaces_and_indentation(shared: Path) -> None:
    """By SentencePiece, where a token by itself loses the space that it begins with."""
    reference = load_reference(str(shared / "models" / "stories260k_hf"), None, False)
    reference.tokenizer.chat_template = "{{ messages }}"
    asker, text = load_asker(reference), "Once upon a time\n    there was a girl"
    ids = asker.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert "".join(streamed(asker, ids)) == asker.text(ids)


def turns(count: int, system: bool = False) -> Messages:
    said = [{"role": ("user", "assistant")[n % 2], "content": str(n)} for n in range(count)]
    return [{"role": "system", "content": "S"}, *said] if system else said


class Echo(Conversation):
    """A model that says what it is told."""

    def ask(self, question: str, show: Callable[[str], None]) -> Iterator[str]:
        show(question)
        yield from ()


def test_a_terminal_gets_what_was_said_and_nothing_to_obey(
    asker: Asker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "\u3000\u3000中文\u00a0: n\u2019est\u202fpas\t\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645 \U0001f469\u200d\U0001f467"
    monkeypatch.setattr("sys.stdin", io.StringIO(said + "\n\x1b]0;title\x07\x85\u202etxt\n"))
    converse(Echo(None, asker, None))
    assert capsys.readouterr().out == said + "⟨U+001B⟩]0;title⟨U+0007⟩⟨U+0085⟩⟨U+202E⟩txt"


def test_the_oldest_turns_go_first_and_the_system_prompt_stays() -> None:
    assert fit(turns(5), len, 5) == (turns(5), 0)
    assert fit(turns(5), len, 4) == (turns(5)[2:], 2)
    kept, dropped = fit(turns(5, system=True), len, 3)
    assert [message["content"] for message in kept] == ["S", "4"]
    assert dropped == 4
    with pytest.raises(EvaluationError, match="longer than the 0 tokens"):
        fit(turns(5), len, 0)


@pytest.fixture
def conversation(asker: Asker) -> Conversation:
    return Conversation(None, asker, None, turns(4))


def test_commands_change_the_conversation(conversation: Conversation, tmp_path: Path) -> None:
    assert command(conversation, f"/save {tmp_path / 'rows.jsonl'}") == f"(added to {tmp_path / 'rows.jsonl'})"
    assert json.loads((tmp_path / "rows.jsonl").read_text()) == {"messages": turns(4)}
    assert "cannot be written" in command(conversation, f"/save {tmp_path / 'none' / 'rows.jsonl'}")
    assert command(conversation, "/undo") == "(undone)"
    assert conversation.messages == turns(2)
    command(conversation, "/system Be brief.")
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]
    assert command(conversation, "/undo") == "(nothing to undo)"
    conversation.messages += turns(2)
    command(conversation, "/reset")
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]
    command(conversation, "/system")
    assert conversation.messages == []
    assert command(conversation, "/sytem x").startswith("(/sytem is not a command)\n/system")


def test_the_command_line_changes_the_saved_generation_config(asker: Asker) -> None:
    asker.generation_config.do_sample = True
    assert generation_config(asker, None, None).do_sample
    assert generation_config(asker, None, None).max_new_tokens == 512, "half of the context of 1024"
    greedy = generation_config(asker, 7, 0.0)
    assert (greedy.do_sample, greedy.max_new_tokens) == (False, 7)
    assert generation_config(asker, None, 0.5).temperature == 0.5
    with pytest.raises(EvaluationError, match="leaves no room for a question in a context of 1024"):
        generation_config(asker, 1024, None)


@pytest.mark.parametrize(
    "words", [[], ["a", "--temperature", "-1"], ["a", "--max-new-tokens", "0"], ["a", "--sytem", "x"]]
)
def test_a_wrong_command_line_ends_with_status_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(words)
    assert ended.value.code == 2
    assert "usage: sft chat" in capsys.readouterr().err


def test_a_run_is_its_tuned_model_its_base_or_a_checkpoint(run: Run) -> None:
    path = str(run.path)
    assert choose(path).target.model == str(run.final)
    base = choose(path, base=True)
    assert base.target.model == run.record["base_model"]["path"]
    assert base.reference.path == str(run.final), "prompted as the tuned one is"
    with pytest.raises(EvaluationError, match=r"no checkpoint of step 3. There are: none"):
        choose(path, checkpoint=3)
    run.final.rename(run.checkpoints / "checkpoint-3")
    assert choose(path, checkpoint=3).target.model == str(run.checkpoints / "checkpoint-3")
    with pytest.raises(EvaluationError, match=r"has no final model .* --checkpoint 3"):
        choose(path)
    (run.checkpoints / "checkpoint-3" / "model.safetensors").unlink()
    with pytest.raises(EvaluationError, match="holds a shard per process"):
        choose(path, checkpoint=3)


def test_the_base_model_is_not_run_with_code_that_has_changed_since_the_training(run: Run) -> None:
    run.update(base_model=run.record["base_model"] | {"code_sha256": "of the code that it was trained with"})
    assert choose(str(run.path)).target.model == str(run.final)
    with pytest.raises(EvaluationError, match="have changed since"):
        choose(str(run.path), base=True)


def test_what_is_no_model_is_refused_in_one_message(run: Run, tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="There is no folder"):
        choose(str(tmp_path / "nothing"))
    with pytest.raises(EvaluationError, match="are for a run's folder"):
        choose(str(run.final), base=True)
    (run.final / "chat_template.jinja").unlink()
    with pytest.raises(EvaluationError, match="has no chat template"):
        choose(str(run.path)).load()
