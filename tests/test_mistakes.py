"""A user's mistake costs seconds: one message with the value, the reason and the remedy, status 2, and nothing left behind."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sft.cli import run
from sft.program import exit_on_error

RECIPE = """\
schema_version: 1
version: 1
model: {name_or_path: "builtin:demo"}
data: {train: rows.jsonl, max_length: 128}
train: {global_batch_size: 8}
"""
ROW = {"prompt": "Hi", "completion": "Hello"}


@dataclass(frozen=True)
class Mistake:
    """The words after the recipe's name, and the value, reason and remedy that the message must hold."""

    words: str
    told: tuple[str, ...]
    files: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


TYPOS = {
    "an unknown key": Mistake(
        "", ("mine.yaml is not a valid recipe", "data.max_len: unknown key; did you mean `max_length`?"),
        files={"mine.yaml": RECIPE.replace("max_length", "max_len")},
    ),
    "data that is missing": Mistake("data.train=gone.jsonl", ("data.train", "gone.jsonl", "no file or folder")),
    "a batch that cannot be divided": Mistake(
        "train.global_batch_size=7", ("train.global_batch_size=7 is not a multiple of micro_batch_size x processes = 1 x 2", "6 or 8"),
        environment={"NPROC": "2"},
    ),
}  # fmt: skip
MISTAKES = TYPOS | {
    "a value of the wrong type": Mistake("train.learning_rate=fast", ("train.learning_rate", '"fast"', "number")),
    "no override": Mistake("learning_rate", ("'learning_rate' is neither the recipe (mine.yaml) nor an override",)),
    "useless columns": Mistake(
        "", ("rows.jsonl has no usable columns", "Found: question, reply", "`messages`", "Rename"),
        files={"rows.jsonl": '{"question": "a", "reply": "b"}\n'},
    ),
    "a DeepSpeed file that contradicts the recipe": Mistake(
        "train.deepspeed=mine.json",
        ("mine.json contradicts the recipe", "gradient_clipping is 5", "train.max_grad_norm is 1.0", '"auto"'),
        files={"mine.json": '{"gradient_clipping": 5}'},
    ),
    "flash attention without a GPU": Mistake(
        "model.attn_implementation=flash_attention_2",
        ("model.attn_implementation=flash_attention_2, and there is no GPU", "sdpa"),
    ),
    "documents longer than the model reads": Mistake(
        "data.max_length=4096", ("data.max_length=4096 is more than the model's 1024 positions", "at most 1024")
    ),
    "no model folder": Mistake("model.name_or_path=./gone", ("model.name_or_path=./gone: the folder does not", "hub id")),
    "an unknown task": Mistake("eval.tasks=[gsm8kk]", ("`gsm8kk` is not a task of lm_eval", "did you mean `gsm8k`?")),
    "a task that runs code": Mistake(
        "eval.tasks=[humaneval]", ("`humaneval` runs Python code that the model writes", "confirm_run_unsafe_code=true")
    ),
    "an output_dir that is a file": Mistake("output_dir=rows.jsonl", ("output_dir=rows.jsonl", "Not a directory")),
    "an output_dir where nothing can be made": Mistake("output_dir=/proc/x", ("output_dir=/proc/x: /proc",)),
    "an output_dir with a variable": Mistake("output_dir=$RUNS/x", ("output_dir=$RUNS/x", "not expanded")),
    "a plan with the trainer's own keys": Mistake(
        "--plan train.trainer_args.push_to_hub=true train.trainer_args.optimm=x",
        ("push_to_hub: decided by", "optimm: unknown"),
    ),
    "a plan with a change that no run allows": Mistake(
        "--plan train.resume_allow_changes=[train.seed]", ("train.resume_allow_changes", "train.seed")
    ),
}  # fmt: skip


def prepare(folder: Path, mistake: Mistake) -> list[str]:
    """The user's folder; returns the words of the command."""
    for name, text in ({"mine.yaml": RECIPE, "rows.jsonl": json.dumps(ROW) + "\n"} | mistake.files).items():
        (folder / name).write_text(text)
    return ["mine.yaml", *mistake.words.split()]


def check(status: int | str | None, printed: str, message: str, mistake: Mistake, folder: Path) -> None:
    assert status == 2, message
    assert "Traceback" not in message
    for part in mistake.told:
        assert part in message
    # The message and nothing else: nothing has started.
    assert len(message.strip().splitlines()) <= 6
    assert printed == ""
    assert [path.name for path in folder.glob("outputs/*") if path.name not in (".builtin", ".prepared")] == []


def started(*_: object) -> None:
    """What the launcher would call to start the training."""
    raise AssertionError("the mistake was not found before the start")


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_message_before_anything_starts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mistake = MISTAKES[name]
    monkeypatch.chdir(tmp_path)
    words = prepare(tmp_path, mistake)
    for key, value in mistake.environment.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(os, "execv", started)
    with pytest.raises(SystemExit) as ended, exit_on_error():
        run(["train", *words])
    printed = capsys.readouterr()
    check(ended.value.code, printed.out, printed.err, mistake, tmp_path)


def as_a_user(folder: Path, words: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sft.launch", *words],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("name", TYPOS)
def test_a_plain_mistake_is_found_before_torch_is_imported(name: str, tmp_path: Path) -> None:
    words = prepare(tmp_path, TYPOS[name])
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "torch.py").write_text("raise AssertionError('torch was imported')\n")
    ended = as_a_user(tmp_path, words, PYTHONPATH=str(tmp_path / "path"), **TYPOS[name].environment)
    check(ended.returncode, ended.stdout, ended.stderr, TYPOS[name], tmp_path)


# What only the tokenizer or the rows show: still before any weight is loaded.
LATER = {
    "a padding token that is not in the vocabulary": Mistake(
        "model.pad_token=<|padd|>", ("model.pad_token=<|padd|> is not in the tokenizer's vocabulary", "<|endoftext|>")
    ),
    "a trainer argument with a typo": Mistake(
        "train.trainer_args.optimm=x",
        ("train.trainer_args", "optimm: unknown to trl.SFTConfig; did you mean `optim`?"),
    ),
    "a compiler that is missing": Mistake(
        "train.deepspeed=zero3", ("train.deepspeed (deepspeed_", "no no-compiler on PATH", "Install a compiler"),
        environment={"CXX": "no-compiler", "TORCH_EXTENSIONS_DIR": "built"},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", LATER)
def test_a_mistake_that_only_shows_later_leaves_nothing_either(name: str, tmp_path: Path) -> None:
    ended = as_a_user(tmp_path, prepare(tmp_path, LATER[name]), **LATER[name].environment)
    assert "Interrupted" not in ended.stderr  # of the process that prepares the data meanwhile
    # The command that starts the training is printed before the process itself finds the mistake.
    printed = [line for line in ended.stdout.splitlines() if "-m sft.train" not in line]
    check(ended.returncode, "".join(printed), ended.stderr, LATER[name], tmp_path)
