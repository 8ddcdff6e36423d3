"""Recognizes the training configs of other tools by their keys. sft/convert converts them."""

from __future__ import annotations

from collections.abc import Collection

# The first whose keys a file has. Each set of keys is one that the tool's files have and no other's; names are separated by blanks.
_KEYS = {
    "accelerate": ("compute_environment", "distributed_type num_processes"),
    "DeepSpeed": ("zero_optimization",),
    "axolotl": ("base_model",),
    "LLaMA-Factory": (
        "finetuning_type",
        "cutoff_len",
        "stage model_name_or_path",
        "template dataset",
        "model_class",
        "infer_backend",
        "export_dir",
    ),
    "torchtune": ("tokenizer checkpointer", "model dataset optimizer", "checkpointer model"),
    "alignment-handbook": ("dataset_mixture", "dataset_mixer", "chat_template model_name_or_path"),
    "trl": (
        "dataset_name",
        "dataset_train_split",
        "datasets model_name_or_path",
        "model_name_or_path per_device_train_batch_size",
        "model_name_or_path learning_rate",
        "model_name_or_path output_dir",
        "dataset_text_field",
    ),
    "transformers": ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
}


def other_tool(keys: Collection[object]) -> str | None:
    """The tool (of sft/convert, accelerate or DeepSpeed) whose config has these top-level keys; None for a recipe and for anything else.

    >>> other_tool(["base_model", "datasets", "micro_batch_size"])
    'axolotl'
    """
    if {"schema_version", "version"} <= set(keys) or {"model", "data", "train"} <= set(keys):
        return None
    for tool, signs in _KEYS.items():
        if any(set(sign.split()) <= set(keys) for sign in signs):
            return tool
    return None
