"""python -m eval.chat RUN: have the models of a run answer the fixed prompts."""

import os
import signal

from sft.program import end_with_parent

if "SFT_PARENT" in os.environ:  # before the imports, during which the parent may end
    end_with_parent(int(os.environ["SFT_PARENT"]), signal.SIGTERM)

from eval.chat.samples import main
from sft.program import run_main

run_main(main)
