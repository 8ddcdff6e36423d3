"""The sizes of the model, the documents and the packs that the parts of gpu.py share."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

# hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads, vocab_size
SHAPES = {True: (2048, 11008, 36, 16, 2, 151936), False: (64, 128, 2, 4, 2, 544)}
LENGTHS = {"short": (90, 0.7), "long": (2200, 0.9)}
"""Median and sigma of lognormal document lengths, tokens."""

PACKS = 4


@dataclass(frozen=True)
class Documents:
    """Random token ids, of which the last three fifths are trained."""

    rows: Path
    lengths: np.ndarray
    labelled: int


@dataclass(frozen=True)
class Bench:
    """Where a part works, and at which size."""

    work: Path
    gpu: bool

    @property
    def pack(self) -> int:
        return 16384 if self.gpu else 1024

    @property
    def model(self) -> Path:
        return self.work / "model"

    def documents(self, kind: str) -> Documents:
        """As many as fill PACKS packs; the same in every part."""
        from sft.data.packing import pack

        generator, (middle, sigma), most = np.random.default_rng(0), LENGTHS[kind], self.pack
        lengths = np.clip(generator.lognormal(np.log(middle * most / 16384), sigma, PACKS * most), 6, most).astype(int)
        count = int(np.searchsorted(lengths.cumsum(), PACKS * most, side="right"))
        while len(pack(lengths[:count], most)[1]) > PACKS:
            count -= 1
        rows = [(generator.integers(10, 500, length).tolist(), int(length * 0.4) + 1) for length in lengths[:count]]
        lines = [json.dumps({"input_ids": ids, "labels": [-100] * hidden + ids[hidden:]}) for ids, hidden in rows]
        file = self.work / f"{kind}.rows.jsonl"
        file.write_text("\n".join(lines) + "\n")
        return Documents(file, lengths[:count], sum(len(ids) - hidden for ids, hidden in rows))

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What the part `model` has found: losses and FLOPs of the documents, and the GPU's peak."""
        return json.loads((self.model / "facts.json").read_text())
