import pytest

from sft.train.spikes import FEWEST, Spikes


def seen(*losses: float) -> list[bool]:
    spikes = Spikes()
    return [spikes.sees(loss) for loss in losses]


def test_a_loss_far_above_the_others_is_a_spike_and_those_after_it_are_none() -> None:
    usual = [2.0, 2.1, 1.9, 2.05, 1.95] * 4
    assert seen(*usual, 4.0, *usual) == [False] * 20 + [True] + [False] * 20


def test_a_fall_and_ordinary_noise_are_no_spikes() -> None:
    assert not any(seen(*(10 / step for step in range(1, 60))))
    assert not any(seen(*(2 + 0.3 * (step % 7 - 3) / 3 for step in range(100))))


def test_a_loss_that_hardly_moves_has_no_spikes_by_its_last_digits() -> None:
    assert not any(seen(*[1.0] * 20, 1.05))
    assert seen(*[1.0] * 20, 1.2)[-1]


@pytest.mark.parametrize(("before", "spike"), [(FEWEST - 1, False), (FEWEST, True)])
def test_a_few_lines_say_nothing_yet(before: int, spike: bool) -> None:
    assert seen(*[2.0] * before, 9.0)[-1] is spike


def test_a_line_without_a_loss_is_passed_over() -> None:
    spikes = Spikes()
    assert [spikes.sees(loss) for loss in [*[2.0] * FEWEST, None, 9.0]][-2:] == [False, True]
