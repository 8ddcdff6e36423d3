"""python -m sft.export RUN: what scripts/export.sh runs."""

import os

# Read by the libraries when they are imported. DeepSpeed is, and does nothing here.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

from sft.export.main import main
from sft.program import run_main

run_main(main)
