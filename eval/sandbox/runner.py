"""Runs generated programs side by side, each in a process of its own with limits. docs/evaluation-code.md says what is enforced how."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from eval.sandbox.limits import LIMITS, VARIABLES, Isolation, Limits, Outcome
from sft.errors import EvaluationError
from sft.plan.hardware import cpu_cores
from sft.recipe.schema import REPOSITORY

MOST_WORKERS = 32

# What a program would have to manage for a limit not to hold. It runs before the first score, with the limits that are claimed.
_PROOFS = {
    "network": "import socket\nis_refused(lambda: socket.create_connection(('127.0.0.1', PORT), 5))",
    "environment": "import os\nassert set(os.environ) == VARIABLES",
    "files": "is_refused(lambda: open(OUTSIDE, 'a'))\nopen('inside', 'w').write('x')",
    "file size": "is_refused(lambda: open('large', 'w').truncate(SIZE + 1))",
    "user": "import os\nassert os.getuid() != 0",
}
_PROOFS_BEGIN = """
VARIABLES, OUTSIDE, SIZE, PORT = {variables!r}, {outside!r}, {size!r}, {port}
def is_refused(act):
    try:
        act()
    except OSError:
        return
    raise AssertionError("what must be refused was not")
"""


def _workers(programs: int, limits: Limits) -> int:
    """Processes to run them in: one a processor of this rank, and no more than memory has room for."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    processors = max(1, cpu_cores() // ranks)
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return max(1, min(programs, processors, available // limits.memory_bytes // ranks, MOST_WORKERS))


class _Worker:
    """eval/sandbox/worker.py in a process that has none of this one's environment."""

    def __init__(self, limits: Limits) -> None:
        kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "TMPDIR") if name in os.environ}
        # The seed of hashes is read at the start: the programs are forks of it.
        fixed = {name: VARIABLES[name] for name in ("PATH", "PYTHONHASHSEED")}
        environment = kept | fixed | {"PYTHONPATH": str(REPOSITORY)}
        self.process = subprocess.Popen(
            [sys.executable, "-s", "-B", "-P", "-m", "eval.sandbox.worker"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            start_new_session=True,
        )
        try:
            self.isolation = Isolation(**self._ask(asdict(limits)))
        except BaseException:
            self.close()
            raise

    def _ask(self, question: object) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None and self.process.stderr is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise EvaluationError(f"Generated code cannot be run here: {self.process.stderr.read()[-2000:]}")
        found: dict[str, Any] = json.loads(answer)
        if "broken" in found:
            raise EvaluationError(f"Generated code cannot be run within its limits any more: {found['broken']}")
        return found

    def run(self, program: str) -> Outcome:
        """Run one program to its end."""
        return Outcome(**self._ask(program))

    def close(self) -> None:
        """End it with everything in it."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


def run_programs(programs: Sequence[str], limits: Limits = LIMITS) -> list[Outcome]:
    """Run programs, several at a time; how each ended, in their order.

    Raises:
        EvaluationError: One could not be run within its limits: that is no fault of the program, and no score.
    """
    waiting: SimpleQueue[int] = SimpleQueue()
    for number in range(len(programs)):
        waiting.put(number)
    outcomes: dict[int, Outcome] = {}
    errors: list[Exception] = []

    def serve() -> None:
        try:
            worker = _Worker(limits)
            try:
                while not errors:
                    number = waiting.get_nowait()
                    outcomes[number] = worker.run(programs[number])
            except Empty:
                return
            finally:
                worker.close()
        except Exception as error:
            errors.append(error)

    # A worker ends with the thread that started it, so each has its own.
    threads = [threading.Thread(target=serve, daemon=True) for _ in range(_workers(len(programs), limits))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [outcomes[number] for number in range(len(programs))]


@cache
def prove_isolation(limits: Limits = LIMITS) -> Isolation:
    """What is enforced on this machine, with the limits tried out.

    Raises:
        EvaluationError: A limit that is thought to be enforced is not.
    """
    if sys.platform != "linux":
        raise EvaluationError(
            f"Generated code is run on Linux only: on {sys.platform} nothing would hold it. Leave the code tasks out, or evaluate in a "
            "Linux container."
        )
    worker, server = _Worker(limits), socket.create_server(("127.0.0.1", 0))  # a connection would succeed
    try:
        here = {"outside": str(Path(__file__).resolve()), "port": server.getsockname()[1]}
        given = _PROOFS_BEGIN.format(variables=set(VARIABLES), size=limits.file_bytes, **here)
        for name in worker.isolation.enforced.keys() & _PROOFS.keys():
            outcome = worker.run(given + _PROOFS[name])
            if outcome.ending != "passed":
                raise EvaluationError(
                    f"Generated code cannot be run within its limits here: {name} should be held "
                    f"({worker.isolation.enforced[name]}), and was not: {outcome.detail}"
                )
        return worker.isolation
    finally:
        server.close()
        worker.close()


def describe(isolation: Isolation) -> str:
    """What a person reads before generated code runs."""
    lines = ["Generated code runs within limits:"]
    lines += [f"  {name}: {how}" for name, how in isolation.enforced.items()]
    if isolation.not_enforced:
        lines += ["NOT enforced on this machine (a container without network is the place for it):"]
        lines += [f"  {name}: {why}" for name, why in isolation.not_enforced.items()]
    return "\n".join(lines)
