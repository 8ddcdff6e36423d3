"""The embedded demo (`builtin:demo`): a model, a tokenizer, data and a task, made here from a seed, with no network.

A sentence about a journey becomes JSON:

    On Friday Rita travels to Oslo by train with 4 bags  ->  {"name":"Rita","to":"Oslo","day":"Friday","by":"train","count":4}

The model is a Qwen2 of half a million random weights: it scores nothing before training. One name-and-city pair in five is
never trained, so the test asks for what was not memorised. Needs no torch: the launcher makes it before any rank starts.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sft.errors import RunError

VERSION = 1
"""Raised with any change here that could move a score."""

NAMES = (
    "Anna Boris Clara David Elena Frank Grace Henry Irene Jacob Karen Louis Maria Nora Oscar Paula Quinn Rita "
    "Simon Tina Uma Victor Wendy Xavier Yara Zoe Adam Bella Carl Diana"
).split()
CITIES = (
    "Paris Berlin Rome Madrid Oslo Vienna Prague Dublin Lisbon Athens Warsaw Sofia Riga Tallinn Zurich Geneva "
    "Milan Naples Porto Bergen Lyon Nice Turin Seville"
).split()
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
VEHICLES = ("train", "flight", "bus", "ferry")
SENTENCES = (
    "{name} needs {count} seats on the {by} to {to} on {day}",
    "Please book {count} {by} tickets to {to} for {name}, leaving {day}",
    "On {day} {name} travels to {to} by {by} with {count} bags",
    "Could you reserve the {day} {by} to {to}? It is for {name}, party of {count}",
    "{count} people, {by} to {to}, {day}, under the name {name}",
    "I am {name} and I want to take the {by} to {to} this {day} with {count} friends",
    "For {name}: {to}, {day}, {count} seats, by {by}",
    "The {by} to {to} on {day} should have {count} places for {name}",
)

TRAIN_ROWS, TEST_ROWS = 6000, 200
# The sentences hold no more than 541 tokens worth merging; the embedding is a multiple of 32.
VOCABULARY, HIDDEN, LAYERS, HEADS, FEED_FORWARD = 544, 128, 3, 4, 256
# Near 1/sqrt(hidden). With transformers' default of 0.02 a model this small and shallow learns nothing in a minute.
INITIALIZER_RANGE = 0.08
PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TASK = """\
# Written by sft/hub/demo.py: sentence to JSON, on name-and-city pairs that were not trained.
task: demo_extraction
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{test}"}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], do_sample: false, max_gen_toks: 48}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
metadata: {{version: {version}}}
"""


@dataclass(frozen=True)
class Demo:
    """Where the demo's parts are."""

    model: Path
    train: Path
    task: Path


def _rows(count: int, held_out: bool, generator: random.Random) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    while len(rows) < count:
        name, city = generator.randrange(len(NAMES)), generator.randrange(len(CITIES))
        if ((name * 31 + city * 17) % 5 == 0) != held_out:
            continue
        facts = {
            "name": NAMES[name],
            "to": CITIES[city],
            "day": generator.choice(DAYS),
            "by": generator.choice(VEHICLES),
            "count": generator.randint(2, 9),
        }
        rows.append((generator.choice(SENTENCES).format(**facts), json.dumps(facts, separators=(",", ":"))))
    return rows


def questions(count: int) -> list[str]:
    """The task's questions, about pairs that are not trained: the same ones each time."""
    return [question for question, _ in _rows(count, True, random.Random(f"{VERSION} questions"))]


def _write_tokenizer(folder: Path, texts: list[str]) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    # Digits and punctuation stand alone, so that a count or a quotation mark is never part of a longer token.
    words = pre_tokenizers.Split(Regex(r"\s+|\d|[^\w\s]+"), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def _write_model(folder: Path) -> None:
    from safetensors.numpy import save_file

    generator = np.random.default_rng(VERSION)

    def random_weights(*shape: int) -> np.ndarray:
        return generator.normal(0.0, INITIALIZER_RANGE, shape).astype(np.float32)

    ones, zeros = np.ones(HIDDEN, np.float32), np.zeros(HIDDEN, np.float32)
    shapes = {f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"}
    shapes |= {f"mlp.{name}_proj": (FEED_FORWARD, HIDDEN) for name in ("gate", "up")}
    shapes["mlp.down_proj"] = (HIDDEN, FEED_FORWARD)
    weights = {"model.embed_tokens.weight": random_weights(VOCABULARY, HIDDEN), "model.norm.weight": ones}
    for prefix in (f"model.layers.{layer}." for layer in range(LAYERS)):
        weights |= {f"{prefix}{name}.weight": random_weights(*shape) for name, shape in shapes.items()}
        weights |= {f"{prefix}self_attn.{name}_proj.bias": zeros for name in "qkv"}
        weights |= {f"{prefix}{name}_layernorm.weight": ones for name in ("input", "post_attention")}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": FEED_FORWARD,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "initializer_range": INITIALIZER_RANGE,
        "pad_token_id": 0,
        "eos_token_id": 2,
        "bos_token_id": None,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def make_demo(output_dir: Path) -> Demo:
    """Make the demo's files in a hidden folder of the recipe's output_dir, or find them: the same bytes on every machine."""
    folder = output_dir.expanduser().resolve() / ".builtin" / f"demo-{VERSION}"
    demo = Demo(folder / "model", folder / "train.jsonl", folder / "task" / "demo_extraction.yaml")
    task = TASK.format(test=folder / "task" / "test.jsonl", version=VERSION)
    if folder.exists():
        # The task names its data by absolute path (lm_eval knows no other); the folder may have been moved since.
        if demo.task.read_text() != task:
            demo.task.write_text(task)
        return demo
    # Made beside and renamed: whoever finds the folder finds all of it, also when two ranks make it at once.
    work = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        _write_files(work, demo, task)
        work.rename(folder)
    except OSError as error:
        shutil.rmtree(work, ignore_errors=True)
        if not folder.exists():
            raise RunError(f"The demo cannot be written to {work.parent}: {error}.") from None
    return demo


def _write_files(work: Path, demo: Demo, task: str) -> None:
    for name in ("model", "task"):
        (work / name).mkdir(parents=True)
    generator = random.Random(VERSION)
    train, test = _rows(TRAIN_ROWS, False, generator), _rows(TEST_ROWS, True, generator)
    with (work / "train.jsonl").open("w") as file:
        for question, answer in train:
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": turns}) + "\n")
    with (work / "task" / "test.jsonl").open("w") as file:
        file.writelines(json.dumps({"question": question, "answer": answer}) + "\n" for question, answer in test)
    (work / "task" / demo.task.name).write_text(task)
    _write_tokenizer(work / "model", [text for row in train for text in row])
    _write_model(work / "model")
