"""The machines and models that the tests of the plan share."""

from collections.abc import Callable

from sft.hub.model_facts import ModelFacts
from sft.plan.deepspeed import load_deepspeed
from sft.plan.hardware import Gpu, Hardware
from sft.plan.memory import estimate_memory
from sft.plan.memory_estimate import MemoryEstimate
from sft.recipe.schema import Recipe

MakeRecipe = Callable[..., Recipe]
QWEN = ModelFacts("some/model", "qwen2", "bfloat16", 32768)
# Their config.json's numbers: parameters, vocabulary, hidden size, layers, width of the MLP.
MODELS = {
    # An adapter for each linear layer: query, key, value and output have about 11 h inputs and outputs, gate, up, down 3 (h + f).
    name: ModelFacts(
        name,
        kind,
        "bfloat16",
        32768,
        parameters,
        words,
        hidden,
        layers,
        linear_widths=layers * (11 * hidden + 3 * width),
    )
    for name, kind, parameters, words, hidden, layers, width in (
        ("Qwen/Qwen2.5-3B", "qwen2", 3_085_938_688, 151_936, 2048, 36, 11_008),
        ("Qwen/Qwen2.5-7B", "qwen2", 7_615_616_512, 152_064, 3584, 28, 18_944),
        ("Qwen/Qwen2.5-14B", "qwen2", 14_770_033_664, 152_064, 5120, 48, 13_824),
        ("meta-llama/Llama-3.1-70B", "llama", 70_553_706_496, 128_256, 8192, 80, 28_672),
    )
}


def cpu(ranks: int = 1, per_node: int | None = None) -> Hardware:
    return Hardware(None, ranks, per_node or ranks, 2, 16.0)


def gpus(
    ranks: int = 1,
    per_node: int | None = None,
    *,
    memory: float = 80.0,
    capability: float = 9.0,
    flash: bool = False,
    flash_3: bool = False,
) -> Hardware:
    gpu = Gpu("NVIDIA Test", memory, capability)
    return Hardware(gpu, ranks, per_node or min(ranks, 8), 16, 128.0, flash, flash_3)


def needs(recipe: Recipe, hardware: Hardware, model: ModelFacts, engine: str = "none") -> MemoryEstimate:
    """With a file of ds_configs/; `none`: without DeepSpeed."""
    found = estimate_memory(recipe, hardware, model, load_deepspeed(engine) if engine != "none" else None)
    assert found is not None
    return found
