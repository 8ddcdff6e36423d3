"""What is wrong with a user's task file, as far as it shows without running anything in it and without its documents."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eval.tasks.data_files import files_missing, splits_missing, splits_of
from eval.tasks.index import LOCAL_FORMATS
from eval.tasks.metrics import OF_EVALUATE, lm_eval_metrics, metrics_wrong
from sft.errors import did_you_mean

OUTPUT_TYPES = ("loglikelihood", "multiple_choice", "loglikelihood_rolling", "generate_until")

# The fields of lm_eval's TaskConfig; the others are read by what loads the file.
KEYS = frozenset(
    "task task_alias tag custom_dataset dataset_path dataset_name dataset_kwargs training_split validation_split test_split fewshot_split "
    "process_docs doc_to_text doc_to_target doc_to_image doc_to_audio unsafe_code doc_to_choice process_results use_prompt description "
    "target_delimiter fewshot_delimiter fewshot_config num_fewshot metric_list output_type generation_kwargs repeats filter_list "
    "should_decontaminate doc_to_decontamination_query gen_prefix metadata".split()
)
ALSO_READ = frozenset({"group", "include"})


class Function(str):
    """The name behind `!function`: module.function, which lm_eval imports from beside the file."""

    __slots__ = ()


def _values(value: object) -> Iterator[object]:
    """A value with all that is in it; an anchor may have put it into itself."""
    left, seen = [value], set[int]()
    while left:
        value = left.pop()
        yield value
        if isinstance(value, (dict, list)) and id(value) not in seen:
            seen.add(id(value))
            left += value.values() if isinstance(value, dict) else value


def functions_of(config: dict[str, Any]) -> list[str]:
    """The functions that a file names, each once."""
    return list(dict.fromkeys(value for value in _values(config) if isinstance(value, Function)))


def parts_of(config: dict[str, Any]) -> list[dict[str, Any]]:
    """A file's dictionaries: a group may define tasks, and change those of others, in its own list."""
    return [value for value in _values(config) if isinstance(value, dict)]


def code_of(config: dict[str, Any]) -> list[str]:
    """What a task runs of others' code, in the words of its file: functions, and metrics that are loaded by a name on the hub."""
    known, loaded = lm_eval_metrics() | OF_EVALUATE, list[str]()
    for part in parts_of(config):
        listed = part.get("metric_list")
        # With `process_results` the names are only those of what it returns.
        if isinstance(listed, list) and part.get("process_results") is None:
            named = [entry.get("metric") for entry in listed if isinstance(entry, dict)]
            loaded += [name for name in named if type(name) is str and name not in known]
    return [*(f"!function {name}" for name in functions_of(config)), *(f"metric: {name}" for name in loaded)]


def functions_missing(path: Path, config: dict[str, Any]) -> list[str]:
    """The functions of one file that are not in the Python file beside it. A module that is not there may be installed.

    Args:
        path: The file that names them: of a file that is included, the included one.
        config: What it says, without what it includes.
    """
    problems = []
    for name in functions_of(config):
        module, dot, function = name.rpartition(".")
        file = path.parent / f"{module.replace('.', '/')}.py"
        if not dot:
            problems.append(f"{path}: `!function {name}` names no module. Write module.function.")
        elif file.is_file() and (wrong := _not_in(file, function)):
            problems.append(f"{path}: `!function {name}`: {wrong}")
        elif not file.is_file() and module == "utils":
            problems.append(f"{path}: `!function {name}`: there is no {file}.")
    return problems


def _not_in(file: Path, function: str) -> str | None:
    """What is wrong with a function's file, read and not run."""
    try:
        body = ast.parse(file.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError) as error:
        return f"{file} cannot be read as Python: {error}."
    # Also what is in a `try` or an `if`; a name inside a function, which is none of the module's, is left to lm_eval.
    nodes = [inside for node in body for inside in ast.walk(node)]
    aliases = [alias for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names]
    if any(alias.name == "*" for alias in aliases):
        return None
    names = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    names |= {alias.asname or alias.name for alias in aliases}
    names |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return None if function in names else f"{file} has no `{function}`{did_you_mean(function, sorted(names), '.')}"


def datasets_of(config: dict[str, Any]) -> tuple[str, ...]:
    """The datasets on the hub that a task names."""
    path = config.get("dataset_path")
    if not isinstance(path, str) or isinstance(path, Function) or path in LOCAL_FORMATS:
        return ()
    return () if path.startswith((".", "/", "~")) or Path(path).exists() else (path,)


def problems_of(path: Path, config: dict[str, Any]) -> list[str]:
    """What is wrong with a task. A group, or a task that a Python class defines, is left to lm_eval."""
    if "group" in config or "class" in config:
        return []
    problems = [
        f"`{key}` is no key of a task{did_you_mean(str(key), sorted(KEYS), '.')}"
        for key in config
        if key not in KEYS | ALSO_READ
    ]
    kind = config.get("output_type", "generate_until")
    if kind not in OUTPUT_TYPES:
        problems.append(f"`output_type: {kind}` is none of {', '.join(OUTPUT_TYPES)}.")
    if not (config.get("dataset_path") or config.get("custom_dataset")):
        problems.append("it has no `dataset_path:` with its documents.")
    if not (config.get("test_split") or config.get("validation_split")):
        problems.append("it has neither `test_split:` nor `validation_split:`, so there is nothing to measure.")
    asks = config.get("use_prompt") or config.get("doc_to_text") is not None
    if kind != "loglikelihood_rolling" and not asks:
        problems.append("it has no `doc_to_text:` with the prompt.")
    if kind == "multiple_choice" and not (config.get("doc_to_choice") or config.get("use_prompt")):
        problems.append("`output_type: multiple_choice` needs `doc_to_choice:`.")
    splits = splits_of(config)
    problems += [*files_missing(splits), *splits_missing(config, splits), *metrics_wrong(path, config)]
    given = config.get("dataset_path")
    if isinstance(given, str) and given.startswith((".", "/", "~")) and not Path(given).expanduser().exists():
        problems.append(f"there is no `dataset_path: {given}`.")
    return [f"{path}: {problem}" for problem in problems]
