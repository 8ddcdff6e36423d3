from collections.abc import Callable

import pytest

from sft.errors import RecipeError
from sft.recipe.schema import Recipe
from sft.recipe.train import parse_duration
from sft.train.max_time import TimeLimit, assumed_save_seconds


def test_a_duration_is_the_sum_of_its_parts() -> None:
    assert [parse_duration(text) for text in ("1d", "23h30m", "90m", "1d2h3m4s")] == [86400, 84600, 5400, 93784]


@pytest.mark.parametrize("text", ["", "5", "h", "30m1h", "1.5h", "-1h", "0m", "00h0s"])
def test_what_is_no_duration_is_refused_with_the_value(text: str, make_recipe: Callable[..., Recipe]) -> None:
    with pytest.raises(RecipeError, match=r"train.max_time: .*such as 23h30m"):
        make_recipe(f'train.max_time="{text}"')


def run_until_due(deadline: float, step: float, save: float) -> tuple[int, float]:
    """Train steps that take as long as each other: how many are done, and when the save is."""
    limit, now, done = TimeLimit(deadline, save), 0.0, 0
    while True:
        limit.begin(now)
        due = limit.is_due(now)
        now += step
        done += 1
        if due:
            return done, now + save


@pytest.mark.parametrize("step", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("save", [0.5, 30.0])
def test_the_save_is_done_in_time_and_no_more_than_two_steps_and_half_a_save_are_given_away(
    step: float, save: float
) -> None:
    done, end = run_until_due(1000, step, save)
    assert 1000 - 2 * step - save / 2 - 6 <= end <= 1000
    assert done > 90


def test_a_limit_that_is_too_short_still_trains_a_step() -> None:
    assert run_until_due(1, 10, 1)[0] == 1


def test_an_unknown_save_is_taken_to_be_slow() -> None:
    assert assumed_save_seconds(3_000_000_000) == 96


def test_a_slow_step_now_and_then_is_reckoned_with() -> None:
    limit = TimeLimit(100, 0)
    for began in (0.0, 1.0, 2.0, 22.0, 23.0):
        limit.begin(began)
    assert limit.needed(23.0) == 1 + 20 + 5
