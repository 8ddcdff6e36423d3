"""Estimates what training needs of each GPU and of the machine's memory, engine by engine.

Activations come from a simulated pass (sft/plan/simulation.py), the rest from arithmetic. One GPU holds, for P
parameters, N ranks that shard and w bytes a number (2 in bf16 and fp16, 4 in fp32):

model states     the table in `_Sizes.states`: weights, gradients, the optimizer's fp32 weights and two moments
buffers          DeepSpeed's: two reduce buckets of at most 5e8 numbers, of 4 bytes in stage 1 and w in 2; in stage 3 one, and the gathered
                 weights: w x at most 1e9 (stage3_max_live_parameters) + one layer + the embedding. DDP's: a second copy of the gradients
activations      the larger of two peaks: the pass over a micro-batch, and the optimizer's step (what is fp32 only then: a chunk of
                 gradients for sft/parallel/optimizer.py, the shard for ZeRO)
reserve          1.5 GiB for the CUDA context and NCCL's and cuBLAS's buffers, and 5 % of the memory for fragments

Where no model can be built or simulated (its own code, routers) activations are those of a plain decoder by arithmetic, and attention is
counted without a matrix of scores. Not counted: what loading takes in the machine's memory.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from math import ceil
from pathlib import Path

from sft.files import cached
from sft.hub.model_facts import ModelFacts, load_config
from sft.plan.deepspeed import LARGEST_BUCKET, DeepSpeedFile
from sft.plan.hardware import Hardware
from sft.plan.layers import HEAD_TILE, resolve_kernels
from sft.plan.memory_estimate import GIB, MemoryEstimate, Pass, PassMemory
from sft.plan.optimizer import state_bytes
from sft.plan.parallelism import mesh_shape, resolve_fsdp
from sft.plan.pipeline import layers_of_stages
from sft.plan.precision import resolve_gradients, resolve_precision, resolve_weights
from sft.recipe.schema import Recipe

RESERVE = 1.5 * GIB
FRAGMENTS = 0.05  # of a GPU's memory
LIVE = 1_000_000_000  # elements: DeepSpeed's stage3_max_live_parameters and sub_group_size
CPU_FACTOR = 1.5  # pinned copies and buffers beside what is offloaded, as DeepSpeed's own estimate has it
_CHUNK = 2**27  # elements of sft/parallel/optimizer.py's step
_SCALES = {True: 1 / 64 + 4 / (64 * 256), False: 4 / 64}  # bytes a 4-bit weight; by bnb_4bit_use_double_quant


def estimate_memory(
    recipe: Recipe, hardware: Hardware, model: ModelFacts, file: DeepSpeedFile | None
) -> MemoryEstimate | None:
    """What one GPU and one node must hold; None on a CPU, and where the model's size is not known."""
    if hardware.gpu is None or model.parameters is None:
        return None
    sizes, stages = _Sizes(recipe, hardware, model, file), layers_of_stages(recipe, model)
    if stages:
        return _estimate_stages(sizes, hardware, stages)
    # A disk costs no memory here but DeepSpeed's buffers.
    where = dict.fromkeys(("gradients", "optimizer"), sizes.optimizer_device) | {"weights": sizes.weights_device}
    states = sizes.states()
    moved = sum(size for name, size in states.items() if where[name] == "cpu")
    parts = {name: size if where[name] == "none" else 0.0 for name, size in states.items()} | {
        "activations": max(sizes.activations(), sizes.step()),
        "buffers": sizes.buffers(),
        "reserve": RESERVE + FRAGMENTS * hardware.gpu.memory_gib * GIB,
    }
    return MemoryEstimate(parts, CPU_FACTOR * moved * hardware.ranks_per_node, hardware, sizes.passed is not None)


def _estimate_stages(sizes: _Sizes, hardware: Hardware, stages: tuple[range, ...]) -> MemoryEstimate:
    """What a GPU of the pipeline stage that needs most must hold, with the sum of each.

    A stage keeps the activations of as many micro-batches as there are stages from it to the last. Weights as under DDP.
    """
    assert hardware.gpu
    working, reserve = sizes.peak - sizes.kept, RESERVE + FRAGMENTS * hardware.gpu.memory_gib * GIB
    for_layers = sizes.activations() - working
    found = []
    for number, layers in enumerate(stages):
        embeddings = ((number == 0) + (number == len(stages) - 1)) * sizes.embedding
        share = (len(layers) * sizes.layer + embeddings) / sizes.parameters
        held = (len(stages) - number) * for_layers * len(layers) / sizes.layers
        parts = {name: share * size for name, size in sizes.states().items()}
        parts |= {"activations": held + working, "reserve": reserve}
        found.append(MemoryEstimate(parts, 0.0, hardware, sizes.passed is not None))
    by_stage = tuple(one.gpu_bytes for one in found)
    return replace(max(found, key=lambda one: one.gpu_bytes), by_stage=by_stage)


