"""Reads the user's task files as text, before lm_eval does: which tasks they define, and what code they run.

lm_eval imports a task's code as it loads it, so consent comes first. Nothing in a file runs here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from eval.sandbox.metric import CODE_METRIC
from eval.tasks.index import members_of, reached
from sft.errors import EvaluationError, did_you_mean
from sft.recipe.load import find_file

# The metrics of the `evaluate` library itself; any other name there is a program of somebody's.
EVALUATE_METRICS = frozenset(
    "accuracy bertscore bleu bleurt brier_score cer character charcut_mt chrf code_eval comet competition_math confusion_matrix coval cuad "
    "exact_match f1 frugalscore glue google_bleu indic_glue mae mahalanobis mape mase matthews_correlation mauve mean_iou meteor mse "
    "nist_mt pearsonr perplexity poseval precision r_squared recall rl_reliability roc_auc rouge sacrebleu sari seqeval smape spearmanr "
    "squad squad_v2 super_glue ter trec_eval wer wiki_split xnli xtreme_s honest label_distribution regard text_duplicates toxicity "
    "word_count word_length mcnemar wilcoxon".split()
)


@dataclass(frozen=True)
class Task:
    """A task, group or tag to measure."""

    name: str
    """As results call it."""

    given: str
    """What lm_eval gets: the name, or the path of the task's file."""

    unsafe: bool = False
    """Whether it runs what the model writes."""

    code: tuple[str, ...] = ()
    """What it runs of its author's code, in the words of the file."""

    members: list[str] = field(default_factory=list)
    """The names in it, where it is a group of the user's."""


class _Function(str):
    """The name behind `!function`."""

    __slots__ = ()


class _TextLoader(yaml.SafeLoader):
    """A task's YAML with `!function` left as text."""


_TextLoader.add_constructor("!function", lambda _, node: _Function(node.value))


def _values(value: object) -> Iterator[object]:
    """A value and everything in it."""
    yield value
    if isinstance(value, (dict, list)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _values(one)


def _metrics(config: dict[str, Any]) -> list[str]:
    listed = config.get("metric_list")
    entries = listed if isinstance(listed, list) else []
    return [entry["metric"] for entry in entries if isinstance(entry, dict) and type(entry.get("metric")) is str]


def _code_of(config: dict[str, Any], known: frozenset[str]) -> list[str]:
    """The functions that a file names, and the metrics that `evaluate` would download as programs."""
    functions = [f"!function {value}" for value in _values(config) if isinstance(value, _Function)]
    known |= EVALUATE_METRICS
    loaded = [
        f"metric: {name}{did_you_mean(name, sorted(known))}"
        for part in _values(config)  # a group may define tasks in its own list, and change others
        if isinstance(part, dict) and part.get("process_results") is None  # with it, it names what that returns
        for name in _metrics(part)
        if name not in known
    ]
    return [*functions, *loaded]


class LocalTasks:
    """The tasks that the user brings; `metrics` are those that lm_eval has, which are no code of others."""

    def __init__(self, include_path: str | None, metrics: frozenset[str]) -> None:
        self.metrics = metrics
        self.by_name: dict[str, list[Task]] = {}
        self.folders: list[Path] = []
        """Where lm_eval looks for groups."""

        self.unreadable: list[str] = []
        if include_path is None:
            return
        folder = find_file(include_path).resolve()
        if not folder.is_dir():
            raise EvaluationError(f"eval.include_path={include_path} is no folder. Name the folder of your task files.")
        for path in sorted(folder.rglob("*.yaml")):
            try:
                self.read(path, folder)
            except EvaluationError as error:
                self.unreadable.append(str(error))  # shown only where a task is missing: the folder may hold other YAML

    def read(self, path: Path, folder: Path) -> Task:
        """Read one file, which must define a task."""
        code: list[str] = []
        config = self._read_yaml(path, code)
        name, group = config.get("group") or config.get("task"), "group" in config
        if not isinstance(name, str):
            raise EvaluationError(f"{path} is not a valid task file: it has no `task:` with the task's name.")
        if group and folder not in self.folders:
            self.folders.append(folder)
        file = Task(
            name,
            # lm_eval takes a task by its path; a group only by name, from a folder.
            name if group else str(path),
            bool(config.get("unsafe_code")) or CODE_METRIC in _metrics(config),
            tuple(dict.fromkeys(code)),
            members_of(config) if group else [],
        )
        self.by_name.setdefault(name, []).append(file)
        return file

    def _read_yaml(self, path: Path, code: list[str], including: tuple[Path, ...] = ()) -> dict[str, Any]:
        """A file with what it includes; adds to the code that it runs."""
        if path in including:
            raise EvaluationError(f"{path} is not a valid task file: it includes itself.")
        try:
            config = yaml.load(path.read_text(encoding="utf-8"), _TextLoader)  # noqa: S506 (made from SafeLoader)
            found = _code_of(config, self.metrics) if isinstance(config, dict) else []
        except (OSError, UnicodeDecodeError) as error:
            raise EvaluationError(f"The task file {path} cannot be read: {error}.") from None
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise EvaluationError(f"{path} is not a valid task file: {error}") from None
        if not isinstance(config, dict):
            raise EvaluationError(f"{path} is not a valid task file: it holds no keys.")
        if not path.is_relative_to(_lm_eval_folder()):  # what is installed is trusted
            code += found
        included = config.pop("include", [])
        merged: dict[str, Any] = {}
        for name in included if isinstance(included, list) else [included]:
            merged |= self._read_yaml((path.parent / str(name)).resolve(), code, (*including, path))
        return merged | config

    def reached(self, file: Task) -> list[Task]:
        """The file and those of the tasks in its group, through groups in groups."""
        inside = {name: found[0].members for name, found in self.by_name.items()}
        names = reached(file.name, inside) - {file.name}
        return [file, *(other for name in sorted(names) for other in self.by_name.get(name, ()))]


def _lm_eval_folder() -> Path:
    spec = find_spec("lm_eval")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent.resolve()
