"""The process that checks saves without its imports: a fork of a rank, made before the rank has joined, loaded or patched anything."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import Any, BinaryIO

from sft.processes import end_with_parent


class Forked:
    """What sft/checkpoint/loader_process.py uses of a subprocess.Popen."""

    def __init__(self, errors: BinaryIO) -> None:
        (read_requests, requests), (answers, write_answers) = os.pipe(), os.pipe()
        parent = os.getpid()
        self.pid, self.status = os.fork(), None
        if not self.pid:
            end_with_parent(parent, signal.SIGKILL)
            os.close(requests)
            os.close(answers)
            _serve(os.fdopen(read_requests, "rb"), os.fdopen(write_answers, "wb"))
        os.close(read_requests)
        os.close(write_answers)
        self.stdin, self.stdout = os.fdopen(requests, "wb"), os.fdopen(answers, "rb")

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        return self._wait(0) or 0

    def _wait(self, how: int) -> Any:
        if self.status is None:
            pid, status = os.waitpid(self.pid, how)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status


def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    try:
        from sft.checkpoint.load_saved import serve
        from sft.checkpoint.loader_process import environment

        for name in os.environ.keys() - environment(os.environ).keys():
            del os.environ[name]
        with suppress(EOFError, BrokenPipeError):
            serve(requests, answers)
    finally:
        os._exit(0)
