"""Measure in at most ten minutes what only a GPU can show, and print the table for benchmarks/README.md.

    python benchmarks/gpu.py                              # on one H100 or H200: no network, 8 GB of disk
    python benchmarks/gpu.py --parts model ours profile   # some parts; `bare`, `packed` and `ladder` are longer comparisons
    python benchmarks/gpu.py --table FOLDER [FOLDER ...]  # the table of earlier results; of a part measured twice, the later
    python benchmarks/gpu.py --cpu                        # each part on a tiny model: shows that it runs, and no speed

Each part (gpu_parts.py) is a process of its own with a time limit. Its figures are kept as they come, so a part that is stopped or fails
costs what it has not measured yet, and a lost machine costs one part. The folder holds results.jsonl, a line a part, and log.txt.
Exit status 1: a part failed or was stopped.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
from machine import described

HERE = Path(__file__).resolve().parent
TOTAL = 590.0  # seconds, of all parts
SLOWER = 4  # a CPU that runs the miniatures beside other work
NEEDED = "accelerate datasets deepspeed liger-kernel peft pydantic pytest pytest-timeout torch transformers trl".split()
MACHINE = "machine"
"""The line of results.jsonl that says where the parts after it ran."""


@dataclass(frozen=True)
class Part:
    """What is measured, in at most so many seconds, and what is aimed at on an H200."""

    seconds: float
    title: str
    goal: str = ""


PARTS = {
    "laws": Part(150, "Tests that need a GPU: attention, isolation probe, Liger, engines", "none fails"),
    "kernels": Part(75, "Kernels, forward and backward over a pack of 16,384 tokens"),
    "model": Part(90, "A model of Qwen2.5-3B's shape with random weights"),
    "ours": Part(150, "Our recipe on it, 16,384 tokens a pass", "MFU 55 % without checkpointing"),
    "article": Part(
        120, "An article's settings: padding, 11 a batch, checkpointing, Liger, ZeRO-2", "ours at least 4x"
    ),
    "memory": Part(150, "Peak memory", "planned within 10 %"),
    "tuning": Part(120, "Auto-tuning"),
    "profile": Part(75, "Profile of steps of one pack"),
    "bare": Part(300, "`trl sft` by default: padding, 8 documents a batch, checkpointing, fp32 weights"),
    "packed": Part(300, "TRL's packing with sdpa, 16,384 tokens a pack"),
    "ladder": Part(500, "From the article's settings to ours, one change at a time"),
}
DEFAULT = list(PARTS)[:8]
FIGURES = {
    "does_not_fit": "does not fit",
    "tokens_per_second": "{:,.0f} tokens/s",
    "mfu": "MFU {:.1%}",
    "milliseconds": "{:,.2f} ms",
    "ratio": "{:.2f}x",
    "share": "{:.1%}",
    "times": "{:,.0f} times",
    "apart": "agrees to {:.0e}",
    "peak_gib": "{:.1f} GiB",
    "planned_gib": "planned {:.1f} GiB",
    "off": "{:+.0%}",
    "text": "{}",
}
"""How each figure of a row is written; other keys are not shown."""


def main() -> None:
    arguments = read_arguments()
    if arguments.table:
        print(table(arguments.table))
        return
    check_environment(arguments.cpu)
    out = arguments.out or HERE / "results" / f"gpu-{date.today()}"
    out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    adopt_orphans()
    write(
        out,
        {"part": MACHINE, "text": described(["torch", "transformers", "trl", "deepspeed", "liger-kernel"])}
        | ({"gpu": "none: a miniature on the CPU"} if arguments.cpu else gpu()),
    )
    factor = SLOWER if arguments.cpu else 1
    work, begun, failed = Path(tempfile.mkdtemp(prefix="gpu-", dir=arguments.work)), time.monotonic(), []
    try:
        for name in arguments.parts:
            seconds = min(
                arguments.limit.get(name, PARTS[name].seconds * factor), TOTAL * factor + begun - time.monotonic()
            )
            record = run(name, seconds, work, out, arguments.cpu)
            write(out, record)
            print(f"{name}: {record['status']} in {record['seconds']:.0f} s", flush=True)
            failed += [name] if record["status"] != "done" else []
    finally:
        end_descendants()
        shutil.rmtree(work, ignore_errors=True)
        print(f"\n{table([out])}\n\n{time.monotonic() - begun:.0f} s; {out} holds results.jsonl and log.txt.")
    if failed:
        print(f"Failed or stopped: {', '.join(failed)}")
        raise SystemExit(1)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the results; more are added to those that it holds")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=DEFAULT, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--limit", nargs="+", type=limit, default=[], metavar="PART=SECONDS")
    parser.add_argument(
        "--work", type=Path, help="where the model of 6 GB goes, and is removed from; default: the system's"
    )
    parser.add_argument(
        "--table", nargs="+", type=Path, metavar="FOLDER", help="print the table of these folders, and stop"
    )
    parser.add_argument("--cpu", action="store_true", help="miniatures on the CPU")
    arguments = parser.parse_args()
    arguments.limit = dict(arguments.limit)
    return arguments


def limit(word: str) -> tuple[str, float]:
    name, _, seconds = word.partition("=")
    if name not in PARTS:
        raise argparse.ArgumentTypeError(f"{name} is no part")
    return name, float(seconds)


def check_environment(cpu: bool) -> None:
    """End with status 2 where a package or the GPU is missing."""
    missing = []
    for package in NEEDED:
        try:
            version(package)
        except PackageNotFoundError:
            missing.append(package)
    if missing:
        print(
            f"gpu.py needs {', '.join(missing)}: pip install --no-index --find-links FOLDER with wheels, or bash scripts/setup.sh"
        )
        raise SystemExit(2)
    if not cpu and not gpu():
        print("gpu.py needs an NVIDIA GPU, and its driver reports none. --cpu runs a miniature of each part.")
        raise SystemExit(2)


def gpu() -> dict[str, Any]:
    """Name, memory and driver of the first GPU; empty without one."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30
        return {
            "gpu": f"{pynvml.nvmlDeviceGetName(handle)} ({memory:.0f} GiB), driver {pynvml.nvmlSystemGetDriverVersion()}"
        }
    except pynvml.NVMLError:
        return {}


