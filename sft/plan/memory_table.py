"""The cheapest engine that fits, for GPUs from few and small to many and large. Arithmetic (sft/plan/memory.py), not measured.

python -m sft.plan.memory_table                         the five models of docs/memory.md
python -m sft.plan.memory_table recipes/qwen3b.yaml     a recipe's own, at its own length

`bash scripts/sft.sh RECIPE --plan --on 2x8x80GB` gives the sum of one cell, for a local model or one that the hub can be asked about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from sft.errors import ModelError, PlanError
from sft.plan.engine import MEMORIES, choose_engine, engine_words, machine, machines_that_fit
from sft.plan.facts import ModelFacts
from sft.plan.hardware import Gpu
from sft.plan.memory import ENGINES, GIB, needed
from sft.program import run_main
from sft.recipe.schema import Data, Model, Recipe, Train

ROWS = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (8, 8))
"""Machines and GPUs of each."""

MODELS: Mapping[str, ModelFacts] = {
    name: ModelFacts(name, kind, "bfloat16", 32768, parameters, words, hidden, layers)
    for name, kind, parameters, words, hidden, layers in (
        ("Qwen/Qwen2.5-3B", "qwen2", 3_085_938_688, 151_936, 2048, 36),
        ("meta-llama/Llama-3.1-8B", "llama", 8_030_261_248, 128_256, 4096, 32),
        ("Qwen/Qwen2.5-14B", "qwen2", 14_770_033_664, 152_064, 5120, 48),
        ("Qwen/Qwen2.5-32B", "qwen2", 32_763_876_352, 152_064, 5120, 64),
        ("meta-llama/Llama-3.1-70B", "llama", 70_553_706_496, 128_256, 8192, 80),
    )
}
"""Their config.json's numbers, and the parameters that follow from them."""


def example(model: str, length: int = 4096) -> Recipe:
    """All weights of a model, in whatever engine fits."""
    train = Train(global_batch_size=64, parallel="auto")
    data = Data(train="data.jsonl", max_length=length)
    return Recipe(schema_version=1, version=1, model=Model(name_or_path=model), data=data, train=train)


def cell(recipe: Recipe, model: ModelFacts, shape: tuple[int, int], memory: float) -> tuple[str, str]:
    """What fits, in short and with its sum; or that nothing does, and what would.

    Args:
        recipe: With train.parallel=auto.
        model: With its size.
        shape: Machines, and GPUs of each.
        memory: GB of each GPU.
    """
    gpu = Gpu("GPU", memory, 8.0)
    hardware = machine(gpu, *shape)
    try:
        found = choose_engine(recipe, hardware, model)
    except PlanError as error:
        smallest = next(machines_that_fit(recipe, gpu, model), "").partition(" with ")[0]
        return "no" + (f"; {smallest} do" if smallest else ""), str(error)
    name = found.value or "none"
    need = needed(recipe, hardware, model, ENGINES[name])
    cpu = f" + {need.cpu / GIB:.0f} CPU" if need.cpu else ""
    return f"{engine_words(name, recipe, hardware)}: {need.gpu_bytes / GIB:.0f}{cpu}", need.words(hardware)


def table(recipe: Recipe, model: ModelFacts) -> str:
    """A model's engines as a table of Markdown, GiB on each GPU behind each; and of each machine's memory."""
    lines = [f"| {model.path} | " + " | ".join(f"{memory} GB" for memory in MEMORIES) + " |"]
    lines.append("|---|" + "---|" * len(MEMORIES))
    for shape in ROWS:
        name = f"{shape[0]} x {shape[1]}" if shape[0] > 1 else str(shape[1])
        cells = (cell(recipe, model, shape, memory)[0] for memory in MEMORIES)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def tables() -> str:
    """Those of docs/memory.md."""
    return "\n\n".join(table(example(name), model) for name, model in MODELS.items())


def main(argv: Sequence[str]) -> None:
    """Print the tables."""
    if not argv:
        print(tables())
        return
    from sft.plan.job import open_recipe

    recipe, _, model = open_recipe(Path(argv[0]), [*argv[1:]], to_run=False)
    if model.parameters is None and recipe.model.name_or_path in MODELS:
        model = MODELS[recipe.model.name_or_path]
    if model.parameters is None:
        raise ModelError(f"The size of {model.path} is not known here. Download it, or give a local folder.")
    engine = {"parallel": "auto", "deepspeed": None, "fsdp": None}
    print(table(recipe.model_copy(update={"train": recipe.train.model_copy(update=engine)}), model))


if __name__ == "__main__":
    run_main(main)
