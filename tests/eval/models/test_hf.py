"""Several processes, and two models, are measured as one process and one model would be."""

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lm_eval.models.huggingface import HFLM

from eval.harness.measure import evaluate_model
from eval.models.hf import SharedHFLM, load_hf
from eval.models.placement import Placement
from eval.models.target import Target
from eval.tasks.load import LoadedTasks, load_tasks
from eval.tasks.reference import Reference
from eval.tasks.settings import Settings, resolve_settings
from eval.tasks.suites import check_tasks
from sft.errors import EvaluationError, LostRank
from sft.recipe.schema import Evaluation

WriteTask = Callable[..., Path]
CHOICE = {"output_type": "multiple_choice", "doc_to_choice": ["a", "b"], "doc_to_target": 0}


@pytest.fixture
def loaded(write_task: WriteTask, reference: Reference, tmp_path: Path) -> tuple[LoadedTasks, Settings]:
    rows = [{"question": "word " * (n + 1), "answer": str(n)} for n in range(7)]
    tasks = (
        write_task("said", rows, num_fewshot=2, fewshot_split="test"),
        write_task("chosen", rows, generation_kwargs=None, metric_list=None, **CHOICE),
        write_task("one", rows[:1], generation_kwargs=None, metric_list=None, **CHOICE),
    )
    evaluation = Evaluation(tasks=tuple(map(str, tasks)))
    selection = check_tasks(evaluation, tmp_path)
    settings = resolve_settings(evaluation, selection, reference, on_gpu=False)
    return load_tasks(selection, settings, False, tmp_path / "log"), settings


def results(folder: Path) -> tuple[Any, list[bytes]]:
    written = json.loads((folder / "results.json").read_text())
    return written, [path.read_bytes() for path in sorted(folder.glob("samples_*"))]


@pytest.mark.slow
def test_two_processes_write_what_one_writes(
    loaded: tuple[LoadedTasks, Settings], tuned_model: Path, reference: Reference, tmp_path: Path
) -> None:
    """Also of a task with fewer documents than processes."""
    tasks, settings = loaded
    target, log = Target("tuned", str(tuned_model)), tmp_path / "log"
    for number in (1, 2):
        placement = Placement(0, number)
        evaluate_model(target, reference.tokenizer, tasks, settings, tmp_path / f"{number}", log, placement)
    (alone, samples), (shared, of_two) = results(tmp_path / "1"), results(tmp_path / "2")
    assert alone["results"] == shared["results"]
    assert samples == of_two
    assert len(samples) == 3


@pytest.mark.slow
def test_an_error_or_the_end_of_a_helper_is_named(
    loaded: tuple[LoadedTasks, Settings], tuned_model: Path, reference: Reference
) -> None:
    from lm_eval.api.instance import Instance

    target, settings = Target("tuned", str(tuned_model)), replace(loaded[1], batch_size=1)
    model = load_hf(target, reference.tokenizer, settings, Placement(0, 2))

    def ask(second: Any) -> list[Any]:
        texts = [("a", {"until": [], "max_gen_toks": 2}), second]
        return model.generate_until(
            [Instance("generate_until", {}, one, 0, (None, n, 1)) for n, one in enumerate(texts)]
        )  # type: ignore[arg-type]

    with pytest.raises(RuntimeError, match="TypeError"):
        ask(("b", None))
    assert len(ask(("b", {"until": [], "max_gen_toks": 2}))) == 2  # it goes on with the next task
    os.kill(int(model.helpers[0].process.pid or 0), signal.SIGKILL)
    with pytest.raises(LostRank, match="Process 1 of the evaluation has ended with exit status -9"):
        ask(("b", {"until": [], "max_gen_toks": 2}))
    missing = replace(target, model=str(tuned_model / "nothing"))
    with pytest.raises((EvaluationError, OSError)):
        load_hf(missing, reference.tokenizer, settings, Placement(0, 2))
    assert multiprocessing.active_children() == []


def test_the_tuned_model_follows_the_base_models_batch_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = iter([64, 16, 64, 64, 64, 8])
    monkeypatch.setattr(HFLM, "_detect_batch_size", lambda *_: next(memory))
    model = object.__new__(SharedHFLM)
    model.half_precision = True
    model.follow(())
    assert [model._detect_batch_size(), model._detect_batch_size()] == model.sizes_found() == [64, 16]
    model.follow([64, 16])
    assert [model._detect_batch_size() for _ in range(3)] == [64, 16, 64]  # a third search has nothing to follow
    model.follow([64])
    with pytest.raises(EvaluationError, match=r"batches of 64, and there is memory for 8 now.*eval\.batch_size=8"):
        model._detect_batch_size()


def test_what_lm_eval_searches_for_is_recorded_and_can_be_given(
    loaded: tuple[LoadedTasks, Settings], tuned_model: Path, reference: Reference, tmp_path: Path
) -> None:
    """Fails where lm_eval finds its sizes by another method than _detect_batch_size."""
    tasks, settings = loaded
    settings = replace(settings, batch_size="auto", max_length=16, limit=2)
    target, log = Target("tuned", str(tuned_model)), tmp_path / "log"
    for given in ({}, {"said": [3], "chosen": [2], "one": [1]}):
        output = tmp_path / f"out{len(given)}"
        placement = Placement(0)
        evaluate_model(target, reference.tokenizer, tasks, settings, output, log, placement, batch_sizes=given)
        found = results(output)[0]["batch_sizes_found"]
        assert found == (given or {"said": [64], "chosen": [64], "one": [64]})
