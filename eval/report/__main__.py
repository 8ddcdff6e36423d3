"""python -m eval.report RUN: write the report of a run again, or compare several runs."""

from eval.report.main import main
from sft.program import run_main

run_main(main)
