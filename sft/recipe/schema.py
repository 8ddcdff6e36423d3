"""Defines the recipe: what a YAML file may say and what each key means. sft/recipe/load.py reads it.

The large sections are in sft/recipe/data.py, train.py and eval.py. Imports no torch: a recipe loads in well under a second.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PrivateAttr, field_validator, model_validator

from sft.recipe.data import Column, Data, Finding, Source
from sft.recipe.eval import Evaluation
from sft.recipe.lora import Lora
from sft.recipe.section import UNRELATED, Section, fixed, named, regular
from sft.recipe.train import EVAL_LOSS, Fsdp, Train

__all__ = [
    "REPOSITORY",
    "SCHEMA_VERSION",
    "SHIPPED",
    "Column",
    "Data",
    "Evaluation",
    "Finding",
    "Fsdp",
    "Lora",
    "Model",
    "Recipe",
    "RopeScaling",
    "Section",
    "Source",
    "Tracking",
    "Train",
]

SCHEMA_VERSION = 1
"""The format of a recipe file that this program reads."""

REPOSITORY = Path(__file__).resolve().parents[2]
"""The checkout; site-packages where a wheel is installed."""

_IN_WHEEL = REPOSITORY / "sft" / "shipped"  # setup.py
SHIPPED = _IN_WHEEL if _IN_WHEEL.is_dir() else REPOSITORY
"""The folder with recipes/ and ds_configs/."""

_MODEL = fixed("the weights and tokens in the checkpoint belong to the other model")
_ROUNDING = named("the same arithmetic in another order from here on")
_MODEL_CODE = named("the model's own code runs, or no longer does, from here on")
_SAME_SEQUENCES = named("as long as the prepared sequences stay the same")


class RopeScaling(Section):
    """Extend the model's positions (its context), under transformers' names."""

    rope_type: Literal["yarn", "linear", "llama3"]
    """Method. `dynamic` and `longrope` are refused: they depend on the longest document of a pack, so packed would differ from separate."""

    factor: float = Field(gt=1)
    """Multiplies the positions."""

    original_max_position_embeddings: int | None = Field(default=None, gt=0)
    """Positions the model was pretrained with. None: max_position_embeddings of its config.json."""

    attention_factor: float | None = Field(default=None, gt=0)
    """yarn: scale of the attention; None: computed from the factor."""

    beta_fast: float | None = Field(default=None, gt=0)
    """yarn: frequencies above this many rotations stay unchanged; None: 32."""

    beta_slow: float | None = Field(default=None, gt=0)
    """yarn: frequencies below this many rotations are divided by the factor; None: 1."""

    low_freq_factor: float | None = Field(default=None, gt=0)
    """Required by llama3; Llama 3.1 has 1."""

    high_freq_factor: float | None = Field(default=None, gt=0)
    """Required by llama3; Llama 3.1 has 4."""

    @model_validator(mode="after")
    def _keys_of_the_type(self) -> RopeScaling:
        own = {
            "yarn": ("attention_factor", "beta_fast", "beta_slow"),
            "llama3": ("low_freq_factor", "high_freq_factor"),
        }
        for kind, names in own.items():
            given = [name for name in names if getattr(self, name) is not None]
            if given and kind != self.rope_type:
                raise ValueError(f"{' and '.join(given)} is for rope_type={kind}, which is {self.rope_type}: remove it")
            if kind == self.rope_type == "llama3" and len(given) < len(names):
                raise ValueError("rope_type=llama3 needs low_freq_factor and high_freq_factor; Llama 3.1 has 1 and 4")
        return self


class Model(Section):
    """The model to train."""

    name_or_path: Annotated[str, _MODEL] = Field(min_length=1)
    """A local folder or a model id on the hub. `builtin:demo`: a tiny model that this project makes, offline."""

    revision: Annotated[str | None, _MODEL] = None
    """Branch, tag or commit on the hub."""

    trust_remote_code: Annotated[bool, _MODEL_CODE] = False
    """Run the Python code that the model ships. A hub model then needs its full commit hash as `revision`; docs/security.md."""

    attn_implementation: Annotated[
        Literal[
            "auto", "varlen", "varlen_fa3", "varlen_fa4", "sdpa", "eager", "flash_attention_2", "flash_attention_3"
        ],
        _ROUNDING,
    ] = "auto"
    """Attention function. `varlen`: attends within each packed document; needs nothing installed. `varlen_fa3`, `varlen_fa4`: the same,
    with the FlashAttention of that package. `auto`: flash-attn if it is installed
    and runs, else varlen, else sdpa with a mask over the whole pack; the plan gives the reason."""

    kernels: Annotated[Literal["auto", "liger", "none"], _ROUNDING] = "auto"
    """Liger's fused norms, rotary embedding and MLP. `auto`: on a GPU, if Liger has kernels for the model type; otherwise the
    plan gives the reason."""

    compile: Annotated[bool, _ROUNDING] = False
    """Apply torch.compile to each decoder layer, which delays the first steps. Not with Liger or ZeRO-3."""

    chat_template: Annotated[str | None, _MODEL] = None
    """A .jinja file, or the name of one of ours (`chatml`, `plain`). None: the tokenizer's own."""

    pad_token: Annotated[str | None, _MODEL] = None
    """Padding token, from the vocabulary or new_tokens, if the tokenizer has none. Never the end-of-turn token: if the tokenizer pads with
    that, None selects another special token."""

    eos_token: Annotated[str | None, _MODEL] = None
    """The token that ends a turn, from the vocabulary or new_tokens, if the tokenizer's own is wrong or missing."""

    new_tokens: Annotated[tuple[Annotated[str, Field(min_length=2)], ...], _MODEL] = ()
    """Special tokens to add, such as `<|im_start|>`. Their embeddings start as the mean of the others."""

    lora: Annotated[Lora | None, _MODEL] = None
    """Train adapters instead of all weights; `lora: {}` takes the defaults."""

    rope_scaling: Annotated[RopeScaling | None, _MODEL] = None
    """Extend the model's positions, for example `{rope_type: yarn, factor: 4.0}`; train on documents of the new length. Saved in
    final/config.json. None: the model's own."""

    freeze: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], _MODEL] = ()
    """Regular expressions searched in parameter names; matching parameters stay frozen, the others are trained:
    `["embed_tokens", "layers\\.[0-3]\\."]`. Each must match. Not with `lora`, which freezes the whole base."""

    quantization: Annotated[Literal["nf4", "fp4", "int8"] | None, _MODEL] = None
    """Keep the frozen base of `lora` in 4 bits (`nf4`, `fp4`) or 8 (`int8`): QLoRA, by bitsandbytes. Layers compute in train.precision.
    final/ is the adapters merged into the dequantized base."""

    bnb_4bit_use_double_quant: Annotated[bool, _MODEL] = True
    """Quantize the scales of `nf4` and `fp4` too: saves 0.4 bits per weight."""

    @field_validator("freeze")
    @classmethod
    def _is_regular(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        return regular(patterns)

    @model_validator(mode="after")
    def _quantized_weights_are_frozen(self) -> Model:
        if self.quantization is not None and self.lora is None:
            raise ValueError(
                f"quantization={self.quantization} without lora: quantized weights cannot be trained. Set model.lora={{}}, or "
                "model.quantization=null"
            )
        return self


class Tracking(Section):
    """Where to send the curves, besides metrics.jsonl."""

    report_to: tuple[Literal["wandb", "tensorboard", "mlflow", "trackio"], ...] = ()
    """Trackers. mlflow and trackio are installed by `pip install -e '.[trackers]'`; docs/metrics.md."""

    project: str = Field(default="sft", min_length=1)
    """Project in wandb and trackio, experiment in mlflow."""

    run_name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run and of its folder. None: the time it started."""


class Recipe(Section):
    """One YAML file: one run."""

    schema_version: Annotated[int, UNRELATED]
    """Format of the file."""

    version: Annotated[int, UNRELATED] = Field(ge=1)
    """Version of the recipe, raised with any change that could move a score."""

    model: Model
    data: Annotated[Data, _SAME_SEQUENCES]
    train: Train
    eval: Annotated[Evaluation, UNRELATED] = Evaluation()
    tracking: Annotated[Tracking, UNRELATED] = Tracking()

    output_dir: Annotated[str, UNRELATED] = Field(default="outputs", min_length=1)
    """Runs go to <output_dir>/<recipe>/<run>."""

    debug: Annotated[bool, UNRELATED] = False
    """Log and compare more on every rank, to find a hang or a rank that differs. Slower."""

    _folder: Path = PrivateAttr(default=Path())

    @property
    def folder(self) -> Path:
        """Where the recipe's file is, and paths of its Python begin."""
        return self._folder

    def placed(self, folder: Path) -> Recipe:
        """This recipe, as a file in a folder."""
        self._folder = folder
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recipe) and self.__dict__ == other.__dict__  # wherever their files are

    def __hash__(self) -> int:
        return hash(self.model_dump_json())

    @model_validator(mode="after")
    def _best_model_is_measured(self) -> Recipe:
        train, every = self.train, self.eval.every_steps
        if not train.load_best_model_at_end:
            return self
        metric = train.metric_for_best_model
        if metric == EVAL_LOSS:
            if self.data.held_out is None:
                raise ValueError(
                    "train.load_best_model_at_end compares the eval loss, and there is no eval split: set data.held_out, such as 0.02, or "
                    "train.metric_for_best_model to a metric of eval.every_steps"
                )
        elif every is None:
            raise ValueError(
                f"train.metric_for_best_model={metric} is measured during training, and eval.every_steps is not set: set it to a multiple "
                f"of train.save_steps={train.save_steps}, or the metric to eval_loss"
            )
        elif not train.saves_at(every):
            raise ValueError(
                f"train.load_best_model_at_end needs a checkpoint wherever {metric} is measured, and there is none every "
                f"eval.every_steps={every} steps: set it to a multiple of train.save_steps, with train.save_strategy=steps"
            )
        return self

    @property
    def sources(self) -> tuple[Source, ...]:
        """The datasets to train on, as a list whichever way they were written."""
        return (Source(path=self.data.train),) if isinstance(self.data.train, str) else self.data.train

    @property
    def held_out_sources(self) -> tuple[Source, ...]:
        """The datasets of the eval split; none where it is a fraction of the training data, or nothing."""
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
