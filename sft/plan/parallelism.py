"""Decides which ranks share layers, sequences or weights, and refuses what cannot be shared so.

sft/parallel/ has what touches the live objects.
"""

from __future__ import annotations

from sft.errors import PlanError
from sft.hub.model_facts import ModelFacts
from sft.plan.decision import Decision, stated
from sft.plan.deepspeed import DeepSpeedFile
from sft.plan.hardware import Hardware
from sft.recipe.schema import Fsdp, Recipe

FSDP2 = "FSDP2"

_TENSOR_STYLES = frozenset({"colwise", "rowwise", "replicated_with_grad_allreduce"})
"""Ways to divide a layer that were trained and compared with one process."""

_FLASH = ("flash_attention_2", "flash_attention_3")


def data_parallel_ranks(recipe: Recipe, hardware: Hardware) -> int:
    """Ranks, or groups of ranks, that each see a batch of their own.

    Ranks that share the matrices of a layer, or the tokens of a sequence, work on one batch together.

    Raises:
        PlanError: The ranks do not divide into such groups.
    """
    train = recipe.train
    together = train.tensor_parallel_size * train.sequence_parallel_size
    if hardware.ranks % together:
        sizes = {"tensor": train.tensor_parallel_size, "sequence": train.sequence_parallel_size}
        asked = " and ".join(f"train.{name}_parallel_size={size}" for name, size in sizes.items() if size > 1)
        raise PlanError(
            f"{asked}: groups of {together} ranks, and {hardware.ranks} is no multiple of that. Start a multiple of {together}, or lower "
            "the size."
        )
    return hardware.ranks // together


def resolve_tensor_parallel(
    recipe: Recipe, hardware: Hardware, model: ModelFacts, deepspeed: DeepSpeedFile | None, kernels: str, precision: str
) -> Decision[int]:
    """Ranks that share each layer's matrices.

    Args:
        recipe: The size.
        hardware: The ranks.
        model: How wide its layers are, and whether transformers has a plan to divide them.
        deepspeed: The file that runs, or None.
        kernels: `liger` or `none`, as planned.
        precision: bf16, fp16 or fp32, as planned.

    Raises:
        PlanError: The message names what to change.
    """
    size = recipe.train.tensor_parallel_size
    if size == 1:
        return Decision(1, stated(recipe.train, "tensor_parallel_size"))
    problem = (
        _other_engine(recipe, hardware, deepspeed)
        or _no_tensor_plan(model)
        or _uneven_layers(size, model)
        or _untested_with_tensor(recipe, kernels, precision)
        or _across_nodes(size, hardware, "twice in each layer")
    )
    if problem:
        raise PlanError(f"train.tensor_parallel_size={size}{problem}")
    return Decision(size, f"the recipe: each rank has 1/{size} of the heads and of the feed-forward width")


def _other_engine(recipe: Recipe, hardware: Hardware, deepspeed: DeepSpeedFile | None) -> str | None:
    train = recipe.train
    if train.sequence_parallel_size > 1:
        other = f"train.sequence_parallel_size={train.sequence_parallel_size}"
        return f" and {other}: one works without DeepSpeed, the other within it. Set one of them to 1."
    if deepspeed is not None:
        remedy = "Set train.deepspeed and train.parallel to null."
        return f", and {deepspeed.path.name} is DeepSpeed's, which takes whole weights. {remedy}"
    if train.fsdp is not None:
        return " and train.fsdp: layers that are divided twice are not built here. Leave one of them out."
    if hardware.ranks != train.tensor_parallel_size:
        return (
            f", and there are {hardware.ranks} ranks: the groups would each have a batch of their own, which is not built "
            f"here. Start {train.tensor_parallel_size} ranks, set the size to {hardware.ranks}, or use train.fsdp or "
            "train.deepspeed=zero3 instead."
        )
    return None


def _no_tensor_plan(model: ModelFacts) -> str | None:
    if model.model_type is None:
        return None  # not known before a download
    styles = model.architecture.tensor_plan if model.architecture else frozenset()
    remedy = "Set it to 1, and use train.deepspeed=zero3 to share the weights."
    if not styles:
        return f": transformers has no plan to divide the layers of models of type {model.model_type}. {remedy}"
    untested = ", ".join(sorted(styles - _TENSOR_STYLES))
    if untested:
        return f": the plan for models of type {model.model_type} divides layers in ways that are untested here ({untested}). {remedy}"
    return None


