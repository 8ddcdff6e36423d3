"""python -m sft.train RECIPE: train one recipe, also under torchrun, accelerate and deepspeed."""

from importlib import import_module

from sft.program import run_main

# An entry point stands outside the layers: the program belongs to launch, and nothing else in train may import it.
run_main(import_module("sft.launch.rank").main)