def write(out: Path, record: dict[str, Any]) -> None:
    with (out / "results.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())


def run(name: str, seconds: float, work: Path, out: Path, cpu: bool) -> dict[str, Any]:
    """Run a part to its end or its limit, and end all that it has started; its line of results.jsonl."""
    rows, log, begun = work / f"{name}.jsonl", out / "log.txt", time.monotonic()
    words = [sys.executable, str(HERE / "gpu_parts.py"), name, str(work), *(["--cpu"] if cpu else [])]
    status = "not started: no time was left"
    if seconds >= 1:
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(work / "cache")}
        environment |= {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "WANDB_MODE": "offline"}
        if cpu:  # threads that spin beside other work take most of the time
            environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        with log.open("a") as file:
            print(f"\n== {name}", file=file, flush=True)
            process = subprocess.Popen(
                words, cwd=HERE.parent, env=environment, stdout=file, stderr=file, start_new_session=True
            )
            with suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
        ended = process.poll()
        end_descendants(show_stacks=ended is None)
        with log.open("a") as file:
            for one in sorted(work.glob("run-*.log")):
                file.write(f"\n-- {one.stem}\n{one.read_text()}")
                one.unlink()
        status = (
            f"stopped after {seconds:.0f} s"
            if ended is None
            else "done"
            if ended == 0
            else f"failed with status {ended}"
        )
    found = [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []
    latest = {row["what"]: row for row in found}  # a count that grows is written again
    return {"part": name, "status": status, "seconds": time.monotonic() - begun, "rows": list(latest.values())}


def adopt_orphans() -> None:
    """Become the parent of what is left of a launcher that dies: it starts its workers in sessions of their own."""
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def end_descendants(show_stacks: bool = False) -> None:
    """Kill every process that was started from here, and wait until they are gone.

    Python writes the stacks of its threads on SIGABRT, with PYTHONFAULTHANDLER set.
    """
    for number in range(10):  # one can start another before it is killed; and one that waits for a driver may never end
        children = psutil.Process().children(recursive=True)
        for child in children:
            with suppress(psutil.Error):
                child.send_signal(signal.SIGABRT if show_stacks and number == 0 else signal.SIGKILL)
        if not psutil.wait_procs(children, timeout=2)[1] and not children:
            return


def table(folders: list[Path]) -> str:
    """Markdown: machine and versions, then each part's rows beside its goal."""
    machines, records = [], {}
    for line in [line for folder in folders for line in read_lines(folder / "results.jsonl")]:
        if line["part"] == MACHINE:
            machines.append(f"{line['gpu']}, {line['text']}")
        else:
            records[line["part"]] = line
    lines = [*dict.fromkeys(machines), "", "| | measured | goal on an H200 |", "|---|---|---|"]
    for name, part in PARTS.items():
        record = records.get(name)
        if record is None and name not in DEFAULT:
            continue
        state = "not measured" if record is None else "" if record["status"] == "done" else record["status"]
        lines.append(f"| **{part.title}** | {state} | {part.goal} |")
        for row in record["rows"] if record else ():
            figures = [words.format(row[key]) for key, words in FIGURES.items() if row.get(key) is not None]
            lines.append(f"| {row['what']} | {', '.join(figures)} | |".replace("\n", " "))
    return "\n".join(lines)


def read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


if __name__ == "__main__":
    main()