def _uneven_layers(size: int, model: ModelFacts) -> str | None:
    widths = {
        "attention heads": model.num_attention_heads,
        "key and value heads": model.num_key_value_heads,
        "feed-forward units": model.intermediate_size,
        "tokens of the vocabulary": model.vocab_size,
    }
    known = {name: count for name, count in widths.items() if count is not None}
    uneven = " and ".join(f"{count} {name}" for name, count in known.items() if count % size)
    return f" does not divide the model's {uneven}. Set it to {_sizes([*known.values()])}." if uneven else None


def _sizes(widths: list[int]) -> str:
    """The sizes above 1 that divide all, in words.

    >>> _sizes([32, 8, 11008])
    '2, 4, 8'
    """
    sizes = [size for size in range(2, min(widths) + 1) if all(width % size == 0 for width in widths)]
    return ", ".join(map(str, sizes)) or "1"


def _untested_with_tensor(recipe: Recipe, kernels: str, precision: str) -> str | None:
    untested = {
        "model.lora (leave it out)": recipe.model.lora is not None,
        "model.new_tokens (leave it out)": bool(recipe.model.new_tokens),
        "model.compile (set it to false)": recipe.model.compile,
        "model.kernels=liger (set model.kernels=none)": kernels == "liger",
        "train.precision=fp16 (set train.precision=bf16 or fp32)": precision == "fp16",
    }
    found = ", ".join(name for name, is_set in untested.items() if is_set)
    return f" does not work, or is untested, with {found}." if found else None


def _across_nodes(size: int, hardware: Hardware, how_often: str) -> str | None:
    if hardware.ranks_per_node % size == 0:
        return None
    return (
        f", and a machine has {hardware.ranks_per_node} ranks: a group would wait for the network {how_often}. Set it to a divisor of "
        f"{hardware.ranks_per_node}; train.deepspeed=zero3 shares weights across machines."
    )


