"""The folder that is handed over: made beside its place, checked, and given its name when it is complete."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft.credentials import secrets_in
from sft.data.tokenizer import load_tokenizer as settled_tokenizer
from sft.errors import ExportError
from sft.export.source import Exported, has_tokenizer, read_config
from sft.files import disk_was_full, in_words, remove
from sft.recipe.schema import Recipe

_TEXT = (".json", ".md", ".jinja", ".sh", ".txt", ".yaml", ".py", "")
_LARGEST_TEXT = 4 << 20
"""Bytes; tokenizer.json of a large vocabulary is larger, and holds nothing of the machine."""


@dataclass(frozen=True)
class Made:
    """A complete folder."""

    folder: Path
    checked: Any
    """From sft/export/check.py."""


def check_output(output: Path, run: Path) -> None:
    """Refuse a place that cannot be the folder, before anything is computed.

    Raises:
        ExportError: It exists, lies in the run, or cannot be written.
    """
    if output.exists() or output.is_symlink():
        raise ExportError(
            f"--output {output} exists already, and is not written over. Remove it, or name another folder."
        )
    resolved = output.resolve()
    if resolved.is_relative_to(run.resolve()):
        raise ExportError(
            f"--output {output} is inside the run {run}, which holds what the run has written and nothing else. Name a folder outside."
        )
    parent = resolved.parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ExportError(
            f"--output {output}: {parent} {'cannot be written' if parent.is_dir() else 'is not a folder'}."
        )


def check_room(parent: Path, needed: int) -> None:
    """Refuse what does not fit.

    Args:
        parent: Where the folder goes; maybe not there yet.
        needed: Bytes.

    Raises:
        ExportError: The disk has less.
    """
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise ExportError(
            f"The export takes {in_words(needed)}, and {parent} has {in_words(free)} free. Free some space, or name "
            f"another disk with --output."
        )


def make_folder(
    source: Exported, output: Path, finish: Callable[[Path, Any], None], link: bool = False, copies: int = 1
) -> Made:
    """Make a complete folder of a model, whose logits have been compared.

    Args:
        source: What is handed over.
        output: The folder's place; not there yet.
        finish: Writes what the target needs beside the model; gets the folder and the tokenizer.
        link: See write_weights.
        copies: How often the weights lie on the disk until the folder is complete.

    Raises:
        UserError: It cannot be made, or is another model than was trained. Nothing is left behind.
    """
    from sft.export.weights import bytes_needed

    check_room(output.parent, 0 if link else copies * bytes_needed(source))
    output.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    beside.chmod(0o755)
    try:
        checked = _fill(source, beside, finish, link)
        beside.rename(output)
    except BaseException as error:
        remove(beside)
        if disk_was_full(error):
            raise ExportError(
                f"The disk of {output.parent} is full; nothing was exported. Free some space, or name another with --output."
            ) from None
        raise
    return Made(output, checked)


def _fill(source: Exported, folder: Path, finish: Callable[[Path, Any], None], link: bool) -> Any:
    from transformers.utils import logging

    from sft.checkpoint.final import complete_config
    from sft.export.check import arithmetic_for, compare, probe_rows
    from sft.export.weights import saved_format, write_weights

    logging.disable_progress_bar()
    tokenizer = load_tokenizer(source)
    rows = probe_rows(tokenizer, source.recipe.model.new_tokens)
    reference = write_weights(source, tokenizer, rows, folder, link)
    complete_config(folder)
    dtype = arithmetic_for(*saved_format(source))
    checked = compare(folder, rows, reference, dtype, source.base.trust_remote_code)
    finish(folder, tokenizer)
    check_private(source, folder)
    for path in folder.iterdir():  # some libraries write weights that only their owner may read
        if path.stat().st_nlink == 1:  # a link is the run's own file, and stays as it is
            path.chmod(0o755 if path.suffix == ".sh" else 0o644)
    return checked


def load_tokenizer(source: Exported) -> Any:
    """The tokenizer of what is handed over.

    Raises:
        ExportError: It cannot be loaded, or has tokens that the model has no row for.
    """
    from transformers import AutoTokenizer

    folder = source.folder if has_tokenizer(source.folder) else source.run.final
    if not has_tokenizer(folder):  # a checkpoint in shares, of a run that is not finished
        return settled_tokenizer(_with_base(source))
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=source.base.trust_remote_code)
    except Exception as error:  # a damaged tokenizer.json comes as the Rust library's bare Exception
        raise ExportError(f"The tokenizer in {source.folder} cannot be loaded: {str(error).splitlines()[0]}") from None
    rows = read_config(source.folder, "config.json").get("vocab_size")
    tokens = max(tokenizer.get_vocab().values()) + 1
    if isinstance(rows, int) and tokens > rows:
        raise ExportError(
            f"The tokenizer in {source.folder} has {tokens} tokens, and the model {rows} rows: they do not belong together."
        )
    return tokenizer


def _with_base(source: Exported) -> Recipe:
    """The recipe with its model where it was found when the training began."""
    return source.recipe.model_copy(update={"model": source.base.model_copy(update={"name_or_path": source.base_path})})


def check_private(source: Exported, folder: Path) -> None:
    """Refuse to hand over a place of this machine, or a key.

    Raises:
        ExportError: A file holds one.
    """
    places = {
        str(source.run.path),
        str(source.run.path.parent),
        str(Path.cwd()),
        str(source.run.record.get("working_directory")),
    }
    places |= {source.base_path} if source.base_path.startswith("/") else set()
    for path in sorted(folder.iterdir()):
        if path.suffix not in _TEXT or path.stat().st_size > _LARGEST_TEXT:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        found = [place for place in places if len(place) > 5 and place in text]
        if found:
            raise ExportError(
                f"{path.name} would tell others of a place on this machine, {found[0]}. Nothing was exported. Take it "
                f"out of the file of that "
                f"name in {source.folder}."
            )
        told = secrets_in(text, [])
        if told:
            raise ExportError(f"{path.name} holds what looks like a key ({told[0]}). Nothing was exported.")
