"""Faults that real users make in weights, data, recipe or run are named in one message: a table of what is planted and what must be said.

A row of FAULTS says how a small working folder is spoilt, the command, its exit status and words of its message. One of each area runs in
CI; the rest, most of which fast tests hold as functions, is `extra`.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Sequence
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

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

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
TRAIN, EVAL, EXPORT = (
    "sft.train {folder}/mine.yaml",
    "eval.run {folder}/model tasks={folder}/task.yaml limit=8",
    ("sft.export {folder}/out/mine/latest --output {folder}/x"),
)
LORA = " model.lora.r=4"
WORDS = {
    "type": "WordLevel",
    "vocab": {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2, "[UNK]": 3, "user": 4, "assistant": 5, "the": 6},
    "unk_token": "[UNK]",
}

Plant = Callable[[Path], Any]


def _no_change(folder: Path) -> None:
    """What is wrong is in the command."""


@dataclass(frozen=True)
class Fault:
    """One fault, and what must become of it."""

    says: tuple[str, ...]
    """Words of the message."""

    plant: Plant = _no_change
    command: str = TRAIN
    status: int = 2
    before: tuple[str, ...] = ()
    """Commands that come first and succeed."""

    environment: dict[str, str] = field(default_factory=dict)


def make_folder(folder: Path, demo: Demo) -> None:
    """A user's folder in which all is well: recipe, rows, model, and a task over test.jsonl."""
    shutil.copytree(demo.model, folder / "model")
    lines = demo.train.read_text().splitlines(keepends=True)
    (folder / "rows.jsonl").write_text("".join(lines[:ROWS]))
    (folder / "other.jsonl").write_text("".join(lines[ROWS : 2 * ROWS]))
    (folder / "mine.yaml").write_text(RECIPE.format(folder=folder))
    test = demo.task.with_name("test.jsonl")
    shutil.copyfile(test, folder / "test.jsonl")
    task = yaml.safe_load(demo.task.read_text()) | {"task": "my_task"}
    task["dataset_kwargs"] = {"data_files": {"test": str(folder / "test.jsonl")}}
    (folder / "task.yaml").write_text(yaml.safe_dump(task))


def _questions(folder: Path) -> list[tuple[str, str]]:
    rows = [json.loads(line)["messages"] for line in (folder / "rows.jsonl").read_text().splitlines()]
    return [(row[0]["content"], row[1]["content"]) for row in rows]


def _rows(make: Callable[[str, str], dict[str, Any]], encoding: str = "utf-8", name: str = "rows.jsonl") -> Plant:
    """Rows that are made of each question and its answer."""

    def plant(folder: Path) -> None:
        made = [json.dumps(make(*row), ensure_ascii=False) + "\n" for row in _questions(folder)]
        (folder / name).write_bytes("".join(made).encode(encoding))

    return plant


def _bytes(change: Callable[[bytes], bytes], name: str = "rows.jsonl") -> Plant:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def _text(change: Callable[[str], str], name: str) -> Plant:
    return lambda folder: (folder / name).write_text(
        change((folder / name).read_text() if (folder / name).exists() else "")
    )


def _json(name: str, **keys: Any) -> Plant:
    """Set keys of a JSON file."""
    return _text(lambda text: json.dumps(json.loads(text) | keys), name)


def _weights(change: Callable[[dict[str, np.ndarray]], Any], name: str = "model/model.safetensors") -> Plant:
    def plant(folder: Path) -> None:
        weights = {key: value.copy() for key, value in load_file(folder / name).items()}
        change(weights)
        save_file(weights, folder / name, metadata={"format": "pt"})

    return plant


def _task(**keys: Any) -> Plant:
    return _text(lambda text: yaml.safe_dump(yaml.safe_load(text) | keys), "task.yaml")


def _template(text: str) -> Plant:
    return _text(lambda _: text, "model/chat_template.jinja")


def _all(*plants: Plant) -> Plant:
    return lambda folder: [plant(folder) for plant in plants]


def _remove(*names: str) -> Plant:
    return lambda folder: [next(folder.glob(name)).unlink() for name in names]


