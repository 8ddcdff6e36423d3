from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sft.errors import EXIT_LOST_RANK, EXIT_USER_ERROR, LostRank
from sft.parallel.lost_ranks import is_lost, told_of_lost_ranks
from sft.recipe.schema import Recipe
from sft.run.directory import Run

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] "


@pytest.fixture
def recipe(make_recipe: Callable[..., Recipe]) -> Recipe:
    return make_recipe("train.ddp_timeout=20")


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError(GLOO + "Timed out waiting 20000ms for recv operation to complete"), True),
        (
            RuntimeError(
                "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.1]:443"
            ),
            True,
        ),
        (RuntimeError("[gloo/transport/tcp/pair.cc:532] Read error [10.0.0.1]:9: Connection reset by peer"), True),
        (RuntimeError("[gloo/transport/tcp/pair.cc:218] writev [10.0.0.1]:9: Broken pipe"), True),
        (torch.distributed.DistStoreError("Timed out after 21 seconds waiting for clients. 1/2 clients joined."), True),
        (RuntimeError("DataLoader timed out after 5 seconds"), False),
        (RuntimeError("CUDA out of memory"), False),
        (ValueError("gloo: timed out"), False),
    ],
)
def test_only_what_a_collective_says_of_another_rank_is_a_lost_rank(error: Exception, lost: bool) -> None:
    assert is_lost(error) == lost


def test_a_lost_rank_is_told_with_rank_step_timeout_reason_and_remedy(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    run = Run(tmp_path / "run")
    (run.checkpoints / "checkpoint-10").mkdir(parents=True)
    run.update(status="running")
    with pytest.raises(LostRank) as told, told_of_lost_ranks(recipe, lambda: "step 12 was trained", run):
        raise RuntimeError(GLOO + "Timed out waiting 20000ms for send operation to complete")
    words = (
        "Rank 3 on ",
        "while step 12 was trained",
        ": Timed out waiting 20000ms",
        "train.ddp_timeout=20",
        "from checkpoint-10.",
    )
    assert all(word in str(told.value) for word in words), told.value
    assert "unbound_buffer" not in str(told.value)
    assert not told.value.named
    late = "Rank 1 (node-1, pid 7) says nothing."
    with (
        pytest.raises(LostRank, match=r"20 s .*step 12 was trained(?s:.*)Rank 1 \(node-1") as told,
        told_of_lost_ranks(recipe, "step 12 was trained", run, lambda: late),
    ):
        raise RuntimeError(GLOO + "Timed out waiting 20000ms for send operation to complete")
    assert told.value.named


def test_a_bug_stays_a_bug(recipe: Recipe) -> None:
    with pytest.raises(RuntimeError, match="shape"), told_of_lost_ranks(recipe, "it ran"):
        raise RuntimeError("shape mismatch")


def test_a_lost_rank_is_no_users_mistake_for_a_scheduler() -> None:
    assert EXIT_LOST_RANK not in (0, EXIT_USER_ERROR)
