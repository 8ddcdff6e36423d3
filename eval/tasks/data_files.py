"""The data files of a user's task, and the splits that they make: what is missing shows without reading them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from eval.tasks.index import LOCAL_FORMATS
from sft.errors import did_you_mean


def _files(given: object) -> list[str]:
    return [item for item in (given if isinstance(given, list) else [given]) if isinstance(item, str)]


def splits_of(config: dict[str, Any]) -> dict[str, list[str]]:
    """Per split, its files on this machine, as `datasets` reads `data_files`; empty where they are not known.

    Those of a dataset on the hub, or in a folder, lie in it.

    >>> splits_of({"dataset_path": "json", "dataset_kwargs": {"data_files": "rows.jsonl"}})
    {'train': ['rows.jsonl']}
    """
    keywords = config.get("dataset_kwargs")
    if config.get("dataset_path") not in LOCAL_FORMATS or not isinstance(keywords, dict):
        return {}
    given = keywords.get("data_files")
    if isinstance(given, list) and any(isinstance(item, dict) for item in given):
        given = {str(item.get("split")): item.get("path") for item in given if isinstance(item, dict)}
    splits = given if isinstance(given, dict) else {"train": given} if given else {}
    folder = Path(str(keywords.get("data_dir") or ""))
    return {
        str(split): [file if "://" in file else str(folder / file) for file in _files(files)]
        for split, files in splits.items()
    }


def _found(file: str) -> list[Path]:
    """The files that a path, or a pattern, stands for."""
    path = Path(file).expanduser()
    if path.exists() or "*" not in file:
        return [path] if path.exists() else []
    return list(Path(path.anchor or ".").glob(str(path.relative_to(path.anchor))))


def _texts(values: object) -> Iterator[str]:
    if isinstance(values, dict | list):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _texts(value)
    elif isinstance(values, str):
        yield values


def files_outside(config: dict[str, Any], folders: Sequence[Path]) -> list[str]:
    """What a task reads on this machine that does not lie in one of some folders, links followed.

    Args:
        config: The task.
        folders: Links resolved.
    """
    path = config.get("dataset_path")
    named = [*_texts(config.get("dataset_kwargs")), *(_texts(path) if path not in LOCAL_FORMATS else ())]
    given = dict.fromkeys([*chain(*splits_of(config).values()), *named])
    return [file for file in given if _is_outside(file, folders)]


def _is_outside(file: str, folders: Sequence[Path]) -> bool:
    if "://" in file:  # others may be this machine too: file://, zip://a::/b
        return "::" in file or file.partition("://")[0] not in ("http", "https", "hf")
    return not all(any(path.resolve().is_relative_to(folder) for folder in folders) for path in _found(file))


def files_missing(splits: dict[str, list[str]]) -> Iterator[str]:
    """What is wrong with the files of each split.

    Args:
        splits: From `splits_of`.
    """
    for files in splits.values():
        here = {file: _found(file) for file in files if "://" not in file}
        yield from (f"there is no data file {file}." for file, found in here.items() if not found)
        empty = all(path.is_file() and not path.stat().st_size for found in here.values() for path in found)
        if empty and len(here) == len(files) and all(here.values()):
            yield from (f"the data file {file} is empty (0 bytes)." for file in here)


def _splits_read(config: dict[str, Any]) -> dict[str, object]:
    """The splits that lm_eval reads as it loads a task, by the key that names each."""
    measured = "test_split" if config.get("test_split") else "validation_split"
    few = config.get("fewshot_config")
    examples = few if isinstance(few, dict) else {}
    read = {measured: config.get(measured)}
    if examples.get("split"):
        return read | {"fewshot_config: split": examples["split"]}
    if config.get("fewshot_split"):
        return read | {"fewshot_split": config["fewshot_split"]}
    if examples.get("samples") is not None:
        return read
    keys = [key for key in ("training_split", "validation_split") if config.get(key)]
    return read | {key: config[key] for key in keys[:1]}


def splits_missing(config: dict[str, Any], splits: dict[str, list[str]]) -> Iterator[str]:
    """The splits that a task reads and that its files do not make.

    Args:
        config: The task.
        splits: From `splits_of`.
    """
    if not splits or config.get("custom_dataset") or "split" in config["dataset_kwargs"]:
        return
    made = f"there {'are' if len(splits) > 1 else 'is'} {', '.join(splits)}"
    for key, split in _splits_read(config).items():
        if isinstance(split, str) and split not in splits:
            hint = did_you_mean(split, list(splits), ".")
            yield f"`{key}: {split}` is no split of its data_files ({made}){hint}"
