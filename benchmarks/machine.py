"""What a measured table says of where it was measured."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


def described(packages: Iterable[str]) -> str:
    """Machine and versions in one line."""
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "?",
    )
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    return f"{len(os.sched_getaffinity(0))} cores of {cpu}, Python {platform.python_version()}, {versions}"


def model_folder(tokenizer: Path, folder: Path) -> Path:
    """A folder that passes for a model's as long as no weights are loaded: the tokenizer's files, and a config."""
    folder.mkdir(parents=True)
    for file in tokenizer.glob("*.json"):
        shutil.copyfile(file, folder / file.name)
    if not (folder / "config.json").exists():
        (folder / "config.json").write_text('{"model_type": "qwen3"}')
    save_file({"none": np.zeros(1, np.float32)}, folder / "model.safetensors")
    return folder
