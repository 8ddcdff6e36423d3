"""Train as sft.train does, and be sent a signal at one point: `AT=held_out SIGNAL=SIGTERM ON=1 ... train_and_signal.py RECIPE ...`.

ON is the rank that hears it, or `all`. TWICE=1 sends a second one some time after the first, while the main thread hangs in C.
SIGNAL=none hangs without one.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from sft.launch import rank as train
from sft.program import run_main
from sft.train.trainer import RecipeTrainer


def send(point: str) -> None:
    """Where this is the point."""
    if point != os.environ["AT"] or os.environ.get("ON", "all") not in ("all", os.environ.get("RANK", "0")):
        return
    os.environ["AT"] = "done"
    if os.environ.get("SIGNAL") == "none":
        ctypes.CDLL(None).sleep(600)
    number = signal.Signals[os.environ.get("SIGNAL", "SIGTERM")]
    os.kill(os.getpid(), number)
    if "TWICE" in os.environ:
        threading.Timer(2.5, os.kill, [os.getpid(), number]).start()  # later than a launcher says the same again
        ctypes.CDLL(None).sleep(600)


def before(where: Any, name: str, point: Callable[..., str]) -> None:
    """Send it before a function is called."""
    function = getattr(where, name)

    def called(*arguments: Any, **named: Any) -> Any:
        send(point(*arguments))
        return function(*arguments, **named)

    setattr(where, name, called)


def main() -> None:
    """Train the recipe on the command line."""
    import eval.models.live_model
    import sft.checkpoint.final
    import sft.train.main

    before(train, "wait_for_data", lambda *_: "preparation")
    before(train, "enter", lambda *_: "import")
    before(sft.train.main, "load_model", lambda *_: "loading")
    before(eval.models.live_model.Live, "_in_step", lambda live: f"evaluation at step {live.trainer.state.global_step}")
    before(sft.checkpoint.final, "save_weights", lambda *_: "final")
    before(
        RecipeTrainer,
        "training_step",
        lambda trainer, *_: f"step {trainer.state.global_step + 1}, micro-batch {trainer.progress.passes + 1}",
    )
    before(
        RecipeTrainer,
        "compute_loss",
        lambda trainer, model, *_: "nothing" if model.training else f"held out {trainer.state.global_step}",
    )
    before(
        RecipeTrainer,
        "_save_optimizer_and_scheduler",
        lambda trainer, *_: f"save {trainer.state.global_step}",
    )
    run_main(train.main)


if __name__ == "__main__":
    assert sys.argv[1:]
    main()
