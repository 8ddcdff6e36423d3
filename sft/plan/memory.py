"""What training needs of each GPU and of the machine's memory, engine by engine. Arithmetic, not measured; imports no torch.

One GPU holds, for P parameters, N ranks that share, w bytes a number (2 in bf16 and fp16, 4 in fp32) and s tokens of one sequence:

model states     the table in `_states`: weights, gradients, the optimizer's fp32 weights and two moments
buffers          DeepSpeed's: two reduce buckets of w x min(5e8, P) in stages 1 and 2; in stage 3 one, and the gathered weights: w x at most
                 1e9 (stage3_max_live_parameters) + one layer + the embedding. DDP's: a second copy of the gradients
activations      of a micro-batch of 1, by the larger of two peaks:
                 - the pass: what the layers keep + the larger of (one layer recomputed, the head)
                   kept with checkpointing: layers x s x h x w; without: layers x s x (8 h + 4 f) x w; every n-th layer: between the two
                   one layer: s x (12 h + 6 f) x w, its outputs and their gradients; h hidden_size, f the width of the MLP
                   the head (TRL's fused one): a tile of min(s, 4096) x 32768 logits x w, gradients of hidden states, s x h x (4 + w),
                   and of its weight, vocabulary x h x (4 + w), where that is trained; as if every token were labelled
                 - the step: what is fp32 only then; a chunk of gradients for sft/parallel/optimizer.py, the rank's share of them for ZeRO
reserve          1.5 GiB for the CUDA context and NCCL's and cuBLAS's buffers, and 5 % of the memory for fragments

Attention is counted as FlashAttention and varlen have it: without a matrix of scores. Not counted: what loading takes in the machine's
memory, and routers, experts and buffers of models that are no plain decoders.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from sft.hub.model_facts import ModelFacts
from sft.plan.deepspeed import LARGEST_BUCKET, DeepSpeedFile
from sft.plan.hardware import Gpu, Hardware
from sft.plan.precision import gradient_bytes
from sft.recipe.schema import Recipe

GIB = 2**30
RESERVE = 1.5 * GIB
FRAGMENTS = 0.05
"""Share of a GPU's memory."""

LIVE = 1_000_000_000
"""Elements, DeepSpeed's stage3_max_live_parameters and sub_group_size."""

CPU_FACTOR = 1.5
"""Pinned copies and buffers beside what is offloaded, as DeepSpeed's own estimate has it."""

_CHUNK = 2**27
"""Elements of sft/parallel/optimizer.py's step."""

_TILE_TOKENS, _TILE_WORDS = 4096, 32768
"""TOKEN_CHUNK_SIZE and _CHUNKED_LOGPROB_CHUNK_SIZE of TRL's fused head."""


@dataclass(frozen=True)
class Engine:
    """What the ranks share out, and what leaves the GPU."""

    stage: int = 0
    """ZeRO's; 0 is DDP, or one process."""

    optimizer_offload: str = "none"
    """`none`, `cpu` or `nvme`: gradients, fp32 weights and moments."""

    weights_offload: str = "none"


ENGINES: Mapping[str, Engine] = {
    "none": Engine(),
    "zero1": Engine(1),
    "zero2": Engine(2),
    "zero3": Engine(3),
    "zero2_offload": Engine(2, "cpu"),
    "zero3_offload": Engine(3, "cpu", "cpu"),
}
"""By the name of the file under ds_configs/; `none` is no DeepSpeed."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes."""

    gpu: Mapping[str, float]
    """On each GPU, part by part."""

    cpu: float
    """Of each machine's memory, all its ranks together."""

    @property
    def gpu_bytes(self) -> float:
        """On each GPU."""
        return sum(self.gpu.values())

    def fits(self, hardware: Hardware) -> bool:
        """Whether the machine has it."""
        gpu = hardware.gpu
        return gpu is not None and self.gpu_bytes <= gpu.memory_gib * GIB and self.cpu <= hardware.cpu_memory_gib * GIB

    def words(self, hardware: Hardware) -> str:
        """The sum: `weights 5.7 + ... = 38 of 80 GiB`."""
        assert hardware.gpu is not None
        parts = " + ".join(f"{name} {size / GIB:.1f}" for name, size in self.gpu.items() if size >= 0.05 * GIB)
        said = f"{parts} = {self.gpu_bytes / GIB:.1f} of {hardware.gpu.memory_gib:.0f} GiB"
        if not self.cpu:
            return said
        assumed = " (assumed: twice its GPUs'; --on 8x80GB+1000GB says it)" if hardware.cpu_memory_assumed else ""
        return f"{said}; {self.cpu / GIB:.0f} of {hardware.cpu_memory_gib:.0f} GiB of the machine's memory{assumed}"


