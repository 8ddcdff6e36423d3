"""Train as sft.train does, with one fault: `AT=POINT DO=ACTION [ON=RANK] [STARTS=N] faults.py RECIPE [key=value ...]`.

A point is where it happens: `import`, `loading`, `data of step N`, `step N, micro-batch M`, `after step N`, `eval loss after step N`,
`evaluation at step N`, `save N`, `final`, or so many seconds after the first step began: `0.7 s`. An action is one of ACTIONS or the name
of a signal. ON is a rank or `all`, whose others do OTHERS, if anything; without STARTS each start of the job fails.

With BAD_ROW=nan|inf|gradient the loss, or only its gradient, is not finite where a row has a `~`; `observed/changes-N.txt` then says of
each step whether it changed anything that rank N's optimizer holds.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer_callback import TrainerCallback

from sft.launch import rank as train
from sft.program import run_main
from sft.train import main as training

LONG = 600
"""Seconds: whoever hangs is ended from outside."""


def hang_in_python() -> None:
    time.sleep(LONG)


def hang_in_c() -> None:
    """No handler of Python's runs meanwhile."""
    ctypes.CDLL(None).sleep(LONG)


def wait_in_c() -> None:
    """As for a GPU: no signal ends the wait."""
    deadline = time.monotonic() + LONG
    while time.monotonic() < deadline:
        ctypes.CDLL(None).sleep(LONG)


def be_signalled_twice() -> None:
    """The second one comes later than a launcher says the same again."""
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Timer(2.5, os.kill, [os.getpid(), signal.SIGTERM]).start()
    hang_in_c()


def fail() -> None:
    raise ZeroDivisionError("made by the test")


def run_out_of_memory() -> None:
    """As torch says it, of a GPU."""
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.25 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.06 GiB is free. Process 7 has "
        "78.03 GiB memory in use. Of the allocated memory 74.80 GiB is allocated by PyTorch, and 1.90 GiB is reserved by PyTorch but "
        "unallocated."
    )


NCCL = "[rank1]:[E1122 19:30:11.426415540 ProcessGroupNCCL.cpp:689] [Rank 1] "
WORK = "WorkNCCL(SeqNum=41, OpType=ALLREDUCE, NumelIn=563200, NumelOut=563200, Timeout(ms)=600000) ran for 600081 milliseconds"
TIMED_OUT = f"Watchdog caught collective operation timeout: {WORK} before timing out."


def be_aborted_by_nccl() -> None:
    """As torch's watchdog thread ends a rank on a GPU."""
    print(
        f"{NCCL}{TIMED_OUT}\n{NCCL}To avoid data inconsistency, we are taking the entire process down.", file=sys.stderr
    )
    print("terminate called after throwing an instance of 'c10::DistBackendError'", file=sys.stderr)
    what = f"[PG ID 0 PG GUID 0 Rank 1] Process group watchdog thread terminated with exception: [Rank 1] {TIMED_OUT}"
    print(f"  what():  {what}", file=sys.stderr, flush=True)
    os.abort()


ACTIONS = {
    "raise": fail,
    "out of memory": run_out_of_memory,
    "NCCL": be_aborted_by_nccl,
    "hang": hang_in_python,
    "hang in C": hang_in_c,
    "wait in C": wait_in_c,
    "signals": be_signalled_twice,
}


def happens(point: str) -> None:
    """Do it where this is the point, once."""
    mine = os.environ.get("ON", "all") in ("all", os.environ.get("RANK", "0"))
    action = os.environ["DO"] if mine and "DO" in os.environ else os.environ.get("OTHERS")
    if point != os.environ.get("AT") or action is None:
        return
    if int(os.environ.get("SFT_RESTARTS", "0")) >= int(os.environ.get("STARTS", "99")):
        return
    os.environ["AT"] = "done"
    if action in ACTIONS:
        ACTIONS[action]()
    else:
        os.kill(os.getpid(), signal.Signals[action])


def before(where: Any, name: str, point: Callable[..., str]) -> None:
    """Have it happen before a function is called."""
    function = getattr(where, name)

    def called(*arguments: Any, **named: Any) -> Any:
        happens(point(*arguments))
        return function(*arguments, **named)

    setattr(where, name, called)


