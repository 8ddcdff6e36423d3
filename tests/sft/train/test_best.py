import math
from collections.abc import Callable

import pytest

from sft.errors import RecipeError
from sft.recipe.schema import Recipe
from sft.train.best import best_step, measurements_without_gain

NAN = math.nan


def test_the_first_of_the_best_finite_scores() -> None:
    assert best_step({10: 0.9, 20: 0.7, 30: 0.7}, larger=False) == 20
    assert best_step({10: NAN, 20: 0.8, 30: math.inf}, larger=True) == 20
    assert best_step({10: NAN}, larger=False) is best_step({}, larger=False) is None


@pytest.mark.parametrize(
    ("scores", "larger", "threshold", "expected"),
    [
        ([0.9, 0.8, 0.8, 0.85], False, 0.0, 2),
        ([0.1, 0.2, 0.2, 0.3], True, 0.0, 0),
        # Small gains add up to one that counts.
        ([0.9, 0.87, 0.84, 0.81], False, 0.05, 1),
        ([NAN, 0.9, NAN, NAN], False, 0.0, 2),
    ],
)
def test_patience_counts_from_the_last_gain(scores: list[float], larger: bool, threshold: float, expected: int) -> None:
    assert measurements_without_gain(dict(enumerate(scores)), larger, threshold) == expected


BEST = ["train.load_best_model_at_end=true", "train.save_steps=20"]
BY_TASK = [*BEST, "train.metric_for_best_model=arc_easy/acc", "eval.tasks=[arc_easy]"]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (BEST, "data.held_out"),
        ([*BEST, "data.held_out=0.1", "train.eval_steps=30"], "eval_steps=30"),
        (BY_TASK, "eval.every_steps"),
        ([*BY_TASK, "eval.every_steps=30"], "eval.every_steps=30"),
        ([*BEST, "data.held_out=0.1", "train.save_strategy=no"], "save_strategy=no"),
        (["train.early_stopping_patience=3"], "early_stopping_patience"),
    ],
)
def test_what_is_compared_must_be_measured_where_a_checkpoint_is(
    overrides: list[str], key: str, make_recipe: Callable[..., Recipe]
) -> None:
    with pytest.raises(RecipeError) as refused:
        make_recipe(*overrides)
    assert key in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "larger"),
    [
        ([*BEST, "data.held_out=0.1"], False),
        ([*BY_TASK, "eval.every_steps=40"], True),
        (
            [
                *BY_TASK[:2],
                "eval.tasks=[wikitext]",
                "train.metric_for_best_model=wikitext/word_perplexity",
                "eval.every_steps=20",
            ],
            False,
        ),
        ([*BY_TASK, "eval.every_steps=40", "train.greater_is_better=false"], False),
    ],
)
def test_a_loss_and_a_perplexity_are_better_when_smaller(
    overrides: list[str], larger: bool, make_recipe: Callable[..., Recipe]
) -> None:
    assert make_recipe(*overrides).train.larger_is_better is larger
