"""From the measurements of base and tuned to what is said of them: comparison, flipped documents, contamination, gate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.compare.comparison import compare
from eval.compare.contamination import check_contamination
from eval.compare.flips import find_flips, write_flips
from eval.compare.gate import judge_gate
from eval.compare.pairs import Results, Samples, finite
from eval.compare.tables import comparison_lines, comparison_table
from sft.files import read_json, write_json
from sft.recipe.schema import Evaluation
from sft.run.directory import Run

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_samples(folder: Path) -> Samples:
    """lm_eval's samples, per task."""
    return {
        # Not splitlines: an answer may hold U+2028, which ends no line of JSON.
        path.stem.removeprefix("samples_"): [json.loads(line) for line in path.read_bytes().split(b"\n") if line]
        for path in sorted(folder.glob("samples_*.jsonl"))
    }


def conclude(run: Run, folder: Path, evaluation: Evaluation, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Compare what two evaluations have left, write comparison.json and flips.jsonl, and print it.

    Args:
        run: The run, for the data that it was trained on.
        folder: Holds base/ and tuned/.
        evaluation: The recipe's `eval` section: its gate and contamination.
        tokenizer: The run's.

    Returns:
        What comparison.json holds.

    Raises:
        EvaluationError: The two were not measured alike.
    """
    from rich.console import Console

    results: tuple[Results, Results] = (
        read_json(folder / "base" / "results.json"),
        read_json(folder / "tuned" / "results.json"),
    )
    samples = (read_samples(folder / "base"), read_samples(folder / "tuned"))
    comparison = compare(*results, *samples)
    flips, comparison["flips"] = find_flips(comparison["metrics"], *results, *samples)
    comparison["contamination"] = check_contamination(
        evaluation.contamination, run, tokenizer, comparison["metrics"], results, samples
    )
    comparison["gate"] = judge_gate(evaluation.gate, comparison)
    write_flips(flips, folder / "flips.jsonl")
    write_json(folder / run.comparison_file.name, finite(comparison))
    console = Console()
    console.print(comparison_table(comparison))
    for line in comparison_lines(comparison):
        console.print(line, markup=False, highlight=False)
    return comparison
