"""Train as sft.train does, and print how many MiB each rank's resident memory has grown by when the model is loaded, and sharded."""

import os
import re
from pathlib import Path
from typing import Any

from transformers.trainer_callback import CallbackHandler

from sft.launch import rank as train
from sft.program import run_main
from sft.train import main as training


def resident() -> float:
    """MiB of this process's own pages; those of files that are mapped do not count."""
    return int(re.findall(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[0]) / 1024


def main() -> None:
    """Look before and after."""
    load, begin, before = training.load_model, CallbackHandler.on_train_begin, [0.0]

    def say(when: str) -> None:
        print(f"rank {os.environ['RANK']} {when} {resident() - before[0]:.0f} MiB", flush=True)

    def load_and_look(*arguments: Any) -> Any:
        before[0] = resident()
        model = load(*arguments)
        say("loaded")
        return model

    def look_and_begin(*arguments: Any) -> Any:
        say("sharded")
        return begin(*arguments)

    training.load_model = load_and_look
    CallbackHandler.on_train_begin = look_and_begin  # type: ignore[method-assign]
    run_main(train.main)


if __name__ == "__main__":
    main()
