"""Makes documents on every core, in the order of their rows."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice

from sft.data.documents import Chunk, DocumentMaker
from sft.data.sources import Numbered
from sft.errors import RunError
from sft.program import end_with_parent, shown_command
from sft.recipe.schema import Source

CHUNK_ROWS = 500

_maker: DocumentMaker
"""Set before the workers are forked, which find it in their memory."""


def made_chunks(
    maker: DocumentMaker, source: Source, number: int, format: str, rows: Iterable[Numbered], workers: int = 1
) -> Iterator[Chunk]:
    """Make documents of all rows of a source, in chunks in the order of the rows.

    Raises RowError where a row stops the preparation; RunError where the system ended a worker.
    """
    pieces = _pieces(rows)
    first = list(islice(pieces, 2))
    if workers == 1 or len(first) < 2:  # starting processes would take longer than the work
        for piece in chain(first, pieces):
            yield maker.make(source, number, format, piece)
        return
    global _maker
    _maker = maker
    waiting: deque[Future[Chunk]] = deque()
    # A process pool and not multiprocessing.Pool, which waits forever for a worker that the system killed.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), _enter_worker, (os.getpid(),)) as pool:
        try:
            for piece in chain(first, pieces):
                waiting.append(pool.submit(_make, source, number, format, piece))
                # Read ahead only as far as the workers need: memory stays the same for any number of rows.
                if len(waiting) > 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise RunError(
                f"The system ended a process that prepared {source.path}, most often because memory ran out. Use fewer cores "
                f"(taskset -c 0-3 {shown_command('sft')} ...) or more memory."
            ) from None
        finally:
            for future in waiting:
                future.cancel()


def _pieces(rows: Iterable[Numbered]) -> Iterator[list[Numbered]]:
    rows = iter(rows)
    while piece := list(islice(rows, CHUNK_ROWS)):
        yield piece


def _enter_worker(parent: int) -> None:
    end_with_parent(parent, signal.SIGKILL)  # it would wait for work forever
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process per core is enough


def _make(source: Source, number: int, format: str, rows: list[Numbered]) -> Chunk:
    return _maker.make(source, number, format, rows)
