import os
import signal
import threading
import time

import pytest

from sft import signals
from sft.errors import Interrupted
from sft.program import exit_on_error, run_main
from sft.signals import held_back


def send(number: signal.Signals) -> None:
    """To this process, and wait until its thread has heard."""
    os.kill(os.getpid(), number)
    for _ in range(1000):
        if signals.asked() is not None:
            return
        time.sleep(0.001)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 143), (signal.SIGINT, 130)])
def test_where_there_is_nothing_to_save_a_signal_ends_the_program_in_one_line(
    number: signal.Signals, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended, signals.listening(), exit_on_error():
        send(number)
        raise AssertionError("it went on")
    assert ended.value.code == status
    assert capsys.readouterr().err == f"\nInterrupted by {number.name}. The same command starts again, or resumes.\n"


def test_a_program_that_swallows_its_interruption_ends_a_little_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python itself drops an exception that a destructor raises."""
    ended = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda status: ended.set())
    monkeypatch.setattr(signals, "_TIDY_SECONDS", 0.2)
    with signals.listening():
        with pytest.raises(Interrupted):
            send(signal.SIGTERM)
            time.sleep(5)
        assert ended.wait(5)


def test_while_steps_are_trained_a_signal_is_only_remembered() -> None:
    with signals.listening():
        signals.hold(lambda number, again: None)
        assert signals.asked() is None
        send(signal.SIGTERM)
        assert signals.asked() == signal.SIGTERM
        with pytest.raises(Interrupted, match="Interrupted by SIGTERM"):
            signals.release()


def test_the_same_signal_told_twice_by_a_launcher_is_one() -> None:
    heard: list[bool] = []
    with signals.listening():
        signals.hold(lambda number, again: heard.append(again))
        send(signal.SIGTERM)
        send(signal.SIGTERM)
        time.sleep(0.05)
    assert heard == [False]


def test_what_a_shell_has_set_to_be_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.listening():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_that_was_held_back_until_a_program_hears_ends_it_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with held_back():
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        with pytest.raises(SystemExit) as ended:
            run_main(lambda words: pytest.fail("it began"))
    assert ended.value.code == 143
    assert capsys.readouterr().err == "\nInterrupted by SIGTERM. The same command starts again, or resumes.\n"


class Recorder:
    """What a signal interrupts."""

    def __init__(self) -> None:
        self.recorded: list[str] = []

    def record(self, interrupted: Interrupted) -> str:
        self.recorded.append(str(interrupted))
        return "It resumes from checkpoint-4."

    def clean_up(self) -> None:
        self.recorded.append("cleaned up")


def test_an_interruption_is_recorded_and_says_what_the_next_start_does(capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder()
    with pytest.raises(SystemExit), signals.listening(), exit_on_error():
        signals.interrupts(recorder.record, recorder.clean_up)
        send(signal.SIGTERM)
    assert recorder.recorded == ["Interrupted by SIGTERM"]
    assert capsys.readouterr().err == "\nInterrupted by SIGTERM. It resumes from checkpoint-4.\n"


def test_a_second_signal_ends_the_process_at_once_and_cleans_up(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, ended = Recorder(), threading.Event()
    monkeypatch.setattr(os, "_exit", lambda status: ended.set())
    monkeypatch.setattr(signals, "_SAME_SECONDS", 0.0)
    with signals.listening():
        signals.interrupts(recorder.record, recorder.clean_up)
        signals.hold()
        send(signal.SIGTERM)
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)
        assert ended.wait(5)
    assert recorder.recorded[:2] == ["Interrupted by SIGTERM", "cleaned up"]
