import numpy as np
import pytest

from benchmarks.coverage import MEANS, of_means
from eval.statistics import ALPHA, bootstrap, score_interval
from eval.strata import Samples, paired

GAINED, SAME = np.ones(60), np.zeros(60)


def draw(generator: np.random.Generator, rates: tuple[float, float], documents: int) -> np.ndarray:
    chance = generator.random(documents)
    return np.where(chance < rates[0], 1.0, np.where(chance < sum(rates), -1.0, 0.0))


def test_a_mean_of_unanimous_tasks_has_the_error_that_their_own_intervals_have() -> None:
    evidence = paired([(GAINED, 0.5), (SAME, 0.5)])
    below, spread = 1 - score_interval(60, 0, 60)[0], score_interval(0, 0, 60)[1]
    assert evidence.interval == pytest.approx((0.5 - np.hypot(below, spread) / 2, 0.5 + spread / 2))
    assert evidence.p_value < 1e-6
    turned = paired([(-GAINED, 0.5), (SAME, 0.5)])
    assert turned.interval == pytest.approx((-evidence.interval[1], -evidence.interval[0]))
    assert turned.p_value == pytest.approx(evidence.p_value)
    unchanged = paired([(SAME, 0.5), (SAME, 0.5)])
    assert unchanged.p_value == 1
    assert unchanged.interval == pytest.approx((-spread / np.sqrt(2), spread / np.sqrt(2)))


def test_scores_that_are_all_the_same_have_an_error_too() -> None:
    for samples in ([(GAINED / 2, 1.0)], [(GAINED / 2, 0.5), (SAME, 0.5)]):
        low, high = paired(samples).interval
        assert high - low > 0.02


def test_a_mean_is_no_surer_than_the_least_sure_task_allows() -> None:
    generator = np.random.default_rng(0)
    scores = generator.normal(0.1, 1, 80)
    low, high = paired([(scores, 0.5), (SAME, 0.5)]).interval
    alone = bootstrap([scores], [1.0])
    spread = score_interval(0, 0, 60)[1]
    reach = np.hypot(alone.interval[1] - scores.mean(), spread) / 2
    assert high == pytest.approx(scores.mean() / 2 + reach)
    assert low < 0 < high


def test_the_p_value_is_that_of_the_interval_that_ends_at_0() -> None:
    generator = np.random.default_rng(1)
    for _ in range(100):
        samples: Samples = [
            (draw(generator, (0.25, 0.12), 50), 0.3),
            (draw(generator, (0.02, 0.02), 90), 0.3),
            (generator.normal(0.1, 0.5, 60), 0.4),
        ]
        evidence = paired(samples)
        assert (evidence.p_value <= ALPHA) == (evidence.interval[0] > 0 or evidence.interval[1] < 0)


@pytest.mark.parametrize(("documents", "few"), [((60, 9), True), ((60, 10), False)])
def test_a_mean_with_a_task_of_too_few_documents_has_too_few(documents: tuple[int, int], few: bool) -> None:
    assert paired([(GAINED[:count], 0.5) for count in documents]).too_few is few
    thirds = np.arange(49) % 4 / 3
    assert paired([(GAINED, 0.5), (thirds, 0.5)]).too_few


@pytest.mark.parametrize("name", ["two: 0.05 / 0.05 each", "two: 0.9 / 0.02 and 0.02 / 0.02"])
def test_the_interval_of_a_mean_holds_the_truth_in_95_of_100_cases(name: str) -> None:
    holds, finds = of_means(MEANS[name], documents=100, times=400)
    assert 0.92 <= holds <= 0.98
    if "0.9" not in name:
        assert finds <= 0.05 + 0.02


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.extra if name.startswith("twenty") else ())
        for name in MEANS
        if "0.02" not in name
    ],
)
def test_the_interval_of_a_mean_holds_the_truth_for_all_rates(name: str) -> None:
    holds, _ = of_means(MEANS[name], documents=100, times=1000)
    assert 0.93 <= holds <= 0.975
