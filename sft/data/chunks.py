"""Chunks of documents in the order of their rows, made on every core."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice

from sft.data.document_maker import DocumentMaker
from sft.data.documents import Chunk
from sft.data.findings import strings
from sft.data.formats import Row
from sft.data.readers import BadRow
from sft.errors import RunError
from sft.processes import end_with_parent
from sft.recipe.schema import Source

_ROWS = 1000
_CHARACTERS = 4_000_000
"""A chunk ends at whichever it reaches first, so that few long rows need no more memory than many short ones."""

_maker: DocumentMaker
"""Set before the workers are forked, which find it in their memory."""

Numbered = tuple[int, Row | BadRow]


def made_chunks(
    maker: DocumentMaker, source: Source, number: int, format: str, rows: Iterable[Numbered], workers: int = 1
) -> Iterator[Chunk]:
    """Make documents of all rows of a source.

    Args:
        maker: Makes them.
        source: Where the rows are from.
        number: Of the source.
        format: Of the rows.
        rows: With their numbers.
        workers: Processes; with 1 this one does the work.

    Yields:
        Chunks in the order of the rows; the last one may hold an error.
    """
    pieces = _pieces(iter(rows))
    head = list(islice(pieces, 2))
    if workers == 1 or len(head) < 2:  # starting processes would take longer than the work
        for piece in (*head, *pieces):
            yield maker.make(source, number, format, piece)
        return
    global _maker
    _maker = maker
    waiting: deque[Future[Chunk]] = deque()
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), _enter_worker, (os.getpid(),)) as pool:
        try:
            for piece in _chained(head, pieces):
                waiting.append(pool.submit(_make, source, number, format, piece))
                # Read ahead only as far as the workers need: memory stays the same for any number of rows.
                if len(waiting) > 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise RunError(
                f"A process that prepared {source.path} was ended by the system, most often because memory ran out. Give the preparation "
                "fewer cores (taskset -c 0-3 bash scripts/sft.sh ...) or more memory."
            ) from None
        finally:
            for future in waiting:
                future.cancel()


def _chained(head: list[list[Numbered]], rest: Iterator[list[Numbered]]) -> Iterator[list[Numbered]]:
    while head:
        yield head.pop(0)
    yield from rest


def _pieces(rows: Iterator[Numbered]) -> Iterator[list[Numbered]]:
    piece: list[Numbered] = []
    characters = 0
    for number, row in rows:
        try:
            characters += 0 if isinstance(row, BadRow) else sum(map(len, strings(row)))
        except RecursionError:
            row = BadRow("it is nested too deeply")
        piece.append((number, row))
        if len(piece) == _ROWS or characters >= _CHARACTERS:
            yield piece
            piece, characters = [], 0
    if piece:
        yield piece


def _enter_worker(parent: int) -> None:
    end_with_parent(parent, signal.SIGKILL)  # it would wait for work forever
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent answers Ctrl-C
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)  # it has nothing to tidy up
    # One process a core is enough threads.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _make(source: Source, number: int, format: str, rows: list[Numbered]) -> Chunk:
    return _maker.make(source, number, format, rows)
