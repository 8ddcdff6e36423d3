"""The recipe: what a YAML file may say and what each key means. sft/recipe/load.py reads it.

The large sections have files of their own: sft/recipe/data.py, sft/recipe/train.py and sft/recipe/eval.py. Imports no torch:
a recipe loads in well under a second.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from sft.recipe.data import Column, Data, Finding, Source
from sft.recipe.eval import Evaluation
from sft.recipe.section import Section
from sft.recipe.train import Fsdp, Train

__all__ = [
    "REPOSITORY",
    "SCHEMA_VERSION",
    "Column",
    "Data",
    "Evaluation",
    "Finding",
    "Fsdp",
    "Lora",
    "Model",
    "Recipe",
    "Section",
    "Source",
    "Tracking",
    "Train",
]

SCHEMA_VERSION = 1
"""The format of a recipe file that this program reads."""

REPOSITORY = Path(__file__).resolve().parents[2]


class Lora(Section):
    """Train low-rank adapters instead of all weights (peft.LoraConfig)."""

    r: int = Field(default=16, gt=0)
    """Rank of the adapters."""

    lora_alpha: int = Field(default=32, gt=0)
    """Scale: the adapter's output is multiplied by lora_alpha / r."""

    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the adapter's input."""

    target_modules: str | tuple[str, ...] = "all-linear"
    """Names of the linear layers that get an adapter; `all-linear` is every one but the output head. Each name must match."""


class Model(Section):
    """What is trained."""

    name_or_path: str = Field(min_length=1)
    """A local folder, an id on the hub, or `builtin:demo` (made by this project, no network)."""

    revision: str | None = None
    """Branch, tag or commit on the hub; the full hash of a commit is always the same model."""

    trust_remote_code: bool = False
    """Run Python code that the model ships: of a hub model only with a full commit hash as `revision`. See docs/security.md."""

    attn_implementation: Literal["auto", "varlen", "sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "auto"
    """Attention function. `varlen`: within each packed document, with nothing to install. `auto`: flash-attn where it is installed
    and runs, else varlen, else sdpa with a mask over the whole pack; the plan says why."""

    kernels: Literal["liger", "none"] = "liger"
    """Liger's fused RMSNorm, RoPE and SwiGLU layers; on a GPU only."""

    compile: bool = False
    """torch.compile for each decoder layer: a minute or more at the start, for faster steps. Not with Liger or ZeRO-3."""

    chat_template: str | None = None
    """A .jinja file, or the name of one of ours (`chatml`, `plain`). None: the tokenizer's own."""

    pad_token: str | None = None
    """A token of the vocabulary, or of new_tokens, for padding where the tokenizer has none. Never the end-of-turn token: where the
    tokenizer pads with that, None chooses another special token."""

    eos_token: str | None = None
    """A token of the vocabulary, or of new_tokens, that ends a turn, where the tokenizer's own is wrong or missing."""

    new_tokens: tuple[Annotated[str, Field(min_length=2)], ...] = ()
    """Special tokens to add, such as `<|im_start|>`; their embeddings start as the mean of the others."""

    lora: Lora | None = None
    """Set to train adapters; `lora: {}` takes the defaults."""


class Tracking(Section):
    """Where the curves go besides metrics.jsonl."""

    report_to: tuple[Literal["wandb", "tensorboard"], ...] = ()
    """Trackers."""

    project: str = "sft"
    """Project in wandb."""

    run_name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run and of its folder. None: the time it started."""


class Recipe(Section):
    """One YAML file: one run."""

    schema_version: int
    """Format of the file."""

    version: int = Field(ge=1)
    """Of the recipe, raised with any change that could move a score."""

    model: Model
    data: Data
    train: Train
    eval: Evaluation = Evaluation()
    tracking: Tracking = Tracking()

    output_dir: str = Field(default="outputs", min_length=1)
    """Runs go to <output_dir>/<recipe>/<run>."""

    debug: bool = False
    """Log and compare more, on every rank, to find a hang or a rank that differs. Slower."""

    @model_validator(mode="after")
    def _measured_on_whole_layers(self) -> Recipe:
        train, refused = self.train, []
        if self.eval.every_steps is not None:
            refused += [f"train.tensor_parallel_size={train.tensor_parallel_size}"] * (train.tensor_parallel_size > 1)
            refused += [f"train.sequence_parallel_size={train.sequence_parallel_size}"] * (
                train.sequence_parallel_size > 1
            )
            # Each new length would be compiled, until torch gives up on the layer and trains it uncompiled.
            refused += ["model.compile=true"] * self.model.compile
        if refused:
            raise ValueError(
                f"eval.every_steps={self.eval.every_steps} does not work with {' and '.join(refused)}: leave one of them out, and measure "
                "after the training"
            )
        return self

    @property
    def sources(self) -> tuple[Source, ...]:
        """The datasets to train on, as a list whichever way they were written."""
        return (Source(path=self.data.train),) if isinstance(self.data.train, str) else self.data.train

    @property
    def held_out_sources(self) -> tuple[Source, ...]:
        """The datasets that are held out; none where a fraction is, or nothing."""
        held_out = self.data.held_out
        if isinstance(held_out, str):
            return (Source(path=held_out),)
        return held_out if isinstance(held_out, tuple) else ()

    @property
    def sequence_length(self) -> int:
        """Tokens of the longest sequence: the length of a pack, or without packing of a document."""
        return self.data.pack_length or self.data.max_length

    @property
    def sequences_per_step(self) -> int:
        """Sequences per optimizer step. `resolve_plan` has checked that the tokens divide."""
        if self.train.global_batch_size is not None:
            return self.train.global_batch_size
        assert self.train.global_batch_tokens is not None
        return self.train.global_batch_tokens // self.sequence_length
