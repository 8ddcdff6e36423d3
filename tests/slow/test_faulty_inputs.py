"""Faults that users make in weights, data, recipe, task or run are named in one message: a table of what is planted and what is said.

A row says how a small working folder is spoilt, the command, its exit status and words of its message. One of each area runs in CI; the
rest is `extra`.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from sft.hub.demo import Demo
from tests.slow.conftest import rows
from tests.slow.ranks import Ranks

pytestmark = pytest.mark.slow

RECIPE = """\
schema_version: 1
version: 1
model: {{name_or_path: {folder}/model}}
data: {{train: {folder}/rows.jsonl, max_length: 128}}
train: {{global_batch_size: 4, learning_rate: 1e-3, max_steps: 4, save_steps: 2, logging_steps: 1, save_canary: false}}
eval: {{chat: false}}
output_dir: {folder}/out
"""
ROWS = 240
TRAIN, LORA = "sft.train {folder}/mine.yaml", " model.lora.r=4"
EVAL = "eval.run {folder}/model tasks={folder}/task.yaml limit=8"
EVAL_RUN = "eval.run {folder}/out/mine/latest tasks={folder}/task.yaml limit=8"
EXPORT = "sft.export {folder}/out/mine/latest --output {folder}/x --to merged"
FINAL, RUN = "out/mine/latest/final", "out/mine/latest"
TEMPLATE, WEIGHTS = "model/chat_template.jinja", "model/model.safetensors"

Plant = Callable[[Path], Any]


def nothing(folder: Path) -> None:
    """What is wrong is in the command."""


@dataclass(frozen=True)
class Fault:
    """One fault, and what must become of it."""

    says: tuple[str, ...]
    """Words of the message."""

    plant: Plant = nothing
    command: str = TRAIN
    status: int = 2
    before: str | None = None
    """A command that comes first and succeeds."""

    environment: dict[str, str] = field(default_factory=dict)


def make_folder(folder: Path, demo: Demo) -> None:
    """A user's folder in which all is well: recipe, rows, model, and a task over test.jsonl."""
    shutil.copytree(demo.model, folder / "model")
    (folder / "rows.jsonl").write_text("".join(demo.train.read_text().splitlines(keepends=True)[:ROWS]))
    (folder / "mine.yaml").write_text(RECIPE.format(folder=folder))
    shutil.copyfile(demo.task.with_name("test.jsonl"), folder / "test.jsonl")
    task = yaml.safe_load(demo.task.read_text()) | {"task": "my_task"}
    task["dataset_kwargs"] = {"data_files": {"test": str(folder / "test.jsonl")}}
    (folder / "task.yaml").write_text(yaml.safe_dump(task))


def both(*plants: Plant) -> Plant:
    return lambda folder: [plant(folder) for plant in plants]


def removed(*names: str) -> Plant:
    return lambda folder: [(folder / name).unlink() for name in names]


def file(name: str, change: Callable[[bytes], bytes]) -> Plant:
    """Change the content of a file, which may be named by a pattern."""

    def plant(folder: Path) -> None:
        path = next(folder.glob(name), folder / name)
        path.write_bytes(change(path.read_bytes() if path.exists() else b""))

    return plant


def keys(name: str, **values: Any) -> Plant:
    """Set keys of a JSON or YAML file."""
    return file(name, lambda content: json.dumps(yaml.safe_load(content) | values).encode())


def weights(change: Callable[[dict[str, np.ndarray]], Any]) -> Plant:
    def plant(folder: Path) -> None:
        tensors = {key: value.copy() for key, value in load_file(folder / WEIGHTS).items()}
        change(tensors)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    return plant


def row_each(make: Callable[[str, str], dict[str, Any]], encoding: str = "utf-8") -> Plant:
    """Rows that are made of each question and its answer."""

    def change(content: bytes) -> bytes:
        turns = [json.loads(line)["messages"] for line in content.splitlines()]
        made = [make(turn[0]["content"], turn[1]["content"]) for turn in turns]
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made).encode(encoding)

    return file("rows.jsonl", change)


def conversation(question: str, answer: str, *system: str) -> dict[str, Any]:
    said = [*(("system", text) for text in system), ("user", question), ("assistant", answer)]
    return {"messages": [{"role": role, "content": text} for role, text in said]}


def killed(folder: Path) -> None:
    """The finished run, as a kill after step 2 would have left it."""
    run = (folder / RUN).resolve()
    shutil.rmtree(run / "final")
    shutil.rmtree(run / "checkpoints" / "checkpoint-4")
    record = json.loads((run / "run.json").read_text()) | {"status": "running"}
    record["sessions"][-1] |= {"status": "running", "ended": None, "seconds": None, "last_step": None}
    (run / "run.json").write_text(json.dumps(record))


def folder_of_splits(folder: Path) -> None:
    (folder / "data").mkdir()
    for name in ("train", "test", "more"):
        shutil.copyfile(folder / "rows.jsonl", folder / "data" / f"{name}.jsonl")


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 3]) + content[middle + 1 :]


def doubled(tensors: dict[str, np.ndarray]) -> None:
    tensors["model.norm.weight"] *= 2


