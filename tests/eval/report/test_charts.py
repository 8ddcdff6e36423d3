import math
import re

import numpy as np
import pytest

from eval.report.charts import Series, chart, with_mean, y_range


def series(y: list[float], name: str = "loss") -> Series:
    return Series(name, np.arange(1.0, len(y) + 1), np.array(y, float))


def test_a_spike_of_one_step_in_a_hundred_thousand_is_drawn_to_its_full_height() -> None:
    y = np.sin(np.arange(100_000) / 1000)
    y[54_321] = 3.0
    svg = chart("Loss", "", [Series("loss", np.arange(100_000.0), y)])["svg"]
    heights = [float(found) for found in re.findall(r"L [\d.]+ ([\d.]+)", svg)]
    top, bottom = 14 / 190, (190 - 22) / 190
    low, high = y_range(y, from_zero=False)
    expected = 190 * (bottom - (bottom - top) * (3.0 - low) / (high - low))
    assert min(one for one in heights if one > 15) == pytest.approx(expected, abs=1.0)
    assert len(svg) < 100_000


def test_a_value_that_is_not_finite_breaks_the_curve_and_is_marked() -> None:
    found = chart("Loss", "", [series([3.0, 2.0, math.nan, 1.0, math.inf, 0.5])])
    assert found["notes"] == ["\N{MULTIPLICATION SIGN} not a finite number"]
    assert "nan" not in found["svg"]
    assert found["description"] == "loss: first 3, last 0.5, from 0.5 to 3"


def test_one_value_far_above_all_others_does_not_flatten_them() -> None:
    y = [1.0 + step % 5 / 10 for step in range(200)]
    y[100] = 1e6
    assert y_range(np.array(y), from_zero=False)[1] < 2


def test_noise_in_the_fourth_digit_does_not_fill_the_chart() -> None:
    low, high = y_range(np.array([1.0, 1.00001]), from_zero=False)
    assert high - low > 0.004


@pytest.mark.parametrize("y", [[], [1.0], [2.0, 2.0], [math.nan], [0.0, 1e-300], [1e300, -1e300], [math.inf, 1.0]])
def test_any_values_give_a_chart(y: list[float]) -> None:
    assert "nan" not in chart("Loss", "", [series(y)])["svg"]


def test_a_chart_takes_its_colors_from_the_page_and_has_no_ids_that_two_charts_share() -> None:
    charts = [chart(title, "", with_mean(series([1.0] * 80))) for title in ("a", "b")]
    for one in charts:
        assert {"var(--c0)", "var(--soft)", "var(--rule)"} <= set(re.findall(r"var\(--\w+\)", one["svg"]))
        assert "#0000" not in one["svg"]
    ids = [set(re.findall(r'id="([^"]+)"', one["svg"])) for one in charts]
    assert not ids[0] & ids[1]
    assert [one.name for one in charts[0]["legend"]] == ["loss", "mean of the last 4"]
