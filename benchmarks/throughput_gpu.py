"""How fast does a 3B (or 7B) model train on one GPU: `trl sft`'s defaults, an article's settings, TRL's packing, or ours?

    python benchmarks/throughput_gpu.py                          # all arms, alpaca-like lengths, equal steps
    python benchmarks/throughput_gpu.py --arm C --lengths long   # one arm by itself, in a few minutes
    python benchmarks/throughput_gpu.py --arm ladder             # from S to C, one change at a time
    python benchmarks/throughput_gpu.py --steps-as shipped       # each arm with the steps that it would take by itself
    python benchmarks/throughput_gpu.py --size tiny              # no GPU: every arm runs, no speed is shown

A model of Qwen2.5's shape with random weights is made on the spot; nothing is downloaded. The arms, each a process of its own:

- A: what `trl sft` does when it is told nothing: 8 documents a batch, padded, checkpointing, fp32 weights under bf16, sdpa
- S: padding, 11 documents a batch, checkpointing, Liger's layer kernels, ZeRO-2
- B: TRL's packing as it is shipped, 16,384 tokens a pack, sdpa with a mask over the pack; otherwise A without checkpointing
- C: our recipe: packs of 16,384 tokens, attention within documents, Liger, no checkpointing, the
  cheapest engine that holds the model

The one default that is changed for all is max_length, so that all arms train the same documents whole. With equal steps one
optimizer step holds all documents. Before any speed is shown, the first step's loss of each arm must be what the documents have
one at a time, without padding or packing. Real tokens are counted, without padding; MFU counts 6 FLOPs a token and weight of the
layers, the head for labelled tokens only, and 6 x layers x heads x head_dim x the sum of squared lengths for causal attention.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from machine import described
from side_by_side import ROOT, losses, seconds_to_steps, show, turned, use_the_cores

sys.path.insert(0, str(ROOT))

PACK = 16384
# hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads, vocab_size, tied
SHAPES = {
    "3b": (2048, 11008, 36, 16, 2, 151936, True),
    "7b": (3584, 18944, 28, 28, 4, 152064, False),
    "tiny": (64, 128, 2, 4, 2, 544, True),
}
LENGTHS = {"alpaca": (90, 0.7), "long": (2200, 0.9)}
"""Median and sigma of lognormal document lengths, tokens."""

TRL = ROOT / "benchmarks" / "throughput_trl.py"
S_AS_RECIPE = {
    "data.packing": "false",
    "model.attn_implementation": "sdpa",
    "train.micro_batch_size": 11,
    "train.gradient_checkpointing": "true",
    "train.deepspeed": "zero2",
}
ARMS: dict[str, dict[str, Any]] = {
    "A": {"batch": 8, "packing": False, "checkpointing": True, "liger": False, "zero": False},
    "S": {"batch": 11, "packing": False, "checkpointing": True, "liger": True, "zero": True},
    "B": {"batch": 1, "packing": True, "checkpointing": False, "liger": False, "zero": False},
    "C": {},
    # Each rung keeps what the one before has changed; the last is C.
    "S as a recipe": S_AS_RECIPE,
    "+ packing, a mask over the pack": S_AS_RECIPE | {"data.packing": "true", "train.micro_batch_size": 1},
    "+ attention within documents": {"train.gradient_checkpointing": "true", "train.deepspeed": "zero2"},
    "+ no checkpointing": {"train.deepspeed": "zero2"},
    "+ the cheapest engine = C": {},
}
LADDER = list(ARMS)[4:]


@dataclass(frozen=True)
class Documents:
    """What is trained."""

    rows: Path
    lengths: np.ndarray
    labelled: int


def main() -> None:
    arguments = read_arguments()
    use_the_cores()
    gpu = gpu_name()
    if gpu is None and arguments.size != "tiny":
        print("throughput_gpu.py needs an NVIDIA GPU, and torch sees none. --size tiny runs every arm on the CPU.")
        raise SystemExit(2)
    if gpu is None:
        print("No GPU: Liger and ZeRO are left out and fp32 takes bf16's place, so no speed is shown.", flush=True)
    with tempfile.TemporaryDirectory(dir=arguments.work) as name:
        folder = Path(name)
        documents = make_documents(arguments, folder)
        reference = one_process("make", arguments, folder, documents.rows, folder / "made")["loss"]
        print(f"One document at a time: loss {reference:.5f}", flush=True)
        wanted = [arm for choice in arguments.arm for arm in (LADDER if choice == "ladder" else [choice])]
        results = measure(wanted, documents, reference, arguments, folder)
    if gpu is not None:
        from sft.train.metrics import PEAK_FLOPS

        peak = next((rate for part, rate in PEAK_FLOPS.items() if part in gpu), None)
        report(results, documents, arguments, peak)
    print(gpu or "CPU", described(["torch", "transformers", "trl", "deepspeed", "liger-kernel"]), sep=", ")


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arm", nargs="+", choices=["A", "S", "B", "C", "ladder"], default=["A", "S", "B", "C"])
    parser.add_argument("--size", choices=list(SHAPES), default="3b")
    parser.add_argument("--lengths", choices=list(LENGTHS), default="alpaca")
    parser.add_argument("--steps-as", choices=["equal", "shipped"], default="equal")
    parser.add_argument("--tokens", type=int, help="of all documents; four packs unless given")
    parser.add_argument("--steps", type=int, default=6, help="of a run; the first two are not timed")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="overrides of C's recipe")
    parser.add_argument("--work", type=Path, help="where model and checkpoint go: 60 GB for 3b, 140 for 7b")
    return parser.parse_args()


def gpu_name() -> str | None:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def pack_length(arguments: argparse.Namespace) -> int:
    return 1024 if arguments.size == "tiny" else PACK


def make_documents(arguments: argparse.Namespace, folder: Path) -> Documents:
    """Random token ids of which the last three fifths are trained, as prompt and answer; packed once by ours."""
    generator, most = np.random.default_rng(0), pack_length(arguments)
    middle, sigma = LENGTHS[arguments.lengths]
    scale = 16384 / most  # a miniature of the same shape
    tokens = arguments.tokens or 4 * most
    lengths = np.clip(generator.lognormal(np.log(middle / scale), sigma, tokens), 6, most).astype(int)
    lengths = lengths[: np.searchsorted(lengths.cumsum(), tokens)]
    rows, labelled = folder / "rows.jsonl", 0
    with rows.open("w") as file:
        for length in lengths:
            ids = generator.integers(10, 500, length).tolist()
            hidden = int(length * 0.4) + 1
            labelled += int(length) - hidden
            file.write(json.dumps({"input_ids": ids, "labels": [-100] * hidden + ids[hidden:]}) + "\n")
    print(
        f"{len(lengths)} documents, {lengths.sum()} tokens, {labelled} labelled; mean {lengths.mean():.0f}, longest {lengths.max()}"
    )
    return Documents(rows, lengths, labelled)


def one_process(
    what: str, arguments: argparse.Namespace, folder: Path, rows: Path, target: Path, **settings: Any
) -> dict[str, Any]:
    """Run throughput_trl.py to its end, and read what it has measured; `seconds` are those to each step."""
    target.mkdir(exist_ok=True)
    given = {"what": what, "shape": SHAPES[arguments.size], "model": str(folder / "model"), "rows": str(rows)}
    given |= {"folder": str(target), "max_length": pack_length(arguments), **settings}
    (target / "given.json").write_text(json.dumps(given))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"] if settings.get("zero") else []
    words = [sys.executable, *launcher, str(TRL), str(target / "given.json")]
    seconds = seconds_to_steps(words, target)
    return json.loads((target / "measured.json").read_text()) | {"seconds": seconds}


def run(
    arm: str, documents: Documents, equal: bool, steps: int, target: Path, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Losses, seconds to each step, and peak memory of one arm."""
    target.mkdir()
    if "batch" in ARMS[arm]:
        settings = ARMS[arm] | {"steps": steps, "accumulation": 1_000_000 if equal else 1}
        found = one_process("train", arguments, target.parent, documents.rows, target, **settings)
    else:
        recipe = target.with_suffix(".yaml")
        batch = ARMS[arm].get("train.micro_batch_size", 1)
        units = count_packs(documents, target.parent, arguments) if batch == 1 else len(documents.lengths)
        sequences = -(-units // batch) * batch if equal else batch
        recipe.write_text(recipe_text(target, documents, sequences, steps, arguments))
        words = [f"{key}={value}" for key, value in ARMS[arm].items() if gpu_name() or value != "zero2"]
        seconds = seconds_to_steps([sys.executable, "-m", "sft.train", str(recipe), *words, *arguments.set], target)
        lines = next(target.glob("*/[0-9]*/metrics.jsonl")).read_text().splitlines()
        logged = [json.loads(line) for line in lines]
        peak = max(line["peak_memory_gib"] for line in logged)
        found = {"seconds": seconds, "peak": peak, "tokens": [line["tokens_seen"] for line in logged]}
    found |= {"losses": losses(target)}
    # Ours end with a checkpoint besides the model: 50 GB for 3b, more than several arms leave room for.
    shutil.rmtree(target)
    return found


def count_packs(documents: Documents, folder: Path, arguments: argparse.Namespace) -> int:
    """Packs that ours makes of the documents."""
    from sft.data.prepare import prepare
    from sft.launch.job import open_recipe

    recipe = folder / "count.yaml"
    recipe.write_text(recipe_text(folder / "count", documents, 1, 1, arguments))
    opened, _, facts = open_recipe(recipe, [])
    return prepare(opened, facts).sequences


def recipe_text(folder: Path, documents: Documents, sequences: int, steps: int, arguments: argparse.Namespace) -> str:
    return f"""\
schema_version: 1
version: 1
output_dir: {folder}
model: {{name_or_path: {folder.parent}/model, attn_implementation: varlen, kernels: liger}}
data: {{train: {documents.rows}, max_length: {pack_length(arguments)}, packing: true}}
train:
  global_batch_size: {sequences}
  micro_batch_size: 1
  max_steps: {steps}
  learning_rate: 1e-6
  lr_scheduler_type: constant
  gradient_checkpointing: false
  parallel: auto
  logging_steps: 1
  save_steps: 1000000
  resume: never
"""


def measure(
    wanted: list[str], documents: Documents, reference: float, arguments: argparse.Namespace, folder: Path
) -> dict[str, list[dict[str, Any]]]:
    """Run the arms in turn; an arm whose first loss is not the documents' own ends everything."""
    results: dict[str, list[dict[str, Any]]] = {}
    shipped = arguments.steps_as == "shipped"
    for number in range(arguments.rounds):
        for arm in turned(wanted, number):
            target = folder / f"{number}-{list(ARMS).index(arm)}"
            try:
                if shipped and number == 0:
                    check(arm, run(arm, documents, True, 1, Path(f"{target}-check"), arguments), reference)
                found = run(arm, documents, not shipped, arguments.steps, target, arguments)
            except SystemExit as error:
                if "out of memory" not in str(error):
                    raise
                print(f"{arm}: does not fit", flush=True)
                continue
            if not shipped:
                check(arm, found, reference)
            results.setdefault(arm, []).append(found)
    return results


def check(arm: str, found: dict[str, Any], reference: float) -> None:
    """Refuse to go on where the first step's loss, over all documents, is another than the documents' own."""
    first = found["losses"][0]
    # bf16 rounds each logit to three digits; over tens of thousands of tokens the mean is better than that.
    if not abs(first - reference) <= 5e-3:
        print(
            f"{arm}: the loss of the first step is {first:.5f}, one document at a time {reference:.5f}: no speed is shown."
        )
        raise SystemExit(1)
    print(f"{arm}: same work, first loss {first:.5f}", flush=True)


def flops(documents: Documents, size: str) -> float:
    """Of one pass forward and backward over all documents."""
    hidden, intermediate, layers, heads, kv_heads, vocabulary, _ = SHAPES[size]
    head_dim = hidden // heads
    layer = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim + 3 * hidden * intermediate
    attention = 6 * layers * heads * head_dim * float((documents.lengths.astype(float) ** 2).sum())
    return (
        6.0 * layers * layer * int(documents.lengths.sum()) + 6.0 * hidden * vocabulary * documents.labelled + attention
    )


def report(
    results: dict[str, list[dict[str, Any]]], documents: Documents, arguments: argparse.Namespace, peak: float | None
) -> None:
    """Print real tokens a second, MFU and memory of each arm, and every ratio to the last."""
    tokens = int(documents.lengths.sum())
    rates: dict[str, list[float]] = {}
    for arm, rounds in results.items():
        for found in rounds:
            seconds, steps = found["seconds"], len(found["seconds"]) - 2
            # With equal steps each holds all documents; else what was trained is counted by the trainer.
            trained = tokens * steps if arguments.steps_as == "equal" else found["tokens"][-1] - found["tokens"][1]
            rates.setdefault(arm, []).append(trained / (seconds[-1] - seconds[1]))
    whole = {arm: values for arm, values in rates.items() if len(values) == arguments.rounds}
    if not whole:
        return
    show(
        f"{arguments.size}, {arguments.lengths}, steps {arguments.steps_as}: real tokens a second",
        whole,
        list(whole)[-1],
        "/s",
    )
    for arm, values in whole.items():
        used = median(values) * flops(documents, arguments.size) / tokens
        share = f"{used / peak:.1%}" if peak else "not known"
        memory = max(found["peak"] for found in results[arm])
        print(f"{arm:40} MFU {share}, {used / 1e12:.0f} TFLOP/s, peak memory {memory:.1f} GiB")


if __name__ == "__main__":
    main()