def resolve_sequence_parallel(
    recipe: Recipe, hardware: Hardware, model: ModelFacts, deepspeed: DeepSpeedFile | None, attention: str, micro: int
) -> Decision[int]:
    """Ranks that share the tokens of each sequence.

    Args:
        recipe: The size, and whether documents are packed.
        hardware: The ranks.
        model: Its heads, and how it attends.
        deepspeed: The file that runs, or None.
        attention: The attention function, as planned.
        micro: Sequences of a forward pass, as planned.

    Raises:
        PlanError: The message names what to change.
    """
    size = recipe.train.sequence_parallel_size
    if size == 1:
        return Decision(1, stated(recipe.train, "sequence_parallel_size"))
    problem = (
        _no_zero(deepspeed)
        or _uneven_heads(size, model)
        or _lost_mask(recipe, model, attention)
        or _untested_with_sequences(recipe, micro)
        or _across_nodes(size, hardware, "four times in each layer")
    )
    if problem:
        raise PlanError(f"train.sequence_parallel_size={size}{problem}")
    padded = -(-recipe.sequence_length // size)
    return Decision(
        size,
        f"the recipe: each rank has {padded} of at most {recipe.sequence_length} tokens, and 1/{size} of the heads",
    )


def _no_zero(deepspeed: DeepSpeedFile | None) -> str | None:
    if deepspeed is None or deepspeed.stage not in (2, 3):
        runs = f"{deepspeed.path.name} is ZeRO-{deepspeed.stage}" if deepspeed else "train.deepspeed is not set"
        return f" is DeepSpeed's, over ZeRO-2 or 3, and {runs}. Set train.deepspeed=zero2 or zero3."
    if deepspeed.zero.get("reduce_scatter", True) is not True:
        return f" needs gradients that are reduced by scattering: remove reduce_scatter from {deepspeed.path.name}."
    return None


def _uneven_heads(size: int, model: ModelFacts) -> str | None:
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    if heads is not None and heads % size:
        return f" does not divide the model's {heads} attention heads. Set it to {_sizes([heads])}."
    if kv_heads is not None and kv_heads % size and size % kv_heads:
        return f" neither divides the model's {kv_heads} key and value heads nor is a multiple of them. Set it to {_sizes([kv_heads])}."
    return None


def _lost_mask(recipe: Recipe, model: ModelFacts, attention: str) -> str | None:
    """What a model or a batch says by a mask is lost: each rank makes one for its own tokens, and it is thrown away."""
    known, packed, kind = model.architecture, recipe.data.packing, model.model_type or "this kind"
    if known is not None and (known.recurrent or known.mask_only or not known.has_interface):
        why = (
            "carry a state from token to token"
            if known.recurrent
            else "do not say all in transformers' attention interface"
        )
        return f", and models of type {kind} {why}, so that ranks cannot exchange tokens for heads. Set it to 1."
    if attention == "eager":
        return ", and attn_implementation=eager needs a mask, which the ranks do not exchange. Set model.attn_implementation=sdpa."
    if packed and attention == "sdpa":
        remedy = "Set model.attn_implementation=auto, or data.packing=false."
        return f", and sdpa keeps packed documents apart by a mask, which the ranks do not exchange. {remedy}"
    window, by_mask = model.sliding_window, attention not in _FLASH and not (packed and attention == "varlen")
    if window is not None and window < recipe.sequence_length and by_mask:
        return (
            f", and the model sees {window} tokens back, which {attention} says by a mask that the ranks do not exchange. Set "
            f"data.max_length to at most {window}, or data.packing=true."
        )
    return None


def _untested_with_sequences(recipe: Recipe, micro: int) -> str | None:
    if recipe.data.packing and micro > 1:
        return f" shares one pack at a time, and train.micro_batch_size is {micro}. Set it to 1."
    if recipe.model.compile:
        return " is untested with model.compile=true. Set that to false."
    extra = recipe.train.trainer_args
    if extra.get("loss_type", "nll") != "nll" or extra.get("label_smoothing_factor"):
        return " works with the plain loss only. Remove loss_type and label_smoothing_factor from train.trainer_args."
    return None


def resolve_fsdp(recipe: Recipe, hardware: Hardware) -> Fsdp | None:
    """The sharding that runs: the recipe's section, or None where there is none, or one process only."""
    return recipe.train.fsdp if hardware.ranks > 1 else None


def mesh_shape(fsdp: Fsdp, hardware: Hardware) -> tuple[int, int]:
    """Copies of the model, and ranks that share each."""
    if fsdp.sharding_strategy != "hybrid_shard":
        return 1, hardware.ranks
    return hardware.ranks // hardware.ranks_per_node, hardware.ranks_per_node


def check_fsdp(recipe: Recipe, hardware: Hardware, precision: str) -> None:
    """Refuse what FSDP2 cannot do here.

    Raises:
        PlanError: The message names a setting that can run.
    """
    fsdp, per_node = resolve_fsdp(recipe, hardware), hardware.ranks_per_node
    if fsdp is None:
        return
    together = recipe.train.tensor_parallel_size * recipe.train.sequence_parallel_size
    hybrid = fsdp.sharding_strategy == "hybrid_shard"
    problems = {
        f"train.fsdp with groups of {together} ranks on one batch (train.tensor_parallel_size x train.sequence_parallel_size) is not "
        "built: FSDP2 shares the model among ranks that each have a batch of their own. Leave train.fsdp out, or set both sizes to 1.": (
            together > 1
        ),
        "train.precision=fp16 with train.fsdp: fp16 needs its loss scaled, which is not built for shards of weights. Set "
        "train.precision=bf16 where the GPU has it, else fp32; or leave train.fsdp out and set train.deepspeed=zero3.": (
            precision == "fp16"
        ),
        "model.new_tokens with model.lora under train.fsdp: peft trains single rows of the embeddings, and reads them where each "
        "rank has a shard only. Leave train.fsdp out, set train.deepspeed=zero2, or train all weights: model.lora=null.": (
            bool(recipe.model.new_tokens) and recipe.model.lora is not None
        ),
        f"train.fsdp.sharding_strategy=hybrid_shard copies the model to each machine, and {hardware.ranks} processes are no multiple "
        f"of the {per_node} on this one. Start as many on each, or set it to full_shard.": (
            hybrid and hardware.ranks % per_node != 0
        ),
        "train.fsdp.sharding_strategy=hybrid_shard shares the model within a machine, and there is one process on each. Set it to "
        "full_shard, which shares it among all machines; or leave train.fsdp out.": hybrid and per_node == 1,
    }
    problem = next((problem for problem, applies in problems.items() if applies), None)
    if problem:
        raise PlanError(problem)


def describe_fsdp(fsdp: Fsdp, hardware: Hardware) -> str:
    """The reason beside the engine's name in the plan."""
    copies, shards = mesh_shape(fsdp, hardware)
    if fsdp.sharding_strategy == "hybrid_shard":
        across = f"{copies} copies" if copies > 1 else "one machine, so one copy, as full_shard"
        where = f"hybrid_shard: {across}, each shared by {shards} ranks"
    else:
        where = f"{fsdp.sharding_strategy}: shared by {shards} ranks"
    units = f"modules over {fsdp.min_num_params:,} parameters" if fsdp.min_num_params else "decoder layers"
    offload = ", offloaded to the machine's memory" if fsdp.offload_params else ""
    return f"train.fsdp, {where}; wraps {units}{offload}"
