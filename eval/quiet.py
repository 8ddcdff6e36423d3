"""What the libraries print while an evaluation runs, kept off the terminal."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

LOG = "lm_eval.log"


def first_line(error: BaseException) -> str:
    """What an error says, on one line."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextmanager
def chatter_to(path: Path) -> Iterator[None]:
    """Keep what the libraries say off the terminal, in a file. lm_eval's progress bars stay on a terminal."""
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
        stack.enter_context(redirect_stdout(log))
        if not sys.stderr.isatty():
            stack.enter_context(redirect_stderr(log))
        yield
