"""results.json and samples as lm_eval leaves them, with what eval/harness adds."""

from typing import Any

Rows = list[dict[str, Any]]


def results(scores: dict[str, dict[str, Any]], higher: bool | None = True, **more: Any) -> dict[str, Any]:
    """results.json of a model.

    Args:
        scores: By task, its scores as lm_eval spells them.
        higher: Whether higher is better, for every metric.
        more: Other keys, instead of the usual ones.
    """
    metrics = {key.split(",")[0] for task in scores.values() for key in task if "," in key}
    return {
        "settings_hash": "a",
        "settings": {"limit": 4},
        "results": scores,
        "group_subtasks": {},
        "higher_is_better": {task: dict.fromkeys(metrics, higher) for task in scores},
        "n-samples": {},
        "n-shot": {},
        "versions": {},
        "failed": {},
        "prompts_cut": [],
        "measured_model": {"model": "m", "revision": None},
        "config": {"model_dtype": "torch.float32"},
    } | more


def scored(
    score: object, metric: str = "acc", stderr: object = 0.1, n: int = 100, higher: bool | None = True, **more: Any
) -> dict[str, Any]:
    """results.json of one task, `arc`, with one score."""
    scores = {f"{metric},none": score, f"{metric}_stderr,none": stderr, "sample_len": n}
    return results({"arc": scores}, higher, **more)


def sampled(values: list[Any], metric: str = "acc", filter_name: str = "none") -> Rows:
    """A task's samples, a document for each value."""
    return [
        {"doc_id": n, "filter": filter_name, metric: value, "doc_hash": str(n), "prompt_hash": str(n)}
        for n, value in enumerate(values)
    ]
