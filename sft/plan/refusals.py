"""Refuses what cannot run here as the recipe states it. A new combination is a new `if` with its message: value, reason and remedy."""

from __future__ import annotations

from collections.abc import Iterator

from sft.errors import PlanError
from sft.hub.model_facts import OVERFLOWS_FP16
from sft.plan.case import Case
from sft.plan.layers import kernels_problem
from sft.plan.optimizer import optimizer_refusals
from sft.plan.pipeline import pipeline_refusals
from sft.plan.precision import has_bf16
from sft.plan.rope import positions, rope_refusals
from sft.plan.schedule import decay_steps

_TENSOR_STYLES = frozenset({"colwise", "rowwise", "replicated_with_grad_allreduce"})
"""Ways to divide a layer that were trained and compared with one process."""

UNTESTED = {
    "tensor parallel": "sequence parallel, fsdp, lora, new tokens, freeze, compile, fp16, smoothing, noise, optimizer",
    "sequence parallel": "compile, smoothing, noise, loss_type",
    "pipeline": "modules_to_save, quantization, own code, new rows, compile, fp16, optimizer, smoothing, noise, best, trainer_args",
    "zero3": "compile, dora, decomposed, modules_to_save, int8, selective lora",
    "nvme": "best",
    "stage 0": "best",
    "fsdp": "fp16, new rows, dora, decomposed, modules_to_save, int8",
    "quantization": "compile, decomposed",
    "int8": "dora",
    "eval during training": "tensor parallel, sequence parallel, pipeline, compile",
    "freeze": "lora",
    "smoothing": "loss_type",
    "selective": "eager",
}
"""What does not work together, or was never compared with a training that is known to be right; the words are those of `_used`."""


def _used(case: Case) -> dict[str, str]:
    """What does not work with everything, as a person writes it; empty where the recipe does not use it."""
    train, model, lora = case.recipe.train, case.recipe.model, case.recipe.model.lora
    stage, selective = case.deepspeed and case.deepspeed.stage, train.gradient_checkpointing == "selective"
    rows = {
        "tensor parallel": (train.tensor_parallel_size > 1, f"train.tensor_parallel_size={train.tensor_parallel_size}"),
        "sequence parallel": (
            train.sequence_parallel_size > 1,
            f"train.sequence_parallel_size={train.sequence_parallel_size}",
        ),
        "pipeline": (train.pipeline_parallel_size > 1, f"train.pipeline_parallel_size={train.pipeline_parallel_size}"),
        "zero3": (stage == 3, f"train.deepspeed={case.file}"),
        "stage 0": (stage == 0, f"train.deepspeed={case.file} without ZeRO"),
        "nvme": (case.deepspeed is not None and case.deepspeed.offload == "nvme", f"train.deepspeed={case.file}"),
        "fsdp": (case.fsdp is not None, "train.fsdp"),
        "fp16": (case.plan.precision.value == "fp16", "train.precision=fp16"),
        "optimizer": (train.optim != "adamw", f"train.optim={train.optim}"),
        "smoothing": (train.label_smoothing_factor > 0, "train.label_smoothing_factor"),
        "noise": (bool(train.neftune_noise_alpha), "train.neftune_noise_alpha"),
        "loss_type": (train.trainer_args.get("loss_type", "nll") != "nll", "train.trainer_args.loss_type"),
        "trainer_args": (bool(train.trainer_args), "train.trainer_args"),
        "best": (train.load_best_model_at_end, "train.load_best_model_at_end=true"),
        "selective": (selective, "train.gradient_checkpointing=selective"),
        "selective lora": (selective and lora is not None, "train.gradient_checkpointing=selective and model.lora"),
        "eval during training": (case.recipe.eval.every_steps is not None, "eval.every_steps"),
        "eager": (case.plan.attention.value == "eager", "model.attn_implementation=eager"),
        "compile": (model.compile, "model.compile=true"),
        "freeze": (bool(model.freeze), "model.freeze"),
        "new tokens": (bool(model.new_tokens), "model.new_tokens"),
        "new rows": (bool(model.new_tokens and lora), "model.new_tokens and model.lora"),
        "own code": (model.trust_remote_code and case.model.config is None, "model.trust_remote_code=true"),
        "quantization": (model.quantization is not None, f"model.quantization={model.quantization}"),
        "int8": (model.quantization == "int8", "model.quantization=int8"),
        "lora": (lora is not None, "model.lora"),
        "dora": (bool(lora and lora.use_dora), "model.lora.use_dora=true"),
        "decomposed": (
            bool(lora and lora.takes_from_base),
            f"model.lora.init_lora_weights={lora and lora.init_lora_weights}",
        ),
        "modules_to_save": (bool(lora and lora.modules_to_save), "model.lora.modules_to_save"),
    }
    return {word: shown if is_used else "" for word, (is_used, shown) in rows.items()}


