"""Sends what lm_eval and other libraries print to a log instead of the terminal, and puts their errors into one line."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TextIO

LOG = "lm_eval.log"


def first_line(error: BaseException) -> str:
    """The first line of an error."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def summary(error: BaseException) -> str:
    """An error's type and first line.

    >>> summary(KeyError("answer")), summary(StopIteration())
    ("KeyError: 'answer'", 'StopIteration')
    """
    kind, said = type(error).__name__, first_line(error)
    return kind if said == kind else f"{kind}: {said}"


@contextmanager
def _descriptor_to(descriptor: int, log: TextIO) -> Iterator[TextIO]:
    """Redirect a file descriptor to the log, with what C code and started programs write; yields where it went before."""
    with os.fdopen(os.dup(descriptor), "w", encoding="utf-8") as before:
        os.dup2(log.fileno(), descriptor)
        try:
            yield before
        finally:
            os.dup2(before.fileno(), descriptor)


@contextmanager
def chatter_to(path: Path) -> Iterator[None]:
    """Redirect the libraries' output to a file. lm_eval's progress bars stay on a terminal."""
    import datasets
    import transformers

    transformers.utils.logging.disable_default_handler()
    transformers.utils.logging.enable_propagation()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    root, level = logging.getLogger(), logging.getLogger().level
    with path.open("a", encoding="utf-8") as log, ExitStack() as stack:
        handler = logging.StreamHandler(log)
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
        root.addHandler(handler)
        root.setLevel(logging.INFO)
        stack.callback(root.setLevel, level)
        stack.callback(root.removeHandler, handler)
        sys.stdout.flush()
        sys.stderr.flush()
        on_terminal = sys.stderr.isatty()
        stack.enter_context(_descriptor_to(1, log))
        terminal = stack.enter_context(_descriptor_to(2, log))
        stack.enter_context(redirect_stdout(log))
        stack.enter_context(redirect_stderr(terminal if on_terminal else log))
        yield
