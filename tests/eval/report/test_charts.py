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
    curve = max(re.findall(r' d="([^"]+)"', svg), key=len)
    heights = [float(found) for found in re.findall(r"L [\d.]+ ([\d.]+)", curve)]
    top, bottom = min(heights), max(heights)
    assert min(one for one in heights if one > top + 5) == pytest.approx((top + bottom) / 2, abs=1.0)
    assert len(svg) < 100_000


def test_one_value_far_above_all_others_does_not_flatten_them() -> None:
    y = [1.0 + step % 5 / 10 for step in range(200)]
    y[100] = 1e6
    limits = y_range(np.array(y))
    assert limits is not None
    assert limits[1] < 2


@pytest.mark.parametrize("y", [[], [1.0], [2.0, 2.0], [math.nan], [0.0, 1e-300], [1e300, -1e300], [math.inf, 1.0]])
def test_any_values_give_a_chart(y: list[float]) -> None:
    assert "nan" not in chart("Loss", "", [series(y)])["svg"]


def test_two_charts_share_no_id() -> None:
    charts = [chart(title, "", with_mean(series([1.0] * 80))) for title in ("a", "b")]
    ids = [set(re.findall(r'id="([^"]+)"', one["svg"])) for one in charts]
    assert not ids[0] & ids[1]
