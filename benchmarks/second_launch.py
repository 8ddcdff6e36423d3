"""How much sooner is the first training step when the data is prepared already?

    python benchmarks/second_launch.py ../shared/data/sft/t0_short.jsonl ../shared/data/tokenizers/qwen3

Starts the same recipe twice on a small model with that tokenizer, and times from the command to the first line of a step. The
loss of the first step must be the same. The part that is no preparation (imports, model, first step) bounds the ratio: it is what
the second start takes.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import described

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help=".jsonl")
    parser.add_argument("tokenizer", type=Path, help="folder")
    parser.add_argument(
        "--rows", type=int, nargs="+", help="repeat the file's rows up to each number; the file as it is unless given"
    )
    arguments = parser.parse_args()
    lines = arguments.source.read_text().splitlines(keepends=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = small_model(arguments.tokenizer, folder / "model")
        for rows in arguments.rows or [len(lines)]:
            data = folder / f"rows-{rows}.jsonl"
            data.write_text("".join(itertools.islice(itertools.cycle(lines), rows)))
            recipe = folder / f"recipe-{rows}.yaml"
            recipe.write_text(
                f"schema_version: 1\nversion: 1\noutput_dir: {folder}/outputs\nmodel: {{name_or_path: {model}}}\n"
                f"data: {{train: {data}, max_length: 512}}\n"
                "train: {global_batch_size: 1, max_steps: 1, resume: never}\n"
            )
            (first, loss), (second, again) = first_step(recipe), first_step(recipe)
            assert loss == again, f"another first step: {loss}, {again}"
            print(
                f"{rows:>9,} rows: first start {first:6.1f} s, second {second:6.1f} s, {first / second:5.2f} x; loss {loss} both",
                flush=True,
            )
    print(described(["torch", "transformers", "trl", "tokenizers"]))


def small_model(tokenizer: Path, folder: Path) -> Path:
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen3Config(
        vocab_size=len(AutoTokenizer.from_pretrained(tokenizer)), num_key_value_heads=2, head_dim=16, **sizes
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    for file in tokenizer.glob("*.json"):
        shutil.copyfile(file, folder / file.name)
    return folder


def first_step(recipe: Path) -> tuple[float, str]:
    """Seconds from the command to the first step, and its loss as printed."""
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "sft.launch", str(recipe)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step "):
            seconds = time.monotonic() - started
            process.stdout.read()
            process.wait()
            return seconds, line.split("loss ")[1].split()[0]
    raise SystemExit(f"no step was taken; exit status {process.wait()}")


if __name__ == "__main__":
    main()
