"""Loads a saved model as a user would, by `from_pretrained` in a fresh process on the CPU, and compares its logits with the live model's.

`python -m sft.checkpoint.load_again PARENT_PID FOLDER EXCHANGE` is the process: it reads EXCHANGE/request.pt and writes result.json there.
The evaluation starts the process, so that no GPU waits for it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from sft.program import end_with_parent

if __name__ == "__main__":  # before the imports, which take seconds
    end_with_parent(int(sys.argv[1]), signal.SIGKILL)

from sft.errors import RunError, WrongSave
from sft.files import read_json, remove, write_json
from sft.parallel.environment import environment_without_launcher
from sft.run.directory import Run

SECONDS = 1800
"""How long loading may take."""

_KEYS = ("missing_keys", "unexpected_keys", "mismatched_keys")


def request_load(run: Run, request: tuple[Any, ...]) -> None:
    """Have the evaluation load final/: token ids, their logits, those without adapters or None, the limit, whether code is trusted."""
    import torch

    exchange = exchange_of(run)
    remove(exchange)  # of an earlier end of this run
    exchange.mkdir()
    torch.save(request, exchange / "request.pt")


def exchange_of(run: Run) -> Path:
    """Where the request waits, while final/ has not been loaded."""
    return run.path / ".final-load"


class Load:
    """The process that loads final/, from now on."""

    def __init__(self, run: Run) -> None:
        self.run, self.exchange = run, exchange_of(run)
        (self.exchange / "result.json").unlink(missing_ok=True)
        words = [
            sys.executable,
            "-m",
            "sft.checkpoint.load_again",
            str(os.getpid()),
            str(run.final),
            str(self.exchange),
        ]
        environment = environment_without_launcher() | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        with (self.exchange / "stderr").open("wb") as errors:
            # In a session of its own: a terminal's Ctrl-C is for the evaluation.
            self.process = subprocess.Popen(
                words, env=environment, stdout=errors, stderr=errors, start_new_session=True
            )

    def check(self) -> None:
        """Wait until final/ is loaded, and record how far its logits are.

        Raises:
            WrongSave: It is another model than was trained; it is kept as `unverified`.
            RunError: It could not be loaded. The next start tries again.
        """
        run, exchange = self.run, self.exchange
        if how := self._failed():
            raise RunError(
                f"{run.final} could not be verified: the process that loads it on the CPU {how}. It needs the machine's memory for one "
                "copy of the weights. Give the job more memory, or skip the verification: train.save_canary=false. "
                f"{run.next_start}."
            )
        result = read_json(exchange / "result.json")
        remove(exchange)
        if not result["problems"]:
            run.update(save_checked=run.record.get("save_checked", {}) | {"logits_differ": result["distance"]})
            print(f"{run.final}: loaded again its logits differ by {result['distance']:.1e} of their norm.", flush=True)
            return
        remove(run.unverified)
        run.final.rename(run.unverified)
        lines = "".join(f"  {problem}\n" for problem in result["problems"])
        error = WrongSave(
            f"What was saved is not the model that was trained. In {run.unverified}, which was final/ until now:\n{lines}What was measured "
            "of it counts for nothing. This is a bug of this project or of a library, not of the recipe: report it with plan.json and "
            "run.json."
        )
        run.update(status="failed", evaluation="failed", error=str(error))
        raise error

    def _failed(self) -> str | None:
        """How the process ended, as a phrase, unless it has written its result."""
        try:
            status = self.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            return f"had not loaded it after {SECONDS} s"
        finally:
            self.process.kill()
        if status == -signal.SIGKILL:
            return "was killed, as Linux does where memory runs out"
        last = "".join((self.exchange / "stderr").read_text(errors="replace").strip().splitlines()[-1:])
        done = status == 0 and (self.exchange / "result.json").exists()
        return None if done else f"ended with status {status}: {last}"


def main(folder: Path, exchange: Path) -> None:
    """Load, and write what is wrong and the distance of the logits."""
    import torch
    from transformers import AutoModelForCausalLM, logging

    from sft.model.live import logits_distance

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    rows, logits, untrained, limit, trusts_code = torch.load(exchange / "request.pt")
    problems, apart = list[str](), float("inf")
    try:
        # Without ignore_mismatched_sizes, tensors of another shape raise an error that does not name them.
        loaded: tuple[Any, dict[str, Any]] = AutoModelForCausalLM.from_pretrained(
            folder, trust_remote_code=trusts_code, ignore_mismatched_sizes=True, output_loading_info=True
        )
        model, info = loaded
        with torch.no_grad():
            found = model.eval()(input_ids=torch.tensor(rows), use_cache=False).logits.float()
        problems += [f"{key}: {', '.join(sorted(map(str, info[key])))}" for key in _KEYS if info[key]]
        apart = logits_distance(logits, found)
        if not apart <= limit:
            problems.append(
                f"logits differ by {apart:.2%} of their norm; other kernels alone make less than {limit:.1%}"
            )
        elif untrained is not None and apart > 2 * logits_distance(untrained, found):
            problems.append("logits are those of the base: the adapters are not merged")
    except Exception as error:  # whatever keeps a user from loading it
        problems.append(f"it cannot be loaded: {type(error).__name__}: {error}")
    write_json(exchange / "result.json", {"problems": problems, "distance": apart})


if __name__ == "__main__":
    main(Path(sys.argv[2]), Path(sys.argv[3]))