def refuse(case: Case) -> None:
    """Refuse a recipe that cannot run here: PlanError, a line for each problem."""
    used = _used(case)
    problems = [
        f"{used[one]} with {used[other]} does not work, or is untested. Change one of them."
        for one, others in UNTESTED.items()
        for other in others.split(", ")
        if used[one] and used[other]
    ]
    problems += [*_numbers(case), *_schedule(case), *rope_refusals(case.recipe, case.model)]
    problems += [*optimizer_refusals(case.recipe, case.hardware, case.deepspeed), *_precision(case), *_layers(case)]
    problems += [*_quantization(case), *_tensor_parallel(case), *_sequence_parallel(case), *pipeline_refusals(case)]
    if problems:
        raise PlanError("\n".join(problems))


def _numbers(case: Case) -> Iterator[str]:
    # Positions restart at each document, so that the length of a pack does not matter to the model.
    limit, length = positions(case.recipe, case.model), case.recipe.data.max_length
    if limit is not None and length > limit:
        extended = "or extend them: model.rope_scaling"
        yield f"data.max_length={length} is more than the model's {limit} positions. Set it to at most {limit}, {extended}."
    decay, rate = case.recipe.train.weight_decay, case.plan.learning_rate.value
    if rate * decay >= 1:
        yield f"train.weight_decay={decay:g} x learning rate {rate:g}: a step would wipe out the weights. AdamW's is usually 0 to 0.1."


def _schedule(case: Case) -> Iterator[str]:
    train, steps, warmup = case.recipe.train, case.plan.max_steps.value, case.plan.warmup_steps.value
    is_estimate = train.max_steps is None and (case.data is None or not case.data.exact)
    if not steps or warmup is None or is_estimate:
        return
    falls = {"warmup_stable_decay": decay_steps(train, steps), "polynomial": 1}.get(train.lr_scheduler_type)
    if falls is not None and warmup + falls > steps:
        yield (
            f"train.lr_scheduler_type={train.lr_scheduler_type}: a warmup of {warmup} and a decay of {falls} steps or more are longer than "
            f"the run's {steps}. Shorten the warmup or the decay."
        )


def _precision(case: Case) -> Iterator[str]:
    wanted, gpu = case.recipe.train.precision, case.hardware.gpu
    if wanted == "bf16" and gpu is not None and not has_bf16(gpu):
        capability = f"compute capability {gpu.compute_capability}"
        yield f"train.precision=bf16, and this GPU ({gpu.name}, {capability}) has none. Set train.precision=auto."
    if wanted == "fp16" and gpu is None:
        yield "train.precision=fp16 needs a GPU, and there is none here. Set train.precision=fp32 or auto."
    overflows = case.model.model_type in OVERFLOWS_FP16
    if wanted == "fp16" and gpu is not None and case.model.dtype == "bfloat16" and (overflows or has_bf16(gpu)):
        better, name = "bf16" if has_bf16(gpu) else "fp32", case.recipe.model.name_or_path
        yield (
            f"train.precision=fp16, and {name} was trained in bfloat16, whose values overflow fp16. Set train.precision={better}."
        )


def _layers(case: Case) -> Iterator[str]:
    unfit = case.hardware.gpu is not None and kernels_problem(case.recipe, case.hardware, case.model)
    if case.recipe.model.kernels == "liger" and unfit:
        yield f"model.kernels=liger, and {unfit}. Set model.kernels=auto."
    if case.recipe.train.gradient_checkpointing == "offload" and case.hardware.gpu is None:
        yield (
            "train.gradient_checkpointing=offload moves activations from a GPU to the CPU's memory, and there is no GPU here. Set it to "
            "true or auto."
        )
    ranks, per_node = case.hardware.ranks, case.hardware.ranks_per_node
    if case.fsdp and case.fsdp.sharding_strategy == "hybrid_shard" and (per_node == 1 or ranks % per_node):
        yield (
            "train.fsdp.sharding_strategy=hybrid_shard shards the model within a node and replicates it across nodes, and there are "
            f"{ranks} processes, {per_node} on this node. Start as many on each, at least two, or set it to full_shard."
        )


