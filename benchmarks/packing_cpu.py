"""Is packing worth it on a CPU: padded, packed as TRL ships it, or packed by us?

    python benchmarks/packing_cpu.py
    python benchmarks/packing_cpu.py --max-length 8192

The same documents of lognormal lengths (most of them much shorter than the longest) train the same tiny Qwen2 in fp32 three ways,
each in a process of its own:

- padded: TRL with `packing=False`, its default of 8 documents a batch, padded to the longest of them
- packed by TRL: `packing=True` as it is shipped: bfd, one pack a batch, sdpa with a mask over the whole pack
- ours: the recipe with `model.attn_implementation: varlen`, one pack a batch, attention within each document

A step holds all documents, so that the loss of each step, per trained token, must be the same on all sides, whatever they put into
a batch. Timed is between the lines of the first and of the last step, without start and warm-up; counted are real tokens, padding
left out. A batch of one document has no padding either; on a CPU that is as good as packing, on a GPU it leaves the GPU idle.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
from machine import described
from side_by_side import ROOT, check_agreement, losses, seconds_to_steps, show, turned, use_the_cores

sys.path.insert(0, str(ROOT))

TRL = """
import sys
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

model, rows, folder, steps, max_length, batch, packing = sys.argv[1:]
network = AutoModelForCausalLM.from_pretrained(model, dtype="float32", attn_implementation="sdpa")
arguments = SFTConfig(
    output_dir=folder,
    max_steps=int(steps),
    per_device_train_batch_size=int(batch),
    gradient_accumulation_steps=1_000_000,  # the step ends where the documents do
    max_length=int(max_length),
    packing=packing == "yes",
    learning_rate=1e-4,
    lr_scheduler_type="constant",
    adam_beta2=0.95,
    gradient_checkpointing=False,
    seed=0,
    use_cpu=True,
    bf16=False,
    logging_steps=1,
    save_strategy="steps",
    save_steps=int(steps),
    report_to="none",
    disable_tqdm=True,
)
data = Dataset.from_json(rows, cache_dir=folder + "/cache")
SFTTrainer(network, arguments, train_dataset=data, processing_class=AutoTokenizer.from_pretrained(model)).train()
"""

RECIPE = """
schema_version: 1
version: 1
output_dir: {folder}
model: {{name_or_path: {model}, attn_implementation: varlen, kernels: none}}
data: {{train: {rows}, max_length: {max_length}}}
train:
  global_batch_size: {packs}
  micro_batch_size: 1
  max_steps: {steps}
  learning_rate: 1e-4
  lr_scheduler_type: constant
  precision: fp32
  logging_steps: 1
  save_steps: 1000000
  resume: never
"""

PADDED, TRL_PACKED, OURS = "padded", "packed by TRL", "ours"


def main() -> None:
    arguments = read_arguments()
    use_the_cores()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(folder)
        for max_length in arguments.max_length:
            measure(model, max_length, arguments, folder / str(max_length))
    print(described(["torch", "transformers", "trl"]), f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}")


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-length", type=int, nargs="+", default=[2048, 4096, 8192], help="tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32768, help="of all documents")
    parser.add_argument("--steps", type=int, default=3, help="of a run; the first is not timed")
    parser.add_argument("--padded-batch", type=int, default=8, help="documents a batch of the padded side")
    return parser.parse_args()


def make_model(folder: Path) -> Path:
    """A Qwen2 of two small layers, grouped heads, and the demo's tokenizer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from sft.hub.demo import VOCABULARY, make_demo

    demo = make_demo(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(
        vocab_size=VOCABULARY, num_key_value_heads=2, initializer_range=0.08, max_position_embeddings=16384, **sizes
    )
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(demo.model / file, folder / "model" / file)
    return folder / "model"


def make_rows(max_length: int, tokens: int, file: Path) -> int:
    """Documents as token ids, all of them trained; returns how many tokens they are."""
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(np.log(max_length / 24), 0.9, tokens), 8, max_length).astype(int)
    lengths = lengths[: np.searchsorted(lengths.cumsum(), tokens)]
    file.parent.mkdir()
    with file.open("w") as rows:
        for length in lengths:
            rows.write(json.dumps({"input_ids": generator.integers(10, 500, length).tolist()}) + "\n")
    mean, most = lengths.mean(), lengths.max()
    print(f"\nT={max_length}: {len(lengths)} documents of {mean:.0f} tokens on average, the longest {most}", flush=True)
    return int(lengths.sum())


def measure(model: Path, max_length: int, arguments: argparse.Namespace, folder: Path) -> None:
    """Print the real tokens a second of the three sides at one length of packs."""
    rows = folder / "rows.jsonl"
    tokens = make_rows(max_length, arguments.tokens, rows)
    packs = count_packs(model, rows, max_length, folder)
    speeds: dict[str, list[float]] = {}
    for number in range(arguments.rounds):
        found = {}
        for side in turned([PADDED, TRL_PACKED, OURS], number):
            target = folder / f"{number}-{side.replace(' ', '-')}"
            target.mkdir()
            words = command(side, model, rows, target, max_length, packs, arguments)
            seconds = seconds_to_steps(words, target)
            found[side] = losses(target)
            speeds.setdefault(side, []).append(tokens * (arguments.steps - 1) / (seconds[-1] - seconds[0]))
        check_agreement(found, f"{arguments.steps} steps over the same documents")
    show(f"T={max_length}: real tokens a second", speeds, TRL_PACKED, "/s")
    ratios = [ours / padded for ours, padded in zip(speeds[OURS], speeds[PADDED], strict=True)]
    print(f"ours to padded: {sorted(ratios)[len(ratios) // 2]:.3f}x ({min(ratios):.3f} to {max(ratios):.3f})")


def count_packs(model: Path, rows: Path, max_length: int, folder: Path) -> int:
    """Packs that ours makes of the documents: one step holds them all."""
    from sft.data.prepare import prepare
    from sft.launch.job import open_recipe

    recipe = folder / "count.yaml"
    recipe.write_text(recipe_text(model, rows, folder / "count", max_length, 1, 1))
    opened, _, facts = open_recipe(recipe, [])
    return prepare(opened, facts).sequences


def recipe_text(model: Path, rows: Path, folder: Path, max_length: int, packs: int, steps: int) -> str:
    return RECIPE.format(folder=folder, model=model, rows=rows, max_length=max_length, packs=packs, steps=steps)


def command(
    side: str, model: Path, rows: Path, folder: Path, max_length: int, packs: int, arguments: argparse.Namespace
) -> list[str]:
    if side == OURS:
        recipe = Path(f"{folder}.yaml")
        recipe.write_text(recipe_text(model, rows, folder, max_length, packs, arguments.steps))
        return [sys.executable, "-m", "sft.train", str(recipe)]
    batch, packing = (1, "yes") if side == TRL_PACKED else (arguments.padded_batch, "no")
    words = (model, rows, folder, arguments.steps, max_length, batch, packing)
    return [sys.executable, "-c", TRL, *map(str, words)]


if __name__ == "__main__":
    main()
