"""Several processes, and two models, are measured as one process and one model would be."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval import ranks
from eval.harness.measure import evaluate_model
from eval.models.hf import DataParallelHFLM, fewest_documents, in_order, share_documents
from eval.models.placement import BatchSizes, Placement
from eval.models.target import Target
from eval.reference import Reference
from eval.tasks.load import leaves, load_tasks
from eval.tasks.settings import Settings, resolve_settings
from eval.tasks.suites import check_tasks
from sft.errors import EvaluationError
from sft.recipe.schema import Evaluation

WriteTask = Callable[..., Path]
Resolve = Callable[..., Settings]


@pytest.fixture
def task(write_task: WriteTask, settings: Resolve, tmp_path: Path) -> Any:
    """A task that draws two of many examples for each document."""
    file = write_task(
        "mine", [{"question": f"Number {n}?", "answer": str(n)} for n in range(31)], num_fewshot=2, fewshot_split="test"
    )
    evaluation = Evaluation(tasks=(str(file),))
    loaded = load_tasks(check_tasks(evaluation, tmp_path), settings("mine"), False, tmp_path / "log")
    (task,) = leaves(loaded.by_name["mine"])
    return task


def prompts(task: Any, rank: int, world_size: int) -> dict[int, str]:
    task.set_fewshot_seed(seed=0)
    task.build_all_requests(rank=rank, world_size=world_size, limit=9)
    return {one.doc_id: one.args[0] for one in task.instances}


def test_a_documents_examples_do_not_depend_on_the_number_of_processes(task: Any) -> None:
    alone = prompts(task, 0, 1)
    # What lm_eval 0.4.13 does: once it draws for each document by itself, share_documents is not needed.
    assert prompts(task, 1, 2) != {number: alone[number] for number in (1, 3, 5, 7)}
    share_documents(task)
    share_documents(task)  # base and tuned are asked with the same tasks
    assert prompts(task, 0, 1) == alone
    assert prompts(task, 0, 2) | prompts(task, 1, 2) == alone
    assert sorted(prompts(task, 1, 2)) == [number for number, _ in task.doc_iterator(rank=1, world_size=2, limit=9)]


def test_scores_and_samples_come_back_in_the_order_of_one_process() -> None:
    def sample(number: int, name: str) -> dict[str, Any]:
        return {"doc_id": number, "filter": name}

    def held(rank: int) -> dict[str, list[dict[str, Any]]]:
        return {"arc": [sample(n, name) for name in ("strict", "loose") for n in range(rank, 7, 3)]}

    merged = in_order([held(rank) for rank in range(3)])["arc"]
    assert merged == [sample(n, name) for name in ("strict", "loose") for n in range(7)]
    scores = [{"arc": {("acc", "none"): list(range(rank, 7, 3))}} for rank in range(3)]
    assert in_order(scores) == {"arc": {("acc", "none"): list(range(7))}}


def test_a_process_with_fewer_requests_is_not_padded() -> None:
    import torch

    model = object.__new__(DataParallelHFLM)
    model._rank, model._world_size = 1, 3
    assert model.all_gather(torch.tensor(5)).tolist() == [5, 5, 5]


def test_the_fewest_documents_count_within_the_limit(task: Any) -> None:
    assert [fewest_documents([task], limit) for limit in (None, 4, 100)] == [31, 4, 31]


def test_more_processes_than_gpus_are_refused_by_name() -> None:
    assert [ranks.gpu_of(number, 2) for number in (0, 1)] == [0, 1]
    with pytest.raises(EvaluationError, match="Process 2 of the evaluation has no GPU: 2 are visible"):
        ranks.gpu_of(2, 2)


def test_a_process_by_itself_meets_nobody() -> None:
    assert (ranks.launched(), ranks.rank(), ranks.is_first()) == (1, 0, True)
    assert ranks.exchange(3) == ranks.collect(3) == [3]
    assert ranks.from_first(lambda: 3) == ranks.first_then_others(lambda: 3) == 3
    with pytest.raises(ranks.TaskFailed, match="no room"):
        ranks.exchange(None, failure="no room")


def test_the_tuned_model_is_asked_in_the_base_models_batches() -> None:
    base = BatchSizes()
    assert [base.decide(lambda: 64), base.decide(lambda: 16)] == base.found == [64, 16]
    tuned = BatchSizes(base.found, strict=True)
    assert [tuned.decide(lambda: 64) for _ in range(3)] == [64, 16, 64]  # a third search has nothing to follow


def test_less_memory_than_the_base_model_had_is_a_failure_only_where_rounding_moves_answers() -> None:
    with pytest.raises(EvaluationError, match=r"batches of 64, and there is memory for 8 now.*eval\.batch_size=8"):
        BatchSizes([64], strict=True).decide(lambda: 8)
    assert BatchSizes([64]).decide(lambda: 8) == 8


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
