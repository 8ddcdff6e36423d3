"""Warnings about a task come from the samples that lm_eval returns, and a sound task gets none."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval.harness.measure import evaluate_model
from eval.models.placement import Placement
from eval.models.target import Target
from eval.reference import Reference
from eval.tasks.load import load_tasks
from eval.tasks.settings import Settings, resolve_settings
from eval.tasks.suites import check_tasks
from sft.errors import EvaluationError
from sft.recipe.schema import Evaluation

WriteTask = Callable[..., Path]
Rows = list[dict[str, Any]]

NUMBERS = [{"question": f"Number {n}?", "answer": str(n)} for n in range(8)]
LONG = [{"question": f"Number {n}?", "answer": f"the number {n}"} for n in range(8)]
CITIES = ["Oslo", "Rome", "Paris", "Nice"]
CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "label",
    "generation_kwargs": None,
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}
LETTER = {"until": ["\n"], "max_gen_toks": 1}
REGEX = [{"name": "x", "filter": [{"function": "regex", "regex_pattern": "#### ([0-9]+)"}, {"function": "take_first"}]}]


def choices(label: Callable[[int], Any], offered: Callable[[int], list[str]] = lambda n: CITIES) -> Rows:
    return [{"question": f"Town {n}?", "choices": offered(n), "label": label(n)} for n in range(8)]


TASKS: dict[str, tuple[Rows, dict[str, Any], tuple[str, ...]]] = {
    "my_sound_letters": (NUMBERS, {"generation_kwargs": LETTER}, ()),
    "my_sound_labels": (choices(lambda n: n % 4), CHOICE, ()),
    "my_sound_order": (choices(lambda n: 0, lambda n: [f"good {n}", f"bad {n}"]), CHOICE, ()),
    "my_sound_texts": (choices(lambda n: CITIES[n % 4]), CHOICE, ()),
    "my_sound_few": (choices(lambda n: 0)[:4], CHOICE, ()),
    "my_one_class": (choices(lambda n: 2), CHOICE, ("'Paris' is right in all 8",)),
    "my_same_choices": (
        choices(lambda n: n % 2, lambda n: ["a", "b", "a"]),
        CHOICE,
        ("8 of 8 documents offer the same choice",),
    ),
    "my_copies": (NUMBERS[:4] * 2, {"generation_kwargs": LETTER}, ("4 of 8 documents repeat",)),
    "my_shown": (
        LONG,
        {"doc_to_text": "{{question}}\n{{answer}}\nAgain:", "generation_kwargs": LETTER},
        ("shows the answer", "cut off"),
    ),
    "my_never_equal": (
        NUMBERS,
        {"doc_to_target": "{{answer}}\n", "generation_kwargs": {"until": ["\n"], "max_gen_toks": 2}},
        ("`until`: '\\n'",),
    ),
    "my_sampled": (
        NUMBERS,
        {"generation_kwargs": LETTER | {"do_sample": True, "temperature": 1.0}},
        ("my_sampled samples one",),
    ),
    "my_own_examples": (
        NUMBERS,
        {"num_fewshot": 2, "fewshot_split": "test", "generation_kwargs": LETTER},
        ("its 2 examples",),
    ),
    "my_cut": (NUMBERS, {"generation_kwargs": {"until": ["\n"], "max_gen_toks": 8}}, ("cut off at max_gen_toks=8",)),
    "my_too_short": (LONG, {"generation_kwargs": LETTER}, ("cut off at max_gen_toks=1",)),
    "my_unfound": (
        NUMBERS,
        {"generation_kwargs": LETTER, "filter_list": REGEX},
        ("the filters of my_unfound find nothing",),
    ),
}


@pytest.mark.slow
def test_what_can_hardly_be_meant_is_told_and_nothing_else(
    tuned_model: Path,
    reference: Reference,
    write_task: WriteTask,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = [write_task(name, rows, **keys) for name, (rows, keys, _) in TASKS.items()]
    evaluation = Evaluation(tasks=tuple(map(str, paths)), batch_size=8)
    selection = check_tasks(evaluation, tmp_path)
    settings = resolve_settings(evaluation, selection, reference, on_gpu=False)
    loaded = load_tasks(selection, settings, False, tmp_path / "log")
    target, output = Target("tuned", str(tuned_model)), tmp_path / "tuned"
    evaluate_model(target, reference.tokenizer, loaded, settings, output, tmp_path / "log", Placement(0, "a test"))
    told = json.loads((output / "results.json").read_text())["doubts"]
    shown = capsys.readouterr().out
    assert [doubt for doubt in told if f"Warning: {doubt}" not in shown] == []
    for name, (_, _, words) in TASKS.items():
        own = [doubt for doubt in told if name in doubt.replace(":", " ").split()]
        assert len(own) == len(words), (name, own)
        assert all(word in doubt for word, doubt in zip(words, own, strict=True)), own


@pytest.mark.parametrize(
    ("label", "told"),
    [
        (lambda n: n % 4 + 1, "2 right answers of 8 documents are none of their choices: document 4 has 4"),
        (lambda n: "ABCD"[n % 4], "document 1 has 'A'"),
        (lambda n: -1, "8 right answers of 8"),
        (lambda n: [0, 7], "document 1 has 7"),
    ],
)
def test_a_right_answer_that_is_no_choice_is_refused_before_any_weight(
    label: Callable[[int], Any],
    told: str,
    settings: Callable[..., Settings],
    write_task: WriteTask,
    tmp_path: Path,
) -> None:
    task = write_task("mine", choices(label), **CHOICE)
    with pytest.raises(EvaluationError, match=told):
        load_tasks(check_tasks(Evaluation(tasks=(str(task),)), tmp_path), settings(), False, tmp_path / "log")


def test_more_examples_than_there_are_are_refused(
    settings: Callable[..., Settings], write_task: WriteTask, tmp_path: Path
) -> None:
    task = write_task("mine", fewshot_split="test")
    with pytest.raises(EvaluationError, match="mine has 4 documents for examples, and num_fewshot is 9"):
        load_tasks(
            check_tasks(Evaluation(tasks=(str(task),)), tmp_path), settings(num_fewshot=9), False, tmp_path / "log"
        )