class _Sizes:
    """The sizes that the sums are made of, in bytes, for one recipe, machine, model and engine."""

    def __init__(self, recipe: Recipe, hardware: Hardware, model: ModelFacts, file: DeepSpeedFile | None) -> None:
        assert model.parameters
        self.recipe, self.file, self.layer = recipe, file, model.layer_size
        self.fsdp = resolve_fsdp(recipe, hardware) if file is None else None
        self.stage = 3 if self.fsdp else file.stage if file else 0
        """ZeRO's. 0 is DDP, or one process; FSDP2 shards what ZeRO-3 shards, of fp32 weights."""
        devices = ("cpu", "cpu") if self.fsdp and self.fsdp.offload_params else ("none", "none")
        self.optimizer_device, self.weights_device = file.devices if file else devices
        alike = max(1, hardware.ranks // recipe.train.tensor_parallel_size)
        self.ranks = mesh_shape(self.fsdp, hardware)[1] if self.fsdp else alike
        """That shard what the engine shards."""
        stated = recipe.train.micro_batch_size
        micro = 1 if stated == "auto" else stated
        self.tokens = ceil(recipe.sequence_length / recipe.train.sequence_parallel_size) * micro
        """Of a micro-batch, on one rank; of one sequence where the recipe leaves it open."""
        self.parameters = model.parameters / recipe.train.tensor_parallel_size
        self.hidden, self.layers = model.hidden_size or 0, model.num_hidden_layers or 0
        self.vocabulary = model.vocab_size or 0
        self.embedding = self.vocabulary * self.hidden
        # A gated MLP in a layer of that size, whose attention is about 2.5 h squared: also the experts of a mixture.
        self.wide = max((self.layer - 2.5 * self.hidden**2) / (3 * self.hidden), self.hidden) if self.hidden else 0.0
        self.precision = resolve_precision(recipe, hardware, model).value
        self.is_half = self.precision != "fp32"
        self.width = 2 if self.is_half else 4
        lora = recipe.model.lora
        self.adapters = lora is not None
        adapters = model.adapter_parameters(lora) or 0
        self.trained: float = adapters if lora else self.parameters - model.frozen_parameters
        kept_in = resolve_weights(recipe, hardware, None, self.precision).value
        self.autocasts = self.stage == 0 and self.is_half and kept_in == "fp32"
        accumulation = ceil(recipe.sequences_per_step / micro / hardware.ranks)
        added_up_in = resolve_gradients(recipe, hardware, None, self.precision, accumulation).value
        self.of_gradient = 4 if added_up_in == "fp32" else 2
        """Bytes of a trained parameter's gradient between micro-batches, without ZeRO."""
        self.passed = self._pass(hardware, model)
        self.kept, self.peak = self._pass_of_plain_decoder()
        if self.passed is not None:
            self.kept, self.peak = self.passed.kept, self.passed.peak
        if lora is not None and self.passed is not None:
            self.trained = self.passed.trained
        # Beside fp32 weights, which are among the weights where the optimizer steps on them itself.
        self.moments = state_bytes(recipe, self.trained, 0.0 if lora else self.embedding, self.hidden)
        self.held = self.width * self.parameters + self._quantized(model)
        """Bytes of all weights in the dtype that they are kept in."""

    def _pass(self, hardware: Hardware, model: ModelFacts) -> PassMemory | None:
        """A forward and backward pass, simulated; None where the model cannot be."""
        train, half = self.recipe.train, "float16" if self.precision == "fp16" else "bfloat16"
        in_half = self.is_half and not self.autocasts
        wanted = Pass(
            tokens=self.tokens,
            dtype=half if in_half else "float32",
            autocast=half if self.autocasts or (self.adapters and self.is_half and self.stage == 0) else None,
            recompute_every=self.recompute_every,
            # What torch.compile fuses is counted as what Liger fuses.
            liger=resolve_kernels(self.recipe, hardware, model).value == "liger" or self.recipe.model.compile,
            eager=self.recipe.model.attn_implementation == "eager",
            # ZeRO and FSDP2 take the gradients away as they come.
            fp32_gradients=in_half and not self.adapters and self.stage == 0 and self.of_gradient == 4,
            all_logits=bool(train.label_smoothing_factor),
            tensor_parallel_size=train.tensor_parallel_size,
            lora=self.recipe.model.lora,
            freeze=self.recipe.model.freeze,
        )
        return simulated(model, wanted)

    @property
    def recompute_every(self) -> int:
        """Every n-th layer recomputes its activations; 0: none."""
        mode = self.recipe.train.gradient_checkpointing
        return int(mode) if isinstance(mode, int) else 1

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
            DDP            4         4            8          (and w for autocast's copies of all but the embedding in half precision)
            ZeRO-1         w         w + 4        12/N
            ZeRO-2         w         4/N          12/N
            ZeRO-3         w/N       4/N          12/N
            FSDP2          4/N       4/N          8/N
        """
        stage, trained = self.stage, self.trained
        weights = self.held / (self.ranks if stage == 3 else 1)
        if self.adapters:
            return {"weights": weights + 4 * trained, "gradients": 4 * trained, "optimizer": self.moments}
        if self.fsdp is not None:
            each = {"weights": 4 * self.parameters, "gradients": 4 * trained, "optimizer": self.moments}
            return {name: size / self.ranks for name, size in each.items()}
        if stage > 0:
            gradients = (self.width + 4) * trained if stage == 1 else 4 * trained / self.ranks
            return {"weights": weights, "gradients": gradients, "optimizer": (4 * trained + self.moments) / self.ranks}
        if self.autocasts or not self.is_half:
            # The embedding is looked up, and TRL's head casts a tile of its weight at a time.
            embedding = self.embedding / self.recipe.train.tensor_parallel_size
            copies = self.width * (self.parameters - embedding) if self.autocasts else 0
            return {"weights": 4 * self.parameters + copies, "gradients": 4 * trained, "optimizer": self.moments}
        return {"weights": weights, "gradients": self.of_gradient * trained, "optimizer": 4 * trained + self.moments}

    def buffers(self) -> float:
        """What the engine reduces and gathers in."""
        stated = self.file.zero.get("reduce_bucket_size") if self.file else None
        bucket: float = stated if isinstance(stated, int) else min(LARGEST_BUCKET, self.trained)
        # A quantized layer's largest weight, in the dtype that it computes in.
        unpacked = self.width * self.hidden * self.wide if self.recipe.model.quantization else 0.0
        if self.fsdp is not None:
            # The layer that computes and those gathered ahead; the embedding for the whole pass; a gradient before it is sharded.
            ahead = self.fsdp.prefetch or 1
            keeps_all = self.fsdp.sharding_strategy == "shard_grad_op"
            gathered = self.parameters if keeps_all else (1 + ahead) * self.layer + self.embedding
            return unpacked + self.width * gathered + (self.width + 4) * max(self.layer, self.embedding)
        if self.stage == 0:
            # TRL's head gathers its weight where ranks share layers.
            gathered = 4.0 * self.embedding if self.recipe.train.tensor_parallel_size > 1 else 0.0
            return unpacked + gathered + (4 * self.trained if self.ranks > 1 else 0.0)
        if self.stage < 3:
            # Under offload each gradient passes through a buffer as large as the largest weight.
            offloaded = self.embedding if self.optimizer_device != "none" else 0
            return unpacked + (4 if self.stage == 1 else self.width) * 2 * bucket + self.width * offloaded
        return unpacked + self.width * bucket + min(self.held, self.width * (LIVE + self.layer + self.embedding))

    def activations(self) -> float:
        """The peak of a forward and backward pass over a micro-batch."""
        mode = self.recipe.train.gradient_checkpointing
        if mode == "offload":  # two layers' inputs are on their way
            return self.peak - self.kept + 2 * self.tokens * self.hidden * self.width
        if mode == "selective":  # the outputs of attention
            return self.peak + self.layers * self.tokens * self.hidden * self.width
        return self.peak

    def _pass_of_plain_decoder(self) -> tuple[float, float]:
        """What a forward pass keeps, and the peak, by arithmetic."""
        tokens, width, every = self.tokens, self.width, self.recompute_every
        # Under autocast what goes from layer to layer is fp32.
        inputs = tokens * self.hidden * (4 if self.autocasts else width)
        outputs = tokens * (8 * self.hidden + 4 * self.wide) * width
        # Layers that recompute keep their inputs, the others their outputs.
        recompute = ceil(self.layers / every) if every else 0
        kept = recompute * inputs + (self.layers - recompute) * outputs
        one_layer = tokens * (12 * self.hidden + 6 * self.wide) * width
        tile = min(tokens, HEAD_TILE[0]) * HEAD_TILE[1] * width
        head = tile + (tokens + (0 if self.adapters else self.vocabulary)) * self.hidden * (4 + width)
        if self.recipe.train.label_smoothing_factor:
            # All logits at most: as they are, and three times in fp32 (copy, log_softmax, gradient).
            head += tokens * self.vocabulary * (width + 12)
        return kept, kept + max(one_layer, head)

    def step(self) -> float:
        """What the optimizer's step holds besides the states."""
        stage = self.stage
        if self.adapters or self.optimizer_device != "none" or not self.is_half or self.autocasts:
            return 0.0
        if stage == 0:
            # Gradients in fp32 are stepped on as they are.
            return 0.0 if self.of_gradient == 4 else 4.0 * min(max(_CHUNK, self.embedding), self.trained)
        if self.fsdp is not None:
            return 0.0
        shard = self.parameters / self.ranks
        return 4 * (min(LIVE, shard) if stage == 3 else shard)


def simulated(model: ModelFacts, wanted: Pass) -> PassMemory | None:
    """What a simulated pass takes; None for a model that brings its own code, or whose code looks at values, as most routers do."""
    if model.config is None:
        return None

    def simulate_pass() -> dict[str, int] | None:
        from sft.plan.simulation import simulate  # imports torch

        try:
            return asdict(simulate(load_config(model.path, model.commit, False), wanted))
        except Exception:  # in whatever way the code of a model fails without values
            return None

    code = [Path(__file__).with_name("simulation.py")]
    found = cached("memory", [model.config, asdict(wanted)], code, simulate_pass)
    return PassMemory(**found) if found else None