NO_SYSTEM = (
    "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

IN_CI = {
    "weights: a NaN in one layer": Fault(
        ("NaN or infinite values: model.layers.1.mlp.up_proj.weight",),
        weights(lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"].__setitem__((3, 5), np.nan)),
    ),
    "config: rope_scaling without its factor": Fault(
        ("yarn", "factor"), keys("model/config.json", rope_scaling={"rope_type": "yarn"})
    ),
    "tokenizer: no files": Fault(
        ("holds no tokenizer",), removed("model/tokenizer.json", "model/tokenizer_config.json")
    ),
    "template: drops the system turn": Fault(
        ("leaves out what the system says", "'Answer as JSON.'"),
        both(
            file(TEMPLATE, lambda _: NO_SYSTEM.encode()), row_each(lambda *row: conversation(*row, "Answer as JSON."))
        ),
    ),
    "roles: preferences": Fault(
        ("preference data", "DPO"),
        row_each(lambda question, answer: {"prompt": question, "chosen": answer, "rejected": "No."}),
    ),
    "encoding: Latin-1": Fault(
        ("line 1 is not UTF-8", "0xe9"),
        row_each(lambda question, answer: conversation(question, "Café " + answer), "latin-1"),
    ),
    "splits: a folder of splits": Fault(
        ("several splits", "test.jsonl"), folder_of_splits, TRAIN + " data.train={folder}/data"
    ),
    "numbers: a key of another program": Fault(
        ("train.lr_scheduler_kwargs: unknown key", "`min_lr_ratio`"), command=TRAIN + " train.lr_scheduler_kwargs={{}}"
    ),
    "environment: a precision left over from accelerate": Fault(
        ("accelerate", "fp16", "train.precision"), environment={"ACCELERATE_MIXED_PRECISION": "fp16"}
    ),
    "resume: rows in another order": Fault(
        ("data, tokenizer or chat template has changed", "train.resume=never"),
        both(killed, file("rows.jsonl", lambda content: b"".join(content.splitlines(keepends=True)[::-1]))),
        before=TRAIN,
    ),
    "evaluation: a target that no document has": Fault(
        ("my_task", "'anwser' is undefined"), keys("task.yaml", doc_to_target="{{anwser}}"), EVAL
    ),
    "export: no tokenizer": Fault(
        ("final holds no tokenizer", "--checkpoint"), removed(f"{FINAL}/tokenizer.json"), EXPORT, before=TRAIN
    ),
}
FAULTS = IN_CI | {
    "weights: a layer of zeros": Fault(
        ("nothing but zeros: model.layers.1.*",),
        weights(lambda tensors: [tensors[name].fill(0) for name in tensors if ".layers.1." in name]),
    ),
    "config: generation that ends at an ordinary token": Fault(
        ("Warning: The model's configuration ends generation at 10",),
        file("model/generation_config.json", lambda _: b'{"eos_token_id": [10]}'),
        status=0,
    ),
    "tokenizer: a normalizer that transformers leaves out": Fault(
        ("200 x", "other tokens than tokenizer.json makes"),
        keys("model/tokenizer.json", normalizer={"type": "Lowercase"}),
        status=0,
    ),
    "template: keeps the last two turns": Fault(
        ("1 of the assistant's 3 turns",),
        file(TEMPLATE, lambda content: content.replace(b"in messages %}", b"in messages[-2:] %}")),
    ),
    "roles: answers that hold the next question": Fault(
        ("240 of 240 rows", "data.allow=[dialogue]"),
        row_each(lambda question, answer: conversation(question, f"{answer}\nUser: {question}\nAssistant: {answer}")),
        TRAIN + " data.max_length=256",
    ),
    "numbers: weight decay": Fault(("train.weight_decay=2000", "wipe out"), command=TRAIN + " train.weight_decay=2000"),
    "numbers: a learning rate that moves nothing": Fault(
        ("Warning: The training has not moved the weights",), command=TRAIN + " train.learning_rate=1e-12", status=0
    ),
    "environment: prepared data altered by a byte": Fault(
        ("tokens.bin has changed", "prepared again"),
        file("out/.prepared/[!.]*/tokens.bin", flipped),
        TRAIN + " tracking.run_name=second",
        0,
        TRAIN,
    ),
    "resume: no JSON in metrics.jsonl": Fault(
        ("lacks 2 of the 2 lines",),
        both(killed, file(f"{RUN}/metrics.jsonl", lambda _: b"not json\n")),
        status=0,
        before=TRAIN,
    ),
    "resume: adapters on a base that was changed in place": Fault(
        ("model.safetensors has changed", "train.resume=never"),
        both(killed, weights(doubled)),
        TRAIN + LORA,
        before=TRAIN + LORA,
    ),
    "evaluation: the base changed in place": Fault(
        ("Warning: The base model", "model.safetensors has changed"), weights(doubled), EVAL_RUN, 0, TRAIN
    ),
    "export: an edit that is accepted": Fault(
        ("are equal",),
        keys(f"{FINAL}/generation_config.json", temperature=0.5, do_sample=True),
        EXPORT + " --accept-edits",
        0,
        TRAIN,
    ),
}


def run(ranks: Ranks, command: str, folder: Path, environment: dict[str, str]) -> dict[str, str]:
    words = shlex.split(command.format(folder=folder))
    if words[0] == "sft.train":
        # It starts this one in a process of its own, without the imports that are here already.
        prepared = ranks.run(1, ["sft.launch.prepare", *words[1:]], expect=None, **environment)
        if prepared["status"] != "0":
            return prepared
    return ranks.run(1, words, expect=None, **environment)


@pytest.mark.parametrize("name", rows(FAULTS, IN_CI))
def test_a_fault_is_named(name: str, tmp_path: Path, demo: Demo, ranks: Ranks) -> None:
    fault = FAULTS[name]
    make_folder(tmp_path, demo)
    if fault.before is not None:
        assert run(ranks, fault.before, tmp_path, {})["status"] == "0"
    fault.plant(tmp_path)
    printed = run(ranks, fault.command, tmp_path, fault.environment)
    assert printed["status"] == str(fault.status), printed
    message = printed["stderr"] + printed["stdout"]
    assert "Traceback" not in message
    assert [words for words in fault.says if words not in message] == [], message
