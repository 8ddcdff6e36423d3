"""python -m sft.launch RECIPE: the same as `sft train RECIPE`."""

import sys
from importlib import import_module

sys.argv.insert(1, "train")
# An entry point stands outside the layers.
import_module("sft.cli").main()
