"""How long does it take to get rows ready for training: TRL's own preparation, or ours?

    python benchmarks/preparation.py ../shared/data/sft/t0_short.jsonl ../shared/data/tokenizers/qwen3

Both sides read the same file of prompts and completions, render it through the same chat template, tokenize, mask and pack it,
each in a process of its own on all cores that it was given. First their tokens and labels are compared, row by row: the same but
for the line break behind the end-of-turn token, which TRL trains (tests/slow/test_parity_with_trl.py). Timed is what each does
between an open tokenizer and sequences on disk, without imports; the whole commands are timed beside.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
from machine import described, model_folder

ROOT = Path(__file__).resolve().parent.parent

TRL = """
import sys, time, warnings
warnings.filterwarnings("ignore")
import datasets
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from trl import SFTConfig, SFTTrainer
datasets.disable_progress_bars()
rows, model, folder, processes, max_length = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(model)
sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=8)
network = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **sizes))
started = time.monotonic()
read = datasets.Dataset.from_json(rows, cache_dir=folder + "/cache").select_columns(["prompt", "completion"])
arguments = SFTConfig(output_dir=folder, use_cpu=True, bf16=False, max_length=int(max_length), packing=True, shuffle_dataset=False,
    dataset_num_proc=int(processes) or None, report_to="none")
trainer = SFTTrainer(network, arguments, train_dataset=read, processing_class=tokenizer)
seconds = time.monotonic() - started
packs = trainer.train_dataset
used = sum(map(sum, packs["seq_lengths"]))
print(seconds, len(packs), used / (len(packs) * int(max_length)))
packs.save_to_disk(folder + "/packs")
"""


def main() -> None:
    arguments = read_arguments()
    with tempfile.TemporaryDirectory(dir=arguments.work) as name:
        folder = Path(name)
        model = model_folder(arguments.tokenizer, folder / "model")
        # As conversations, so that both sides use the chat template; without the end tokens of another model in the answers.
        conversations, plain = write_rows(arguments.rows, folder)
        targets: dict[str, Path] = {}
        timings: dict[str, list[tuple[float, float]]] = {}
        for repeat in range(arguments.repeats):
            for side, processes in (("TRL, one process", 0), ("TRL, a process a core", cores()), ("ours", None)):
                target = folder / f"{side}-{repeat}".replace(" ", "-").replace(",", "")
                if processes is None:
                    result = run_ours(plain, model, target, arguments.max_length)
                else:
                    result = run_trl(conversations, model, target, processes, arguments.max_length)
                timings.setdefault(side, []).append(result[:2])
                print(
                    f"{side}: {result[0]:.2f} s, {result[2]} packs, {result[3]:.4f} full; whole command {result[1]:.2f} s",
                    flush=True,
                )
                if repeat == 0:
                    targets[side] = target
        documents, differing = compare(targets["ours"], targets["TRL, one process"])
        print(
            f"\nSame work: {documents} documents with the same tokens and labels but for {differing} trained line breaks of TRL's."
        )
        print(
            f"{'median of ' + str(arguments.repeats):24} {'preparation':>12} {'of ours':>8} {'whole command':>14} {'of ours':>8}"
        )
        ours = timings["ours"]
        for side, runs in timings.items():
            # Run by run: the three sides of a round meet the machine in the same mood.
            ratios = [median(run[part] / own[part] for run, own in zip(runs, ours, strict=True)) for part in (0, 1)]
            seconds = [median(run[part] for run in runs) for part in (0, 1)]
            print(f"{side:24} {seconds[0]:>10.2f} s {ratios[0]:>7.2f}x {seconds[1]:>12.2f} s {ratios[1]:>7.2f}x")
        print(described(["trl", "transformers", "tokenizers", "datasets"]))


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help=".jsonl with prompt and completion")
    parser.add_argument("tokenizer", type=Path, help="folder")
    parser.add_argument("--max-length", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--work", type=Path, help="where temporary files go")
    return parser.parse_args()


def cores() -> int:
    import os

    return len(os.sched_getaffinity(0))


def write_rows(source: Path, folder: Path) -> tuple[Path, Path]:
    conversations, plain = folder / "conversations.jsonl", folder / "plain.jsonl"
    with source.open() as rows, conversations.open("w") as turns, plain.open("w") as texts:
        for line in rows:
            row = json.loads(line)
            prompt, completion = row["prompt"], row["completion"].removesuffix("<|endoftext|>")
            if completion.strip():
                asked, answered = {"role": "user", "content": prompt}, {"role": "assistant", "content": completion}
                turns.write(json.dumps({"prompt": [asked], "completion": [answered]}) + "\n")
                texts.write(json.dumps({"prompt": prompt, "completion": completion}) + "\n")
    return conversations, plain


def timed(command: list[str]) -> tuple[str, float]:
    started = time.monotonic()
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - started
    if ended.returncode:
        raise SystemExit(ended.stderr[-3000:])
    return ended.stdout, seconds


def run_trl(rows: Path, model: Path, folder: Path, processes: int, max_length: int) -> tuple[float, float, int, float]:
    folder.mkdir()
    output, whole = timed([sys.executable, "-c", TRL, *map(str, (rows, model, folder, processes, max_length))])
    seconds, packs, fill = output.split()[-3:]
    return float(seconds), whole, int(packs), float(fill)


def run_ours(rows: Path, model: Path, folder: Path, max_length: int) -> tuple[float, float, int, float]:
    folder.mkdir()
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"schema_version: 1\nversion: 1\noutput_dir: {folder}\nmodel: {{name_or_path: {model}}}\n"
        f"data: {{train: {rows}, max_length: {max_length}, special_tokens: keep}}\ntrain: {{global_batch_size: 1}}\n"
    )
    _, whole = timed([sys.executable, "-m", "sft.launch.prepare", str(recipe)])
    summary = json.loads(entry(folder).joinpath("prepared.json").read_text())
    packing = summary["ledger"]["packing"]
    return summary["seconds"], whole, packing["packs"], packing["fill"]


def entry(folder: Path) -> Path:
    return next(path.parent for path in folder.glob(".prepared/*/prepared.json"))


def compare(ours: Path, theirs: Path) -> tuple[int, int]:
    """All documents of both, whatever the order: how many, and how many labels TRL has besides."""
    sys.path.insert(0, str(ROOT))
    from datasets import load_from_disk

    from sft.data.store import DocumentStore

    store = DocumentStore.open(entry(ours))
    mine: dict[bytes, list[bytes]] = {}
    for index in range(len(store.documents)):
        ids, trained = store.document(index)
        mine.setdefault(ids.astype(np.int64).tobytes(), []).append(trained.tobytes())
    documents = differing = 0
    for pack in load_from_disk(str(theirs / "packs")):
        start = 0
        for length in pack["seq_lengths"]:
            ids = np.array(pack["input_ids"][start : start + length])
            trained = np.array(pack["labels"][start : start + length]) != -100
            masks = mine[ids.tobytes()]
            mask = np.frombuffer(masks.pop(), np.uint8).astype(bool)
            besides = np.flatnonzero(trained[1:] != mask[1:]) + 1
            assert besides.tolist() in ([], [length - 1]), "TRL's labels differ elsewhere than in the last line break"
            differing += len(besides)
            documents += 1
            start += length
    assert documents == len(store.documents), "one side has more documents"
    return documents, differing


if __name__ == "__main__":
    main()
