"""python -m sft.launch RECIPE: what scripts/sft.sh runs."""

from sft.launch.main import main
from sft.program import run_main

run_main(main)
