"""python -m sft.train RECIPE: train one recipe, also under torchrun, accelerate and deepspeed."""

from sft.errors import run_main
from sft.launch.rank import main

run_main(main)
