"""A conversation in a real terminal: what is shown as it comes, Ctrl-C, Ctrl-D; and from a pipe."""

import errno
import json
import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sft.files import write_json
from sft.hub.demo import make_demo
from sft.run.directory import Run

pytestmark = pytest.mark.slow

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TERM": "dumb"}


class Terminal:
    """A program that believes to be talked to by a person."""

    def __init__(self, *words: str | Path) -> None:
        self.screen = ""
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "eval.chat.terminal", *map(str, words)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=os.environ | ENVIRONMENT,
            start_new_session=True,
            preexec_fn=lambda: __import__("fcntl").ioctl(0, 0x540E, 0),  # TIOCSCTTY: Ctrl-C comes as a signal
        )
        os.close(slave)

    def keys(self, text: str) -> None:
        os.write(self.master, text.encode())

    def answers(self, text: str) -> None:
        """Type what the next prompt asks for: what is typed before it, the terminal may take otherwise."""
        self.sees("> ")
        self.keys(text)

    def sees(self, text: str, seconds: float = 60) -> None:
        """Wait until it is on the screen, and go on behind it."""
        deadline = time.monotonic() + seconds
        while text not in self.screen:
            assert time.monotonic() < deadline, f"{text!r} was not shown: {self.screen!r}"
            assert self.reads(), f"nothing came, or it has ended, without {text!r}: {self.screen!r}"
        self.screen = self.screen.partition(text)[2]

    def interrupts(self, text: str) -> None:
        """Press Ctrl-C until it is seen what it does.

        Python hears a signal that comes between the showing of a prompt and the wait for a key only with the next key.
        """
        for _ in range(20):
            self.keys("\x03")
            while text not in self.screen and self.reads(3):
                pass
            if text in self.screen:
                self.screen = self.screen.partition(text)[2]
                return
        raise AssertionError(f"{text!r} was not shown: {self.screen!r}")

    def reads(self, seconds: float = 60) -> bool:
        """Wait for more; False where nothing comes."""
        if not select.select([self.master], [], [], seconds)[0]:
            return False
        try:
            self.screen += os.read(self.master, 65536).decode(errors="replace")
        except OSError as error:  # the other end is closed
            assert error.errno == errno.EIO
            return False
        return True

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose final model is the demo's untrained one, which never ends an answer."""
    outputs = tmp_path_factory.mktemp("outputs")
    demo = make_demo(outputs)
    run = Run(outputs / "tiny" / "first")
    run.path.mkdir(parents=True)
    sections = {
        "model": {"name_or_path": "builtin:demo"},
        "data": {"train": "builtin:demo"},
        "train": {"global_batch_size": 8},
    }
    recipe = json.dumps({"schema_version": 1, "version": 1, **sections})
    run.recipe_file.write_text(recipe)
    base = {"name_or_path": "builtin:demo", "revision": None, "path": str(demo.model)}
    write_json(run.path / "run.json", {"status": "finished", "overrides": [], "base_model": base})
    shutil.copytree(demo.model, run.final)
    config = json.loads((run.final / "config.json").read_text())
    write_json(run.final / "config.json", config | {"max_position_embeddings": 384})
    return run


@pytest.fixture
def terminal(run: Run) -> Iterator[Terminal]:
    started = Terminal(run.path, "--max-new-tokens", "340")
    yield started
    started.close()


def test_a_person_talks_stops_an_answer_and_leaves(terminal: Terminal, run: Run) -> None:
    terminal.sees("tuned: ")
    terminal.sees("> ")
    terminal.interrupts("(Ctrl-D exits)")  # there is nothing to stop
    terminal.answers("For Nora: Oslo\n")
    terminal.sees("For Nora: Oslo\r\n")
    terminal.reads()  # the answer begins
    terminal.interrupts("(stopped)")
    terminal.answers("/reset\n")
    terminal.sees("(a new conversation)")
    # Each answer fills what it may: the next question has no room beside it.
    terminal.answers("a\n")
    terminal.sees("(cut at 340 tokens")
    terminal.answers("b\n")
    terminal.sees("(The context of 384 tokens is full. /reset starts over.)")
    terminal.answers("\x04")
    assert terminal.process.wait() == 0


def test_from_a_pipe_each_line_is_a_turn(run: Run) -> None:
    words = [sys.executable, "-m", "eval.chat.terminal", str(run.path), "--base", "--max-new-tokens", "5"]
    done = subprocess.run(
        words,
        input="a\n\nb\n/exit\nc\n",
        capture_output=True,
        text=True,
        env=os.environ | ENVIRONMENT,
        timeout=100,
        check=True,
    )
    assert done.stderr.count("(cut at 5 tokens") == 2
    assert len(done.stdout.splitlines()) >= 2
    assert "Traceback" not in done.stderr