class Faults(TrainerCallback):  # type: ignore[misc]
    """The points of a training."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.passes = trainer, 0

        def passed(*_: Any) -> str:
            self.passes += 1
            return f"step {trainer.state.global_step + 1}, micro-batch {self.passes}"

        before(trainer, "training_step", passed)
        before(
            trainer,
            "compute_loss",
            lambda model, *_: "training" if model.training else self.now("eval loss after step"),
        )
        before(trainer, "_save_optimizer_and_scheduler", lambda *_: self.now("save"))
        read = trainer.get_batch_samples

        def read_and_fail(epoch: Any, *arguments: Any) -> Any:
            def batches() -> Any:
                happens(f"data of step {trainer.state.global_step + 1}")
                while True:  # not `yield from`, which would close the epoch with this
                    try:
                        yield next(epoch)
                    except StopIteration:
                        return

            return read(batches(), *arguments)

        trainer.get_batch_samples = read_and_fail

    def now(self, point: str) -> str:
        """A point of the step that is done."""
        return f"{point} {self.trainer.state.global_step}"

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock."""
        at = os.environ.get("AT", "")
        if at.endswith(" s"):
            threading.Timer(float(at.removesuffix(" s")), happens, [at]).start()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """The step is done."""
        self.passes = 0
        happens(self.now("after step"))


def digest(trainer: Any) -> str:
    """Of what the innermost optimizer steps on, and of its state."""
    from torch.distributed.tensor import DTensor

    optimizer, shards = trainer.optimizer, []
    while hasattr(optimizer, "optimizer"):
        # ZeRO-3's, which it lends to AdamW for the step.
        shards = getattr(optimizer, "fp32_partitioned_groups_flat", shards)
        optimizer = optimizer.optimizer
    held = [weight for group in optimizer.param_groups for weight in group["params"]]
    held += [*shards, *(value for state in optimizer.state.values() for value in state.values())]
    found = hashlib.sha256()
    for value in held:
        value = value.to_local() if isinstance(value, DTensor) else torch.as_tensor(value)
        found.update(value.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class Changes(TrainerCallback):  # type: ignore[misc]
    """Notes whether a step changed anything."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.before = trainer, ""
        folder = Path(trainer.args.output_dir).parent / "observed"
        folder.mkdir(exist_ok=True)
        self.file = folder / f"changes-{trainer.args.process_index}.txt"

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before the first micro-batch."""
        self.before = digest(self.trainer)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the optimizer's step."""
        with self.file.open("a") as lines:
            lines.write(f"{state.global_step} {'same' if digest(self.trainer) == self.before else 'changed'}\n")


def spoil_losses(kind: str) -> None:
    """Make the loss of a micro-batch with a `~`, or its gradient, not finite."""
    from sft.train import trainer as recipe_trainer

    plain, take = recipe_trainer.plain_loss, Trainer.get_batch_samples
    spoilt: set[bytes] = set()

    def taken(trainer: Any, *arguments: Any) -> Any:
        batches, tokens = take(trainer, *arguments)
        (token,) = trainer.processing_class.encode("~", add_special_tokens=False)
        spoilt.clear()
        # By their labels: the last stage of a pipeline is given hidden states for tokens.
        spoilt.update(batch["labels"].numpy().tobytes() for batch in batches if (batch["input_ids"] == token).any())
        return batches, tokens

    def spoiled(trainer: Any, model: Any, inputs: Any, tokens: Any) -> Any:
        loss = plain(trainer, model, inputs, tokens)
        if inputs["labels"].numpy().tobytes() in spoilt and trainer.model.training:
            if kind == "gradient":
                loss.register_hook(lambda gradient: gradient * float("inf"))
            else:
                loss = loss * float("nan") if kind == "nan" else loss + float("inf")
        return loss

    recipe_trainer.plain_loss, Trainer.get_batch_samples = spoiled, taken


def main() -> None:
    """Plant the fault, and train."""
    import sft.checkpoint.final
    from eval.models.live_model import Live

    sys.argv[1:] = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]  # the deepspeed launcher's
    before(train, "enter", lambda *_: "import")
    before(training, "load_model", lambda *_: "loading")
    before(sft.checkpoint.final, "save_weights", lambda *_: "final")
    before(Live, "_in_step", lambda live: f"evaluation at step {live.trainer.state.global_step}")
    bad_row, begin = os.environ.get("BAD_ROW"), Trainer.train
    if bad_row:
        spoil_losses(bad_row)

    def begin_with_faults(trainer: Any, *arguments: Any, **named: Any) -> Any:
        trainer.add_callback(Faults(trainer))
        if bad_row:
            trainer.add_callback(Changes(trainer))
        return begin(trainer, *arguments, **named)

    Trainer.train = begin_with_faults
    run_main(train.main)


if __name__ == "__main__":
    main()
