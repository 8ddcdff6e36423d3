"""The recipe: what a YAML file may say and what each key means. sft/recipe_file.py reads it.

Imports no torch: a recipe loads in well under a second.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

SCHEMA_VERSION = 1
"""The format of a recipe file that this program reads."""

REPOSITORY = Path(__file__).resolve().parent.parent

Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Column = Literal[
    "messages",
    "conversations",
    "prompt",
    "completion",
    "instruction",
    "input",
    "output",
    "response",
    "history",
    "system",
    "tools",
    "text",
    "input_ids",
    "labels",
    "chat_template_kwargs",
]
"""What rows are read by."""

Finding = Literal["role_order", "empty_turn", "last_turn", "special_tokens", "end_token", "undecodable", "placeholder"]


class Section(BaseModel):
    """A closed, frozen group of keys: an unknown key is an error, and nothing changes after loading."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Lora(Section):
    """Train low-rank adapters instead of all weights (peft.LoraConfig)."""

    r: int = Field(default=16, gt=0)
    """Rank of the adapters."""

    lora_alpha: int = Field(default=32, gt=0)
    """Scale: the adapter's output is multiplied by lora_alpha / r."""

    lora_dropout: Fraction = 0.0
    """Dropout on the adapter's input."""

    target_modules: str | tuple[str, ...] = "all-linear"
    """Names of the linear layers that get an adapter; `all-linear` is every one but the output head."""


class Model(Section):
    """What is trained."""

    name_or_path: str = Field(min_length=1)
    """A local folder, an id on the hub, or `builtin:demo` (made by this project, no network)."""

    revision: str | None = None
    """Branch, tag or commit on the hub."""

    trust_remote_code: bool = False
    """Run Python code that the model's repository ships."""

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
    """A token of the vocabulary, or of new_tokens, for padding where the tokenizer has none. Never the end-of-turn token."""

    eos_token: str | None = None
    """A token of the vocabulary, or of new_tokens, that ends a turn, where the tokenizer's own is wrong or missing."""

    new_tokens: tuple[Annotated[str, Field(min_length=2)], ...] = ()
    """Special tokens to add, such as `<|im_start|>`; their embeddings start as the mean of the others."""

    lora: Lora | None = None
    """Set to train adapters; `lora: {}` takes the defaults."""


class Source(Section):
    """One dataset of a list."""

    path: str = Field(min_length=1)
    """A local .json, .jsonl, .csv, .parquet or .arrow file (text also .gz or .zst), a folder of them or one that `save_to_disk`
    wrote, a pattern such as `chats/*.jsonl`, an id on the hub, or `builtin:demo`."""

    name: str | None = None
    """Configuration of a hub dataset."""

    split: str = "train"
    """Split of a hub dataset or of a `save_to_disk` folder; slices such as `train[:1000]` work on files too."""

    revision: str | None = None
    """Branch, tag or commit on the hub."""

    streaming: bool = False
    """Read a hub dataset from the network instead of downloading it first."""

    format: Literal["messages", "sharegpt", "prompt_completion", "alpaca", "text", "tokens"] | None = None
    """What the rows are. None: found out from their columns, and said."""

    columns: dict[Column, str] = Field(default_factory=dict)
    """Columns under another name: ours to theirs, such as {instruction: question, output: answer}."""

    chat: bool = True
    """Put prompt and completion given as text through the chat template. False: as they stand, ended by the EOS token."""

    weight: float | None = Field(default=None, gt=0)
    """Share of this source in the rows of the mixture, relative to the others' weights; as many rows as the scarcest allows."""

    rows: int | None = Field(default=None, gt=0)
    """Take this many rows, drawn by data.seed."""

    epochs: float = Field(default=1.0, gt=0)
    """Times each row is seen in one pass over the mixture; 0.5 draws half of them."""


