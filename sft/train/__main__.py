"""python -m sft.train RECIPE: train one recipe, also under torchrun, accelerate and deepspeed."""

from sft.program import run_main
from sft.train.main import main

run_main(main)
