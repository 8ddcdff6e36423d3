"""The model: loaded in the plan's precision, with the plan's attention and kernels, and written so that it loads alone."""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from sft import attention
from sft.embeddings import embed_new_tokens, trainable_rows
from sft.errors import ModelError
from sft.job import Job
from sft.live_parallelism import loading_arguments
from sft.recipe import Lora, Model
from sft.remote_code import HOW_TO_ALLOW, is_refusal
from sft.tensor_parallel import sum_norm_gradients_once
from sft.weights import MASTER

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def weights_dtype(job: Job) -> torch.dtype:
    """What the weights are loaded in.

    DeepSpeed and MasterAdamW keep an fp32 copy of what they train, and under DDP adapters are fp32 beside a frozen base: all
    take the weights in the compute format. Everything else trains the weights themselves, which bf16 would round at each step.
    """
    keeps_own_copy = job.deepspeed is not None or job.recipe.model.lora is not None or job.plan.weights.value == MASTER
    return DTYPES[job.plan.precision.value] if keeps_own_copy else torch.float32


def check_kernels(job: Job) -> None:
    """Refuse Liger for a model it has no kernels for: it would apply nothing and say so in a debug log only.

    Raises:
        ModelError: The model's type is unknown to the installed Liger.
    """
    kind = job.model.model_type
    if job.plan.kernels.value != "liger" or kind is None:
        return
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ModelError(
            f"model.kernels=liger, and Liger has no kernels for models of type {kind}. Set model.kernels=none."
        )


def _from_pretrained(job: Job, tokenizer: Any, **arguments: Any) -> Any:
    return load_base(job.recipe.model, job.model.path, weights_dtype(job), tokenizer, **arguments)


def load_base(model: Model, path: str, dtype: torch.dtype, tokenizer: Any, **arguments: Any) -> Any:
    """The model that training starts from, with rows for its new tokens and the tokenizer's special tokens.

    Args:
        model: The recipe's section.
        path: A folder, or the id on the hub.
        dtype: Of the weights.
        tokenizer: From load_tokenizer, or as it was saved.
        arguments: Of from_pretrained.

    Raises:
        ModelError: It cannot be loaded.
    """
    from transformers import AutoModelForCausalLM

    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            path, revision=model.revision, trust_remote_code=model.trust_remote_code, dtype=dtype, **arguments
        )
    except (OSError, ValueError, ImportError, UnpicklingError) as error:
        if is_refusal(error):
            raise ModelError(
                f"model.name_or_path={model.name_or_path}: the model is code of its own, which is not run unless the recipe says so. "
                f"{HOW_TO_ALLOW}"
            ) from None
        if isinstance(error, UnpicklingError):
            raise ModelError(
                f"model.name_or_path={model.name_or_path}: its .bin file holds other things than tensors, or is damaged, and is not "
                "loaded: what it holds could run as a program. Get the model as safetensors."
            ) from None
        raise ModelError(f"{model.name_or_path} cannot be loaded: {str(error).splitlines()[0]}") from None
    embed_new_tokens(loaded, tokenizer, model.new_tokens, model.name_or_path)
    _agree_on_special_tokens(loaded, tokenizer)
    return loaded


def load_model(job: Job, tokenizer: Any) -> Any:
    """Load the model that is to be trained.

    Args:
        job: Where it is, and its precision, attention and kernels.
        tokenizer: From load_tokenizer; its special tokens become the model's, and its new tokens get rows.

    Raises:
        ModelError: It cannot be loaded, or the tokenizer is not its own.
    """
    if job.plan.attention.value == attention.NAME:
        attention.register()
    model = _from_pretrained(job, tokenizer, attn_implementation=job.plan.attention.value, **loading_arguments(job))
    if job.recipe.train.tensor_parallel_size > 1:
        sum_norm_gradients_once(model)
    if job.plan.kernels.value == "liger":
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        # TRL's fused head computes the loss; Liger's would replace the forward that it patches.
        _apply_liger_kernel_to_instance(model, fused_linear_cross_entropy=False, cross_entropy=False)
    return model


def _agree_on_special_tokens(model: Any, tokenizer: Any) -> None:
    """Generation stops at the end of the turn, and still at what the base model stopped at."""
    config = model.config.get_text_config()
    stops = [tokenizer.eos_token_id]
    for earlier in (model.generation_config.eos_token_id, config.eos_token_id):
        ids = earlier if isinstance(earlier, list) else [earlier]
        stops += [token for token in ids if token is not None and token not in stops]
    model.generation_config.eos_token_id = stops
    model.generation_config.pad_token_id = config.pad_token_id = tokenizer.pad_token_id
    config.eos_token_id = tokenizer.eos_token_id


def lora_config(lora: Lora, model: Any, new: list[int]) -> Any:
    """peft's configuration of the recipe's adapters.

    Args:
        lora: The recipe's section.
        model: From load_model.
        new: Ids of tokens whose rows in the embeddings are trained besides.

    Raises:
        ModelError: Rows of this model's embeddings cannot be trained so.
    """
    from peft import LoraConfig

    modules = lora.target_modules
    return LoraConfig(
        r=lora.r,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules=modules if isinstance(modules, str) else list(modules),
        trainable_token_indices=trainable_rows(model, new, modules),
        task_type="CAUSAL_LM",
    )


def merge_adapter(job: Job, tokenizer: Any, adapter: Path, target: Path) -> None:
    """Write base and adapter as one model that loads without peft.

    The base is loaded anew: the one in memory may be spread over ranks.

    Args:
        job: Names the base and its precision.
        tokenizer: Its special tokens become the model's.
        adapter: Folder that peft wrote.
        target: Folder to write to.
    """
    from peft import PeftModel
    from transformers.integrations import deepspeed

    # In ZeRO-3 from_pretrained would shard the base over ranks that are not here. The training may go on, and needs it again.
    in_training = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        PeftModel.from_pretrained(_from_pretrained(job, tokenizer), adapter).merge_and_unload().save_pretrained(target)
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = in_training