def _only_one_shard(folder: Path) -> None:
    weights = load_file(folder / "model" / "model.safetensors")
    names = sorted(weights)
    shards = {name: f"model-0000{1 + (name > names[9])}-of-00002.safetensors" for name in names}
    save_file({name: weights[name] for name in names[:10]}, folder / "model" / shards[names[0]], {"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": shards}
    (folder / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model" / "model.safetensors").unlink()


def _zeros(name: str) -> Callable[[dict[str, np.ndarray]], Any]:
    return lambda weights: [weights[key].fill(0) for key in weights if name in key]


def _adapter(folder: Path) -> None:
    """An adapter's configuration and weights beside the model's."""
    keys = {"base_model_name_or_path": str(folder / "model"), "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "model" / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "task_type": "CAUSAL_LM"} | keys)
    )
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    shapes = {"A": (4, 128), "B": (128, 4)}
    weights = {name.format(layer, end): np.ones(shapes[end], np.float32) for layer in range(3) for end in shapes}
    save_file(weights, folder / "model" / "adapter_model.safetensors", {"format": "pt"})


def _turns(text: str) -> str:
    """A chat template without markers that writes each message so."""
    return f"{{% for message in messages %}}{text}{{% endfor %}}" + (
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def _asked_system(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": "Answer as JSON."}, *_asked(question, answer)["messages"]]}


def _asked(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def latest(folder: Path) -> Path:
    """The run."""
    return (folder / "out" / "mine" / "latest").resolve()


def _killed(change: Callable[[Path], Any] = lambda run: None) -> Plant:
    """The finished run as a kill after step 2 would have left it, and then changed."""

    def plant(folder: Path) -> None:
        run = latest(folder)
        shutil.rmtree(run / "final")
        shutil.rmtree(run / "checkpoints" / "checkpoint-4")
        record = json.loads((run / "run.json").read_text()) | {"status": "running"}
        record["sessions"][-1] |= {"status": "running", "ended": None, "seconds": None, "last_step": None}
        (run / "run.json").write_text(json.dumps(record))
        change(run)

    return plant


def _in_checkpoint(change: Callable[[Path], Any]) -> Plant:
    return _killed(lambda run: change(run / "checkpoints" / "checkpoint-2"))


def _folder_of_splits(folder: Path) -> None:
    (folder / "data").mkdir()
    for name in ("train", "test", "more"):
        shutil.copyfile(folder / "rows.jsonl", folder / "data" / f"{name}.jsonl")


def _flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 3]) + content[middle + 1 :]


def _in_final(plant: Plant) -> Plant:
    return lambda folder: plant(latest(folder) / "final")


def _choices(label: str, choices: Sequence[str] = ("Oslo", "Rome", "Paris", "Nice")) -> Plant:
    """The task as multiple choice; the label is made of the number n of the right one."""
    documents = [json.dumps({"question": f"Town {row}?", "choices": list(choices), "n": row % 4}) for row in range(20)]
    return _all(
        lambda folder: (folder / "test.jsonl").write_text("\n".join(documents)),
        _task(
            output_type="multiple_choice",
            doc_to_text="{{question}}",
            doc_to_choice="{{choices}}",
            doc_to_target=label,
            generation_kwargs=None,
            metric_list=[{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        ),
    )


RUN = (TRAIN,)
EVAL_RUN = "eval.run {folder}/out/mine/latest tasks={folder}/task.yaml limit=8"
DATA = TRAIN + " data.train={folder}/data"
HELD_OUT = TRAIN + " data.held_out="

FAULTS: dict[str, dict[str, Fault]] = {
    "weights": {
        "a NaN in one layer": Fault(
            ("NaN or infinite values: model.layers.1.mlp.up_proj.weight",),
            _weights(lambda weights: weights["model.layers.1.mlp.up_proj.weight"].__setitem__((3, 5), np.nan)),
        ),
        "a shard that the index names is missing": Fault(
            ("model-00002-of-00002.safetensors is missing",), _only_one_shard
        ),
        "an adapter beside the model's weights": Fault(("adapter_config.json", "adapters for another model"), _adapter),
        "a layer of zeros": Fault(("nothing but zeros: model.layers.1.*",), _weights(_zeros(".layers.1."))),
        "half a file": Fault(
            ("model.safetensors was cut off",),
            _bytes(lambda content: content[: len(content) // 2], "model/model.safetensors"),
        ),
    },
    "config": {
        "an encoder-decoder": Fault(("encoder-decoder (t5)", "decoders"), _json("model/config.json", model_type="t5")),
        "quantized weights": Fault(
            ("quantized", "unquantized"),
            _json("model/config.json", quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128}),
        ),
        "heads that the hidden size cannot be shared by": Fault(
            ("do not fit its config.json", "q_proj.weight [128, 128] (by config.json [126, 128])"),
            _json("model/config.json", num_attention_heads=3, num_key_value_heads=3),
        ),
        "a generation_config that ends at an ordinary token": Fault(
            ("Warning: The model's configuration ends generation at 10",),
            _text(lambda _: '{"eos_token_id": [10]}', "model/generation_config.json"),
            status=0,
        ),
        "rope_scaling without its factor": Fault(
            ("yarn", "factor"), _json("model/config.json", rope_scaling={"rope_type": "yarn"})
        ),
    },
    "tokenizer": {
        "no files": Fault(("holds no tokenizer",), _remove("model/tokenizer.json", "model/tokenizer_config.json")),
        "nine words in ten unknown": Fault(
            ("The tokenizer loses text", "rows.jsonl"),
            _all(
                _json("model/tokenizer.json", model=WORDS, pre_tokenizer={"type": "Whitespace"}, decoder=None),
                _json("model/tokenizer_config.json", unk_token="[UNK]"),
            ),
        ),
        "a normalizer that transformers leaves out": Fault(
            ("200 x", "other tokens than tokenizer.json makes"),
            _json("model/tokenizer.json", normalizer={"type": "Lowercase"}),
            status=0,
        ),
        "more tokens than the embedding has rows": Fault(
            ("tokens", "544 rows", "do not belong together"),
            _json(
                "model/tokenizer_config.json",
                additional_special_tokens=[f"<extra_{number}>" for number in range(20)],
            ),
        ),
    },
    "template": {
        "drops the system turn": Fault(
            ("leaves out what the system says", "'Answer as JSON.'"),
            _all(
                _template(
                    _turns(
                        "{% if message.role != 'system' %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>{% endif %}"
                    )
                ),
                _rows(_asked_system),
            ),
        ),
        "reads a variable that nobody sets": Fault(
            ("turns are not where its answers are",),
            _template(_turns("<|im_start|>{{ message.role }}\n{{ content }}<|im_end|>")),
        ),
        "keeps the last two turns": Fault(
            ("1 of the assistant's 3 turns",),
            _text(lambda text: text.replace("in messages %}", "in messages[-2:] %}"), "model/chat_template.jinja"),
        ),
        "drops the result of a tool": Fault(
            ("row 1", "result of a tool call", "seat 12"),
            _all(
                _template(
                    _turns("<|im_start|>{{ message.role }}\n{{ message.content if message.role != 'tool' }}<|im_end|>")
                ),
                _rows(
                    lambda question, answer: {
                        "messages": [
                            {"role": "user", "content": question},
                            {"role": "assistant", "content": "Let me see."},
                            {"role": "tool", "content": "seat 12"},
                            {"role": "assistant", "content": answer},
                        ]
                    }
                ),
            ),
        ),
        "escapes HTML": Fault(
            ("leaves out what the assistant says", "<b>"),
            _all(
                _text(lambda text: text.replace("['content']", "['content'] | e"), "model/chat_template.jinja"),
                _rows(lambda question, answer: _asked(question, f"<b>{answer}</b>")),
            ),
        ),
    },
    "roles": {
        "preferences": Fault(
            ("preference data", "DPO"),
            _rows(lambda question, answer: {"prompt": question, "chosen": answer, "rejected": "No."}),
        ),
        "answers that hold the next question": Fault(
            ("240 of 240 rows", "data.allow=[dialogue]"),
            _rows(lambda question, answer: _asked(question, f"{answer}\nUser: {question}\nAssistant: {answer}")),
            TRAIN + " data.max_length=256",
        ),
        "empty answers": Fault(
            ("Nothing is left to train on", "no answer"),
            _rows(lambda question, answer: {"prompt": question, "completion": ""}),
        ),
    },
    "encoding": {
        "Latin-1": Fault(
            ("line 1 is not UTF-8", "0xe9"),
            _rows(lambda question, answer: _asked(question, "Café " + answer), "latin-1"),
        ),
        "the last line cut off": Fault(("row 240", "not JSON"), _bytes(lambda content: content[:-40])),
    },
    "splits": {
        "a folder of splits": Fault(("several splits", "test.jsonl"), _folder_of_splits, DATA),
        "held-out rows without answers": Fault(
            ("data.held_out", "no row that can be used"),
            _rows(lambda question, answer: {"prompt": question, "completion": ""}, name="held.jsonl"),
            HELD_OUT + "{folder}/held.jsonl",
        ),
    },
    "numbers": {
        f"train.{words}": Fault(says, status=status, command=f"{TRAIN} train.{words}")
        for words, status, says in (
            ("warmup_ratio=0.03", 2, ("train.warmup_ratio: unknown key", "`warmup_steps`")),
            ("weight_decay=2000", 2, ("train.weight_decay=2000", "wipe out")),
            ("global_batch_size=null train.global_batch_tokens=8", 2, ("multiple of data.max_length=128",)),
            ("learning_rate=2e-2", 0, ("Warning: train.learning_rate=0.02",)),
            ("learning_rate=1e-12", 0, ("Warning: The training has not moved the weights",)),
            ("max_grad_norm=1e-9", 0, ("Warning: train.max_grad_norm=1e-09",)),
        )
    },
    "environment": {
        "a precision left over from accelerate": Fault(
            ("accelerate", "fp16", "train.precision"), environment={"ACCELERATE_MIXED_PRECISION": "fp16"}
        ),
        "a key of wandb that was cut off": Fault(
            ("WANDB_API_KEY has 3 characters", "at least 40"),
            command=TRAIN + " tracking.report_to=[wandb]",
            environment={"WANDB_API_KEY": "abc", "WANDB_MODE": "online"},
        ),
        "prepared data altered by a byte": Fault(
            ("tokens.bin has changed", "prepared again"),
            lambda folder: _bytes(_flipped, "tokens.bin")(next((folder / "out" / ".prepared").glob("[!.]*"))),
            TRAIN + " tracking.run_name=second",
            0,
            (TRAIN,),
        ),
    },
    "resume": {
        "rows in another order": Fault(
            ("data, tokenizer or chat template has changed", "train.resume=never"),
            _all(_killed(), _bytes(lambda content: b"".join(content.splitlines(keepends=True)[::-1]))),
            before=RUN,
        ),
        "no optimizer": Fault(
            ("checkpoint-2: optimizer.pt is missing",),
            _in_checkpoint(lambda checkpoint: (checkpoint / "optimizer.pt").unlink()),
            before=RUN,
        ),
        "no JSON in metrics.jsonl": Fault(
            ("lacks 2 of the 2 lines",), _killed(_bytes(lambda _: b"not json\n", "metrics.jsonl")), status=0, before=RUN
        ),
        "another padding token": Fault(
            ("pad_token was '<|endoftext|>'", "'<|im_start|>' now"),
            _all(_killed(), _json("model/tokenizer_config.json", pad_token="<|im_start|>")),
            status=0,
            before=RUN,
        ),
        "adapters on a base that was changed in place": Fault(
            ("model.safetensors has changed", "train.resume=never"),
            _all(_killed(), _weights(lambda weights: weights["model.norm.weight"].__imul__(2))),
            TRAIN + LORA,
            before=(TRAIN + LORA,),
        ),
    },
    "evaluation": {
        "a target that no document has": Fault(
            ("my_task", "'anwser' is undefined"), _task(doc_to_target="{{anwser}}"), EVAL
        ),
        "the same choices": Fault(
            ("8 of 8 documents offer the same choice twice",), _choices("{{n}}", ["a"] * 4), EVAL, 0
        ),
        "the answer in its prompt": Fault(
            ("the prompt shows the answer", "8 of 8"),
            _task(doc_to_text="{{question}}\n{{answer}}\nNow again:"),
            EVAL,
            0,
        ),
        "a limit too small for any answer": Fault(
            ("8 of 8 answers to my_task are cut off at max_gen_toks=2",),
            _task(generation_kwargs={"until": ["\n"], "max_gen_toks": 2}),
            EVAL,
            0,
        ),
        "a filter that finds nothing": Fault(
            ("the filters of my_task find nothing in 8 of 8",),
            _task(
                filter_list=[
                    {
                        "name": "x",
                        "filter": [
                            {"function": "regex", "regex_pattern": "#### (-?[0-9]+)"},
                            {"function": "take_first"},
                        ],
                    }
                ]
            ),
            EVAL,
            0,
        ),
        "answers that are sampled": Fault(
            ("do_sample: true",),
            _task(generation_kwargs={"until": ["\n"], "max_gen_toks": 32, "do_sample": True, "temperature": 1.0}),
            EVAL,
            0,
        ),
        "the base changed in place": Fault(
            ("Warning: The base model", "model.safetensors has changed"),
            _weights(lambda weights: weights["model.norm.weight"].__imul__(2)),
            EVAL_RUN,
            0,
            before=RUN,
        ),
    },
    "export": {
        "no tokenizer": Fault(
            ("final holds no tokenizer", "--checkpoint"),
            lambda folder: (latest(folder) / "final" / "tokenizer.json").unlink(),
            EXPORT + " --to merged",
            before=RUN,
        ),
        "an edit that is accepted": Fault(
            ("are equal",),
            _in_final(_json("generation_config.json", temperature=0.5, do_sample=True)),
            EXPORT + " --to merged --accept-edits",
            0,
            before=RUN,
        ),
        "adapters merged into a base that was changed in place": Fault(
            ("model.safetensors has changed", "adapters"),
            _weights(lambda weights: weights["model.norm.weight"].__imul__(2)),
            EXPORT + " --to merged --checkpoint 2",
            before=(TRAIN + LORA,),
        ),
        "an unfinished run": Fault(
            ("has no final/ yet", "--checkpoint 2"), _killed(), EXPORT + " --to merged", before=RUN
        ),
    },
}
"""By area and name."""

TABLE = {f"{area}: {name}": fault for area, faults in FAULTS.items() for name, fault in faults.items()}
IN_CI = [
    "weights: a NaN in one layer",
    "config: rope_scaling without its factor",
    "tokenizer: no files",
    "template: drops the system turn",
    "roles: preferences",
    "encoding: Latin-1",
    "splits: a folder of splits",
    "numbers: train.warmup_ratio=0.03",
    "environment: a precision left over from accelerate",
    "resume: rows in another order",
    "evaluation: a target that no document has",
    "export: no tokenizer",
]


def _run(ranks: Ranks, words: list[str], environment: dict[str, str]) -> dict[str, str]:
    if (
        words[0] == "sft.train"
    ):  # which starts this one in a process of its own, without the imports that are here already
        prepared = ranks.run(1, ["sft.launch.prepare", *words[1:]], expect=None, **environment)
        if prepared["status"] != "0":
            return prepared
    return ranks.run(1, words, expect=None, **environment)


@pytest.mark.parametrize("name", rows(TABLE, IN_CI))
def test_a_fault_is_named(name: str, tmp_path: Path, demo: Demo, ranks: Ranks) -> None:
    fault = TABLE[name]
    make_folder(tmp_path, demo)
    for command in fault.before:
        assert _run(ranks, shlex.split(command.format(folder=tmp_path)), {})["status"] == "0"
    fault.plant(tmp_path)
    words = shlex.split(fault.command.format(folder=tmp_path))
    environment = {name: value.format(folder=tmp_path) for name, value in fault.environment.items()}
    printed = _run(ranks, words, environment)
    assert printed["status"] == str(fault.status), printed
    message = printed["stderr"] + printed["stdout"]
    assert "Traceback" not in message
    assert [words for words in fault.says if words not in message] == [], message
