"""Look at a dataset and write a recipe for it that starts, with the reason for each value; or say at once all that is missing."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from sft.data.facts import inspect_data
from sft.data.readers import Row
from sft.errors import PlanError, RecipeError, UserError
from sft.hub.model_facts import ModelFacts
from sft.hub.names import is_pattern
from sft.init.choose import choose_length, choose_steps, choose_weights
from sft.init.draft import Draft, as_yaml
from sft.init.own_task import EVAL_SPLIT, OwnTask, as_written, hold_out, put_task, write_rows, write_task
from sft.init.rows import Rows, read_sample
from sft.init.tokens import Tokenized, settle_tokenizer, tokenize
from sft.launch.job import checked_model, open_job
from sft.launch.topology import read_topology
from sft.plan.hardware import Hardware, described_hardware, detect_hardware
from sft.program import shown_command
from sft.terminal import visible_line

SMALL, LARGER = "Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-1.5B"
"""The model where none is named, on a CPU and on a GPU: open, ungated, Apache-2.0, with a chat template and a padding token."""


def main(
    data: str,
    model: str | None = None,
    gpus: str | None = None,
    columns: str | None = None,
    output: Path | None = None,
    given: Sequence[str] = (),
) -> None:
    """Write a recipe, its eval split and its task, and print where.

    Args:
        data: A file, folder, pattern or hub id.
        model: A folder or hub id; None: a small open one.
        gpus: The machine, such as `8x80GB`; None: this one.
        columns: `prompt=question,completion=answer`.
        output: The recipe's file; None: named after the data.
        given: Overrides, `key=value`, which hold.

    Raises:
        RecipeError: All that is missing.
    """
    output = output or Path(f"{_name_of(data)}.yaml")
    problems = Problems()
    problems.check(lambda: _check_output(output))
    hardware = problems.check(lambda: _hardware(gpus))
    draft = problems.check(lambda: _draft(given, model)) or Draft()
    named = problems.check(lambda: _columns(columns))
    rows = problems.check(lambda: read_sample(data, named, draft.recipe().output_dir))
    default = SMALL if hardware is None or hardware.gpu is None else LARGER
    draft.put("model.name_or_path", model or default, "" if model else "no --model was given: a small, open one")
    facts = problems.check(lambda: checked_model(draft.recipe()))
    tokenizer = problems.check(lambda: settle_tokenizer(draft, rows)) if rows and facts else None
    sample = problems.check(lambda: tokenize(draft, tokenizer, rows)) if rows and tokenizer else None
    if problems.lines:
        raise RecipeError(problems.message(data))
    assert rows and sample and facts and hardware
    _write(draft, rows, sample, facts, hardware, output)


T = TypeVar("T")


class Problems:
    """What is missing: collected, so that it is said at once."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def check(self, step: Callable[[], T]) -> T | None:
        """What a step returns; None where it fails."""
        try:
            return step()
        except UserError as error:
            self.lines.append(str(error))
            return None

    def message(self, data: str) -> str:
        """All of it in one message."""
        return "\n".join([f"No recipe for {data} yet:", *("  " + line.replace("\n", "\n  ") for line in self.lines)])


def _name_of(data: str) -> str:
    """A recipe's name for a dataset.

    >>> _name_of("my data/train-reviews.csv.gz"), _name_of("owner/chats"), _name_of("x/*.jsonl")
    ('train-reviews', 'chats', 'x')
    """
    parts = [part for part in Path(data).parts if not is_pattern(part)]
    return re.sub(r"[^\w-]+", "_", parts[-1].split(".")[0]).strip("_-") if parts else "recipe"


def _check_output(output: Path) -> None:
    if output.suffix not in (".yaml", ".yml"):
        raise RecipeError(f"-o {output}: give the recipe a name that ends in .yaml.")
    for path in (output, folder_beside(output)):
        if path.exists():
            raise RecipeError(f"{path} exists already. Name another with -o, or move it away.")
    if not output.parent.is_dir():
        raise RecipeError(f"-o {output}: there is no folder {output.parent}.")


