"""config.json of a model that is for use: in the words of every program that reads it. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from sft.files import read_json, write_json


def complete_config(folder: Path) -> None:
    """Make config.json one that other programs read as transformers 5 does, and that is for use and not for training.

    transformers 5 writes how positions are rotated as `rope_parameters`. Programs that read config.json themselves, and transformers 4,
    know `rope_theta` and `rope_scaling` only, and take 10,000 without a word where those are missing.

    Args:
        folder: Of the model.
    """
    config = read_json(folder / "config.json")
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        config["rope_theta"] = rope["rope_theta"]
        if rope.get("rope_type", "default") != "default":
            # With the theta: where there is a rope_scaling transformers 5 reads that alone, and GPT-NeoX no other theta.
            config["rope_scaling"] = dict(rope)
    if config.get("use_cache") is False:
        config["use_cache"] = True  # the training turns it off
    write_json(folder / "config.json", config)
