"""Converts what several tools say about the model: quantization, its own code, chat templates in the file."""

from __future__ import annotations

import re
from pathlib import Path

from sft.convert.conversion import Conversion, is_true

_FLASH = ("flash_attention_2", "flash_attention_3", "kernels-community/flash-attn2", "kernels-community/flash-attn3")
ATTENTION = dict.fromkeys((*_FLASH, "kernels-community/vllm-flash-attn3", "auto"), "auto") | {
    "sdpa": "sdpa",
    "eager": "eager",
}
"""auto takes flash-attn where it is installed, else FlashAttention inside torch."""

OWN_TEMPLATE = "the tokenizer's own chat template is used; if it has none, set model.chat_template"


def quantized(c: Conversion) -> None:
    """Convert bitsandbytes' flags, once it is known whether adapters are trained."""
    kind = str(c.get("bnb_4bit_quant_type", c.get("bnb_config_kwargs.bnb_4bit_quant_type", "nf4")))
    four, eight = is_true(c.get("load_in_4bit")), is_true(c.get("load_in_8bit"))
    if not four:
        c.inapplicable.add("use_bnb_nested_quant")
    for key in filter(
        c.has, ("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_config_kwargs.bnb_4bit_quant_type")
    ):
        if not is_true(c.get(key)) and key.startswith("load"):
            c.keep(key, "not quantized")
        elif "model.lora" not in c.settings:
            c.drop(key, "no adapters are trained, and quantized weights alone cannot be")
        elif key.startswith("load") or four:
            c.carry(key, "model.quantization", "int8" if eight and key != "load_in_4bit" else kind)
        else:
            c.drop(key, "no effect without load_in_4bit")


def remote_code(c: Conversion, revision: str) -> None:
    """Convert trust_remote_code: here the model's own code runs only from a commit."""
    key = "trust_remote_code"
    if c.has(key) and is_true(c.get(key)) and not re.fullmatch(r"[0-9a-f]{40}", str(c.get(revision))):
        c.drop(
            key,
            "models of transformers need none; where a model does, set model.revision to a commit, and model.trust_remote_code",
        )


def own_template(c: Conversion, key: str, text: str) -> None:
    """Convert a chat template that stands in the file: it becomes a file beside the recipe."""
    if "{" not in text:
        c.carry(key, "model.chat_template", text)
        return
    name = f"{Path(c.file).stem}.jinja"
    c.templates[name] = text
    c.change(key, "model.chat_template", name, "a chat template is a file of its own; -o writes it beside the recipe")
