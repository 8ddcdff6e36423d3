from itertools import product

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.stats import binomtest, false_discovery_control, ttest_rel

from benchmarks.coverage import DRAWS, exact, simulated
from eval.statistics import (
    ALPHA,
    RESAMPLES,
    Z,
    _resampled,
    bootstrap,
    holm,
    independent,
    mcnemar,
    score_interval,
)
from eval.strata import paired

FINDS = 0.05 + 0.012
"""5 % of verdicts where nothing has changed, and what a thousand simulations may be off by."""


@pytest.mark.parametrize(("gained", "lost"), [(1, 7), (12, 5), (30, 12), (0, 9), (110, 150), (4000, 4100)])
def test_mcnemar_is_the_exact_test_less_half_of_what_was_seen(gained: int, lost: int) -> None:
    exact = binomtest(gained, gained + lost)
    seen = binomtest(gained, gained + lost, alternative="less").pvalue - (
        binomtest(gained - 1, gained + lost, alternative="less").pvalue if gained else 0
    )
    assert mcnemar(gained, lost) == pytest.approx(exact.pvalue - seen)


def test_a_published_example_comes_out() -> None:
    # Fagerland, Lydersen and Laake (2014), Statistics in Medicine 33:2850, airway hyper-responsiveness before and after.
    assert mcnemar(1, 7) == pytest.approx(0.039, abs=5e-4)
    assert score_interval(1, 7, 21) == pytest.approx((-0.517, -0.026), abs=5e-4)


@pytest.mark.parametrize(
    ("gained", "lost", "documents"), [(5, 2, 40), (0, 3, 50), (40, 10, 200), (0, 0, 30), (9, 0, 9)]
)
def test_the_score_interval_ends_where_the_constrained_likelihood_is_z_away(
    gained: int, lost: int, documents: int
) -> None:
    for end in score_interval(gained, lost, documents):
        if abs(end) > 1 - 1e-6:
            continue

        def unlikely(rate: float, end: float = end) -> float:
            probabilities = np.clip([rate + end, rate, 1 - 2 * rate - end], 1e-12, 1)
            return -float(np.dot([gained, lost, documents - gained - lost], np.log(probabilities)))

        bounds = (max(0.0, -end) + 1e-12, (1 - end) / 2 - 1e-12)
        rate = minimize_scalar(unlikely, bounds=bounds, method="bounded", options={"xatol": 1e-12}).x
        distance = (gained - lost - documents * end) / np.sqrt(documents * (2 * rate + end - end**2))
        assert abs(distance) == pytest.approx(Z, rel=1e-3)


def test_the_interval_and_the_p_value_never_contradict_each_other() -> None:
    for documents, gained, lost in product((10, 31, 104), range(0, 90, 3), range(0, 60, 3)):
        if gained + lost <= documents:
            values = np.repeat([1.0, -1.0, 0.0], [gained, lost, documents - gained - lost])
            evidence = paired([(values, 1.0)])
            low, high = evidence.interval
            assert (evidence.p_value <= ALPHA) == (low > 0 or high < 0)
    generator = np.random.default_rng(0)
    for _ in range(300):
        values = generator.normal(0.25, 1, 60)
        evidence = bootstrap([values], [1.0], 199)
        assert (evidence.p_value <= ALPHA) == (evidence.interval[0] > 0 or evidence.interval[1] < 0)
    # 15 of 21 would be more than chance by the interval alone.
    values = np.repeat([1.0, -1.0, 0.0], [15, 6, 79])
    assert score_interval(15, 6, 100)[0] > 0
    assert paired([(values, 1.0)]).interval[0] == 0


@pytest.mark.parametrize("rates", [(0.2, 0.2), (0.3, 0.1)])
def test_the_interval_of_right_and_wrong_holds_the_truth_in_95_of_100_cases(rates: tuple[float, float]) -> None:
    holds, finds = exact(*rates, 50)
    assert 0.93 <= holds <= 0.97
    if rates[0] == rates[1]:
        assert finds <= 0.05


