from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import distributed_c10d

from sft.errors import EXIT_LOST_RANK, EXIT_USER_ERROR, LostRank, PlanError
from sft.parallel import process_group as distributed
from sft.parallel.process_group import is_rank_0, job_hardware, reporting_lost_ranks
from sft.recipe.schema import Recipe
from sft.run.directory import Run

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] "
SEND = GLOO + "Timed out waiting 20000ms for send operation to complete"


def test_one_process_started_by_hand_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert (job_hardware().ranks, is_rank_0()) == (1, True)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "3")
    assert (job_hardware().ranks, job_hardware().ranks_per_node, is_rank_0()) == (4, 2, False)


@pytest.fixture
def _group_of_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        # Put back at the end; a build without NCCL has none.
        monkeypatch.setattr(distributed_c10d, name, timedelta(minutes=10))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    distributed._limit_waiting(33)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.leave_group()


@pytest.mark.usefixtures("_group_of_one")
def test_groups_that_are_made_without_a_timeout_have_the_recipes() -> None:
    """DeepSpeed's are made so, and the device mesh's."""
    torch.distributed.new_group([0])
    assert distributed.group_timeouts() == {33}
    assert distributed_c10d._get_default_timeout("nccl").total_seconds() == 33


def test_an_environment_in_which_nccl_waits_for_ever_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    with pytest.raises(PlanError, match=r"TORCH_NCCL_ASYNC_ERROR_HANDLING=0.*Unset it"):
        distributed._limit_waiting(33)


@pytest.fixture
def recipe(make_recipe: Callable[..., Recipe]) -> Recipe:
    return make_recipe("train.ddp_timeout=20")


@pytest.mark.parametrize("late", ["", "Rank 1 (node-1, pid 7) says nothing."])
def test_a_lost_rank_is_one_message_with_rank_step_timeout_reason_and_remedy(
    late: str, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    run = Run(tmp_path / "run")
    (run.checkpoints / "checkpoint-10").mkdir(parents=True)
    run.update(status="running")
    with (
        pytest.raises(LostRank) as caught,
        reporting_lost_ranks(recipe, lambda: "step 12 was trained", run, lambda: late),
    ):
        raise RuntimeError(SEND)
    words = ("Rank 3 on ", "step 12", ": Timed out waiting 20000ms", "train.ddp_timeout=20", "checkpoint-10", late)
    assert all(word in str(caught.value) for word in words), caught.value
    assert "unbound_buffer" not in str(caught.value)
    assert caught.value.named == bool(late)
    assert EXIT_LOST_RANK not in (0, EXIT_USER_ERROR)


def test_a_bug_stays_a_bug(recipe: Recipe) -> None:
    with pytest.raises(RuntimeError, match="shape"), reporting_lost_ranks(recipe, "it ran"):
        raise RuntimeError("shape mismatch")
