"""python -m sft.launch RECIPE: what scripts/sft.sh runs."""

from sft.errors import run_main
from sft.launch.main import main

run_main(main)
