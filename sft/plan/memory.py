"""Estimates what training needs of each GPU and of the machine's memory, engine by engine. Arithmetic, not measured.

One GPU holds, for P parameters, N ranks that shard, w bytes a number (2 in bf16 and fp16, 4 in fp32) and s tokens of one sequence:

model states     the table in `_Sizes.states`: weights, gradients, the optimizer's fp32 weights and two moments
buffers          DeepSpeed's: two reduce buckets of w x min(5e8, P) in stages 1 and 2; in stage 3 one, and the gathered weights: w x at most
                 1e9 (stage3_max_live_parameters) + one layer + the embedding. DDP's: a second copy of the gradients
activations      of a micro-batch of 1, by the larger of two peaks: the pass (what the layers keep + the larger of one layer recomputed and
                 the head), and the step (what is fp32 only then: a chunk of gradients for sft/parallel/optimizer.py, the shard for ZeRO)
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
from sft.plan.hardware import Hardware
from sft.plan.optimizer import state_bytes
from sft.plan.precision import gradient_bytes, resolve_precision
from sft.recipe.schema import Recipe

GIB = 2**30
RESERVE = 1.5 * GIB
FRAGMENTS = 0.05  # of a GPU's memory
LIVE = 1_000_000_000  # elements: DeepSpeed's stage3_max_live_parameters and sub_group_size
CPU_FACTOR = 1.5  # pinned copies and buffers beside what is offloaded, as DeepSpeed's own estimate has it
_CHUNK = 2**27  # elements of sft/parallel/optimizer.py's step
_SCALES = {True: 1 / 64 + 4 / (64 * 256), False: 4 / 64}  # bytes a 4-bit weight; by bnb_4bit_use_double_quant
_TILE_TOKENS, _TILE_WORDS = 4096, 32768  # TOKEN_CHUNK_SIZE and _CHUNKED_LOGPROB_CHUNK_SIZE of TRL's fused head


@dataclass(frozen=True)
class Engine:
    """What the ranks shard, by ZeRO's stage (0 is DDP, or one process), and where the rest is: `none` (the GPU), `cpu` or `nvme`."""

    stage: int = 0
    optimizer_offload: str = "none"
    """Of gradients, fp32 weights and moments."""
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
    """Bytes on each GPU, part by part, and of each node's memory, all its ranks together."""

    gpu: Mapping[str, float]
    cpu: float

    @property
    def gpu_bytes(self) -> float:
        """On each GPU."""
        return sum(self.gpu.values())

    def lack(self, hardware: Hardware) -> str | None:
        """What there is too little of, such as `90.1 of 80 GiB`; None where the estimate fits."""
        assert hardware.gpu
        if self.gpu_bytes > hardware.gpu.memory_gib * GIB:
            return f"{self.gpu_bytes / GIB:.1f} of {hardware.gpu.memory_gib:.0f} GiB"
        if self.cpu > hardware.cpu_memory_gib * GIB:
            return f"{self.cpu / GIB:.0f} of {hardware.cpu_memory_gib:.0f} GiB of the machine's memory"
        return None

    def fits(self, hardware: Hardware) -> bool:
        """Whether the machine has it."""
        return self.lack(hardware) is None

    def words(self, hardware: Hardware) -> str:
        """The sum: `weights 5.7 + ... = 38.0 of 80 GiB`."""
        assert hardware.gpu
        parts = " + ".join(f"{name} {size / GIB:.1f}" for name, size in self.gpu.items() if size >= 0.05 * GIB)
        shown = f"{parts} = {self.gpu_bytes / GIB:.1f} of {hardware.gpu.memory_gib:.0f} GiB"
        assumed = " (assumed: twice its GPUs'; --on 8x80GB+1000GB states it)" if hardware.cpu_memory_assumed else ""
        cpu = f"; {self.cpu / GIB:.0f} of {hardware.cpu_memory_gib:.0f} GiB of the machine's memory{assumed}"
        return shown + (cpu if self.cpu else "")


def engine_of(file: DeepSpeedFile | None) -> Engine:
    """What a DeepSpeed file configures."""
    return Engine(file.stage, *file.devices) if file else Engine()


