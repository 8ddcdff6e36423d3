"""Show the changes with which a recipe fits on some GPUs, and write the recipe with one of them: `sft plan RECIPE --fit`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from shlex import join

from sft.errors import PlanError, RecipeError
from sft.launch.checks import check_installed
from sft.launch.job import check_recipe, checked_model
from sft.launch.rerun import recipe_of
from sft.launch.topology import read_topology
from sft.plan.fit import Proposal, describe, fit
from sft.plan.hardware import described_hardware, detect_hardware
from sft.plan.plan import print_plan
from sft.recipe.load import load_recipe
from sft.recipe.local_code import check_code
from sft.recipe.write import recipe_lines
from sft.terminal import visible_line


def show_fit(word: str, overrides: Sequence[str], on: str | None, number: int, file: Path | None) -> None:
    """Print whether a recipe fits, and if not the changes with which it does.

    Args:
        word: The recipe, or a run's folder.
        overrides: Changed keys.
        on: GPUs that are not here; None: this machine's.
        number: Of a change, from 1: its plan is shown, or it is what is written. 0: all changes; the first is written.
        file: Where to write the recipe with a change; None: nowhere.

    Raises:
        UserError: It cannot run, whatever its memory; there is no such change; or the file cannot be written.
    """
    check_installed()
    file = file.absolute() if file is not None else None  # a run's folder may change the working directory
    command = join(["sft", "plan", word, *overrides, *(["--on", on] if on else [])])
    path, overrides = recipe_of(word, overrides)
    topology = read_topology()
    hardware = described_hardware(on) if on else detect_hardware(topology.ranks, topology.per_node)
    if hardware.gpu is None:
        raise PlanError("--fit counts the memory of GPUs, and there is none here. Name some: --on 8x80GB.")
    checked = check_recipe(path, overrides, hardware)
    model = checked_model(checked.recipe, to_run=False)
    if model.parameters is None:
        name = checked.recipe.model.name_or_path
        raise PlanError(
            f"--fit cannot count the weights of {name}: its config.json is not in the hub's cache and the hub does not answer, or "
            f"the model needs code of its own. Where there is a network: hf download {name} config.json."
        )
    found = fit(checked.recipe, hardware, model, checked.data)
    if found.memory is not None and found.lack is None:
        fits = f"{word} fits on {hardware.device}: {found.memory.short}, by the plan's estimate."
        if file is not None:
            raise PlanError(f"--write {file}: {fits} There is nothing to change.")
        print(visible_line(fits))
        return
    title = f"{word}: {checked.recipe.model.name_or_path} does not fit on {hardware.device}: {found.lack}"
    if not found.proposals:
        raise PlanError(
            f"{title}\nNo change that is known here makes it fit. Take a smaller model, or shorter documents (data.max_length)."
        )
    if number > len(found.proposals):
        raise PlanError(f"--fit {number}: there are {len(found.proposals)} changes. --fit without a number lists them.")
    if file is not None:
        _write(file, checked.path, overrides, found.proposals, number)
    elif number:
        case = found.proposals[number - 1].case
        print_plan(case.plan, f"{word} with {describe(found.proposals[number - 1])} on {case.hardware.device}")
    else:
        print(visible_line(title))
        print("\n".join(["Changes that make it fit; each was planned:", *_lines(found.proposals)]))
        print(f"The plan of one: {command} --fit 1\nThe recipe with one: {command} --fit 1 --write FILE.yaml")


def _lines(proposals: Sequence[Proposal]) -> list[str]:
    lines = []
    for number, one in enumerate(proposals, 1):
        engine = one.case.plan.engine.value + (" with offload" if one.case.offloads else "")
        hours = f"; {one.case.plan.time.value} in all" if one.case.plan.time.value else ""
        lines += [
            f"{number:>3}. {describe(one)}",
            f"     memory: {one.memory.short}, {engine}",
            f"     time:   {one.cost}{hours}",
            f"     result: {one.result}",
        ]
    return lines


def _write(file: Path, recipe: Path, overrides: Sequence[str], proposals: Sequence[Proposal], number: int) -> None:
    """Write the recipe with the overrides and a change, by default the first that a recipe can hold, and read it as a start does."""
    chosen = proposals[number - 1] if number else next((one for one in proposals if one.overrides), proposals[0])
    if not chosen.overrides:
        raise PlanError(
            f"--write {file}: the change is another machine ({describe(chosen)}), and the recipe stays as it is."
        )
    changes = [*overrides, *chosen.overrides]
    words = join({word.partition("=")[0]: word for word in changes}.values())
    values = load_recipe(recipe, changes).model_dump(mode="json", exclude_unset=True)
    numbers = [f"{key}: {values.pop(key)}" for key in ("schema_version", "version")]
    lines = [f"# {visible_line(f'{recipe} with {words}')}", *numbers, *recipe_lines(values, {})]
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write("\n".join(lines) + "\n")
    except OSError as error:
        raise RecipeError(f"--write {file}: it cannot be written: {error.strerror}. Name another file.") from None
    try:
        check_code(load_recipe(file))
    except BaseException:
        file.unlink()
        raise
    print(f"{file}: {recipe} with {words}, without its comments.")