def folder_beside(output: Path) -> Path:
    """Where the eval split and the task go."""
    return output.with_name(f"{output.stem}_eval")


def _draft(given: Sequence[str], model: str | None) -> Draft:
    draft = Draft(given)
    if draft.has("data.train"):
        raise RecipeError("data.train: leave it out, it is DATA.")
    if model is not None and draft.has("model.name_or_path"):
        raise RecipeError("model.name_or_path and --model both name the model: leave one out.")
    return draft


def _hardware(gpus: str | None) -> Hardware:
    if gpus is not None:
        try:
            return described_hardware(gpus)
        except PlanError as error:
            raise PlanError(str(error).replace("--on", "--gpus", 1)) from None
    topology = read_topology()
    return detect_hardware(topology.ranks, topology.per_node)


def _columns(columns: str | None) -> dict[str, str] | None:
    if not columns:
        return None
    pairs = [part.partition("=") for part in columns.split(",")]
    if not all(ours.strip() and theirs.strip() for ours, _, theirs in pairs):
        raise RecipeError(f"--columns {columns}: write prompt=NAME,completion=NAME.")
    return {ours.strip(): theirs.strip() for ours, _, theirs in pairs}


def _write(draft: Draft, rows: Rows, sample: Tokenized, facts: ModelFacts, hardware: Hardware, output: Path) -> None:
    """Choose everything else, write it, and print where."""
    data, folder, count = rows.source.path, folder_beside(output), len(rows.numbered)
    columns = ", ".join(f"{theirs} -> {ours}" for ours, theirs in rows.source.columns.items())
    reason = f"format {rows.format}{f', columns {columns}' if columns else ''}"
    draft.put("data.train", as_written(rows.source), reason)
    if sample.bad:
        reason_bad = f"{sample.bad} of {count:,} rows cannot be used (the first: {sample.why_bad})"
        draft.put("data.on_bad_row", "drop", reason_bad)
    if not rows.is_all:
        known = inspect_data(draft.recipe(), facts.path)  # None for a dataset on the hub
        count = max(count, known.documents if known else 0)
    drawn = hold_out(draft, rows, folder)
    choose_length(draft, sample.lengths, facts)
    choose_weights(draft, hardware, facts)
    steps = choose_steps(draft, sample.lengths, max(1, count - len(drawn)), hardware.ranks)
    task = put_task(draft, drawn, rows, folder)
    text = as_yaml(draft, _title(data, output, draft), output.parent)
    _save(output, text, drawn, task, hardware)
    print(visible_line(f"{output}: {draft.recipe().model.name_or_path} on {data}, about {steps:,} steps."))
    print(visible_line(f"Check data.train: {reason}."))
    print(f"Look at it: {shown_command('sft', str(output), '--show', '3')}")


def _title(data: str, output: Path, draft: Draft) -> list[str]:
    command = shown_command("sft", str(output))
    return [
        f"{draft.recipe().model.name_or_path} on {data}. Written by `sft init`; every value is yours to change.",
        f"  {command} --show 3    # three rows as the model gets them, and what was found in the data",
        f"  {command} --plan      # every decision with its reason",
        f"  {command}",
    ]


def _save(output: Path, text: str, drawn: Sequence[Row], task: OwnTask | None, hardware: Hardware) -> None:
    """Write the recipe with its eval split and task, and check them as a start does; nothing stays of what would not start."""
    folder = folder_beside(output)
    try:
        if drawn:
            folder.mkdir()
            write_rows(folder / EVAL_SPLIT, drawn)
        if task is not None:
            write_task(folder, task)
        output.write_text(text, encoding="utf-8")
        open_job(output, [], hardware, to_run=False)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        output.unlink(missing_ok=True)
        raise
