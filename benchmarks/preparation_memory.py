"""Does the memory that preparation takes grow with the number of rows?

    python benchmarks/preparation_memory.py ../shared/data/sft/t0_short.jsonl ../shared/data/tokenizers/qwen3 --rows 25000 1000000

Repeats the file's rows up to each number, prepares them, and samples the anonymous memory (what is not a file of the disk's
cache) of the process and all its workers together every tenth of a second.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import described, model_folder

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help=".jsonl")
    parser.add_argument("tokenizer", type=Path, help="folder")
    parser.add_argument("--rows", type=int, nargs="+", default=[25_000, 1_000_000])
    parser.add_argument("--work", type=Path, help="where temporary files go")
    arguments = parser.parse_args()
    print(
        f"{'rows':>10} {'peak of all processes':>22} {'largest process':>16} {'seconds':>8} {'rows/s':>8} {'fill':>7}"
    )
    for rows in arguments.rows:
        with tempfile.TemporaryDirectory(dir=arguments.work) as name:
            together, largest, summary = measure(arguments.source, arguments.tokenizer, rows, Path(name))
        seconds, packing = summary["seconds"], summary["ledger"]["packing"]
        assert summary["ledger"]["total"]["rows"]["in"] == rows
        print(
            f"{rows:>10,} {together / 1024:>18,.0f} MiB {largest / 1024:>12,.0f} MiB {seconds:>8.1f} {rows / seconds:>8,.0f} "
            f"{packing['fill']:>7.4f}",
            flush=True,
        )
    print(described(["transformers", "tokenizers", "numpy"]))


def measure(source: Path, tokenizer: Path, rows: int, folder: Path) -> tuple[int, int, dict[str, object]]:
    """Peaks in KiB of all processes together and of the largest, and prepared.json."""
    with source.open() as lines, (folder / "rows.jsonl").open("w") as target:
        target.writelines(itertools.islice(itertools.cycle(lines.readlines()), rows))
    model = model_folder(tokenizer, folder / "model")
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"schema_version: 1\nversion: 1\noutput_dir: {folder}\nmodel: {{name_or_path: {model}}}\n"
        f"data: {{train: {folder / 'rows.jsonl'}, max_length: 2048}}\ntrain: {{global_batch_size: 1}}\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "sft.launch.prepare", str(recipe)], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    together = largest = 0
    while process.poll() is None:
        sizes = [anonymous(pid) for pid in family(process.pid)]
        together, largest = max(together, sum(sizes)), max([largest, *sizes])
        time.sleep(0.1)
    if process.returncode:
        assert process.stderr is not None
        raise SystemExit(process.stderr.read()[-2000:])
    entry = next(folder.glob(".prepared/*/prepared.json"))
    return together, largest, json.loads(entry.read_text())


def family(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(member for child in children for member in family(int(child)))]


def anonymous(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")), 0)


if __name__ == "__main__":
    main()
