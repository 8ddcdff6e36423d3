"""Faults that real users make, planted into a small working folder. tests/slow/test_planted_faults.py runs each as a user would.

A row of FAULTS says how the folder is spoilt, the command, its exit status and words that its message must hold.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.torch
import torch
import yaml
from safetensors.numpy import load_file, save_file

from sft.hub.demo import Demo

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
LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 2254352\n"

Plant = Callable[[Path], Any]


def _no_change(folder: Path) -> None:
    """What is wrong is in the command."""


@dataclass(frozen=True)
class Fault:
    """One fault, and what must become of it."""

    told: tuple[str, ...]
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


def _two_sets(folder: Path) -> None:
    """The whole model beside shards of another one."""
    whole = (folder / "model" / "model.safetensors").read_bytes()
    _only_one_shard(folder)
    (folder / "model" / "model.safetensors").write_bytes(whole)


def _float8(folder: Path) -> None:
    file = folder / "model" / "model.safetensors"
    weights = {key: torch.from_numpy(value) for key, value in load_file(file).items()}
    weights = {key: value.to(torch.float8_e4m3fn) if "_proj.weight" in key else value for key, value in weights.items()}
    safetensors.torch.save_file(weights, file, {"format": "pt"})


def _zeros(name: str) -> Callable[[dict[str, np.ndarray]], Any]:
    return lambda weights: [weights[key].fill(0) for key in weights if name in key]


def _without(key: str) -> Callable[[str], str]:
    return lambda text: json.dumps({name: value for name, value in json.loads(text).items() if name != key})


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


def _no_documents(folder: Path) -> None:
    with (folder / "task.yaml").open("a") as file:
        file.write("process_docs: !function utils.none\n")
    (folder / "utils.py").write_text("def none(documents):\n    return documents.filter(lambda one: False)\n")


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
        "an adapter's folder as the model": Fault(
            ("model.name_or_path", "adapter_config.json: adapters for another model"),
            _all(_adapter, _remove("model/config.json")),
        ),
        "an adapter beside the model's weights": Fault(("adapter_config.json", "adapters for another model"), _adapter),
        "infinity in the embedding of a token that no row has": Fault(
            ("NaN or infinite values: model.embed_tokens.weight",),
            _weights(lambda weights: weights["model.embed_tokens.weight"].__setitem__(540, np.inf)),
        ),
        "a layer of zeros": Fault(("nothing but zeros: model.layers.1.*",), _weights(_zeros(".layers.1."))),
        "zeros alone": Fault(("nothing but zeros: model.layers.0.*",), _weights(_zeros(""))),
        "half a file": Fault(
            ("model.safetensors was cut off",),
            _bytes(lambda content: content[: len(content) // 2], "model/model.safetensors"),
        ),
        "a pointer of Git LFS": Fault(("Git LFS",), _bytes(lambda _: LFS_POINTER.encode(), "model/model.safetensors")),
        "a web page": Fault(
            ("holds no weights", "<!doctype html>"),
            _bytes(lambda _: b"<!doctype html><body>Access denied</body>", "model/model.safetensors"),
        ),
        "two sets of weights": Fault(("two sets of weights", "model-00001-of-00002.safetensors"), _two_sets),
        "float8 without its scales": Fault(("F8_E4M3", "no quantization_config"), _float8),
    },
    "config": {
        "fewer positions than data.max_length": Fault(
            ("data.max_length=128", "64 positions"), _json("model/config.json", max_position_embeddings=64)
        ),
        "a model_type that transformers does not know": Fault(
            ("qwen9", "does not recognize"), _json("model/config.json", model_type="qwen9")
        ),
        "an encoder-decoder": Fault(("encoder-decoder (t5)", "decoders"), _json("model/config.json", model_type="t5")),
        "an encoder": Fault(("encoder (bert)", "decoders"), _json("model/config.json", model_type="bert")),
        "quantized weights": Fault(
            ("quantized", "unquantized"),
            _json("model/config.json", quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128}),
        ),
        "no model_type": Fault(("config.json has no model_type",), _text(_without("model_type"), "model/config.json")),
        "an activation that does not exist": Fault(
            ("no model can be built", "'swiglu'"), _json("model/config.json", hidden_act="swiglu")
        ),
        "a rope type that does not exist": Fault(
            ("no model can be built", "'ntk'"),
            _json("model/config.json", rope_scaling={"rope_type": "ntk", "factor": 4.0}),
        ),
        "a padding token beyond the vocabulary": Fault(
            ("pad_token_id=32000", "vocab_size=544"), _json("model/config.json", pad_token_id=32000)
        ),
        "heads that the hidden size cannot be shared by": Fault(
            ("do not fit its config.json", "q_proj.weight [128, 128] (by config.json [126, 128])"),
            _json("model/config.json", num_attention_heads=3, num_key_value_heads=3),
        ),
        "a generation_config that transformers refuses to save": Fault(
            ("Warning: generation_config.json sets sampling parameters",),
            _text(lambda _: '{"do_sample": false, "temperature": 0.6}', "model/generation_config.json"),
            status=0,
        ),
        "a generation_config that ends at an ordinary token": Fault(
            ("Warning: The model's configuration ends generation at 10",),
            _text(lambda _: '{"eos_token_id": [10]}', "model/generation_config.json"),
            status=0,
        ),
        "a multimodal model": Fault(("Qwen2VLConfig",), _json("model/config.json", model_type="qwen2_vl")),
        "rope_scaling without its factor": Fault(
            ("yarn", "factor"), _json("model/config.json", rope_scaling={"rope_type": "yarn"})
        ),
    },
    "tokenizer": {
        "no files": Fault(("holds no tokenizer",), _remove("model/tokenizer.json", "model/tokenizer_config.json")),
        "its configuration alone": Fault(("holds no tokenizer",), _remove("model/tokenizer.json")),
        "nine words in ten unknown": Fault(
            ("The tokenizer loses text", "rows.jsonl"),
            _all(
                _json("model/tokenizer.json", model=WORDS, pre_tokenizer={"type": "Whitespace"}, decoder=None),
                _json("model/tokenizer_config.json", unk_token="[UNK]"),
            ),
        ),
        "a normalizer that lowercases": Fault(
            ("The tokenizer loses text", "rows.jsonl"),
            _all(
                _json("model/tokenizer.json", normalizer={"type": "Lowercase"}),
                _json("model/config.json", model_type="llama"),
            ),
        ),
        "a normalizer that transformers leaves out": Fault(
            ("200 x", "other tokens than tokenizer.json makes"),
            _json("model/tokenizer.json", normalizer={"type": "Lowercase"}),
            status=0,
        ),
        "an end of turn that is cut into pieces": Fault(
            ("<|im_end|>", "no special token", "never learns to stop"),
            _all(
                _text(
                    lambda text: json.dumps(
                        (read := json.loads(text))
                        | {"added_tokens": [one for one in read["added_tokens"] if one["content"] != "<|im_end|>"]}
                    ),
                    "model/tokenizer.json",
                ),
                _json("model/tokenizer_config.json", eos_token="<|endoftext|>", pad_token="<|im_start|>"),
            ),
        ),
        "more tokens than the embedding has rows": Fault(
            ("tokens", "544 rows", "do not belong together"),
            _json(
                "model/tokenizer_config.json",
                additional_special_tokens=[f"<extra_{number}>" for number in range(20)],
            ),
        ),
        "half a file": Fault(
            ("tokenizer", "cannot be loaded from its folder"),
            _bytes(lambda content: content[:5000], "model/tokenizer.json"),
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
        "refuses the system turn": Fault(
            ("refuses it", "No system role", "row 1"),
            _all(
                _template(
                    _turns(
                        "{% if message.role == 'system' %}{{ raise_exception('No system role') }}{% endif %}"
                        "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>"
                    )
                ),
                _rows(_asked_system),
            ),
        ),
        "is no Jinja": Fault(("model.chat_template", "unexpected '}'"), _template(_turns("{{ message.content }"))),
        "reads a variable that nobody sets": Fault(
            ("turns are not where its answers are",),
            _template(_turns("<|im_start|>{{ message.role }}\n{{ content }}<|im_end|>")),
        ),
        "keeps the last two turns": Fault(
            ("1 of the assistant's 3 turns",),
            _text(lambda text: text.replace("in messages %}", "in messages[-2:] %}"), "model/chat_template.jinja"),
        ),
        "ends a turn with another family's token": Fault(
            ("<|eot_id|>", "no special token"),
            _text(lambda text: text.replace("<|im_end|>", "<|eot_id|>"), "model/chat_template.jinja"),
        ),
        "asks the assistant to speak by another name": Fault(
            ("model.chat_template", "cannot be told"),
            _template(
                _turns("<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>").replace(
                    "<|im_start|>assistant", "<|im_start|>model"
                )
            ),
        ),
        "asks the assistant to speak by another name, behind markers": Fault(
            ("model.chat_template", "never be prompted as it was trained"),
            _text(
                lambda text: text.replace(
                    "add_generation_prompt %}<|im_start|>assistant", "add_generation_prompt %}<|im_start|>model"
                ),
                "model/chat_template.jinja",
            ),
        ),
        "gives both speakers one header": Fault(
            ("model.chat_template", "cannot see who speaks"),
            _template(
                _turns("<|im_start|>user\n{{ message.content }}<|im_end|>").replace("assistant", "user"),
            ),
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
        "capital letters": Fault(
            ("unknown role 'User'", "known: assistant"),
            _text(lambda text: text.replace('"user"', '"User"'), "rows.jsonl"),
        ),
        "from and value swapped": Fault(
            ("row 1", "unknown role"),
            _rows(lambda question, answer: {"conversations": [{"value": "human", "from": question}]}),
        ),
        "preferences": Fault(
            ("preference data", "DPO"),
            _rows(lambda question, answer: {"prompt": question, "chosen": answer, "rejected": "No."}),
        ),
        "answers that hold the next question": Fault(
            ("240 of 240 rows", "data.allow=[dialogue]"),
            _rows(lambda question, answer: _asked(question, f"{answer}\nUser: {question}\nAssistant: {answer}")),
            TRAIN + " data.max_length=256",
        ),
        "one column for prompt and completion": Fault(
            ("names answer twice",),
            _rows(lambda question, answer: {"question": question, "answer": answer}),
            TRAIN + " 'data.train=[{{path: {folder}/rows.jsonl, columns: {{prompt: answer, completion: answer}}}}]'",
        ),
        "empty answers": Fault(
            ("Nothing is left to train on", "no answer"),
            _rows(lambda question, answer: {"prompt": question, "completion": ""}),
        ),
        "an answer that is no text": Fault(
            ("row 1", "type float"), _rows(lambda question, answer: {"prompt": question, "completion": float("nan")})
        ),
    },
    "encoding": {
        "UTF-16": Fault(("rows.jsonl", "UTF-16", "save it as UTF-8"), _rows(_asked, "utf-16")),
        "Latin-1": Fault(
            ("line 1 is not UTF-8", "0xe9"),
            _rows(lambda question, answer: _asked(question, "Café " + answer), "latin-1"),
        ),
        "GBK": Fault(("line 1 is not UTF-8",), _rows(lambda question, answer: _asked(question, "好 " + answer), "gbk")),
        "gzip without its name": Fault(("gzip", "rows.jsonl.gz"), _bytes(gzip.compress)),
        "Parquet without its name": Fault(
            ("parquet", "name it rows.parquet"),
            lambda folder: pq.write_table(pa.table({"text": ["Hi"] * 9}), folder / "rows.jsonl"),
        ),
        "the last line cut off": Fault(("row 240", "not JSON"), _bytes(lambda content: content[:-40])),
        "one bad byte": Fault(("row 240", "0xff"), _bytes(lambda content: content[:-5] + b'\xff"}]}\n')),
        "a pointer of Git LFS": Fault(("Git LFS", "git lfs pull"), _bytes(lambda _: LFS_POINTER.encode())),
    },
    "splits": {
        "the training file held out": Fault(("Nothing is left", "held out"), command=HELD_OUT + "{folder}/rows.jsonl"),
        "per cent": Fault(("data.held_out", "less than 1", "5"), command=HELD_OUT + "5"),
        "nothing left to train": Fault(("Nothing is left", "held out"), command=HELD_OUT + "0.999"),
        "nothing held out": Fault(("data.held_out=0.0001", "Raise it"), command=HELD_OUT + "0.0001"),
        "a folder of splits": Fault(("several splits", "test.jsonl"), _folder_of_splits, DATA),
        "a split that a file has not": Fault(
            ("split=validation", "a file has no splits"),
            command=TRAIN + " 'data.train=[{{path: {folder}/rows.jsonl, split: validation}}]'",
        ),
        "a slice without rows": Fault(
            ("no rows in split=train[90000:]",),
            command=TRAIN + " 'data.train=[{{path: {folder}/rows.jsonl, split: \"train[90000:]\"}}]'",
        ),
        "more rows than there are": Fault(
            ("rows=100000", "240 usable rows"),
            command=TRAIN + " 'data.train=[{{path: {folder}/rows.jsonl, rows: 100000}}]'",
        ),
        "held-out rows without answers": Fault(
            ("data.held_out", "no row that can be used"),
            _rows(lambda question, answer: {"prompt": question, "completion": ""}, name="held.jsonl"),
            HELD_OUT + "{folder}/held.jsonl",
        ),
    },
    "numbers": {
        **{
            words: Fault(told, command=f"{TRAIN} {words}")
            for words, told in {
                "train.learning_rate=2e5": ("train.learning_rate: must be less than or equal to 1",),
                "train.adam_beta1=1.0": ("train.adam_beta1: must be less than 1",),
                "train.adam_epsilon=1e8": ("train.adam_epsilon: must be less than or equal to 0.01",),
                "train.weight_decay=2000": ("train.weight_decay=2000", "wipe out"),
                "model.lora.lora_dropout=1.0": ("model.lora.lora_dropout: must be less than 1",),
                "model.lora.r=1000": ("model.lora.r=1000", "hidden size of 128"),
                "train.learning_rate=0": ("train.learning_rate: must be greater than 0",),
                "train.learning_rate=1,5e-5": ("train.learning_rate", '"1,5e-5"'),
                "train.warmup_steps=0.03": ("train.warmup_steps", "integer", "0.03"),
                "train.warmup_ratio=0.03": ("train.warmup_ratio: unknown key", "`warmup_steps`"),
                "train.max_steps=0": ("train.max_steps: must be greater than 0",),
                "train.max_steps=-1": ("train.max_steps: must be greater than 0, got -1",),
                "train.seed=1.5": ("train.seed", "integer", "1.5"),
                "train.min_lr_ratio=10": ("train.min_lr_ratio", "1, got 10"),
                "model.lora.lora_alpha=0": ("model.lora.lora_alpha: must be greater than 0",),
                "data.max_length=100000": ("data.max_length=100000", "1024 positions"),
                "data.max_length=16": ("Nothing is left", "too long"),
                "data.max_length=24 data.overlong=truncate": ("Nothing is left", "targets past max length"),
                "train.global_batch_size=null train.global_batch_tokens=8": (
                    "global_batch_tokens=8",
                    "multiple of data.max_length=128",
                ),
            }.items()
        },
        **{
            words: Fault((told,), status=0, command=f"{TRAIN} {words}")
            for words, told in {
                "train.learning_rate=2e-2": "Warning: train.learning_rate=0.02",
                "train.learning_rate=1e-12": "Warning: The training has not moved the weights",
                "train.weight_decay=10": "Warning: train.weight_decay=10",
                "train.max_grad_norm=1e-9": "Warning: train.max_grad_norm=1e-09",
                "train.max_steps=null train.num_train_epochs=0.0001": "Warning: The run has 1 optimizer step",
                "train.adam_beta1=0.95 train.adam_beta2=0.1": "Warning: train.adam_beta1=0.95",
                "model.lora.r=1 model.lora.lora_alpha=16384": "Warning: model.lora.lora_alpha=16384",
                "eval.every_steps=9 eval.every_tasks=[{folder}/task.yaml]": "Warning: eval.every_steps=9",
                "train.trainer_args.label_smoothing_factor=1.0": "Warning: train.trainer_args.label_smoothing_factor=1.0",
                "train.trainer_args.neftune_noise_alpha=500": "Warning: train.trainer_args.neftune_noise_alpha=500",
            }.items()
        },
    },
    "environment": {
        "a precision left over from accelerate": Fault(
            ("accelerate", "fp16", "train.precision"), environment={"ACCELERATE_MIXED_PRECISION": "fp16"}
        ),
        "DeepSpeed left over from accelerate": Fault(
            ("DEEPSPEED|DeepSpeed",), environment={"ACCELERATE_USE_DEEPSPEED": "true"}
        ),
        "FSDP left over from accelerate": Fault(("FSDP",), environment={"ACCELERATE_USE_FSDP": "true"}),
        "no network, and a model that is not cached": Fault(
            ("model.name_or_path=org/model-of-nobody", "not in the hub's cache"),
            command=TRAIN + " model.name_or_path=org/model-of-nobody",
        ),
        "a key of wandb that was cut off": Fault(
            ("WANDB_API_KEY has 3 characters", "at least 40"),
            command=TRAIN + " tracking.report_to=[wandb]",
            environment={"WANDB_API_KEY": "abc", "WANDB_MODE": "online"},
        ),
        "no compiler for DeepSpeed": Fault(
            ("train.deepspeed", "no ninja and no c++"),
            command=TRAIN + " train.deepspeed=zero2",
            environment={"PATH": "/nowhere", "TORCH_EXTENSIONS_DIR": "{folder}/extensions"},
        ),
        "a place that cannot be written": Fault(
            ("output_dir=/proc/out", "cannot be written"), command=TRAIN + " output_dir=/proc/out"
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
        "another chat template": Fault(
            ("data, tokenizer or chat template has changed",),
            _all(_killed(), _text(lambda text: "Chat: " + text, "model/chat_template.jinja")),
            before=RUN,
        ),
        "no random state": Fault(
            ("checkpoint-2: rng_state.pth is missing",),
            _in_checkpoint(lambda checkpoint: (checkpoint / "rng_state.pth").unlink()),
            before=RUN,
        ),
        "no optimizer": Fault(
            ("checkpoint-2: optimizer.pt is missing",),
            _in_checkpoint(lambda checkpoint: (checkpoint / "optimizer.pt").unlink()),
            before=RUN,
        ),
        "a step edited by hand": Fault(
            ("checkpoint-2: trainer_state.json",),
            _in_checkpoint(lambda checkpoint: _json("trainer_state.json", global_step=3)(checkpoint)),
            before=RUN,
        ),
        "another name": Fault(
            ("checkpoint-3: it is of step 2", "checkpoint-2"),
            _in_checkpoint(lambda checkpoint: checkpoint.rename(checkpoint.with_name("checkpoint-3"))),
            before=RUN,
        ),
        "a line of metrics.jsonl removed": Fault(
            ("lacks 1 of the 2 lines", "step 1"),
            _killed(_bytes(lambda lines: lines.split(b"\n", 1)[1], "metrics.jsonl")),
            status=0,
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
        "half of run.json": Fault(
            ("run.json cannot be read", "train.resume=never"),
            _killed(_bytes(lambda content: content[:100], "run.json")),
            before=RUN,
        ),
        "the run moved away": Fault(
            ("latest leads to", "Bring it back"),
            _killed(lambda run: run.rename(run.parent.parent.parent / "moved")),
            status=0,
            before=RUN,
        ),
        "adapters on a base that was changed in place": Fault(
            ("model.safetensors has changed", "train.resume=never"),
            _all(_killed(), _weights(lambda weights: weights["model.norm.weight"].__imul__(2))),
            TRAIN + LORA,
            before=(TRAIN + LORA,),
        ),
        "no manifest": Fault(
            ("checkpoint-2: it has no manifest.json",),
            _in_checkpoint(lambda checkpoint: (checkpoint / "manifest.json").unlink()),
            before=RUN,
        ),
    },
    "evaluation": {
        "a target that no document has": Fault(
            ("my_task", "'anwser' is undefined"), _task(doc_to_target="{{anwser}}"), EVAL
        ),
        "a prompt that no document has": Fault(
            ("my_task", "'qestion' is undefined"), _task(doc_to_text="{{qestion}}"), EVAL
        ),
        **{
            f"a right answer that is no choice: {label}": Fault(told, _choices(label), EVAL)
            for label, told in {
                "{{n + 1}}": ("my_task", "document 4 has 4"),
                "{{'ABCD'[n]}}": ("document 1 has 'A'",),
                "{{choices[n] | lower}}": ("document 1 has 'oslo'",),
            }.items()
        },
        "the same right answer to everything": Fault(
            ("my_task", "'Oslo' is right in all 8 documents"), _choices("0"), EVAL, 0
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
        "a target that contains a stop text": Fault(
            ("none can equal it", r"'\n'"), _task(doc_to_target="{{answer}}\n"), EVAL, 0
        ),
        "a limit too small for any answer": Fault(
            ("8 of 8 answers to my_task are cut off at max_gen_toks=2",),
            _task(generation_kwargs={"until": ["\n"], "max_gen_toks": 2}),
            EVAL,
            0,
        ),
        "no stop text": Fault(
            ("cut off at max_gen_toks=64",), _task(generation_kwargs={"until": [], "max_gen_toks": 64}), EVAL, 0
        ),
        "a stop text that begins every answer": Fault(
            ("none can equal it",),
            _task(generation_kwargs={"until": ["{", " ", "\n", *map(chr, range(97, 123))], "max_gen_toks": 32}),
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
        "every document ten times": Fault(
            ("3 of 8 documents repeat",),
            _bytes(lambda content: b"".join(content.splitlines(keepends=True)[:5] * 10), "test.jsonl"),
            EVAL,
            0,
        ),
        "answers that are sampled": Fault(
            ("do_sample: true",),
            _task(generation_kwargs={"until": ["\n"], "max_gen_toks": 32, "do_sample": True, "temperature": 1.0}),
            EVAL,
            0,
        ),
        "examples from the documents that are measured": Fault(
            ("its 3 examples",), _task(fewshot_split="test"), EVAL + " num_fewshot=3", 0
        ),
        "more examples than there are": Fault(
            ("my_task has 200 documents", "num_fewshot is 500"), _task(fewshot_split="test"), EVAL + " num_fewshot=500"
        ),
        "process_docs leaves no document": Fault(
            ("my_task", "no document is left", "process_docs"), _no_documents, EVAL + " confirm_run_task_code=true"
        ),
        "final/ replaced by the base": Fault(
            ("model.safetensors has changed", "--accept-edits"),
            lambda folder: shutil.copyfile(
                folder / "model/model.safetensors", latest(folder) / "final/model.safetensors"
            ),
            EVAL_RUN,
            before=RUN,
        ),
        "the base changed in place": Fault(
            ("Warning: The base model", "model.safetensors has changed"),
            _weights(lambda weights: weights["model.norm.weight"].__imul__(2)),
            EVAL_RUN,
            0,
            before=RUN,
        ),
        "no documents": Fault(("test.jsonl is empty",), _bytes(lambda _: b"", "test.jsonl"), EVAL),
        "a split that the data has not": Fault(
            ("`test_split: validation`", "test"), _task(test_split="validation"), EVAL
        ),
        "an aggregation that does not exist": Fault(
            ("`aggregation: avg`",), _task(metric_list=[{"metric": "exact_match", "aggregation": "avg"}]), EVAL
        ),
    },
    "export": {
        "no tokenizer": Fault(
            ("final holds no tokenizer", "--checkpoint"),
            lambda folder: (latest(folder) / "final" / "tokenizer.json").unlink(),
            EXPORT + " --to merged",
            before=RUN,
        ),
        "weights cut off": Fault(
            ("model.safetensors has changed", "--accept-edits"),
            lambda folder: _bytes(lambda content: content[:9999], "model.safetensors")(latest(folder) / "final"),
            EXPORT + " --to merged",
            before=RUN,
        ),
        "a damaged checkpoint": Fault(
            ("checkpoint-2 is not what was written", "checksum differs"),
            lambda folder: _bytes(_flipped, "model.safetensors")(latest(folder) / "checkpoints" / "checkpoint-2"),
            EXPORT + " --to merged --checkpoint 2",
            before=RUN,
        ),
        **{
            f"{name} of final/ edited": Fault(
                (f"{name} has changed", "--accept-edits"),
                _in_final(_bytes(lambda content: content + b" ", name)),
                EXPORT + " --to merged",
                before=RUN,
            )
            for name in ("chat_template.jinja", "generation_config.json", "config.json", "tokenizer.json")
        },
        "a file of final/ removed": Fault(
            ("generation_config.json is missing",),
            _in_final(_remove("generation_config.json")),
            EXPORT + " --to merged",
            before=RUN,
        ),
        "weights of another model in final/": Fault(
            ("model.safetensors has changed",),
            lambda folder: shutil.copyfile(
                folder / "model/model.safetensors", latest(folder) / "final/model.safetensors"
            ),
            "sft.export {folder}/out/mine/latest --to hub --repo-id me/mine --dry-run",
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
        "adapters whose base is gone": Fault(
            ("/model", "is gone"),
            lambda folder: shutil.rmtree(folder / "model"),
            EXPORT + " --to merged",
            before=(TRAIN + LORA,),
        ),
        "a context of no tokens": Fault(
            ("--max-length 0", "1 or more"), command=EXPORT + " --to vllm --gpus 1 --max-length 0", before=RUN
        ),
        "an unfinished run": Fault(
            ("has no final/ yet", "--checkpoint 2"), _killed(), EXPORT + " --to merged", before=RUN
        ),
        "GPUs that the heads cannot be shared by": Fault(
            ("--gpus 3", "4 attention heads"), command=EXPORT + " --to vllm --gpus 3", before=RUN
        ),
        "a folder that is there": Fault(
            ("/x exists already",), lambda folder: (folder / "x").mkdir(), EXPORT + " --to merged", before=RUN
        ),
    },
}
"""By area and name."""


def told(message: str, words: str) -> bool:
    """Whether a message holds words, or one of several (`a|b`)."""
    return any(re.search(re.escape(one), message) for one in words.split("|"))