def estimate_memory(recipe: Recipe, hardware: Hardware, model: ModelFacts, engine: Engine) -> MemoryEstimate:
    """What one GPU and one node must hold, for a model with a known number of parameters; without its shape no activations are counted."""
    assert hardware.gpu
    sizes = _Sizes(recipe, hardware, model, engine)
    # A disk costs no memory here but DeepSpeed's buffers.
    where = dict.fromkeys(("gradients", "optimizer"), engine.optimizer_offload) | {"weights": engine.weights_offload}
    states = sizes.states()
    moved = sum(size for name, size in states.items() if where[name] == "cpu")
    stay = {name: size if where[name] == "none" else 0.0 for name, size in states.items()}
    peak, name = max((sizes.activations(), "activations"), (sizes.step(), "step"))
    reserve = RESERVE + FRAGMENTS * hardware.gpu.memory_gib * GIB
    parts = stay | {"buffers": sizes.buffers(), name: peak, "reserve": reserve}
    return MemoryEstimate(parts, CPU_FACTOR * moved * hardware.ranks_per_node)


class _Sizes:
    """The sizes that the sums are made of, in bytes, for one recipe, machine, model and engine."""

    def __init__(self, recipe: Recipe, hardware: Hardware, model: ModelFacts, engine: Engine) -> None:
        assert model.parameters
        assert hardware.gpu
        self.recipe, self.engine, self.layer = recipe, engine, model.layer_size
        self.gpu_gib = hardware.gpu.memory_gib
        self.ranks = max(1, hardware.ranks // recipe.train.tensor_parallel_size)
        """That shard what the engine shards."""
        self.parameters = model.parameters / recipe.train.tensor_parallel_size
        self.hidden, self.layers = model.hidden_size or 0, model.num_hidden_layers or 0
        self.vocabulary = model.vocab_size or 0
        self.embedding = self.vocabulary * self.hidden
        # A gated MLP in a layer of that size, whose attention is about 2.5 h squared: also the experts of a mixture.
        self.wide = max((self.layer - 2.5 * self.hidden**2) / (3 * self.hidden), self.hidden) if self.hidden else 0.0
        precision = resolve_precision(recipe, hardware, model).value
        self.is_half = precision != "fp32"
        self.width = 2 if self.is_half else 4
        lora = recipe.model.lora
        self.adapters = lora is not None
        # At most, an adapter for each matrix of a plain decoder: query, key, value, output have h + h each; gate, up, down h + f. Fused
        # experts have none, and are most of such a model.
        fused = model.linear_parameters is not None and model.linear_parameters < model.body_parameters / 2
        of_mlp = 0.0 if fused else 3 * (self.hidden + self.wide)
        of_adapters = lora.r * self.layers * (8 * self.hidden + of_mlp) if lora else 0.0
        # Layers beside adapters that are trained whole are mostly the embeddings.
        whole = len(lora.modules_to_save) * self.embedding if lora else 0.0
        self.trained = of_adapters + whole if lora else self.parameters - model.frozen_parameters
        # Beside fp32 weights, which are among the weights where the optimizer steps on them itself.
        self.moments = state_bytes(recipe, self.trained, 0.0 if lora else self.embedding, self.hidden)
        self.held = self.width * self.parameters + self._quantized(model)
        """Bytes of all weights in the dtype that they are kept in."""
        # fp32 weights that compute in half precision: full fine-tuning under DDP, as sft/plan/precision.py has it.
        alone = hardware.ranks == 1 and precision != "fp16" and recipe.train.optim == "adamw"
        self.autocasts = not self.adapters and engine.stage == 0 and not alone and self.is_half

    def _quantized(self, model: ModelFacts) -> float:
        """Bytes that quantization adds to the weights: fewer than none."""
        kind, linear = self.recipe.model.quantization, model.linear_parameters or 0
        if kind is None:
            return 0.0
        scales = _SCALES[self.recipe.model.bnb_4bit_use_double_quant]
        return linear * ((1.0 if kind == "int8" else 0.5 + scales) - self.width)

    def states(self) -> dict[str, float]:
        """Weights, gradients and optimizer on each rank, wherever they are kept.

        Bytes a trained parameter, with the 8 of AdamW's moments (state_bytes has the other optimizers'); w = 2 in half precision, else 4:

                           weights   gradients    optimizer
            one process    w         4            12         (16-bit gradients where sft/plan/precision.py has them; fp32: 4, 4, 8)
            DDP            4         4            8          (and w again for autocast's copies in half precision)
            ZeRO-1         w         w + 4        12/N
            ZeRO-2         w         4/N          12/N
            ZeRO-3         w/N       4/N          12/N
        """
        stage, trained = self.engine.stage, self.trained
        weights = self.held / (self.ranks if stage == 3 else 1)
        if self.adapters:
            return {"weights": weights, "gradients": 4 * self.trained, "optimizer": 4 * self.trained + self.moments}
        if stage > 0:
            gradients = (self.width + 4) * trained if stage == 1 else 4 * trained / self.ranks
            return {"weights": weights, "gradients": gradients, "optimizer": (4 * trained + self.moments) / self.ranks}
        if self.autocasts or not self.is_half:
            copies = self.width if self.autocasts else 0
            return {"weights": (4 + copies) * self.parameters, "gradients": 4 * trained, "optimizer": self.moments}
        of_gradient = gradient_bytes(trained, self.gpu_gib, self.recipe.train.global_batch_size != 1)
        return {"weights": weights, "gradients": of_gradient * trained, "optimizer": 4 * trained + self.moments}

    def buffers(self) -> float:
        """What the engine reduces and gathers in."""
        bucket = min(LARGEST_BUCKET, self.trained)
        # A quantized layer's largest weight, in the dtype that it computes in.
        unpacked = self.width * self.hidden * self.wide if self.recipe.model.quantization else 0.0
        if self.engine.stage == 0:
            return unpacked + (4 * self.trained if self.ranks > 1 else 0.0)
        if self.engine.stage < 3:
            # Under offload each gradient passes through a buffer as large as the largest weight.
            offloaded = self.embedding if self.engine.optimizer_offload != "none" else 0
            return unpacked + self.width * (2 * bucket + offloaded)
        return unpacked + self.width * bucket + min(self.held, self.width * (LIVE + self.layer + self.embedding))

    def activations(self) -> float:
        """The peak of a forward and backward pass over one sequence."""
        train, width = self.recipe.train, self.width
        tokens = ceil(self.recipe.sequence_length / train.sequence_parallel_size)
        # Under autocast what goes from layer to layer is fp32.
        inputs = tokens * self.hidden * (4 if self.autocasts else width)
        outputs = tokens * (8 * self.hidden + 4 * self.wide) * width
        mode = train.gradient_checkpointing
        every = mode if isinstance(mode, int) and not isinstance(mode, bool) else 1
        # Layers that recompute keep their inputs, the others their outputs.
        recompute = 0 if mode is False else ceil(self.layers / every)
        kept = recompute * inputs + (self.layers - recompute) * outputs
        if mode == "offload":
            kept = 2 * inputs
        if mode == "selective":
            kept += self.layers * tokens * self.hidden * width
        one_layer = tokens * (12 * self.hidden + 6 * self.wide) * width
        tile = min(tokens, _TILE_TOKENS) * min(self.vocabulary, _TILE_WORDS) * width
        head = tile + (tokens + (0 if self.adapters else self.vocabulary)) * self.hidden * (4 + width)
        if train.label_smoothing_factor:
            # All logits at most: as they are, and three times in fp32 (copy, log_softmax, gradient).
            head += tokens * self.vocabulary * (width + 12)
        return kept + max(one_layer, head)

    def step(self) -> float:
        """What the optimizer's step holds besides the states."""
        stage = self.engine.stage
        if self.adapters or self.engine.optimizer_offload != "none" or not self.is_half or self.autocasts:
            return 0.0
        if stage == 0:
            return 4.0 * max(_CHUNK, self.embedding)
        shard = self.parameters / self.ranks
        return 4 * (min(LIVE, shard) if stage == 3 else shard)
