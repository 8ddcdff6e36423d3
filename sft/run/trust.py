"""Decides what of a run's folder can be trusted, which somebody else may have made or edited.

A recipe named on the command line is the user's choice, with everything it says. A run's folder brings its own recipe: what runs code
counts only if this command line says so too. run.json holds checksums of final/ and of the base model; a run without them, written by an
older version, is not checked.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shlex import join
from typing import Any

from sft.errors import RunError
from sft.files import checksum
from sft.run.directory import Run

OWN_RUN = "SFT_OWN_RUN"
"""Environment variable: the run that this job opened, for the processes it starts and for its launcher's restarts."""
TRUST = "model.trust_remote_code=true"  # how a command line allows the code that a run's model ships
ACCEPT = "--accept-edits"  # how a command line says, once, that final/ was edited on purpose


def is_own(run: Path) -> bool:
    """Whether this command has trained the run itself."""
    return os.environ.get(OWN_RUN) == str(run.resolve())


def check_model_code(run: Path, trust_remote_code: bool, allowed: bool, flag: str = TRUST) -> None:
    """Refuse to run the Python files of a run's model. Raises RunError if only the run's recipe allows it."""
    if trust_remote_code and not allowed and not is_own(run):
        raise RunError(
            f"{run}: its recipe has model.trust_remote_code=true, which runs the Python files of its model. A run's folder may come from "
            f"somebody else: read those files, and add {flag} to this command."
        )


def check_consents(run: Path, consents: Mapping[str, str], overrides: Iterable[str]) -> None:
    """Refuse to start a run from its folder if only the folder allows code to run (RunError).

    `consents`: each key of its recipe that does, and the value that a command repeats.
    """
    given = {word.partition("=")[0] for word in overrides}
    missing = [key for key in consents if key not in given]
    if missing and not is_own(run):
        raise RunError(
            f"{run}: its recipe allows code to run ({', '.join(missing)}). A run's folder may come from somebody else: read what would "
            f"run, and add {join([f'{key}={consents[key]}' for key in missing])} to this command."
        )


Checksums = dict[str, dict[str, Any]]
"""Size and checksum (xxh3_128) of each file, by its path in the folder."""

# What libraries load from a model's folder; a README beside it is the user's to edit.
_FINAL_FILES = tuple(f"**/*{suffix}" for suffix in (".safetensors", ".bin", ".json", ".jinja", ".model", ".txt", ".py"))
# What a base model's answers depend on; the tokenizer is the tuned model's.
_BASE_FILES = (
    *("config.json", "adapter_config.json", "*.py"),
    *("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json"),
)


def base_checksums(folder: Path) -> Checksums | None:
    """Checksums of a local model's weights and configuration; None for a hub model, which its commit identifies."""
    return _checksums(folder, _BASE_FILES) if folder.is_dir() else None


def final_checksums(folder: Path) -> Checksums:
    """Checksums of everything that libraries load of a saved model."""
    return _checksums(folder, _FINAL_FILES)


def check_final(run: Run, accept: bool) -> None:
    """Refuse a final/ that is not what the training wrote (RunError). Call it on one rank: it reads every byte.

    Args:
        run: A finished run.
        accept: Keep the edits: their checksums replace the recorded ones, and the report names the files.
    """
    found = final_checksums(run.final)
    changes = _differences(run.record.get("final_files"), found)
    if not changes:
        return
    if not accept:
        raise RunError(
            f"{run.final} is not what the training wrote: {changes}. Put the files back, or use a checkpoint. If you edited "
            f"them on purpose, add {ACCEPT} to this command once."
        )
    run.update(final_files=found)
    day = time.strftime("%Y-%m-%d")
    run.warn("final", f"final/ was edited after the training, which was accepted on {day}: {changes}.")


def base_changes(run: Run) -> str | None:
    """How the base model differs from the one the training started from; None if no difference is known."""
    base = run.record.get("base_model") or {}
    folder = Path(str(base.get("path")))
    changes = _differences(base.get("files"), base_checksums(folder))
    return f"{folder} has changed since {run.path} was started from it: {changes}" if changes else None


def _differences(recorded: Checksums | None, found: Checksums | None) -> str:
    """What has changed, in words; empty if nothing has, or if there is nothing to compare."""
    if recorded is None or found is None:
        return ""
    states = {
        name: "is missing" if name not in found else "was added" if name not in recorded else "has changed"
        for name in sorted({*recorded, *found})
        if recorded.get(name) != found.get(name)
    }
    return "; ".join(f"{name} {state}" for name, state in states.items())


def _checksums(folder: Path, patterns: Iterable[str]) -> Checksums:
    paths = sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})
    with ThreadPoolExecutor(4) as pool:
        found = zip(paths, pool.map(checksum, paths), strict=True)
        return {path.relative_to(folder).as_posix(): {"bytes": size, "xxh3_128": code} for path, (size, code) in found}