@pytest.mark.parametrize("name", ["normal", "skewed (exponential)", "3 in 10 differ"])
def test_the_bootstrap_interval_holds_the_truth_in_95_of_100_cases(name: str) -> None:
    holds, finds = simulated(*DRAWS[name], documents=50, times=1000, resamples=199)
    assert 0.93 <= holds <= 0.97
    assert finds <= FINDS


@pytest.mark.slow
@pytest.mark.parametrize(("documents", "times"), [(50, 4000), (200, 1500)])
@pytest.mark.parametrize("name", DRAWS)
def test_the_bootstrap_interval_holds_the_truth_for_all_kinds_of_scores(name: str, documents: int, times: int) -> None:
    holds, finds = simulated(*DRAWS[name], documents, times)
    assert 0.93 <= holds <= 0.97
    if DRAWS[name][1] == 0:
        assert finds <= FINDS


def test_the_bootstrap_finds_what_a_t_test_finds_of_normal_scores() -> None:
    generator = np.random.default_rng(2)
    base = generator.normal(0, 1, 400)
    tuned = base + generator.normal(0.06, 0.5, 400)
    known = ttest_rel(tuned, base)
    evidence = bootstrap([tuned - base], [1.0])
    interval = known.confidence_interval()
    assert evidence.p_value == pytest.approx(known.pvalue, abs=0.015)
    assert evidence.interval == pytest.approx((interval.low, interval.high), abs=3e-3)


def test_tasks_weigh_as_they_are_told_and_the_draws_are_the_same_each_time() -> None:
    generator = np.random.default_rng(3)
    strata = [generator.normal(mean, 1, size) for mean, size in ((1.0, 400), (0.0, 40))]
    evidence = bootstrap(strata, [0.5, 0.5])
    expected = np.sqrt(strata[0].var(ddof=1) / 400 + strata[1].var(ddof=1) / 40) / 2
    assert evidence.stderr == pytest.approx(expected)
    difference = (strata[0].mean() + strata[1].mean()) / 2
    assert evidence.interval == pytest.approx((difference - 2 * expected, difference + 2 * expected), rel=0.05)
    assert evidence == bootstrap(strata, [0.5, 0.5])
    assert RESAMPLES + 1 == 10_000


def test_mean_and_variance_of_a_resample_are_those_of_its_documents() -> None:
    ones = np.repeat([0.0, 1.0], [20, 40])
    means, variances = _resampled(ones, 40, np.random.default_rng(4))
    assert variances == pytest.approx(means * (1 - means) * 60 / 59)
    values = np.random.default_rng(5).normal(3, 1, 60)
    means, variances = _resampled(values, 40, np.random.default_rng(4))
    drawn = values[np.random.default_rng(4).integers(0, 60, (40, 60))]
    assert means == pytest.approx(drawn.mean(axis=1))
    assert variances == pytest.approx(drawn.var(axis=1, ddof=1))


def test_few_documents_that_differ_prove_nothing() -> None:
    values = np.concatenate([np.full(5, 0.5), np.zeros(95)])
    evidence = bootstrap([values], [1.0])
    assert evidence.p_value >= 2**-4
    assert evidence.interval[0] == 0
    assert evidence.interval[1] > 0.025
    same = bootstrap([np.zeros(50)], [1.0])
    assert (same.p_value, same.interval, same.stderr) == (1.0, (0.0, 0.0), 0.0)


def test_holm_keeps_the_order_and_is_no_smaller_than_any_false_discovery_control() -> None:
    # The values of statsmodels.stats.multitest.multipletests(..., method="holm").
    p_values = [0.01, 0.04, 0.03, 0.005, 0.2]
    assert holm(p_values) == pytest.approx([0.04, 0.09, 0.09, 0.025, 0.2])
    assert (np.array(holm(p_values)) >= false_discovery_control(p_values)).all()
    assert holm([]) == []


def test_scores_with_errors_of_their_own_are_compared_by_them() -> None:
    evidence = independent(-3.0, 3.0, 4.0)
    assert evidence.stderr == 5
    assert evidence.interval == pytest.approx((-3 - 5 * Z, -3 + 5 * Z))
    assert evidence.p_value == pytest.approx(0.5485, abs=1e-4)
