"""Kills at random moments lose nothing. Twenty of them are chosen; fifty are `extra`."""

from pathlib import Path

import pytest

from tests.slow.chaos import chaos
from tests.slow.ranks import Ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("kills", [20, pytest.param(50, marks=pytest.mark.extra)])
def test_a_training_that_is_killed_again_and_again_ends_as_an_undisturbed_one(
    kills: int, ranks: Ranks, tmp_path: Path
) -> None:
    met = chaos(ranks, tmp_path, kills, seed=0)
    assert sum(met.values()) == kills
    assert met["incomplete"], met  # some fall inside a save; test_checkpoints.py plants kills there
