"""Closed forms, and the exact coverage of right and wrong; benchmarks/coverage.py simulates all other scores."""

import numpy as np
import pytest
from scipy.stats import false_discovery_control, norm, t

from benchmarks.coverage import exact, right_or_wrong, unbounded
from eval.compare.statistics import ALPHA, Sample, holm, independent, paired


def with_weight(sample: Sample, weight: float) -> Sample:
    return Sample(sample.values, sample.largest, sample.bounded, weight)


@pytest.mark.parametrize(("gained", "lost", "documents"), [(1, 7, 21), (12, 5, 60), (0, 9, 50), (0, 0, 30), (9, 0, 9)])
def test_right_and_wrong_has_the_error_of_bonett_and_price(gained: int, lost: int, documents: int) -> None:
    more, rates = documents + 2, [(count + 1) / (documents + 2) for count in (gained, lost)]
    variance = (sum(rates) - (rates[0] - rates[1]) ** 2) / more
    expected = np.sqrt(variance * more / (more - 1))
    assert paired([right_or_wrong(gained, lost, documents)]).stderr == pytest.approx(expected)


@pytest.mark.parametrize("rates", [(0.2, 0.2), (0.05, 0.05), (0.3, 0.1)])
def test_the_interval_of_right_and_wrong_holds_the_truth_in_95_of_100_cases(rates: tuple[float, float]) -> None:
    holds, finds = exact(*rates, 50)
    assert 0.945 <= holds <= 0.98
    if rates[0] == rates[1]:
        assert finds <= 0.05


def test_the_interval_of_a_mean_has_welch_s_degrees_of_freedom() -> None:
    half = with_weight(right_or_wrong(9, 3, 40), 0.5)
    evidence = paired([half, half])
    assert evidence.stderr == pytest.approx(paired([right_or_wrong(9, 3, 40)]).stderr / np.sqrt(2))
    reach = t.ppf(0.975, 2 * 41) * evidence.stderr
    assert evidence.interval == pytest.approx((0.15 - reach, 0.15 + reach))


def test_the_interval_and_the_p_value_never_contradict_each_other() -> None:
    samples = [right_or_wrong(gained, lost, 60) for gained in range(0, 40, 3) for lost in range(0, 20, 3)]
    samples += [unbounded(np.random.default_rng(seed).normal(0.25, 1, 60)) for seed in range(50)]
    for sample in samples:
        for family in ([sample], [with_weight(sample, 0.5)] * 2):
            evidence = paired(family)
            low, high = evidence.interval
            assert (evidence.p_value <= ALPHA) == (low > 0 or high < 0)
            assert low <= sample.values.mean() <= high


@pytest.mark.parametrize(
    ("samples", "few"),
    [
        ([right_or_wrong(3, 1, 9)], True),
        ([right_or_wrong(3, 1, 10)], False),
        ([unbounded(np.arange(49.0))], True),
        ([unbounded(np.arange(50.0))], False),
        ([right_or_wrong(3, 1, 60), right_or_wrong(3, 1, 9)], True),
    ],
)
def test_a_verdict_takes_enough_documents_in_each_task(samples: list[Sample], few: bool) -> None:
    assert paired(samples).too_few is few


def test_holm_keeps_the_order_and_is_no_smaller_than_any_false_discovery_control() -> None:
    # The values of statsmodels.stats.multitest.multipletests(..., method="holm").
    p_values = [0.01, 0.04, 0.03, 0.005, 0.2]
    assert holm(p_values) == pytest.approx([0.04, 0.09, 0.09, 0.025, 0.2])
    assert (np.array(holm(p_values)) >= false_discovery_control(p_values)).all()
    assert holm([]) == []


def test_scores_with_errors_of_their_own_are_compared_by_them() -> None:
    evidence = independent(-3.0, 3.0, 4.0, documents=50)
    assert (evidence.stderr, evidence.too_few, independent(-3.0, 3.0, 4.0, 49).too_few) == (5, False, True)
    assert evidence.interval == pytest.approx((-3 - 5 * norm.ppf(0.975), -3 + 5 * norm.ppf(0.975)))
    assert evidence.p_value == pytest.approx(0.5485, abs=1e-4)