def engine_of(file: DeepSpeedFile | None) -> Engine:
    """What a DeepSpeed file asks for."""
    zero = file.config.get("zero_optimization", {}) if file else {}
    devices = [str(zero.get(key, {}).get("device", "none")) for key in ("offload_optimizer", "offload_param")]
    return Engine(file.stage if file else 0, *devices)


def is_half(recipe: Recipe, gpu: Gpu | None) -> bool:
    """Whether the precision, as it will be planned, is bf16 or fp16."""
    wanted = recipe.train.precision
    return wanted in ("bf16", "fp16") or (wanted == "auto" and gpu is not None and gpu.compute_capability >= 8.0)


def mlp_width(model: ModelFacts) -> float:
    """Width of a gated MLP in a layer of that size, whose attention is about 2.5 h squared.

    >>> llama = ModelFacts("Llama-3.1-8B", None, None, None, 8_030_261_248, 128_256, 4096, 32)  # its own is 14336
    >>> round(mlp_width(llama))
    15673
    """
    hidden = model.hidden_size or 0
    return max((model.layer_size - 2.5 * hidden**2) / (3 * hidden), hidden) if hidden else 0.0


def adapter_size(recipe: Recipe, model: ModelFacts) -> float:
    """Parameters of the adapters, at most: one for each matrix of a plain decoder; 0 without."""
    lora, hidden = recipe.model.lora, model.hidden_size or 0
    if lora is None:
        return 0.0
    # Query, key, value, output: h + h each, less where heads are shared; gate, up, down: h + f each.
    return lora.r * (model.num_hidden_layers or 0) * (8 * hidden + 3 * (hidden + mlp_width(model)))


def estimate_memory(recipe: Recipe, hardware: Hardware, model: ModelFacts, engine: Engine) -> MemoryEstimate:
    """What one GPU and one machine must hold.

    Args:
        recipe: Precision, adapters, lengths, checkpointing.
        hardware: The ranks, and the GPU.
        model: With its number of parameters; without its shape activations are left out.
        engine: What is asked for.
    """
    assert model.parameters
    assert hardware.gpu
    states, cpu = _states(recipe, hardware, model, engine)
    buffers = _buffers(recipe, hardware, model, engine)
    peaks = {"activations": _pass(recipe, hardware, model, engine), "step": _step(recipe, hardware, model, engine)}
    peak = max(peaks, key=lambda name: peaks[name])
    reserve = RESERVE + FRAGMENTS * hardware.gpu.memory_gib * GIB
    return MemoryEstimate(states | {"buffers": buffers, peak: peaks[peak], "reserve": reserve}, cpu)


def _width(recipe: Recipe, hardware: Hardware) -> int:
    return 2 if is_half(recipe, hardware.gpu) else 4


