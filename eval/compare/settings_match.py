"""Refuses to compare models that were measured under different settings, and names what differs."""

from __future__ import annotations

from typing import Any

from eval.compare.results import Results, Samples
from sft.errors import EvaluationError

OF_THE_PROMPTS = frozenset(
    {"apply_chat_template", "chat_template_sha256", "fewshot_as_multiturn", "enable_thinking", "add_bos_token"}
)
"""Settings in which a base model with its own prompts (eval.base_template=own) differs from the tuned one."""


def differing(base: object, tuned: object, where: str = "") -> list[str]:
    """Each setting that differs, with both values.

    >>> differing({"limit": 10, "a": {"b": 1}}, {"limit": 10, "a": {"b": 2}})
    ['  a.b: base 1, tuned 2']
    """
    if isinstance(base, dict) and isinstance(tuned, dict):
        names = dict.fromkeys([*base, *tuned])
        inside = (differing(base.get(name), tuned.get(name), f"{where}.{name}".strip(".")) for name in names)
        return [line for lines in inside for line in lines]
    return [] if base == tuned else [f"  {where}: base {base}, tuned {tuned}"]


def check_settings_match(
    base: Results, tuned: Results, base_samples: Samples, tuned_samples: Samples
) -> dict[str, Any] | None:
    """Refuse a comparison where settings, documents or prompts differ; a base model's own prompts may, where the recipe asks for them.

    Returns:
        How the base model was prompted where that had to be decided: `base_template`, and `note`, a sentence about it.
    """
    prompting: dict[str, Any] | None = base.get("prompting")
    own_prompts = prompting is not None and prompting["base_template"] == "own"
    _check_settings(base, tuned, OF_THE_PROMPTS if own_prompts else frozenset())
    measured = base.get("results", {}).keys() & tuned.get("results", {}).keys()
    lost = sorted((base_samples.keys() ^ tuned_samples.keys()) & measured)
    if lost:
        raise EvaluationError(
            f"The samples of {', '.join(lost)} are missing for one of base and tuned. Measure both again with eval.base_cache=false."
        )
    for task in sorted(base_samples.keys() & tuned_samples.keys()):
        _check_documents(task, base_samples[task], tuned_samples[task], prompts=not own_prompts)
    return prompting


def _check_settings(base: Results, tuned: Results, may_differ: frozenset[str]) -> None:
    sides = (base, tuned)
    settings = [{name: value for name, value in one["settings"].items() if name not in may_differ} for one in sides]
    lines = differing(settings[0], settings[1])
    if not lines and base["settings"] == tuned["settings"]:
        lines = differing(base["settings_hash"], tuned["settings_hash"], "settings_hash")
    dtypes = [one.get("config", {}).get("model_dtype") for one in sides]
    lines += differing(dtypes[0], dtypes[1], "dtype of the weights (set eval.dtype)")
    if tuned["settings"].get("dtype") != "float32":  # there other batches move answers
        sizes = [one.get("batch_sizes_found", {}) for one in sides]
        for task in sorted(sizes[0].keys() & sizes[1].keys()):
            lines += differing(sizes[0][task], sizes[1][task], f"batch sizes found for {task} (set eval.batch_size)")
    if lines:
        what = "Base and tuned were measured under different settings and are not compared:"
        raise EvaluationError("\n".join([what, *lines]))


def _check_documents(task: str, base: list[dict[str, Any]], tuned: list[dict[str, Any]], prompts: bool) -> None:
    hashes = {"doc_hash": "documents", "target_hash": "targets"} | ({"prompt_hash": "prompts"} if prompts else {})
    for key, what in hashes.items():
        seen = [{(one["doc_id"], one["filter"]): one.get(key) for one in samples} for samples in (base, tuned)]
        if seen[0] != seen[1]:
            differ = {place[0] for place in seen[0].keys() | seen[1].keys() if seen[0].get(place) != seen[1].get(place)}
            raise EvaluationError(
                f"The {what} of {task} were not the same for base and tuned: {len(differ)} differ. Its data changed between the two; "
                "measure both again with eval.base_cache=false."
            )