class Data(Section):
    """What it is trained on."""

    train: Annotated[str, Field(min_length=1)] | Annotated[tuple[Source, ...], Field(min_length=1)]
    """One path or hub id, or a list of sources."""

    held_out: (
        Annotated[float, Field(gt=0, lt=1)]
        | Annotated[str, Field(min_length=1)]
        | Annotated[tuple[Source, ...], Field(min_length=1)]
        | None
    ) = None
    """Rows that are never trained and whose loss is measured: a fraction of `train`, or other sources."""

    max_length: int = Field(default=2048, gt=1)
    """Tokens of the longest document."""

    packing: bool = True
    """Put several documents into one sequence, a pack; they do not see each other."""

    pack_length: int | None = Field(default=None, gt=1)
    """Tokens of a pack, at least max_length. None: max_length. A larger pack holds more documents and leaves less space free."""

    loss_on: Literal["auto", "assistant", "completion", "last_assistant", "all"] = "auto"
    """Tokens that are trained, each answer with its end-of-turn token. `auto`: every turn of the assistant; of rows with a
    prompt, the completion. Plain text is trained whole, and tokens as they are labelled, whatever is set here."""

    reasoning: Literal["keep", "drop"] = "keep"
    """Thoughts of the assistant (`reasoning_content`, `<think>` blocks): trained as part of the turn, or left out."""

    special_tokens: Literal["escape", "keep"] = "escape"
    """Strings in a row that spell a special token: `escape` has them read as plain text, and cut off where an answer ends
    with one; `keep` lets them become control tokens."""

    overlong: Literal["drop", "truncate", "split", "error"] = "drop"
    """What happens to a document longer than max_length. Counted in the ledger."""

    max_overlong_fraction: Fraction = 0.05
    """More rows than this dropped for their length stop the run."""

    on_bad_row: Literal["error", "drop"] = "error"
    """A row that cannot be read or rendered: stop with its number, or drop and count it."""

    refuse: tuple[Finding, ...] = ()
    """Findings that make a row a bad one too; otherwise they are notes."""

    max_dropped_fraction: Fraction = 0.1
    """More rows than this dropped for other reasons (bad rows, no answer) stop the run; duplicates do not count."""

    min_trained_fraction: Fraction = 0.0
    """Fewer trained tokens than this fraction of all used tokens stop the run."""

    deduplicate: bool = False
    """Train on the first of identical rows only."""

    seed: int = Field(default=0, ge=0)
    """Of what is drawn: the mixture, the held-out rows, the places in packs."""

    @model_validator(mode="after")
    def _weights_of_all_or_none(self) -> Data:
        sources = self.train if isinstance(self.train, tuple) else ()
        weighted = [source.weight is not None for source in sources]
        if any(weighted) and not all(weighted):
            raise ValueError("give `weight` to all sources of `train`, or to none")
        if isinstance(self.held_out, str) and re.fullmatch(r"[\d.,]+ *%?", self.held_out):
            raise ValueError(
                f"held_out={self.held_out} is neither a fraction nor a path; five per cent are written 0.05"
            )
        held_out = self.held_out if isinstance(self.held_out, tuple) else ()
        if any(source.weight or source.rows or source.epochs != 1 for source in held_out):
            raise ValueError("held_out sources are taken whole: weight, rows and epochs are for `train`")
        if any(source.weight is not None and source.rows is not None for source in sources):
            raise ValueError("`rows` and `weight` of a source both say how much is taken: give one")
        return self

    @model_validator(mode="after")
    def _packs_that_hold_any_document(self) -> Data:
        if self.pack_length is not None and not self.packing:
            raise ValueError(
                f"pack_length={self.pack_length} is the length of a pack, and packing is false: leave one of them out"
            )
        if self.pack_length is not None and self.pack_length < self.max_length:
            raise ValueError(
                f"pack_length={self.pack_length} is less than max_length={self.max_length}, so that a document may fit in no pack: "
                f"raise pack_length to {self.max_length} or more, or lower max_length"
            )
        return self


