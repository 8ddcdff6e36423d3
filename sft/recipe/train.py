"""Defines the section `train` of a recipe: the step, the optimizer, the engine, and what is written on the way."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, JsonValue, field_validator, model_validator

from sft.recipe.data import Function
from sft.recipe.optimization import Optimization
from sft.recipe.section import FREE, UNRELATED, Positive, Section, fixed, named

_ORDER = fixed("it decides which rows a step holds: some would be trained twice and others never")
_UNKNOWN = fixed("for a trainer argument it is unknown whether a change would take effect")
_SCHEDULE = named("the new schedule applies from the step that was reached")
_PEAK = named("the schedule has the new peak from here on")
_NORM = named("gradients are clipped to the new norm from here on")
_CALLBACKS = named("the callbacks run from here on, and others no longer do")
_BEST = named("the measurements so far are judged by the new value")
_NOISE = named("the new noise is added from here on")
_SMOOTHING = named("labels are smoothed by the new factor from here on")
_PRECISION = named("the new dtype from here on; AdamW's fp32 state carries over; never to or from fp16")


EVAL_LOSS = "eval_loss"
_OF_BEST = "metric_for_best_model greater_is_better early_stopping_patience early_stopping_threshold".split()


class Fsdp(Section):
    """Shard weights, gradients and optimizer state with FSDP2 (torch's fully_shard) instead of DeepSpeed."""

    sharding_strategy: Literal["full_shard", "shard_grad_op", "hybrid_shard"] = "full_shard"
    """`full_shard`: gather weights for each pass. `shard_grad_op`: keep them gathered from the forward to the backward pass.
    `hybrid_shard`: shard within a node and replicate across nodes."""

    min_num_params: int | None = Field(default=None, gt=0)
    """Wrap modules with at least this many parameters. None: wrap each decoder layer."""

    prefetch: int | None = Field(default=None, gt=0)
    """Layers to gather ahead of the current one, in both passes. None: FSDP2's own order, about one. Each further layer hides more of a
    slow network and costs the memory of a layer."""

    offload_params: bool = False
    """Keep weights, gradients and optimizer state in CPU memory, and run the optimizer there."""

    state_dict_type: Literal["full", "sharded"] = "sharded"
    """Checkpoint format: one file with everything, or one shard per rank. final/ is always a full model."""


class Callback(Section):
    """One of transformers' callbacks, from a file of your own."""

    path: Function
    """`file.py:Class`, the file relative to the recipe's folder."""

    arguments: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of the class."""


class Train(Optimization):
    """How long and how hard to train."""

    global_batch_size: Annotated[int | None, _ORDER] = Field(default=None, gt=0)
    """Sequences per optimizer step, over all GPUs; with packing, a sequence is a pack. Decides the result."""

    global_batch_tokens: Annotated[int | None, _ORDER] = Field(default=None, gt=0)
    """The global batch in tokens: a multiple of data.pack_length, or of data.max_length if that is unset. Set this or global_batch_size."""

    micro_batch_size: Annotated[Positive | Literal["auto"], FREE] = "auto"
    """Sequences per forward pass on one GPU. Decides memory and speed only. `auto`: measured on a GPU; docs/memory.md."""

    remainder: Annotated[Literal["refuse", "fill"], FREE] = "refuse"
    """What to do with a global batch that the GPUs cannot divide evenly. `refuse`: an error that lists sizes that work. `fill`: add dummy
    sequences without loss to each step, so that the result stays the same."""

    learning_rate: Annotated[float, _PEAK] = Field(default=1e-5, gt=0, le=1)
    """Peak learning rate, at base_batch_size if that is set."""

    lr_scaling: Annotated[Literal["none", "linear", "sqrt"], _PEAK] = "none"
    """Multiply learning_rate by batch / base_batch_size (`linear`) or its square root (`sqrt`)."""

    base_batch_size: Annotated[int | None, _PEAK] = Field(default=None, gt=0)
    """The batch size you tuned learning_rate for, in the unit of the batch: sequences, or tokens with global_batch_tokens."""

    num_train_epochs: Annotated[float, _SCHEDULE] = Field(default=1.0, gt=0)
    """Passes over the data. max_steps, if set, overrides it."""

    max_steps: Annotated[int | None, _SCHEDULE] = Field(default=None, gt=0)
    """Optimizer steps to train."""

    max_grad_norm: Annotated[float, _NORM] = Field(default=1.0, ge=0)
    """Clip the gradient to this norm; 0 never clips."""

    neftune_noise_alpha: Annotated[float | None, _NOISE] = Field(default=None, gt=0)
    """NEFTune: in training, add uniform noise within +-alpha / sqrt(document length x hidden size) to the embeddings. 5 to 15 are usual."""

    label_smoothing_factor: Annotated[float, _SMOOTHING] = Field(default=0.0, ge=0, lt=1)
    """Spread this fraction of the loss evenly over the vocabulary. Needs all logits. The eval loss is not smoothed."""

    precision: Annotated[Literal["auto", "bf16", "fp16", "fp32"], _PRECISION] = "auto"
    """Dtype of the forward and backward pass. `auto`: bf16 where the GPU supports it, fp16 on other GPUs, fp32 on a CPU."""

    gradient_checkpointing: Annotated[
        bool | Literal["auto", "selective", "offload"] | Annotated[int, Field(ge=2)], FREE
    ] = "auto"
    """Recompute activations in the backward pass: less memory, about a third more compute. A number n: only every n-th layer.
    `selective`: all but attention. `offload`: keep each layer's input in CPU memory. `auto`: measured on a GPU, off on a CPU;
    docs/memory.md."""

    deepspeed: Annotated[str | None, FREE] = None
    """A DeepSpeed file: one of ds_configs/ (`zero2`, `ds_configs/zero2.json`) or your own. None: `parallel` or `fsdp` decides, else DDP."""

    fsdp: Annotated[Fsdp | None, FREE] = None
    """Shard the model with FSDP2; `fsdp: {}` takes the defaults."""

    parallel: Annotated[Literal["auto"] | None, FREE] = None
    """`auto`: the cheapest engine that fits in memory, by arithmetic; docs/memory.md. None: deepspeed or fsdp, else DDP."""

    tensor_parallel_size: Annotated[int, FREE] = Field(default=1, gt=0)
    """GPUs that share the matrices of each layer. They see the same batch."""

    sequence_parallel_size: Annotated[int, FREE] = Field(default=1, gt=0)
    """GPUs that share the tokens of each sequence (DeepSpeed Ulysses). They see the same batch."""

    pipeline_parallel_size: Annotated[int, FREE] = Field(default=1, gt=0)
    """Stages that the layers are split into, each on GPUs of its own; micro-batches pass through them. docs/pipeline.md."""

    ddp_timeout: Annotated[int, FREE] = Field(default=600, gt=0)
    """Seconds after which a rank stops waiting for the others."""

    seed: Annotated[int, _ORDER] = Field(default=0, ge=0, lt=2**32)
    """Seed of the data order, dropout and adapter weights."""

    save_steps: Annotated[int, UNRELATED] = Field(default=500, gt=0)
    """Optimizer steps between checkpoints."""

    save_strategy: Annotated[
        Literal["steps", "epoch", "no"], BeforeValidator(lambda value: "no" if value is False else value), UNRELATED
    ] = "steps"  # YAML reads a plain `no` as false
    """`steps`: a checkpoint every save_steps. `epoch`: at the end of each epoch. `no`: only when the run is interrupted."""

    save_total_limit: Annotated[int, UNRELATED] = Field(default=2, gt=0)
    """Number of checkpoints to keep."""

    load_best_model_at_end: Annotated[bool, _BEST] = False
    """Make final/ the best checkpoint by metric_for_best_model instead of the last step. It does not count in save_total_limit."""

    metric_for_best_model: Annotated[str, _BEST] = EVAL_LOSS
    """`eval_loss`, the loss on data.held_out; or a metric of eval.every_steps, as `task/metric`."""

    greater_is_better: Annotated[bool | None, _BEST] = None
    """Whether a larger value of the metric is better. None: false for a loss or perplexity, else true."""

    early_stopping_patience: Annotated[int | None, _BEST] = Field(default=None, gt=0)
    """Stop after this many measurements in a row without a better one. None: train all steps."""

    early_stopping_threshold: Annotated[float, _BEST] = Field(default=0.0, ge=0)
    """How much better a measurement must be to count, in the metric's unit."""

    eval_steps: Annotated[int | None, UNRELATED] = Field(default=None, gt=0)
    """Optimizer steps between evaluations of the loss on data.held_out. None: at each checkpoint."""

    logging_steps: Annotated[int, UNRELATED] = Field(default=10, gt=0)
    """Optimizer steps between lines of metrics.jsonl."""

    profile: Annotated[bool, UNRELATED] = False
    """Trace a few steps, and on a GPU the memory of one, to <run>/profile/. Those steps are slower."""

    resume: Annotated[Literal["auto", "must", "never"], UNRELATED] = "auto"
    """`auto`: resume the latest run of this recipe if it is unfinished, from its newest checkpoint. `must`: fail if there is nothing to
    resume. `never`: start a new run."""

    resume_allow_changes: Annotated[tuple[str, ...], UNRELATED] = ()
    """Keys of the recipe, such as `train.max_steps`, that may differ from those the unfinished run started with; docs/resume.md."""

    max_time: Annotated[str | None, UNRELATED] = None
    """Save and stop before this much time has passed since the command started, such as `23h30m`. The same command resumes. None: no
    limit."""

    on_nonfinite: Annotated[Literal["stop", "skip"], FREE] = "stop"
    """When a loss or gradient is NaN or infinite: stop before the step, or skip it."""

    max_nonfinite_steps: Annotated[int, FREE] = Field(default=10, gt=0)
    """Steps that may be skipped in the whole run before it stops."""

    save_canary: Annotated[bool, UNRELATED] = True
    """Verify saves: after step 1, save the model as at the end and compare it with the model in memory, so that a save that loses weights
    stops the run early. final/ is verified the same way; docs/checkpoints.md."""

    trainer_args: Annotated[dict[str, JsonValue], _UNKNOWN] = Field(default_factory=dict)
    """Any other field of the installed trl.SFTConfig, validated against it. Fields that the plan decides are refused."""

    @field_validator("max_time")
    @classmethod
    def _is_a_duration(cls, value: str | None) -> str | None:
        if value is not None:
            parse_duration(value)
        return value

    callbacks: Annotated[tuple[Function | Callback, ...], _CALLBACKS] = ()
    """Your own transformers TrainerCallbacks, as `file.py:Class`, or with `arguments`; they run on each rank; docs/own-python.md."""

    @model_validator(mode="after")
    def _one_batch(self) -> Train:
        batch, tokens, base = self.global_batch_size, self.global_batch_tokens, self.base_batch_size
        if (batch is None) == (tokens is None):
            raise ValueError(
                "give one of global_batch_size (sequences per optimizer step) and global_batch_tokens (tokens), "
                f"got {batch} and {tokens}"
            )
        if self.lr_scaling != "none" and base is None:
            raise ValueError(f"lr_scaling={self.lr_scaling} needs base_batch_size: set it, or set lr_scaling to none")
        if self.lr_scaling == "none" and base is not None:
            raise ValueError(
                f"base_batch_size={base} has no effect while lr_scaling is none: remove it, or set lr_scaling to linear or sqrt"
            )
        return self

    @model_validator(mode="after")
    def _best_is_measured_at_checkpoints(self) -> Train:
        if not self.load_best_model_at_end:
            for name in _OF_BEST:
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(
                        f"{name} has no effect without load_best_model_at_end: set that to true, or remove {name}"
                    )
            return self
        if self.save_strategy == "no":
            raise ValueError(
                "load_best_model_at_end chooses among the checkpoints, and save_strategy=no writes none: set steps or epoch"
            )
        if self.early_stopping_threshold and self.early_stopping_patience is None:
            raise ValueError(
                "early_stopping_threshold has no effect without early_stopping_patience: set both, or none"
            )
        if (
            self.metric_for_best_model == EVAL_LOSS
            and self.eval_steps is not None
            and not self.saves_at(self.eval_steps)
        ):
            raise ValueError(
                "load_best_model_at_end needs a checkpoint wherever the eval loss is measured, and there is none every "
                f"eval_steps={self.eval_steps} steps: remove eval_steps, which then measures at each checkpoint"
            )
        return self

    def saves_at(self, every: int) -> bool:
        """Whether there is a checkpoint at each multiple of a number of steps."""
        return self.save_strategy == "steps" and every % self.save_steps == 0

    @property
    def larger_is_better(self) -> bool:
        """Whether a larger value of metric_for_best_model is the better one."""
        if self.greater_is_better is not None:
            return self.greater_is_better
        return not re.search(r"loss|perplexity|bits_per_byte|ppl", self.metric_for_best_model)

    @model_validator(mode="after")
    def _one_engine(self) -> Train:
        engines = {"parallel": self.parallel, "deepspeed": self.deepspeed, "fsdp": self.fsdp}
        given = [name for name, value in engines.items() if value is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} each name the engine: give one of them")
        sizes = {name: getattr(self, name) for name in ("tensor_parallel_size", "sequence_parallel_size")}
        others = [*given, *(f"{name}={size}" for name, size in sizes.items() if size > 1)]
        if self.pipeline_parallel_size > 1 and others:
            raise ValueError(
                f"pipeline_parallel_size={self.pipeline_parallel_size} does not work with {' and '.join(others)}: remove one of them. The "
                "GPUs of a stage share its batches as DDP does"
            )
        return self


def parse_duration(text: str) -> int:
    """The seconds of a duration in days, hours, minutes and seconds.

    Raises:
        ValueError: It is no duration, or zero.

    >>> parse_duration("23h30m")
    84600
    """
    match = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text)
    days, hours, minutes, seconds = (int(number or 0) for number in match.groups()) if match else (0, 0, 0, 0)
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if not total:
        raise ValueError(f"{text!r} is no duration: write days, hours, minutes and seconds, such as 23h30m")
    return total
