"""Compares a model's weights with its configuration, by names and shapes before they load and by values after."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from sft.errors import ModelError
from sft.hub.model_facts import empty_model, load_config
from sft.hub.weights import read_dtypes, weight_files

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

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
    return find_misfit(model, info)


def find_misfit(model: Any, info: Mapping[str, Any]) -> str | None:
    """What transformers found wrong while it loaded a model, less what is harmless; None where nothing is left.

    Args:
        model: Loaded.
        info: Its loading info.
    """
    from transformers.utils.loading_report import update_key_name

    if getattr(model.config, "quantization_config", None) is not None:
        return None  # its tensors are not the model's
    buffers = [name for name, _ in model.named_buffers()]
    unexpected = {
        key
        for key in info["unexpected_keys"]
        if not _HARMLESS.search(key) and not any(buffer.endswith(key) for buffer in buffers)
    }
    shapes = {key: f"{key} {list(saved)} (by config.json {list(own)})" for key, saved, own in info["mismatched_keys"]}
    missing = set(info["missing_keys"]) - set(shapes)
    lines = [
        *_line("missing from the weights", update_key_name(missing)),
        *_line("in the weights, but not in the model", update_key_name(unexpected)),
        *_line("of another shape", shapes.values()),
        *_other_class(model),
    ]
    if not lines:
        return None
    lines.append(
        "Copy config.json and all weight files again, from one place. If the model has no output embedding of its own, set "
        "tie_word_embeddings to true in config.json; if it does not need some tensors, load it and save it with save_pretrained."
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
        or not (named.endswith("ForCausalLM") and own.endswith("ForCausalLM"))
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
        read_dtypes(file)
    with outside_zero_3():
        refuse_misfit(_compare_with_config(path, tuple(files), revision, trust_remote_code), name)


def refuse_misfit(misfit: str | None, name: str) -> None:
    """Raise what `misfit` has found.

    Raises:
        ModelError: With every line of it.
    """
    if misfit is not None:
        raise ModelError(f"{name}: its weights do not fit its config.json:\n{misfit}")


@contextmanager
def outside_zero_3() -> Iterator[None]:
    """Load a model on this rank alone: in ZeRO-3 from_pretrained would shard it over ranks that are not here."""
    from transformers.integrations import deepspeed

    in_training = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = in_training


def check_values(model: Any, name: str) -> None:
    """Refuse weights that hold NaN or infinity, and layers of zeros, which no gradient passes: a conversion or a merge has failed.

    A tensor is read once, at the speed of memory. One that is sharded over ranks is left out.

    Raises:
        ModelError: There are such tensors.
    """
    broken, layers = [], defaultdict(list)
    for key, tensor in model.named_parameters():
        # Of a quantized tensor the bytes are no numbers of its dtype.
        is_plain = not hasattr(tensor, "device_mesh") and not hasattr(tensor, "quant_state")
        in_memory = not tensor.is_meta and tensor.numel() and is_plain
        if not in_memory or tensor.dtype not in DTYPES.values():
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
        lines = [f"{name}: its weights are broken:", *problems, "Download or convert the model again."]
        raise ModelError("\n".join(lines))
