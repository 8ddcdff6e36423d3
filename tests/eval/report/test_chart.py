import numpy as np
import pytest

from eval.report.chart import Chart, Series, draw, kept_places, tick_labels


def chart(y: list[float], x: list[float] | None = None) -> Chart:
    return draw("Loss", "", [Series("loss", np.array(x or range(1, len(y) + 1), float), np.array(y, float))])


def kinds(one: Chart) -> list[str]:
    return [mark.kind for mark in one.marks if mark.kind != "dot"]


def test_a_spike_of_one_step_in_a_hundred_thousand_is_drawn() -> None:
    y = np.sin(np.arange(100_000) / 1000)
    y[54_321] = 3.0
    kept = kept_places(np.arange(100_000, dtype=float), y, 150)
    assert 54_321 in kept
    assert len(kept) <= 4 * 150
    assert {0, 99_999} <= set(kept.tolist())


def test_few_points_are_all_drawn() -> None:
    assert kept_places(np.arange(10.0), np.zeros(10), 150).tolist() == list(range(10))


def test_the_least_and_largest_of_each_column_are_kept() -> None:
    generator = np.random.default_rng(0)
    x, y = np.arange(5000.0), generator.normal(size=5000)
    kept = set(kept_places(x, y, 10).tolist())
    for start in range(0, 5000, 500):
        part = y[start : start + 499]
        assert start + part.argmax() in kept
        assert start + part.argmin() in kept


def test_a_value_that_is_no_number_breaks_the_curve_and_is_marked() -> None:
    one = chart([3.0, 2.0, float("nan"), 1.0, float("inf"), 0.5])
    assert one.paths[0][1].count("M") == 3
    assert kinds(one) == ["nonfinite", "nonfinite"]
    assert "not a finite number, at optimizer step 3" in one.marks[-2].title
    assert one.notes == ("\N{MULTIPLICATION SIGN} not a finite number",)


def test_marks_on_top_of_each_other_become_one_that_counts() -> None:
    one = chart([1.0] * 5000 + [float("nan")] * 3 + [1.0] * 5000)
    assert kinds(one) == ["nonfinite"]
    assert "and 2 more beside it" in one.marks[0].title


def test_one_value_far_above_all_others_does_not_flatten_them() -> None:
    y = [1.0 + step % 5 / 10 for step in range(200)]
    y[100] = 1e6
    one = chart(y)
    assert kinds(one) == ["above"]
    assert "1e+06, outside the axis" in one.marks[0].title
    assert max(float(label) for _, label in one.y_ticks) < 2


def test_everything_is_inside_the_plot() -> None:
    one = chart([float(value) for value in (5, 1, 9, -3, 0)])
    for mark in one.marks:
        assert 0 <= mark.x <= one.width
        assert 0 <= mark.y <= one.height


@pytest.mark.parametrize(
    "y", [[], [1.0], [2.0, 2.0], [float("nan")], [0.0, 1e-300], [1e300, -1e300], [float("inf"), 1.0]]
)
def test_any_values_give_a_chart(y: list[float]) -> None:
    one = chart(y)
    assert "nan" not in "".join(data for _, data in one.paths)
    assert all(np.isfinite(place) for place, _ in (*one.x_ticks, *one.y_ticks))


def test_steps_have_whole_numbers_on_their_axis() -> None:
    assert [label for _, label in chart([1.0, 2.0, 3.0]).x_ticks] == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("values", "labels"),
    [([0, 1e6, 2e6], ["0", "1M", "2M"]), ([0, 2.5e-6], ["0", "2.5e-6"]), ([-1, 0, 1], ["-1", "0", "1"]), ([], [])],
)
def test_labels_are_short(values: list[float], labels: list[str]) -> None:
    assert tick_labels(values) == labels


def test_a_chart_tells_its_curves_in_words() -> None:
    assert chart([3.0, 1.0]).description == "loss: 3 at first, 1 at last (optimizer steps 2), 1 to 3 between"


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([0.0] * 10, ["0.0", "0.5", "1.0"]),
        ([5e19, 1e20], ["6e19", "8e19", "1e20"]),
        ([12_345_678, 12_345_679], ["12.32M", "12.34M", "12.36M"]),
    ],
)
def test_an_axis_says_no_more_than_its_labels_have_room_for(values: list[float], labels: list[str]) -> None:
    assert [label for _, label in chart(values).y_ticks] == labels


@pytest.mark.parametrize("value", [0.0, -3.0, 1e-12, 1e300, 123456.789, 0.99999, 1.0000001, 7e14, 9.99e15, -1e15])
def test_the_labels_of_an_axis_differ_and_are_short(value: float) -> None:
    for values in ([value], [value, value * 1.0001], [value, 0.0], [value, -2 * value]):
        found = [label for _, label in chart(values).y_ticks]
        assert len(set(found)) == len(found) > 1
        assert max(map(len, found)) <= 10
