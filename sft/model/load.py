"""Loads the model in the plan's precision, with the plan's attention and kernels, and checks what was loaded."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError

from sft.errors import ModelError
from sft.hub.model_facts import empty_model, load_config
from sft.hub.pins import pinned
from sft.hub.remote_code import HOW_TO_ALLOW, is_refusal
from sft.model import attention
from sft.model.adapters import check_adapters, merge_adapters
from sft.model.frozen import check_frozen
from sft.model.new_tokens import embed_new_tokens
from sft.model.quantization import dequantize, keep_training_arithmetic, quantization_config, storage
from sft.model.rope import scale_positions
from sft.model.tensor_parallel import loading_arguments, sum_norm_gradients_once
from sft.model.weight_checks import DTYPES, check_values, check_weights, find_misfit, outside_zero_3, refuse_misfit
from sft.plan.job import Job
from sft.plan.precision import MASTER
from sft.recipe.lora import TAKES_FROM_BASE
from sft.recipe.schema import Model


def weights_dtype(job: Job) -> torch.dtype:
    """What the weights are loaded in.

    DeepSpeed and MasterAdamW keep an fp32 copy of what they train, and under DDP adapters are fp32 beside a frozen base: all
    take the weights in the compute format. Everything else trains the weights themselves, which bf16 would round at each step.
    """
    keeps_own_copy = job.deepspeed is not None or job.recipe.model.lora is not None or job.plan.weights.value == MASTER
    return DTYPES[job.plan.precision.value] if keeps_own_copy else torch.float32


def check_base(job: Job) -> None:
    """Refuse a model whose weights do not fit its config.json, where they are on this machine, and adapters for layers it has not.

    Raises:
        ModelError: Tensors are missing, left over, or of another shape; a name in model.lora.target_modules matches nothing.
    """
    model = pinned(job.recipe, job.model).model
    check_weights(job.model.path, model.revision, model.trust_remote_code, _key(model))
    if model.rope_scaling is not None:
        scale_positions(load_config(job.model.path, model.revision, model.trust_remote_code), model.rope_scaling)
    check_trained(job)


def check_trained(job: Job) -> None:
    """Refuse names of layers and parameters in model.lora and model.freeze that the model does not have (ModelError)."""
    model = pinned(job.recipe, job.model).model
    if model.lora is None and not model.freeze:
        return
    with outside_zero_3():
        config = load_config(job.model.path, model.revision, model.trust_remote_code)
        empty = empty_model(config, model.trust_remote_code)
        if model.freeze:
            check_frozen(model.freeze, empty)
        if model.lora is not None:
            check_adapters(model, empty)


def _key(model: Model) -> str:
    return f"model.name_or_path={model.name_or_path}"


FindModules = Callable[[Any], list[str]]
"""Names of modules of a model without values whose weights are not to be loaded."""


def load_base(
    model: Model,
    path: str,
    dtype: torch.dtype,
    tokenizer: Any,
    storage: torch.dtype = torch.uint8,
    without: FindModules | None = None,
    **arguments: Any,
) -> Any:
    """The model that training starts from, quantized if the recipe says so, with rows for new tokens and the tokenizer's special tokens.

    Args:
        model: The recipe's section.
        path: A folder, or the id on the hub.
        dtype: Of the weights.
        tokenizer: From load_tokenizer, or as it was saved.
        storage: Of the tensors that hold 4-bit weights.
        without: Modules that stay on the meta device.
        arguments: Of from_pretrained.

    Raises:
        ModelError: It cannot be loaded.
    """
    from transformers import AutoModelForCausalLM

    weights = (path, model.revision, model.trust_remote_code, _key(model))
    check_weights(*weights)
    if model.rope_scaling is not None:
        config = load_config(path, model.revision, model.trust_remote_code)
        arguments["config"] = scale_positions(config, model.rope_scaling)
    kind: Any = AutoModelForCausalLM
    if without is not None:
        config = load_config(path, model.revision, model.trust_remote_code)
        empty = empty_model(config, model.trust_remote_code)
        kind = _class_without(type(empty), without(empty))
    try:
        loaded, info = kind.from_pretrained(
            path,
            revision=model.revision,
            trust_remote_code=model.trust_remote_code,
            dtype=dtype,
            output_loading_info=True,
            quantization_config=quantization_config(model, dtype, storage),
            **arguments,
        )
    except (RuntimeError, SafetensorError):
        check_weights(*weights)  # downloaded only now
        raise
    except (OSError, ValueError, ImportError, UnpicklingError) as error:
        raise ModelError(f"{_key(model)}: {_why(error)}") from None
    loaded.__class__ = type(loaded) if without is None else type(empty)
    refuse_misfit(find_misfit(loaded, info), weights[-1])
    check_values(loaded, weights[-1])
    keep_training_arithmetic(loaded)
    embed_new_tokens(loaded, tokenizer, model.new_tokens, model.name_or_path)
    loaded.generation_notes = _settle_generation(loaded, tokenizer)
    return loaded


def _class_without(kind: Any, names: list[str]) -> Any:
    """A model's class of which from_pretrained reads no weights of some modules, as if they were not the model's."""
    short = (name.removeprefix(f"{kind.base_model_prefix}.") for name in names)  # so they stand in a base model's files
    others = re.compile(rf"(^|\.)({'|'.join(map(re.escape, short))})\.")

    def state_dict(self: Any, *args: Any, **arguments: Any) -> Any:
        named = kind.state_dict(self, *args, **arguments).items()
        return {name: tensor for name, tensor in named if not others.search(name)}

    ignored = {*(kind._keys_to_ignore_on_load_unexpected or ()), others.pattern}
    changes = {"state_dict": state_dict, "_keys_to_ignore_on_load_unexpected": ignored, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), changes)


def _why(error: Exception) -> str:
    """Why from_pretrained failed, and what to do."""
    if is_refusal(error):
        return f"the model is code of its own, which is not run unless the recipe says so. {HOW_TO_ALLOW}"
    if isinstance(error, UnpicklingError):
        return (
            "its .bin file holds other things than tensors, or is damaged, and is not loaded: what it holds could run as a program. Get "
            "the model as safetensors."
        )
    first = str(error).splitlines()[0]
    if "quantiz" in first:
        # What upstream advises installs a package, for weights that cannot be trained.
        return f"its weights are quantized, and only unquantized ones can be trained; give that model ({first})"
    return f"it cannot be loaded: {first}"


def load_model(job: Job, tokenizer: Any, without: FindModules | None = None) -> Any:
    """Load the model that is to be trained.

    Args:
        job: Where it is, and its precision, attention and kernels.
        tokenizer: From load_tokenizer; its special tokens become the model's, and its new tokens get rows.
        without: Modules that stay on the meta device.

    Raises:
        ModelError: It cannot be loaded, or the tokenizer is not its own.
    """
    if job.plan.attention.value.startswith(attention.NAME):
        attention.register(job.plan.attention.value)
    on_rank_0 = is_loaded_on_rank_0(job)
    loading: AbstractContextManager[dict[str, str]] = _others_stay_empty() if on_rank_0 else nullcontext({})
    with loading as empty:
        model = load_base(
            pinned(job.recipe, job.model).model,
            job.model.path,
            weights_dtype(job),
            tokenizer,
            storage(job),
            without,
            attn_implementation=job.plan.attention.value,
            **loading_arguments(job),
            **empty,
        )
    model.is_loaded_on_rank_0 = on_rank_0
    if on_rank_0:
        _give_storage(model)
    if job.recipe.train.tensor_parallel_size > 1:
        sum_norm_gradients_once(model)
    if job.plan.kernels.value == "liger":
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        # TRL's fused head computes the loss; Liger's would replace the forward that it patches.
        _apply_liger_kernel_to_instance(model, fused_linear_cross_entropy=False, cross_entropy=False)
    return model


def is_loaded_on_rank_0(job: Job) -> bool:
    """Whether a node holds the full weights once: rank 0 loads them and, when they are sharded, sends each rank its shards.

    Not what every rank computes from the weights before that (quantization, adapters that start as a part of the base), nor models with
    buffers in their files, of which accelerate shards none.
    """
    model = job.recipe.model
    if job.fsdp is None or model.quantization is not None:
        return False
    if model.lora is not None and str(model.lora.init_lora_weights).startswith(TAKES_FROM_BASE):
        return False
    pin = pinned(job.recipe, job.model).model
    empty = empty_model(load_config(job.model.path, pin.revision, pin.trust_remote_code), pin.trust_remote_code)
    return not {name for name, _ in empty.named_buffers()} & empty.state_dict().keys()


@contextmanager
def _others_stay_empty() -> Iterator[dict[str, str]]:
    """Have from_pretrained load the weights on local rank 0 alone, and on the others keep all but buffers on the meta device.

    Yields its further arguments: by itself transformers 5 loads them everywhere.
    """
    names = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")
    os.environ |= dict.fromkeys(names, "true")
    try:
        yield {} if os.environ.get("LOCAL_RANK", "0") == "0" else {"device_map": "meta"}
    finally:
        for name in names:
            os.environ.pop(name, None)


def _give_storage(model: Any) -> None:
    """Replace meta parameters by empty ones on the CPU, of whose pages none is in memory until it is written.

    accelerate finds the optimizer's parameters by their address, and those on the meta device all have the same.
    """
    empty: dict[int, Any] = {}
    for module in model.modules():
        for name, one in module._parameters.items():
            if one is not None and one.is_meta:
                value = torch.empty_like(one, device="cpu")
                module._parameters[name] = empty.setdefault(id(one), torch.nn.Parameter(value, one.requires_grad))


def _settle_generation(model: Any, tokenizer: Any) -> list[str]:
    """Generation stops at the end of the turn, and still at the special tokens that the base model stopped at.

    Returns:
        What else had to change so that generation stops there alone and its configuration can be saved.

    Raises:
        ModelError: transformers would refuse to save generation_config.json.
    """
    config, generation = model.config.get_text_config(), model.generation_config
    earlier = [one if isinstance(one, list) else [one] for one in (generation.eos_token_id, config.eos_token_id)]
    special = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    # In their order, once each; no token beyond the tokenizer's is ever generated.
    stops = dict.fromkeys(token for some in earlier for token in some if token is not None and token < len(tokenizer))
    ordinary = [token for token in stops if token not in special and token >= 0]
    generation.eos_token_id = list(
        dict.fromkeys([tokenizer.eos_token_id, *(token for token in stops if token in special)])
    )
    generation.pad_token_id = config.pad_token_id = tokenizer.pad_token_id
    config.eos_token_id = tokenizer.eos_token_id
    if (
        tokenizer.bos_token_id is not None
    ):  # as the trainer does to the live model; adapters are merged into one that never met it
        generation.bos_token_id = config.bos_token_id = tokenizer.bos_token_id
    notes = _settle_sampling(generation)
    if ordinary:
        words = ", ".join(f"{token} ({tokenizer.decode([token])!r})" for token in ordinary)
        notes.append(
            f"The model's configuration ends generation at {words}, which is no special token of its tokenizer (eos_token_id in "
            "config.json or generation_config.json, or its class's default). The tuned model does not stop there."
        )
    return notes


def _settle_sampling(generation: Any) -> list[str]:
    """Make the generation config one that transformers saves; what had to change for it."""
    try:
        generation.validate(strict=True)
        return []
    except ValueError:
        # Other programs take a temperature of 0 as greedy; transformers samples at no such temperature.
        if generation.temperature == 0:
            generation.temperature = generation.top_p = generation.top_k = generation.min_p = None
        else:
            generation.do_sample = True  # as it is meant: the other keys are for sampling alone
    try:
        generation.validate(strict=True)
    except ValueError as error:
        raise ModelError(f"generation_config.json of the model: {error} Correct it.") from None
    return [
        "generation_config.json sets sampling parameters without do_sample=true, which transformers refuses to save. The tuned "
        "model's says do_sample=true, or leaves them out where the temperature is 0."
    ]


def merge_adapter(job: Job, tokenizer: Any, adapter: Path, target: Path) -> None:
    """Write base and adapter as one model that loads without peft.

    The base is loaded anew, since the one in memory may be sharded, and dequantized where it is quantized: what was trained, unrounded.

    Args:
        job: Names the base and its precision.
        tokenizer: Its special tokens become the model's.
        adapter: Folder that peft wrote. Adapters that started as a part of the base are replaced by ones of the base itself.
        target: Folder to write to.
    """
    lora = job.recipe.model.lora
    assert lora is not None
    with outside_zero_3():
        base = load_dequantized(pinned(job.recipe, job.model).model, job.model.path, weights_dtype(job), tokenizer)
        merge_adapters(lora, base, adapter).save_pretrained(target)


def load_dequantized(model: Model, path: str, dtype: torch.dtype, tokenizer: Any) -> Any:
    """As load_base, and what the recipe quantizes dequantized: the weights that adapters are trained beside, in `dtype`."""
    loaded = load_base(model, path, dtype, tokenizer)
    return loaded if model.quantization is None else dequantize(loaded, dtype)
