"""python -m sft.train RECIPE: train one recipe, also under torchrun, accelerate and deepspeed."""

from sft.launch.rank import main
from sft.program import run_main

run_main(main)
