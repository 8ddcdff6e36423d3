"""The section `train` of a recipe: the step, the optimizer, the engine, and what is written on the way."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue, field_validator, model_validator

from sft.recipe.max_time import parse_duration
from sft.recipe.section import Fraction, Positive, Section


class Fsdp(Section):
    """Share weights, gradients and optimizer state by FSDP2 (torch's fully_shard), instead of DeepSpeed."""

    sharding_strategy: Literal["full_shard", "shard_grad_op", "hybrid_shard"] = "full_shard"
    """`full_shard`: weights are gathered for each pass. `shard_grad_op`: they stay whole from the forward to the backward pass.
    `hybrid_shard`: shared within a machine, and whole on each."""

    min_num_params: int | None = Field(default=None, gt=0)
    """Wrap modules of at least as many parameters. None: each decoder layer."""

    prefetch: int | None = Field(default=None, gt=0)
    """Layers gathered ahead of the one that computes, in the forward and the backward pass. None: FSDP2's own order, about one.
    More hides slower networks, and each takes the memory of a layer."""

    offload_params: bool = False
    """Keep weights, gradients and optimizer state in the CPU's memory; the optimizer steps there."""

    state_dict_type: Literal["full", "sharded"] = "sharded"
    """Checkpoints: one file of everything, or each rank its share. final/ is always whole."""


class Train(Section):
    """How long and how hard to train."""

    global_batch_size: int | None = Field(default=None, gt=0)
    """Sequences per optimizer step, over all GPUs; with packing a sequence is a pack. Decides the result."""

    global_batch_tokens: int | None = Field(default=None, gt=0)
    """The same in tokens: a multiple of data.pack_length, or of data.max_length where there is none. Give one of the two."""

    micro_batch_size: Positive | Literal["auto"] = "auto"
    """Sequences per forward pass on one GPU. Decides memory and speed only. `auto`: measured on a GPU; docs/memory.md."""

    remainder: Literal["refuse", "fill"] = "refuse"
    """A batch that the processes cannot share evenly: refuse it with sizes that work, or fill each step up with sequences that train
    nothing, so that the result is that of any other number of processes."""

    learning_rate: float = Field(default=1e-5, gt=0, le=1)
    """Peak learning rate of AdamW, at base_batch_size where that is given."""

    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """What another batch than base_batch_size does to learning_rate: nothing, x batch / base, or x the root of that."""

    base_batch_size: int | None = Field(default=None, gt=0)
    """The batch that learning_rate was found with, in the unit of the batch: sequences, or tokens with global_batch_tokens."""

    lr_scheduler_type: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape after the warm-up."""

    min_lr_ratio: Fraction = 0.0
    """Where cosine ends, as a fraction of learning_rate."""

    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps from 0 to learning_rate."""

    num_train_epochs: float = Field(default=1.0, gt=0)
    """Passes over the data. max_steps, where given, decides instead."""

    max_steps: int | None = Field(default=None, gt=0)
    """Optimizer steps."""

    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's, on all weights but biases and norms."""

    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""

    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the second moment."""

    adam_epsilon: float = Field(default=1e-8, gt=0, le=0.01)
    """Added to the denominator."""

    max_grad_norm: float = Field(default=1.0, ge=0)
    """Gradients are scaled down to this norm; 0 for never."""

    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Number format of the forward and backward pass. `auto`: bf16 where the GPU has it, else fp32."""

    gradient_checkpointing: bool | Literal["auto", "selective", "offload"] | Annotated[int, Field(ge=2)] = "auto"
    """Recompute activations in the backward pass: less memory, about a third more compute. A number n: in every n-th layer only.
    `selective`: all but attention. `offload`: keep what the layers start from in the machine's memory. `auto`: measured on a GPU, off
    on a CPU; docs/memory.md."""

    deepspeed: str | None = None
    """A file under ds_configs/ (`zero2`, `ds_configs/zero2.json`) or of your own. None: what parallel or fsdp say, else DDP."""

    fsdp: Fsdp | None = None
    """Set to share the model by FSDP2; `fsdp: {}` takes the defaults."""

    parallel: Literal["auto"] | None = None
    """`auto`: the cheapest engine that fits, by arithmetic over the memory; docs/memory.md. None: what deepspeed or fsdp name, else DDP."""

    tensor_parallel_size: int = Field(default=1, gt=0)
    """GPUs that share the matrices of each layer; they see the same batch."""

    sequence_parallel_size: int = Field(default=1, gt=0)
    """GPUs that share the tokens of each sequence (DeepSpeed Ulysses); they see the same batch."""

    ddp_timeout: int = Field(default=600, gt=0)
    """Seconds after which a rank stops waiting for the others."""

    seed: int = Field(default=0, ge=0, lt=2**32)
    """Of the order of the data, dropout and adapter weights."""

    save_steps: int = Field(default=500, gt=0)
    """Optimizer steps between checkpoints."""

    save_total_limit: int = Field(default=2, gt=0)
    """Checkpoints kept."""

    eval_steps: int | None = Field(default=None, gt=0)
    """Optimizer steps between measurements of the loss on data.held_out. None: at each checkpoint."""

    logging_steps: int = Field(default=10, gt=0)
    """Optimizer steps between lines of metrics.jsonl."""

    profile: bool = False
    """Trace a few steady steps, and on a GPU record the memory of one, to <run>/profile/. The profiled steps are slower."""

    resume: Literal["auto", "must", "never"] = "auto"
    """`auto`: go on with the latest run of this recipe where it is unfinished, from its newest checkpoint if it has one."""

    resume_allow_changes: tuple[str, ...] = ()
    """Keys of the recipe, such as `train.max_steps`, that may differ from those that the unfinished run was started with."""

    max_time: str | None = None
    """Time from the start of the command, such as `23h30m`, within which to save and stop; the same command goes on. None: no limit."""

    on_nonfinite: Literal["stop", "skip"] = "stop"
    """A loss or gradient that is NaN or infinite: stop before the step, or skip it."""

    max_nonfinite_steps: int = Field(default=10, gt=0)
    """Steps skipped over the whole run before it stops."""

    save_canary: bool = True
    """After the first step save as at the end, load that in another process, and compare tensors and logits: a save that loses weights
    stops the run in its first minute. final/ is checked alike; docs/saving.md."""

    trainer_args: dict[str, JsonValue] = Field(default_factory=dict)
    """Any other field of the installed trl.SFTConfig, checked against it; what the plan decides is refused."""

    @field_validator("on_nonfinite", mode="before")
    @classmethod
    def _without_rewind(cls, value: object) -> object:
        if value == "rewind":
            raise ValueError(
                "rewind was removed: use skip to train on without the step, or stop to look at its samples first"
            )
        return value

    @field_validator("max_time", mode="before")
    @classmethod
    def _a_unit(cls, value: object) -> object:
        if isinstance(value, int | float) and not isinstance(value, bool):
            raise ValueError(f"{value} has no unit: write such as {value:g}m for minutes, or {value:g}s for seconds")
        return value

    @model_validator(mode="after")
    def _a_time(self) -> Train:
        if self.max_time is not None:
            parse_duration(self.max_time)
        return self

    @model_validator(mode="after")
    def _one_batch(self) -> Train:
        if (self.global_batch_size is None) == (self.global_batch_tokens is None):
            raise ValueError(
                "give one of global_batch_size (sequences per optimizer step) and global_batch_tokens (tokens), "
                f"got {self.global_batch_size} and {self.global_batch_tokens}"
            )
        return self

    @model_validator(mode="after")
    def _a_base_to_scale_by(self) -> Train:
        if self.lr_scaling != "none" and self.base_batch_size is None:
            raise ValueError(
                f"lr_scaling={self.lr_scaling} needs base_batch_size, the batch that learning_rate was found with: give it, or "
                "lr_scaling: none"
            )
        if self.lr_scaling == "none" and self.base_batch_size is not None:
            raise ValueError(
                f"base_batch_size={self.base_batch_size} does nothing while lr_scaling is none: leave it out, or set lr_scaling to linear "
                "or sqrt"
            )
        return self

    @model_validator(mode="after")
    def _one_engine(self) -> Train:
        if self.deepspeed == "auto":
            raise ValueError(
                "deepspeed=auto is now written another way: leave deepspeed out, and write train.parallel: auto"
            )
        engines = {"parallel": self.parallel, "deepspeed": self.deepspeed, "fsdp": self.fsdp}
        given = [name for name, value in engines.items() if value is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} each name the engine: give one of them")
        if self.tensor_parallel_size > 1 and self.deepspeed is not None:
            raise ValueError(
                f"tensor_parallel_size={self.tensor_parallel_size} does not work with deepspeed={self.deepspeed}: leave one of them out"
            )
        if self.sequence_parallel_size > 1 and self.deepspeed is None and self.parallel is None:
            raise ValueError(
                f"sequence_parallel_size={self.sequence_parallel_size} is DeepSpeed's, with ZeRO-2 or ZeRO-3: set deepspeed to zero2 or "
                "zero3, or parallel to auto"
            )
        return self
