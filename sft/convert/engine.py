"""Converts what several tools say about the engine: DeepSpeed's files, FSDP, torch.compile."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sft.convert.conversion import Conversion, is_true, table
from sft.recipe.load import find_file


def deepspeed(c: Conversion, key: str = "deepspeed") -> None:
    """Convert a DeepSpeed file, by its path or its content, to the one of ds_configs/ with the same stage and offload."""
    inside = [one for one in c.keys if one.startswith(f"{key}.") and c.has(one)]
    path = c.get(key)
    if isinstance(path, str) and c.has(key):
        if find_file(path).is_file():
            c.carry(key, "train.deepspeed", path)
            return
        match = re.search(r"z(?:ero)?[_-]?([0-3])", Path(path).name.lower())
        offload = "offload" in path.lower()
        _deepspeed_stage(c, key, int(match[1]) if match else None, offload, f"{path} is not here")
    elif inside:
        stage_key = f"{key}.zero_optimization.stage"
        devices = [
            str(c.get(f"{key}.zero_optimization.offload_{what}.device", "none")) for what in ("optimizer", "param")
        ]
        stage = c.get(stage_key)
        if c.has(stage_key):
            _deepspeed_stage(c, stage_key, stage, devices != ["none", "none"], "its own values are not read")
        for one in inside:
            if c.has(one):
                c.drop(
                    one,
                    "a DeepSpeed file of your own may be named in train.deepspeed; ds_configs/README.md explains each key",
                )


def _deepspeed_stage(c: Conversion, key: str, stage: Any, offload: bool, why: str) -> None:
    if stage not in (0, 1, 2, 3):
        c.drop(
            key, f"{why}, and its name shows no ZeRO stage: set train.deepspeed to a file of ds_configs/ or your own"
        )
    elif stage == 0:
        c.drop(key, "ZeRO-0 is plain data parallelism, as without DeepSpeed")
    else:
        name = f"zero{stage}" + ("_offload" if offload and stage > 1 else "")
        c.change(key, "train.deepspeed", name, f"{why}: ds_configs/{name}.json is the same stage")


_STRATEGIES = {"full_shard": "full_shard", "shard_grad_op": "shard_grad_op", "hybrid_shard": "hybrid_shard"}
_RESHARD = {"true": "full_shard", "false": "shard_grad_op"}
_FSDP_TABLE = """
fsdp_sharding_strategy -> train.fsdp.sharding_strategy
fsdp_reshard_after_forward -> train.fsdp.sharding_strategy
fsdp_offload_params -> train.fsdp.offload_params
fsdp_state_dict_type -> train.fsdp.state_dict_type
fsdp_min_num_params -> train.fsdp.min_num_params
fsdp_activation_checkpointing -> train.gradient_checkpointing
fsdp_version -- FSDP2 is the only one here
fsdp_auto_wrap_policy -- each decoder layer is wrapped; train.fsdp.min_num_params wraps by size
fsdp_transformer_layer_cls_to_wrap -- the decoder layers are found in the model
fsdp_final_state_dict_type -- final/ is always a full model
* -- FSDP2 needs no such setting
"""
_FSDP_ROWS = table(
    _FSDP_TABLE,
    {
        "fsdp_sharding_strategy": _STRATEGIES,
        "fsdp_reshard_after_forward": _RESHARD | _STRATEGIES,
        "fsdp_state_dict_type": {"full_state_dict": "full", "sharded_state_dict": "sharded"},
    },
)
FSDP = {f"fsdp_config.{name}": row for name, row in _FSDP_ROWS.items()}
FSDP |= {f"fsdp_config.{name.removeprefix('fsdp_')}": row for name, row in _FSDP_ROWS.items()}


def fsdp(c: Conversion) -> None:
    """Turn on train.fsdp where the file has FSDP; its settings are in FSDP_ROWS."""
    given = c.get("fsdp")
    names = " ".join(map(str, given)) if isinstance(given, list) else str(given or "")
    inside = [one for one in c.keys if one.startswith("fsdp_config.")]
    if not inside and names.lower() in ("", "false", "none"):
        return
    if "no_shard" in names.lower() or str(c.get("fsdp_config.fsdp_sharding_strategy")).lower() == "no_shard":
        return
    if "train.deepspeed" in c.settings:
        for key in filter(c.has, ("fsdp", *inside)):
            c.drop(key, "the engine is DeepSpeed, which the file names too")
        return
    c.settings["train.fsdp"] = {}
    if c.has("fsdp"):
        strategy = next((ours for theirs, ours in _STRATEGIES.items() if theirs in names.lower()), "full_shard")
        c.change("fsdp", "train.fsdp.sharding_strategy", strategy, "FSDP2, with each decoder layer wrapped")
        if "offload" in names.lower():
            c.settings["train.fsdp.offload_params"] = True


def compiled(c: Conversion, key: str) -> None:
    """Convert torch.compile, where it works."""
    if not c.has(key) or not is_true(c.get(key)):
        return
    if "model.quantization" in c.settings or str(c.settings.get("train.deepspeed")).startswith("zero3"):
        c.drop(key, "model.compile does not work with quantized weights, nor with ZeRO-3")
    else:
        c.change(key, "model.compile", True, "each decoder layer is compiled, instead of Liger's layers")
