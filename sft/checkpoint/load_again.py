"""Loads a saved model as a user would, by `from_pretrained` in a fresh process on the CPU, and compares its logits with the live model's.

The process is `python -m sft.checkpoint.load_again PARENT_PID FOLDER EXCHANGE`; it reads EXCHANGE/request.pt and writes EXCHANGE/result.pt.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from sft.program import end_with_parent

if __name__ == "__main__":  # before the imports, which take seconds
    end_with_parent(int(sys.argv[1]), signal.SIGKILL)
    with suppress(OSError):  # where memory runs out, the kernel should kill this process and not the training
        Path("/proc/self/oom_score_adj").write_text("1000")

import torch
from transformers import AutoModelForCausalLM, logging

from sft.errors import RunError
from sft.model.live import logits_distance
from sft.parallel.environment import environment_without_launcher

SECONDS = 1800
"""How long loading may take."""

_PROBLEMS = {
    "missing_keys": "from_pretrained did not find it, and initialized it at random",
    "unexpected_keys": "from_pretrained does not use it",
    "mismatched_keys": "does not have the shape that config.json gives it",
}


def load_and_compare(
    folder: Path, rows: list[list[int]], logits: torch.Tensor, limit: float, trust_remote_code: bool
) -> tuple[list[str], float]:
    """Load a folder in a fresh process on the CPU: what is wrong with it, and the distance of its logits of these rows.

    Raises:
        RunError: The process was killed or took too long.
    """
    with tempfile.TemporaryDirectory() as exchange:
        torch.save((rows, trust_remote_code), Path(exchange, "request.pt"))
        if how := _run(folder, exchange):
            raise RunError(
                f"{folder} could not be verified: the process that loads it on the CPU {how}. It needs the machine's memory for one copy "
                "of the weights. Give the job more memory, or skip the verification: train.save_canary=false."
            )
        error, problems, found = torch.load(Path(exchange, "result.pt"))
    if error:
        return [f"it cannot be loaded: {error}"], float("inf")
    lines = [f"{name}: {what}" for key, what in _PROBLEMS.items() for name in problems[key]]
    apart = logits_distance(logits, found)
    if not apart <= limit:
        lines.append(f"logits differ by {apart:.2%} of their norm; other kernels alone make less than {limit:.1%}")
    return lines, apart


def _run(folder: Path, exchange: str) -> str | None:
    """Run the process; how it ended, as a phrase, unless it has written its result."""
    words = [sys.executable, "-m", "sft.checkpoint.load_again", str(os.getpid()), str(folder.resolve()), exchange]
    environment = environment_without_launcher() | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    try:  # in a session of its own: a terminal's Ctrl-C is for the training
        done = subprocess.run(words, env=environment, capture_output=True, timeout=SECONDS, start_new_session=True)
    except subprocess.TimeoutExpired:
        return f"had not loaded it after {SECONDS} s"
    if done.returncode == -signal.SIGKILL:
        return "was killed, as Linux does where memory runs out"
    last = "".join(done.stderr.decode(errors="replace").strip().splitlines()[-1:])
    return f"ended with status {done.returncode}: {last}" if done.returncode else None


def main(folder: Path, exchange: Path) -> None:
    """Load, and write the error, or what `from_pretrained` reports and the logits of the rows, in fp32."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    rows, trusts_code = torch.load(exchange / "request.pt")
    try:
        # Without ignore_mismatched_sizes, tensors of another shape raise an error that does not name them.
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, trust_remote_code=trusts_code, ignore_mismatched_sizes=True, output_loading_info=True
        )
        with torch.no_grad():
            logits = model.eval()(input_ids=torch.tensor(rows), use_cache=False).logits.float()
        result: tuple[Any, ...] = (None, {key: sorted(map(str, info[key])) for key in _PROBLEMS}, logits)
    except Exception as error:  # whatever keeps a user from loading it
        result = (f"{type(error).__name__}: {error}", {}, torch.empty(0))
    torch.save(result, exchange / "result.pt")


if __name__ == "__main__":
    main(Path(sys.argv[2]), Path(sys.argv[3]))