def _quantization(case: Case) -> Iterator[str]:
    model, stored = case.recipe.model, case.model.quantization
    key = f"model.quantization={model.quantization}"
    if stored is not None and (model.quantization is not None or stored == "bitsandbytes"):
        yield (
            f"model.name_or_path={model.name_or_path} is stored quantized ({stored}), and adapters are trained beside weights that are "
            "quantized while they load. Name the model that it was made from, and set model.quantization=nf4 with model.lora={}."
        )
    if model.quantization is None:
        return
    if not case.hardware.has_bitsandbytes:
        yield f"{key} is bitsandbytes', which is not installed. Install it: pip install -e '.[qlora]'. Or set model.quantization=null."
    if case.model.linear_parameters is not None and case.model.linear_parameters < case.model.body_parameters / 2:
        yield (
            f"{key}, and only {case.model.linear_parameters:,} of this model's {case.model.parameters:,} weights are in linear layers; "
            "bitsandbytes leaves the others, such as fused experts, as they are. Set model.quantization=null."
        )


def _tensor_parallel(case: Case) -> Iterator[str]:
    model, ranks, size = case.model, case.hardware.ranks, case.recipe.train.tensor_parallel_size
    key = f"train.tensor_parallel_size={size}"
    if size == 1:
        return
    if case.deepspeed is not None:
        yield f"{key}, and {case.file} is DeepSpeed's, which takes full tensors. Set train.deepspeed and train.parallel to null."
    if ranks != size:
        yield (
            f"{key}, and there are {ranks} ranks: groups with a batch of their own each are not built. Start {size} ranks, set the size to "
            f"{ranks}, or use train.fsdp or train.deepspeed=zero3 instead."
        )
    styles = model.architecture.tensor_plan if model.architecture else frozenset()
    if model.model_type is not None and not (styles and styles <= _TENSOR_STYLES):
        yield (
            f"{key}: transformers has no tested plan to divide the layers of models of type {model.model_type}. Set it to 1, and use "
            "train.deepspeed=zero3 to shard the weights."
        )
    heads, widths = (model.num_attention_heads, model.num_key_value_heads), (model.intermediate_size, model.vocab_size)
    if uneven := ", ".join(str(count) for count in (*heads, *widths) if count and count % size):
        yield f"{key} must divide the model's attention heads, feed-forward width and vocabulary, and does not divide {uneven}."
    yield from _across_nodes(case, key, size)


def _sequence_parallel(case: Case) -> Iterator[str]:
    recipe, model, zero, size = case.recipe, case.model, case.deepspeed, case.recipe.train.sequence_parallel_size
    key = f"train.sequence_parallel_size={size}"
    if size == 1 or recipe.train.tensor_parallel_size > 1:
        return
    if zero is None or zero.stage not in (2, 3):
        yield f"{key} is DeepSpeed's, over ZeRO-2 or 3. Set train.deepspeed=zero2 or zero3."
    elif zero.zero.get("reduce_scatter", True) is not True:
        yield f"{key} needs gradients that are reduced by scattering: remove reduce_scatter from {case.file}."
    heads, kv_heads = model.num_attention_heads or size, model.num_key_value_heads or size
    if heads % size:
        yield f"{key} does not divide the model's {heads} attention heads. Set it to a number that does."
    if kv_heads % size and size % kv_heads:
        yield f"{key} neither divides the model's {kv_heads} key and value heads nor is a multiple of them. Set it to a number that does."
    yield from _lost_masks(case, key)
    if recipe.data.packing and case.plan.micro_batch_size.value > 1:
        yield f"{key} shares one pack at a time, and train.micro_batch_size is {case.plan.micro_batch_size.value}. Set it to 1."
    yield from _across_nodes(case, key, size)


def _lost_masks(case: Case, key: str) -> Iterator[str]:
    """What a mask says is lost: each rank makes one for its own tokens, and it is thrown away."""
    known, packed, attention = case.model.architecture, case.recipe.data.packing, case.plan.attention.value
    models, window = f"models of type {case.model.model_type or 'this kind'}", case.model.sliding_window
    boundaries = attention.startswith("flash_attention") or (packed and attention.startswith("varlen"))
    if known is not None and (known.recurrent or known.mask_only or not known.has_interface):
        yield f"{key}, and {models} do more than attend by transformers' interface: ranks cannot exchange tokens for heads. Set it to 1."
    elif attention == "eager" or (packed and attention == "sdpa"):
        yield (
            f"{key}, and {attention} needs a mask, which the ranks do not exchange. Set model.attn_implementation=auto, or "
            "data.packing=false with sdpa."
        )
    elif window is not None and window < case.recipe.sequence_length and not boundaries:
        yield (
            f"{key}, and the model sees {window} tokens back, which {attention} does by a mask that the ranks do not exchange. Set "
            f"data.max_length to at most {window}, or data.packing=true."
        )


def _across_nodes(case: Case, key: str, size: int) -> Iterator[str]:
    per_node = case.hardware.ranks_per_node
    if per_node % size:
        yield (
            f"{key}, and a node has {per_node} ranks: a group would wait for the network in each layer. Set it to a divisor of {per_node}; "
            "train.deepspeed=zero3 shards weights over nodes."
        )
