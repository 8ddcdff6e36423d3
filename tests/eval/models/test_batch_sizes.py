"""Base and tuned are asked in batches of one size, also where lm_eval searches for it."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval.compare.settings_match import differing_sizes
from eval.harness.measure import evaluate_model
from eval.models.backends import Target
from eval.models.batch_sizes import Searches
from eval.models.placement import Placement
from eval.reference import Reference
from eval.tasks.load import load_tasks
from eval.tasks.settings import resolve_settings
from eval.tasks.suites import check_tasks
from sft.errors import EvaluationError
from sft.recipe.schema import Evaluation

WriteTask = Callable[..., Path]


def test_the_tuned_model_is_asked_in_the_base_models_batches() -> None:
    base = Searches()
    assert [base.decide(lambda: 64), base.decide(lambda: 16)] == base.found == [64, 16]
    tuned = Searches(base.found, strict=True)
    assert [tuned.decide(lambda: 64) for _ in range(3)] == [64, 16, 64]  # a third search has nothing to follow


def test_less_memory_than_the_base_model_had_is_a_failure_only_where_rounding_moves_answers() -> None:
    with pytest.raises(EvaluationError, match=r"batches of 64, and there is memory for 8 now.*eval\.batch_size=8"):
        Searches([64], strict=True).decide(lambda: 8)
    assert Searches([64]).decide(lambda: 8) == 8


def results(dtype: str, batch_size: object, **found: list[int]) -> dict[str, Any]:
    return {
        "settings": {"backend": "hf", "batch_size": batch_size, "dtype": dtype},
        "batch_sizes_found": found,
    }


def test_sizes_that_differ_are_named_in_half_precision() -> None:
    base, tuned = results("bfloat16", "auto", arc=[64], bbh=[8]), results("bfloat16", "auto", arc=[32], bbh=[8])
    assert differing_sizes(base, tuned) == ["  arc: base 64, tuned 32"]
    assert differing_sizes(base, base) == []
    assert differing_sizes(results("float32", "auto", arc=[64]), results("float32", "auto", arc=[32])) == []


def test_what_lm_eval_searches_for_is_recorded_and_can_be_given(
    tuned_model: Path, reference: Reference, write_task: WriteTask, tmp_path: Path
) -> None:
    """Fails where lm_eval finds its sizes by another method than _detect_batch_size."""
    choice = {"output_type": "multiple_choice", "doc_to_choice": ["a", "b"], "doc_to_target": 0}
    tasks = (str(write_task("said")), str(write_task("chosen", generation_kwargs=None, metric_list=None, **choice)))
    evaluation = Evaluation(tasks=tasks, max_length=16, limit=2)
    selection = check_tasks(evaluation, tmp_path)
    settings = replace(resolve_settings(evaluation, selection, reference, on_gpu=False), batch_size="auto")
    log = tmp_path / "log"
    loaded = load_tasks(selection, settings, False, log)
    target = Target("tuned", str(tuned_model))
    for given in ({}, {"said": [3], "chosen": [2]}):
        output = tmp_path / f"out{len(given)}"
        evaluate_model(target, reference.tokenizer, loaded, settings, output, log, Placement(0, "a test"), given=given)
        found = json.loads((output / "results.json").read_text())["batch_sizes_found"]
        assert found == (given or {"said": [64], "chosen": [64]})
