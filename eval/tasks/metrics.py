"""The metrics that a user's task names: a name that nobody can score shows before anything is generated."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from eval.sandbox.metric import CODE_METRIC
from sft.errors import did_you_mean

# What `evaluate` loads by these names; it has others by the name of a repository.
OF_EVALUATE = frozenset(
    "accuracy bertscore bleu bleurt brier_score cer character charcut_mt chrf code_eval comet competition_math confusion_matrix coval cuad "
    "exact_match f1 frugalscore glue google_bleu indic_glue mae mahalanobis mape mase matthews_correlation mauve mean_iou meteor mse "
    "nist_mt pearsonr perplexity poseval precision r_squared recall rl_reliability roc_auc rouge sacrebleu sari seqeval smape spearmanr "
    "squad squad_v2 super_glue ter trec_eval wer wiki_split xnli xtreme_s honest label_distribution regard text_duplicates toxicity "
    "word_count word_length mcnemar wilcoxon".split()
)


@cache
def lm_eval_folder() -> Path:
    """Where lm_eval is installed."""
    spec = find_spec("lm_eval")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent.resolve()


@cache
def _registering(function: str) -> tuple[ast.Call, ...]:
    """The calls in lm_eval's metrics.py that give a name, read from its source: importing it takes seconds."""
    tree = ast.parse((lm_eval_folder() / "api" / "metrics.py").read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return tuple(call for call in calls if isinstance(call.func, ast.Name) and call.func.id == function)


def _texts(nodes: Iterable[ast.expr]) -> frozenset[str]:
    return frozenset(str(node.value) for node in nodes if isinstance(node, ast.Constant))


def lm_eval_metrics() -> frozenset[str]:
    """The metrics that lm_eval has by name."""
    words = [word for call in _registering("register_metric") for word in call.keywords]
    return _texts(word.value for word in words if word.arg == "metric")


def lm_eval_aggregations() -> frozenset[str]:
    """What lm_eval has by name to make one score of those of the documents."""
    return _texts(value for call in _registering("register_aggregation") for value in call.args)


def _registers_its_own(path: Path) -> bool:
    return any(b"register_metric" in file.read_bytes() for file in path.parent.glob("*.py"))


def _wrong_with(name: str, entry: dict[str, Any], kind: object) -> str | None:
    known = lm_eval_metrics()
    if kind != "generate_until":
        if name in known:
            return None
        return f"`metric: {name}` is none that lm_eval has for `output_type: {kind}`{did_you_mean(name, sorted(known), '.')}"
    if name == CODE_METRIC:
        return (
            f"`metric: {CODE_METRIC}` has no single score that lm_eval could take by name. Write a function that calls it: "
            "docs/evaluation-code.md shows one."
        )
    if name in known | OF_EVALUATE or entry.get("hf_evaluate") is True or "/" in name:
        return None
    hint = did_you_mean(name, sorted(known | OF_EVALUATE))
    return (
        f"`metric: {name}` is no metric of lm_eval{hint} (One of `evaluate` by that name: add `hf_evaluate: true`.)"
        if hint
        else None
    )


def metrics_wrong(path: Path, config: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a task's `metric_list`.

    A name that is like none that is known is left to `evaluate`, which may find it on the hub. Where the task has `process_results`, names
    are what that function gives.

    Args:
        path: The task's file.
        config: What it says.
    """
    listed = config.get("metric_list")
    if listed is None:
        return
    if not isinstance(listed, list) or not all(isinstance(entry, dict) and "metric" in entry for entry in listed):
        yield "`metric_list:` is a list of entries, each with `metric:`."
        return
    if _registers_its_own(path):
        return
    for entry in listed:
        name, together = entry["metric"], entry.get("aggregation", "mean")
        if type(together) is str and together not in (known := lm_eval_aggregations()):
            yield f"`aggregation: {together}` is none of lm_eval{did_you_mean(together, sorted(known), '.')}"
        # A function is text here, of a type of its own; one that adds up may take what a metric gives.
        if config.get("process_results") is None and type(name) is str and type(together) is str:
            wrong = _wrong_with(name, entry, config.get("output_type", "generate_until"))
            if wrong is not None:
                yield wrong
