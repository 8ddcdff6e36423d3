"""The model: loaded in the plan's precision, with the plan's attention and kernels, and written so that it loads alone."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError

from sft.errors import ModelError, did_you_mean
from sft.hub.pins import pinned
from sft.hub.remote_code import HOW_TO_ALLOW, is_refusal
from sft.hub.weights import read_header, weight_files
from sft.model import attention
from sft.model.new_tokens import embed_new_tokens, trainable_rows
from sft.model.tensor_parallel import loading_arguments, sum_norm_gradients_once
from sft.plan.facts import empty_model, load_config
from sft.plan.job import Job
from sft.plan.precision import MASTER
from sft.recipe.schema import Lora, Model

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


_HARMLESS = re.compile(
    r"(^|\.)(inv_freq|masked_bias|position_ids|_extra_state)$|vision|visual|image|audio|speech|multi_modal|mm_projector|connector"
)
"""Left over in older checkpoints, where they hold nothing learned; or of a multimodal model whose language model alone is loaded."""

_NAMES_SHOWN = 6


@cache
def _compare_with_config(
    path: str, files: tuple[Path, ...], revision: str | None, trust_remote_code: bool
) -> str | None:
    """Load a model's tensors without their values; returns what does not fit, None where all does or nothing can be said."""
    from transformers.modeling_utils import load_state_dict
    from transformers.utils import logging

    config = load_config(path, revision, trust_remote_code)
    try:
        model = empty_model(config, trust_remote_code)
    except ModelError:
        if trust_remote_code:  # its own code may need more than the meta device
            return None
        raise
    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity(logging.CRITICAL)
    try:
        tensors = {key: tensor for file in files for key, tensor in load_state_dict(file, "meta").items()}
        _, info = type(model).from_pretrained(
            None,
            config=model.config,
            state_dict=tensors,
            device_map={"": "meta"},
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except Exception:  # loading the weights says why
        return None
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()
    return _misfit(model, info)


def _misfit(model: Any, info: Mapping[str, Any]) -> str | None:
    """What transformers found wrong while it loaded a model, less what is harmless; None where nothing is left.

    Args:
        model: Loaded.
        info: Its loading info.
    """
    from transformers.utils.loading_report import update_key_name

    if getattr(model.config, "quantization_config", None) is not None:
        return None  # its tensors are not the model's
    buffers = [name for name, _ in model.named_buffers()]

    def is_harmless(key: str) -> bool:
        return _HARMLESS.search(key) is not None or any(buffer.endswith(key) for buffer in buffers)

    mismatched = {
        key: f"{key} {list(saved)} (by config.json {list(wanted)})" for key, saved, wanted in info["mismatched_keys"]
    }
    unexpected = {key for key in info["unexpected_keys"] if not is_harmless(key)}
    missing = set(info["missing_keys"]) - set(mismatched)
    lines = [
        *_line("missing from the weights", update_key_name(missing)),
        *_line("in the weights, but not in the model", update_key_name(unexpected)),
        *_line("of another shape", mismatched.values()),
        *_other_class(model),
    ]
    if not lines:
        return None
    lines.append("Copy config.json and all weight files again, from one place.")
    if any("lm_head" in key for key in missing):
        lines.append(
            "If the model shares its output embedding with its input embedding, set tie_word_embeddings to true in config.json."
        )
    if unexpected and not missing and not mismatched:
        lines.append(
            "If you know that the model does not need these tensors, drop them: load it with from_pretrained, and save it with "
            "save_pretrained."
        )
    return "\n".join(lines)


def _line(what: str, names: Iterable[str]) -> list[str]:
    shown = sorted(names)
    more = f" and {len(shown) - _NAMES_SHOWN} more" if shown[_NAMES_SHOWN:] else ""
    return [f"  {what}: {', '.join(shown[:_NAMES_SHOWN])}{more}"] if shown else []


def _other_class(model: Any) -> list[str]:
    """A line where config.json names another causal language model of transformers than its model_type stands for.

    Models such as Llama and Gemma have tensors of the same names and shapes, and compute different things with them.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    named, own = (model.config.architectures or [""])[0], type(model).__name__
    if (
        named == own
        or named not in KNOWN.values()
        or not named.endswith("ForCausalLM")
        or not own.endswith("ForCausalLM")
    ):
        return []
    return [f"  architectures in config.json: {named}; model_type={model.config.model_type} is {own}"]


def check_weights(path: str, revision: str | None, trust_remote_code: bool, name: str) -> None:
    """Refuse weights that do not fit their config.json: transformers would make up what is missing, and drop what is left over.

    Reads names and shapes only: a second for a model of 70B. Checks nothing where the files are not on this machine yet.

    Args:
        path: A folder, or an id on the hub.
        revision: Of the hub.
        trust_remote_code: Whether the model's own code may run.
        name: The model's, for the message.

    Raises:
        ModelError: A file is broken; config.json stands for no model; tensors are missing, left over, or of another shape.
    """
    from huggingface_hub import try_to_load_from_cache

    folder = Path(path).expanduser()
    if not folder.is_dir():
        cached = try_to_load_from_cache(path, "config.json", revision=revision)
        if not isinstance(cached, str):
            return
        folder = Path(cached).parent
    try:
        files = weight_files(folder)
    except ModelError:
        return  # not on this machine yet
    for file in files:
        read_header(file)
    with _outside_zero_3():
        _refuse_misfit(_compare_with_config(path, tuple(files), revision, trust_remote_code), name)


def _refuse_misfit(misfit: str | None, name: str) -> None:
    if misfit is not None:
        raise ModelError(f"{name}: its weights do not fit its config.json:\n{misfit}")


def check_base(job: Job) -> None:
    """Refuse a model whose weights do not fit its config.json, where they are on this machine, and adapters for layers it has not.

    Raises:
        ModelError: Tensors are missing, left over, or of another shape; a name in model.lora.target_modules matches nothing.
    """
    model = pinned(job.recipe, job.model).model
    check_weights(job.model.path, model.revision, model.trust_remote_code, _key(model))
    if model.lora is None or model.lora.target_modules == "all-linear":
        return
    check_targets(
        model.lora,
        empty_model(load_config(job.model.path, model.revision, model.trust_remote_code), model.trust_remote_code),
    )


def check_targets(lora: Lora, model: Any) -> None:
    """Refuse names of layers that the model does not have: peft trains the others, and says nothing.

    Args:
        lora: The recipe's section.
        model: Any of its class, whatever its weights.

    Raises:
        ModelError: One matches nothing.
    """
    targets, names = lora.target_modules, [name for name, _ in model.named_modules()]
    if isinstance(targets, str):
        unmatched = [] if any(re.fullmatch(targets, name) for name in names) else [targets]
    else:
        unmatched = [target for target in targets if not any(f".{name}".endswith(f".{target}") for name in names)]
    if unmatched and targets != "all-linear":
        layers = {
            name.rpartition(".")[2]
            for name, layer in model.named_modules()
            if isinstance(layer, torch.nn.Linear) or type(layer).__name__ == "Conv1D"
        }
        raise ModelError(
            f"model.lora.target_modules: {', '.join(unmatched)} matches no layer of this model"
            f"{did_you_mean(unmatched[0], sorted(layers), '.')} Its linear layers: {', '.join(sorted(layers))}. Or set all-linear."
        )


def _key(model: Model) -> str:
    return f"model.name_or_path={model.name_or_path}"


@contextmanager
def _outside_zero_3() -> Iterator[None]:
    """Load a model on this rank alone: in ZeRO-3 from_pretrained would shard it over ranks that are not here."""
    from transformers.integrations import deepspeed

    in_training = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = in_training


def _from_pretrained(job: Job, tokenizer: Any, **arguments: Any) -> Any:
    return load_base(pinned(job.recipe, job.model).model, job.model.path, weights_dtype(job), tokenizer, **arguments)


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

    weights = (path, model.revision, model.trust_remote_code, _key(model))
    check_weights(*weights)
    try:
        loaded, info = AutoModelForCausalLM.from_pretrained(
            path,
            revision=model.revision,
            trust_remote_code=model.trust_remote_code,
            dtype=dtype,
            output_loading_info=True,
            **arguments,
        )
    except (RuntimeError, SafetensorError):
        check_weights(*weights)  # downloaded only now
        raise
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
        why = str(error).splitlines()[0]
        if "quantiz" in why:
            # What upstream advises installs a package, for weights that cannot be trained.
            why = f"its weights are quantized, and only unquantized ones can be trained; give that model ({why})"
        raise ModelError(f"{model.name_or_path} cannot be loaded: {why}") from None
    _refuse_misfit(_misfit(loaded, info), weights[-1])
    check_values(loaded, weights[-1])
    embed_new_tokens(loaded, tokenizer, model.new_tokens, model.name_or_path)
    loaded.generation_notes = _agree_on_special_tokens(loaded, tokenizer)
    return loaded


def check_values(model: Any, name: str) -> None:
    """Refuse weights that hold NaN or infinity, and layers of zeros, which no gradient passes: a conversion or a merge has failed.

    A tensor is read once, at the speed of memory. One that is sharded over ranks is left out.

    Args:
        model: Just loaded.
        name: Its name, for the message.

    Raises:
        ModelError: There are such tensors.
    """
    broken, layers = [], defaultdict(list)
    for key, tensor in model.named_parameters():
        if (
            tensor.is_meta
            or not tensor.numel()
            or tensor.dtype not in DTYPES.values()
            or hasattr(tensor, "device_mesh")
        ):
            continue
        low, high = torch.aminmax(tensor.detach())  # NaN where there is one
        if not (low.isfinite() and high.isfinite()):
            broken.append(key)
        layer = re.match(r".*?\.\d+\.", key)
        if layer and tensor.dim() > 1:  # the others may start as zeros: a bias, or a norm that adds 1
            layers[layer[0]].append(bool(low == 0 == high))
    zero = [f"{layer}*" for layer, all_zero in layers.items() if all(all_zero) and len(all_zero) > 1]
    problems = [*_line("NaN or infinite values", broken), *_line("nothing but zeros", zero)]
    if problems:
        raise ModelError(
            "\n".join([f"{name}: its weights are broken:", *problems, "Download or convert the model again."])
        )


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


def _agree_on_special_tokens(model: Any, tokenizer: Any) -> list[str]:
    """Generation stops at the end of the turn, and still at the special tokens that the base model stopped at.

    Returns:
        What else had to change so that generation stops there alone and its configuration can be saved.

    Raises:
        ModelError: transformers would refuse to save generation_config.json.
    """
    config, generation = model.config.get_text_config(), model.generation_config
    stops, ordinary, notes = [tokenizer.eos_token_id], list[int](), list[str]()
    special = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    for earlier in (generation.eos_token_id, config.eos_token_id):
        for token in earlier if isinstance(earlier, list) else [earlier]:
            if token is not None and token not in [*stops, *ordinary]:
                (stops if token in special else ordinary).append(token)
    ordinary = [token for token in ordinary if 0 <= token < len(tokenizer)]  # no other is ever generated
    if ordinary:
        words = ", ".join(f"{token} ({tokenizer.decode([token])!r})" for token in ordinary)
        notes.append(
            f"The model's configuration ends generation at {words}, which is no special token of its tokenizer (eos_token_id in "
            "config.json or generation_config.json, or its class's default). The tuned model does not stop there."
        )
    generation.eos_token_id = stops
    generation.pad_token_id = config.pad_token_id = tokenizer.pad_token_id
    config.eos_token_id = tokenizer.eos_token_id
    try:
        generation.validate(strict=True)
    except ValueError:
        if (
            generation.temperature == 0
        ):  # written for programs that take it as greedy; transformers samples at no such temperature
            generation.temperature = generation.top_p = generation.top_k = generation.min_p = None
        else:
            generation.do_sample = True  # as it is meant: the other keys are for sampling alone
        notes.append(
            "generation_config.json sets sampling parameters without do_sample=true, which transformers refuses to save. The tuned "
            f"model's {'says do_sample=true' if generation.do_sample else 'leaves them out'}."
        )
        try:
            generation.validate(strict=True)
        except ValueError as error:
            raise ModelError(f"generation_config.json of the model: {error} Correct it.") from None
    return notes


def lora_config(lora: Lora, model: Any, new: list[int]) -> Any:
    """peft's configuration of the recipe's adapters.

    Args:
        lora: The recipe's section.
        model: From load_model.
        new: Ids of tokens whose rows in the embeddings are trained besides.

    Raises:
        ModelError: Rows of this model's embeddings cannot be trained so, or there are no layers of a name.
    """
    from peft import LoraConfig

    check_targets(lora, model)
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

    with _outside_zero_3():
        PeftModel.from_pretrained(_from_pretrained(job, tokenizer), adapter).merge_and_unload().save_pretrained(target)
