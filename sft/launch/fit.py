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
from sft.plan.fit import Fit, Proposal, describe, fit
from sft.plan.gpus import gpu_words
from sft.plan.hardware import Hardware, described_hardware, detect_hardware
from sft.plan.memory_estimate import GIB
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
    if file is not None:
        _check_file(file)
        file = file.absolute()  # a run's folder may change the working directory
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
            f"--fit counts the weights of {name}, and none can be built: its config.json is not in the hub's cache and the hub does not "
            f"answer, or it needs code of its own. Where there is a network: hf download {name} config.json."
        )
    found = fit(checked.recipe, hardware, model, checked.data)
    if found.lack is None:
        _say_it_fits(found, hardware, word, file)
        return
    title = f"{word}: {checked.recipe.model.name_or_path} does not fit on {hardware.device}: {found.lack}"
    if not found.proposals:
        raise PlanError(
            f"{title}\nNo change that is known here makes it fit. Take a smaller model, or shorter documents (data.max_length)."
        )
    chosen = _chosen(found.proposals, number, file)
    if file is not None:
        _write(file, checked.path, overrides, chosen)
    elif number:
        print_plan(chosen.case.plan, f"{word} with {describe(chosen)} on {chosen.case.hardware.device}")
    else:
        print(visible_line(title))
        print("\n".join(["Changes that make it fit; each was planned:", *_lines(found.proposals)]))
        print(f"The plan of one: {command} --fit 1")
        if (place := _writable(found.proposals)) or found.proposals[0].overrides:
            print(f"The recipe with one: {command} --fit {place + 1} --write FILE.yaml")


def _say_it_fits(found: Fit, hardware: Hardware, word: str, file: Path | None) -> None:
    assert found.memory
    assert hardware.gpu
    room = hardware.gpu.memory_gib - found.memory.gpu_bytes / GIB
    fits = f"{word} fits on {hardware.device}: {found.memory.short}, {room:.1f} GiB to spare, by the plan's estimate."
    if file is not None:
        raise PlanError(f"--write {file}: {fits} There is nothing to change.")
    smaller = gpu_words(hardware.gpu.name, int(0.9 * hardware.gpu.memory_gib))
    print(visible_line(fits))
    print(f"If it ran out of memory all the same, plan for less: --on {hardware.ranks}x{smaller} --fit")


def _lines(proposals: Sequence[Proposal]) -> list[str]:
    lines = []
    for number, one in enumerate(proposals, 1):
        lines.append(f"{number:>3}. {describe(one)}")
        engine = one.case.plan.engine.value + (" with offload" if one.case.offloads else "")
        hours = f"; {one.case.plan.time.value} in all" if one.case.plan.time.value else ""
        details = {"memory": f"{one.memory.short}, {engine}", "time": one.cost + hours}
        details["result"] = one.result
        lines += [f"     {name + ':':<8}{words}" for name, words in details.items()]
    return lines


def _chosen(proposals: Sequence[Proposal], number: int, file: Path | None) -> Proposal:
    """The change with this number; of 0 the first that a recipe can hold."""
    if number > len(proposals):
        raise PlanError(f"--fit {number}: there are {len(proposals)} changes. --fit without a number lists them.")
    chosen = proposals[number - 1 if number else _writable(proposals)]
    if file is not None and not chosen.overrides:
        raise PlanError(
            f"--write {file}: the change is another machine ({describe(chosen)}), and the recipe stays as it is."
        )
    return chosen


def _writable(proposals: Sequence[Proposal]) -> int:
    """The place of the first that a recipe can hold; else 0."""
    return next((place for place, one in enumerate(proposals) if one.overrides), 0)


def _check_file(file: Path) -> None:
    if file.suffix not in (".yaml", ".yml"):
        raise RecipeError(f"--write {file}: give the recipe a name that ends in .yaml.")
    if file.exists() or file.is_symlink():
        raise RecipeError(f"--write {file}: it exists already. Name another file.")
    if not file.parent.is_dir():
        raise RecipeError(f"--write {file}: there is no folder {file.parent}.")


def _write(file: Path, recipe: Path, overrides: Sequence[str], chosen: Proposal) -> None:
    """Write the recipe with the overrides and the change, and read it as a start does."""
    changes = [*overrides, *chosen.overrides]
    words = join({word.partition("=")[0]: word for word in changes}.values())
    values = load_recipe(recipe, changes).model_dump(mode="json", exclude_unset=True)
    numbers = [f"{key}: {values.pop(key)}" for key in ("schema_version", "version")]
    lines = [f"# {visible_line(f'{recipe} with {words}')}", *numbers, *recipe_lines(values, {})]
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write("\n".join(lines) + "\n")
    except OSError as error:
        raise RecipeError(f"--write {file}: it cannot be written: {error.strerror}.") from None
    try:
        check_code(load_recipe(file))
    except BaseException:
        file.unlink()
        raise
    print(f"{file}: {recipe} with {words}, without its comments.")
