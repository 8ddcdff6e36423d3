"""The process that loads what was saved, as the training sees it: begun early, beside the imports, and asked when something is saved.

Imports no torch; sft/checkpoint/load_saved.py is the program.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from sft.parallel.process_group import LAUNCHED
from sft.signals import held_back

PROGRAM = Path(__file__).with_name("load_saved.py")


def environment(own: Mapping[str, str]) -> dict[str, str]:
    """A user's: without what a launcher or accelerate has told this rank, without GPUs, and without the hub.

    The GPUs have no room for a second model; and what is not in the folder is missing.
    """
    kept = {
        name: value
        for name, value in own.items()
        if name not in LAUNCHED and not name.startswith(("TORCHELASTIC", "ACCELERATE_", "FSDP_"))
    }
    return kept | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}


def start_process(errors: BinaryIO) -> Any:
    """Start the program; a subprocess.Popen.

    What a terminal or a queue sends to the whole job is for the training, which may still save: so this process has a session of its own,
    and signals are blocked until it ignores them.
    """
    with held_back():
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
        # -P: nothing of this project is found from its own folder.
        return subprocess.Popen(
            [sys.executable, "-P", str(PROGRAM), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment(os.environ),
            start_new_session=True,
        )


class Ended(Exception):
    """The process is gone; the text says how."""


class Checker:
    """The process, begun. It costs its memory, some 300 MB, until it is closed."""

    def __init__(self) -> None:
        self.errors: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the process)
        self.process = start_process(self.errors)

    def begin(self) -> None:
        """Start it anew where it has ended meanwhile: it may have waited for days."""
        if self.process.poll() is not None:
            self.process = start_process(self.errors)

    def answer(self) -> dict[str, Any]:
        """Wait for the answer to a request that has one.

        Raises:
            Ended: The process is gone.
        """
        line = self.process.stdout.readline()
        if not line:
            raise Ended(self._how_it_ended())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def tell(self, values: Any, **request: Any) -> None:
        """Send a request.

        Args:
            values: A tensor on the CPU, sent behind it.
            request: As sft/checkpoint/load_saved.py has it.

        Raises:
            Ended: The process is gone.
        """
        values = None if values is None else values.contiguous()
        raw = None if values is None else _raw(values)
        try:
            length = {} if raw is None else {"bytes": len(raw)}
            self.process.stdin.write(json.dumps(request | length).encode() + b"\n")
            if raw is not None:
                self.process.stdin.write(raw)
            self.process.stdin.flush()
        except OSError:
            raise Ended(self._how_it_ended()) from None

    def _how_it_ended(self) -> str:
        status = self.process.wait()
        self.errors.seek(0)
        told = self.errors.read().decode(errors="replace").strip().splitlines()
        if status == -9:
            return "it was killed, as Linux does where memory runs out"
        return f"it ended with status {status}{': ' + told[-1] if told else ''}"

    def close(self) -> None:
        """End it."""
        for stream in (self.process.stdin, self.process.stdout):
            try:
                stream.close()
            except OSError:
                continue
        self.process.wait()
        self.errors.close()


def _raw(tensor: Any) -> Any:
    """The bytes of a tensor on the CPU, of which the caller keeps hold."""
    # Not by numpy: what it has looked at can never be given back, and a weight of the live engine may have to be.
    return (ctypes.c_char * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())
