import pytest

from sft.errors import RanksError
from sft.parallel.agreement import check_agreement


def told(**values: object) -> dict[str, object]:
    return {"step": 3, "place": "its batches", "micro-batches": 4, "trained tokens of the step": 700} | values


def test_ranks_that_agree_go_on() -> None:
    check_agreement([told(), told(), told()], ["120 tokens", "96 tokens", "7 tokens"])


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("micro-batches", 3, "micro-batches: 4 on ranks 0, 2; 3 on rank 1"),
        ("step", 4, "step: 3 on ranks 0, 2; 4 on rank 1"),
        ("trained tokens of the step", 710, "trained tokens of the step: 700 on ranks 0, 2; 710 on rank 1"),
        ("place", "micro-batch 2 of 4", "place: its batches on ranks 0, 2; micro-batch 2 of 4 on rank 1"),
    ],
)
def test_what_differs_is_named_with_the_ranks_and_values(name: str, value: object, line: str) -> None:
    with pytest.raises(RanksError) as error:
        check_agreement([told(), told(**{name: value}), told()], ["a", "b", "c"])
    assert line in str(error.value) and "rank 1 has b" in str(error.value)


def test_a_rank_at_another_comparison_is_named_too() -> None:
    with pytest.raises(RanksError, match="micro-batches: 4 on rank 0; None on rank 1"):
        check_agreement([told(), {"step": 3, "place": "micro-batch 1 of 4"}])
