"""Kills at random moments lose nothing."""

from pathlib import Path

import pytest

from tests.slow.chaos import chaos
from tests.slow.ranks import Ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_training_that_is_killed_twenty_times_ends_as_an_undisturbed_one(ranks: Ranks, tmp_path: Path) -> None:
    met = chaos(ranks, tmp_path, kills=20, seed=0)
    assert sum(met.values()) == 20
    assert met["incomplete"], met  # some fell inside a save
