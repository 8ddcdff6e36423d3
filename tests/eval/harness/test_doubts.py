"""Warnings about a task come from the samples that lm_eval returns, and a sound task gets none."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval.harness.measure import evaluate_model
from eval.models.placement import Placement
from eval.models.target import Target
from eval.tasks.load import load_tasks
from eval.tasks.reference import Reference
from eval.tasks.settings import resolve_settings
from eval.tasks.suites import check_tasks
from sft.recipe.schema import Evaluation

WriteTask = Callable[..., Path]
Rows = list[dict[str, Any]]

NUMBERS = [{"question": f"Number {n}?", "answer": str(n)} for n in range(8)]
LETTER = {"until": ["\n"], "max_gen_toks": 1}

TASKS: dict[str, tuple[Rows, dict[str, Any], tuple[str, ...]]] = {
    "my_sound_letters": (NUMBERS, {"generation_kwargs": LETTER}, ()),
    "my_cut": (NUMBERS, {"generation_kwargs": {"until": ["\n"], "max_gen_toks": 8}}, ("cut off at max_gen_toks",)),
}


@pytest.mark.slow
def test_what_can_hardly_be_meant_is_told_and_nothing_else(
    tuned_model: Path, reference: Reference, write_task: WriteTask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [write_task(name, rows, **keys) for name, (rows, keys, _) in TASKS.items()]
    evaluation = Evaluation(tasks=tuple(map(str, paths)), batch_size=8)
    selection = check_tasks(evaluation, tmp_path)
    settings = resolve_settings(evaluation, selection, reference, on_gpu=False)
    loaded = load_tasks(selection, settings, False, tmp_path / "log")
    target, output = Target("tuned", str(tuned_model)), tmp_path / "tuned"
    evaluate_model(target, reference.tokenizer, loaded, settings, output, tmp_path / "log", Placement(0))
    told = json.loads((output / "results.json").read_text())["doubts"]
    shown = capsys.readouterr().out
    assert [doubt for doubt in told if f"Warning: {doubt}" not in shown] == []
    for name, (_, _, words) in TASKS.items():
        own = [doubt for doubt in told if name in doubt.replace(":", " ").split()]
        assert len(own) == len(words), (name, own)
        assert all(word in doubt for word, doubt in zip(words, own, strict=True)), own
