from collections import Counter
from typing import Any

import numpy as np
import pytest

from sft.data.documents import DOCUMENT
from sft.data.mixture import Mixture, mix
from sft.errors import DataError
from sft.recipe.schema import Data, Source


def documents(*sources: list[int], pieces: int = 1) -> np.ndarray:
    """A row for each number, which is its content; every row of as many documents as `pieces`."""
    records = [
        (10, 5, 0, 0, number, row, content * 0x9E3779B97F4A7C15 % 2**64, content)
        for number, contents in enumerate(sources)
        for row, content in enumerate(contents, start=1)
        for _ in range(pieces)
    ]
    return np.array(records, DOCUMENT)


def data(*sources: dict[str, Any], **keys: Any) -> Data:
    return Data(
        train=tuple(Source(path=f"{name}.jsonl", **source) for name, source in zip("abcde", sources, strict=False)),
        **keys,
    )


def mixed(all_documents: np.ndarray, section: Data) -> Mixture:
    assert isinstance(section.train, tuple)
    return mix(all_documents, section.train, section)


def seen(mixture: Mixture, all_documents: np.ndarray) -> list[int]:
    """Times that rows of each source are seen in one pass."""
    counts = Counter(np.repeat(all_documents["source"], mixture.times).tolist())
    return [counts[source] for source in range(all_documents["source"].max() + 1)]


A_HUNDRED = list(range(100))


@pytest.mark.parametrize(
    ("weights", "available", "expected"),
    [
        ([1, 1], [100, 30], [30, 30]),
        ([0.7, 0.3], [70, 100], [70, 30]),
        ([0.5, 0.25, 0.25], [1000, 10, 500], [20, 10, 10]),
    ],
)
def test_weights_are_shares_of_rows_and_the_scarcest_source_is_used_up(
    weights: list[float], available: list[int], expected: list[int]
) -> None:
    rows = documents(*[[1000 * source + row for row in range(count)] for source, count in enumerate(available)])
    mixture = mixed(rows, data(*({"weight": float(weight)} for weight in weights)))
    assert seen(mixture, rows) == expected
    assert mixture.times.max() == 1
    assert sum(mixture.dropped["not_drawn"]) == sum(available) - sum(expected)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"epochs": 0.5}, {0: 50, 1: 50}),
        ({"epochs": 2.5}, {2: 50, 3: 50}),
        ({"rows": 10, "epochs": 1.5}, {0: 90, 1: 5, 2: 5}),
    ],
)
def test_epochs_are_how_often_a_row_is_seen(keys: dict[str, Any], expected: dict[int, int]) -> None:
    assert Counter(mixed(documents(A_HUNDRED), data(keys)).times.tolist()) == expected


def test_more_rows_than_there_are_is_an_error_with_the_numbers() -> None:
    told = r"rows=101 of a.jsonl, which has 100 usable rows. Take fewer, or leave `rows` out and repeat them with epochs: 1.01"
    with pytest.raises(DataError, match=told):
        mixed(documents(A_HUNDRED), data({"rows": 101}))
    with pytest.raises(DataError, match=r"rows=60 of a.jsonl, which has 50 usable rows"):
        mixed(documents(A_HUNDRED[:50] * 2), data({"rows": 60}, deduplicate=True))


@pytest.mark.parametrize("fraction", [0.01, 0.5])
def test_a_held_out_fraction_is_about_that_and_never_trained(fraction: float) -> None:
    count = 20_000
    mixture = mixed(documents(list(range(count))), data({}, held_out=fraction))
    # Five standard deviations of a binomial.
    assert abs(mixture.held_out.mean() - fraction) < 5 * (fraction * (1 - fraction) / count) ** 0.5
    assert ((mixture.times > 0) != mixture.held_out).all()


def test_what_is_held_out_is_decided_by_content_wherever_a_row_stands() -> None:
    contents = [*range(500), *range(250)]
    rows = documents(contents, list(range(400, 600)))
    mixture = mixed(rows, data({}, {}, held_out=0.3))
    side: dict[int, bool] = {}
    for digest, held_out in zip(rows["digest"].tolist(), mixture.held_out.tolist(), strict=True):
        assert side.setdefault(digest, held_out) == held_out
    alone, other = (mixed(documents(list(range(600))), data({}, held_out=0.3, seed=seed)).held_out for seed in (0, 1))
    assert list(side.values()) == alone.tolist()
    assert (alone & other).sum() < 90, "as many as chance has in common: 54"


def test_rows_that_another_source_holds_out_are_not_trained() -> None:
    rows = documents(A_HUNDRED, list(range(90, 120)))
    section = data({}, held_out="b.jsonl")
    mixture = mixed(rows, section)
    assert mixture.held_out.tolist() == [False] * 100 + [True] * 30
    assert mixture.dropped["held_out"].tolist() == [False] * 90 + [True] * 10 + [False] * 30
    assert mixture.times.tolist() == [1] * 90 + [0] * 40


def test_the_first_of_identical_rows_stays_across_sources() -> None:
    rows = documents([1, 2, 1, 3, 1], [3, 4, 4])
    kept = mixed(rows, data({}, {}, deduplicate=True))
    assert kept.times.tolist() == [1, 1, 0, 1, 0, 0, 1, 0]
    assert kept.dropped["duplicate"].tolist() == [times == 0 for times in kept.times]
    every = mixed(rows, data({}, {}))
    assert every.times.tolist() == [1] * 8
    assert every.duplicate_rows.tolist() == kept.duplicate_rows.tolist() == [2, 4, 5, 7]


@pytest.mark.parametrize(
    "keys", [{"held_out": 0.3}, {"deduplicate": True}, {"held_out": "b.jsonl"}, {"held_out": 0.2, "deduplicate": True}]
)
@pytest.mark.parametrize("source", [{}, {"rows": 20}, {"epochs": 1.5}])
def test_the_pieces_of_a_row_stay_together(keys: dict[str, Any], source: dict[str, Any]) -> None:
    contents, held_out = [*range(60), *range(20)], [3, 4, 100] if keys.get("held_out") == "b.jsonl" else []
    section = data(source, **keys)
    whole = mixed(documents(contents, held_out), section)
    pieces = mixed(documents(contents, held_out, pieces=3), section)
    assert pieces.times.tolist() == np.repeat(whole.times, 3).tolist()
    assert pieces.held_out.tolist() == np.repeat(whole.held_out, 3).tolist()
    assert pieces.duplicate_rows.tolist() == (whole.duplicate_rows * 3).tolist()
    for reason, dropped in whole.dropped.items():
        assert pieces.dropped[reason].tolist() == np.repeat(dropped, 3).tolist()
