from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval import ranks
from eval.models.data_parallel import DataParallelHFLM, deal_out, fewest_documents, in_order
from eval.tasks.load import leaves, load_tasks
from eval.tasks.settings import Settings
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
    # What lm_eval 0.4.13 does: once it draws for each document by itself, deal_out is not needed.
    assert prompts(task, 1, 2) != {number: alone[number] for number in (1, 3, 5, 7)}
    deal_out(task)
    deal_out(task)  # base and tuned are asked with the same tasks
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