def _shared(recipe: Recipe, hardware: Hardware, model: ModelFacts) -> tuple[float, int]:
    """Parameters that a rank holds where nothing is shared out but a layer's matrices; and the ranks that share."""
    assert model.parameters
    tensor = recipe.train.tensor_parallel_size
    return model.parameters / tensor, max(1, hardware.ranks // tensor)


def _autocasts(recipe: Recipe, hardware: Hardware, engine: Engine) -> bool:
    """Whether fp32 weights compute in half precision: full fine-tuning under DDP, as sft/plan/weights.py has it."""
    alone = hardware.ranks == 1 and recipe.train.precision != "fp16"
    return recipe.model.lora is None and engine.stage == 0 and not alone and is_half(recipe, hardware.gpu)


def _states(recipe: Recipe, hardware: Hardware, model: ModelFacts, engine: Engine) -> tuple[dict[str, float], float]:
    """Bytes on a GPU, and of the machine's memory.

    Bytes a trained parameter; w = 2 in half precision, else 4:

                       weights   gradients    optimizer
        one process    w         4            12         (16-bit gradients where sft/plan/weights.py has them; fp32: 4, 4, 8)
        DDP            4         4            8          (and w again for autocast's copies in half precision)
        ZeRO-1         w         w + 4        12/N
        ZeRO-2         w         4/N          12/N
        ZeRO-3         w/N       4/N          12/N
    """
    (parameters, ranks), width = _shared(recipe, hardware, model), _width(recipe, hardware)
    trained = adapter_size(recipe, model) if recipe.model.lora is not None else parameters
    share = 1 if engine.stage == 0 else ranks
    if recipe.model.lora is not None:
        sizes = {
            "weights": width * parameters / (ranks if engine.stage == 3 else 1),
            "gradients": 4 * trained,
            "optimizer": 12 * trained,
        }
    elif engine.stage == 0:
        sizes = _unshared(recipe, hardware, engine, parameters, width)
    else:
        sizes = {
            "weights": width * parameters / (ranks if engine.stage == 3 else 1),
            "gradients": (width + 4) * parameters if engine.stage == 1 else 4 * parameters / share,
            "optimizer": 12 * parameters / share,
        }
    return _offloaded(sizes, hardware, engine)


def _unshared(recipe: Recipe, hardware: Hardware, engine: Engine, parameters: float, width: int) -> dict[str, float]:
    if _autocasts(recipe, hardware, engine):
        return {"weights": (4 + width) * parameters, "gradients": 4 * parameters, "optimizer": 8 * parameters}
    if width == 4:
        return {"weights": 4 * parameters, "gradients": 4 * parameters, "optimizer": 8 * parameters}
    assert hardware.gpu is not None
    several = recipe.train.global_batch_size != 1
    gradients = gradient_bytes(parameters, hardware.gpu.memory_gib, several)
    return {"weights": width * parameters, "gradients": gradients * parameters, "optimizer": 12 * parameters}


def _offloaded(sizes: dict[str, float], hardware: Hardware, engine: Engine) -> tuple[dict[str, float], float]:
    """What stays on the GPU, and what its machine holds instead; a disk costs no memory here but DeepSpeed's buffers."""
    leaving = {"gradients": engine.optimizer_offload, "optimizer": engine.optimizer_offload}
    leaving["weights"] = engine.weights_offload
    stay = {name: 0.0 if leaving[name] != "none" else size for name, size in sizes.items()}
    moved = sum(size for name, size in sizes.items() if leaving[name] == "cpu")
    return stay, CPU_FACTOR * moved * hardware.ranks_per_node


def _buffers(recipe: Recipe, hardware: Hardware, model: ModelFacts, engine: Engine) -> float:
    (parameters, ranks), width = _shared(recipe, hardware, model), _width(recipe, hardware)
    trained = adapter_size(recipe, model) if recipe.model.lora is not None else parameters
    bucket = min(LARGEST_BUCKET, trained)
    embedding = (model.vocab_size or 0) * (model.hidden_size or 0)
    if engine.stage == 0:
        return 4 * trained if ranks > 1 else 0.0
    if engine.stage < 3:
        # Under offload each gradient passes through a buffer as large as the largest weight.
        return width * (2 * bucket + (embedding if engine.optimizer_offload != "none" else 0))
    return width * (bucket + min(parameters, LIVE + model.layer_size + embedding))


def _pass(recipe: Recipe, hardware: Hardware, model: ModelFacts, engine: Engine) -> float:
    """The peak of a forward and backward pass over one sequence."""
    hidden, layers = model.hidden_size or 0, model.num_hidden_layers or 0
    width, wide = _width(recipe, hardware), mlp_width(model)
    tokens = ceil(recipe.sequence_length / recipe.train.sequence_parallel_size)
    # Under autocast what goes from layer to layer is fp32.
    inputs = tokens * hidden * (4 if _autocasts(recipe, hardware, engine) else width)
    outputs = tokens * (8 * hidden + 4 * wide) * width
    mode = recipe.train.gradient_checkpointing
    every = mode if isinstance(mode, int) and not isinstance(mode, bool) else 1
    # Those that recompute, and those that keep their outputs.
    recompute = 0 if mode is False else ceil(layers / every)
    kept = recompute * inputs + (layers - recompute) * outputs
    if mode == "offload":
        kept = 2 * inputs
    if mode == "selective":
        kept += layers * tokens * hidden * width
    one_layer = tokens * (12 * hidden + 6 * wide) * width
    return kept + max(one_layer, _head(recipe, model, tokens, width))


def _head(recipe: Recipe, model: ModelFacts, tokens: int, width: int) -> float:
    hidden, words = model.hidden_size or 0, model.vocab_size or 0
    tile = min(tokens, _TILE_TOKENS) * min(words, _TILE_WORDS) * width
    weight = words if recipe.model.lora is None else 0
    return tile + (tokens + weight) * hidden * (4 + width)


def _step(recipe: Recipe, hardware: Hardware, model: ModelFacts, engine: Engine) -> float:
    """What the optimizer's step holds besides the states."""
    parameters, ranks = _shared(recipe, hardware, model)
    if recipe.model.lora is not None or engine.optimizer_offload != "none" or not is_half(recipe, hardware.gpu):
        return 0.0
    if engine.stage == 0:
        embedding = (model.vocab_size or 0) * (model.hidden_size or 0)
        return 0.0 if _autocasts(recipe, hardware, engine) else 4.0 * max(_CHUNK, embedding)
    return 4 * (min(LIVE, parameters / ranks) if engine.stage == 3 else parameters / ranks)