class Fsdp(Section):
    """Share weights, gradients and optimizer state by FSDP2 (torch's fully_shard), instead of DeepSpeed."""

    sharding_strategy: Literal["full_shard", "shard_grad_op", "hybrid_shard"] = "full_shard"
    """`full_shard`: weights are gathered for each pass. `shard_grad_op`: they stay whole from the forward to the backward pass.
    `hybrid_shard`: shared within a machine, and whole on each."""

    min_num_params: int | None = Field(default=None, gt=0)
    """Wrap modules of at least as many parameters. None: each decoder layer."""

    prefetch: int = Field(default=1, ge=0)
    """Layers gathered ahead of the one that computes."""

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

    learning_rate: float = Field(default=1e-5, gt=0)
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

    adam_beta1: Fraction = 0.9
    """Decay of the first moment."""

    adam_beta2: Fraction = 0.95
    """Decay of the second moment."""

    adam_epsilon: float = Field(default=1e-8, gt=0)
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
    """A file under ds_configs/ (`zero2`, `ds_configs/zero2.json`) or of your own. `auto`: the cheapest that fits, none in one
    process. None: DDP."""

    fsdp: Fsdp | None = None
    """Set to share the model by FSDP2; `fsdp: {}` takes the defaults."""

    parallel: Literal["auto"] | None = None
    """`auto`: the cheapest engine that fits, by arithmetic over the memory. None: what deepspeed or fsdp name, else DDP."""

    tensor_parallel_size: int = Field(default=1, gt=0)
    """GPUs that share the matrices of each layer; they see the same batch."""

    sequence_parallel_size: int = Field(default=1, gt=0)
    """GPUs that share the tokens of each sequence (DeepSpeed Ulysses); they see the same batch."""

    ddp_timeout: int = Field(default=600, gt=0)
    """Seconds after which a rank stops waiting for the others."""

    seed: int = Field(default=0, ge=0)
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

    trainer_args: dict[str, JsonValue] = Field(default_factory=dict)
    """Any other field of the installed trl.SFTConfig, checked against it; what the plan decides is refused."""

    @model_validator(mode="after")
    def _one_batch(self) -> Train:
        if (self.global_batch_size is None) == (self.global_batch_tokens is None):
            raise ValueError(
                "give one of global_batch_size (sequences per optimizer step) and global_batch_tokens (tokens), "
                f"got {self.global_batch_size} and {self.global_batch_tokens}"
            )
        return self


class Evaluation(Section):
    """What lm-evaluation-harness measures, on the base and on the tuned model alike."""

    tasks: tuple[str, ...] = ()
    """Names of lm_eval tasks or groups, and paths of task files. `builtin:demo` is the demo's task."""

    suite: Literal["leaderboard"] | None = None
    """A named set of tasks, besides `tasks`."""

    include_path: str | None = None
    """A folder of task files that `tasks` may name."""

    limit: int | None = Field(default=None, gt=0)
    """Documents per task; None for all."""

    num_fewshot: int | None = Field(default=None, ge=0)
    """Examples in the prompt; None for each task's own number."""

    batch_size: Positive | Literal["auto"] = "auto"
    """Documents per forward pass. `auto`: lm_eval's search on a GPU, 32 on a CPU."""

    parallelize: bool | Literal["auto"] = "auto"
    """Spread the layers over all visible GPUs, which compute one after another. `auto`: where the weights do not fit on one."""

    max_gen_toks: int | None = Field(default=None, gt=0)
    """Longest answer in tokens; None for each task's own, or 1,024 where it has none."""

    apply_chat_template: bool = True
    """Ask through the tuned model's chat template."""

    system_instruction: str | None = None
    """System prompt."""

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Number format of the weights. `auto`: the one that the tuned model was saved in, for both models."""

    seed: int = Field(default=0, ge=0)
    """Of few-shot sampling."""

    confirm_run_unsafe_code: bool = False
    """Allow tasks that run the code a model wrote, on this machine."""


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

    output_dir: str = "outputs"
    """Runs go to <output_dir>/<recipe>/<run>."""

    debug: bool = False
    """Log and compare more, on every rank, to find a hang or a rank that differs. Slower."""

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
