"""The recipe: what a YAML file may say, what each key means, and how mistakes in it are told.

    recipe = load_recipe(Path("recipes/tiny.yaml"), ["train.learning_rate=1e-5"])

Imports no torch: a recipe loads in well under a second.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from sft.errors import RecipeError, did_you_mean

SCHEMA_VERSION = 1
"""The format of a recipe file that this program reads."""

REPOSITORY = Path(__file__).resolve().parent.parent

Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


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

    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "auto"
    """Attention function. `auto`: flash-attn where it is installed and the GPU has it, else sdpa."""

    kernels: Literal["liger", "none"] = "liger"
    """Liger's fused RMSNorm, RoPE and SwiGLU layers; on a GPU only."""

    chat_template: str | None = None
    """A .jinja file, or the name of one of ours (`chatml`, `plain`). None: the tokenizer's own."""

    pad_token: str | None = None
    """A token of the vocabulary for padding, where the tokenizer has none. Never the end-of-turn token."""

    eos_token: str | None = None
    """A token of the vocabulary that ends a turn, where the tokenizer's own is wrong or missing."""

    lora: Lora | None = None
    """Set to train adapters; `lora: {}` takes the defaults."""


class Source(Section):
    """One dataset of a list."""

    path: str = Field(min_length=1)
    """A local .json, .jsonl, .parquet or .arrow file, a folder of them, an id on the hub, or `builtin:demo`."""

    name: str | None = None
    """Configuration of a hub dataset."""

    split: str = "train"
    """Split of a hub dataset or folder; slices such as `train[:1000]` work."""

    revision: str | None = None
    """Branch, tag or commit on the hub."""


class Data(Section):
    """What it is trained on."""

    train: Annotated[str, Field(min_length=1)] | Annotated[tuple[Source, ...], Field(min_length=1)]
    """One path or hub id, or a list of sources."""

    max_length: int = Field(default=2048, gt=1)
    """Tokens: the longest document, and with packing the length of a pack."""

    packing: bool = True
    """Put several documents into one sequence of max_length tokens; they do not see each other."""

    loss_on: Literal["assistant", "all"] = "assistant"
    """Tokens that are trained: the assistant's turns with their end-of-turn token, or every token."""

    overlong: Literal["drop", "truncate", "error"] = "drop"
    """What happens to a document longer than max_length. Counted in the ledger."""

    num_proc: int | None = Field(default=None, gt=0)
    """Processes that tokenize. None: one for every 20,000 rows, at most the number of cores."""


class Train(Section):
    """How long and how hard to train."""

    global_batch_size: int | None = Field(default=None, gt=0)
    """Sequences per optimizer step, over all GPUs; with packing a sequence is a pack. Decides the result."""

    global_batch_tokens: int | None = Field(default=None, gt=0)
    """The same in tokens: a multiple of data.max_length. Give one of the two."""

    micro_batch_size: Positive | Literal["auto"] = "auto"
    """Sequences per forward pass on one GPU. Decides memory and speed only."""

    learning_rate: float = Field(default=1e-5, gt=0)
    """Peak learning rate of AdamW."""

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

    gradient_checkpointing: bool | Literal["auto"] = "auto"
    """Recompute activations in the backward pass: less memory, about a third more compute. `auto`: on a GPU only."""

    deepspeed: str | None = None
    """A file under ds_configs/ (`zero2`, `ds_configs/zero2.json`) or of your own. None: DDP."""

    seed: int = Field(default=0, ge=0)
    """Of the order of the data, dropout and adapter weights."""

    save_steps: int = Field(default=500, gt=0)
    """Optimizer steps between checkpoints."""

    save_total_limit: int = Field(default=2, gt=0)
    """Checkpoints kept."""

    logging_steps: int = Field(default=10, gt=0)
    """Optimizer steps between lines of metrics.jsonl."""

    resume: Literal["auto", "must", "never"] = "auto"
    """`auto`: go on with the latest run of this recipe where it is unfinished and has a checkpoint."""

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

    @property
    def sources(self) -> tuple[Source, ...]:
        """The datasets, as a list whichever way they were written."""
        return (Source(path=self.data.train),) if isinstance(self.data.train, str) else self.data.train

    @property
    def sequences_per_step(self) -> int:
        """Sequences per optimizer step. `resolve_plan` has checked that the tokens divide."""
        if self.train.global_batch_size is not None:
            return self.train.global_batch_size
        assert self.train.global_batch_tokens is not None
        return self.train.global_batch_tokens // self.data.max_length


class _Loader(yaml.SafeLoader):
    """YAML as people write it: `2e-5` is a number, and a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise RecipeError(f"line {key_node.start_mark.line + 1}: the key {key!r} is not a name; quote it")
            if key in seen:
                raise RecipeError(f"line {key_node.start_mark.line + 1}: `{key}` was already given on line {seen[key]}")
            seen[key] = key_node.start_mark.line + 1
        return super().construct_mapping(node, deep=True)


# PyYAML follows YAML 1.1, where 2e-5 has no dot and is therefore a string.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def _read_yaml(text: str, origin: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except RecipeError as error:
        raise RecipeError(f"{origin} is not a valid recipe:\n  {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise RecipeError(f"{origin} is not valid YAML:\n  {place}{problem}") from None
    except (ValueError, RecursionError) as error:  # an impossible date, or nesting without end
        raise RecipeError(f"{origin} is not valid YAML:\n  {error}") from None


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise RecipeError(f"'{override}' is not an override. Write key=value, for example train.learning_rate=1e-5.")
    *parents, leaf = key.split(".")
    section = values
    for parent in parents:
        if section.get(parent) is None:
            section[parent] = {}
        section = section[parent]
        if not isinstance(section, dict):
            raise RecipeError(f"override {override}: `{parent}` holds {section!r}, which has no keys of its own")
    section[leaf] = _read_yaml(text, f"override {override}")


def _known_keys(location: tuple[str | int, ...]) -> list[str]:
    """The keys that are allowed where an unknown one was found."""
    schema: Any = Recipe
    for part in location[:-1]:
        if isinstance(part, int) or not hasattr(schema, "model_fields"):
            continue
        field = schema.model_fields.get(part)
        if field is None:
            continue
        options = [field.annotation]
        for option in options:  # the list grows while it is read: unions in tuples in unions
            options += getattr(option, "__args__", ())
        schema = next((o for o in options if isinstance(o, type) and issubclass(o, Section)), schema)
    return list(schema.model_fields)


# What other tools, or transformers, call a key.
_OTHER_NAMES = {
    "lr": "learning_rate",
    "epochs": "num_train_epochs",
    "num_epochs": "num_train_epochs",
    "batch_size": "global_batch_size",
    "per_device_train_batch_size": "micro_batch_size",
    "gradient_accumulation_steps": "global_batch_size` (accumulation follows from it), not `gradient_accumulation_steps",
    "lr_scheduler": "lr_scheduler_type",
    "bf16": "precision",
    "fp16": "precision",
    "max_seq_length": "max_length",
    "use_liger_kernel": "kernels",
    "model_name_or_path": "name_or_path",
    "dataset": "train",
}


def _where_else(key: str) -> str:
    """The section that has this key, where it was written in the wrong one."""
    for name, field in Recipe.model_fields.items():
        if (
            isinstance(field.annotation, type)
            and issubclass(field.annotation, Section)
            and key in field.annotation.model_fields
        ):
            return f"; it belongs to `{name}`"
    return ""


def _location(problem: Any) -> list[str | int]:
    """Where a problem is, without the branch of a union that pydantic tried (`str`, `tuple[Source, ...]`)."""
    *parents, last = problem["loc"]
    branches = {"str", "int", "bool", "constrained-int", "constrained-str"}
    path = [part for part in parents if isinstance(part, int) or not ("[" in part or part in branches)]
    if problem["type"] == "extra_forbidden" or isinstance(last, int) or not ("[" in last or last in branches):
        path.append(last)
    return path


def _explain(error: ValidationError) -> list[str]:
    lines: dict[str, str] = {}
    for problem in error.errors(include_url=False):
        path = _location(problem)
        where = ".".join(map(str, path)) or "recipe"
        value = problem["input"]
        if problem["type"] == "extra_forbidden":
            name = str(path[-1])
            known = _known_keys(tuple(path))
            other = _OTHER_NAMES.get(name, "")
            suggestion = f"; here it is `{other}`" if other.split("`")[0] in known else did_you_mean(name, known)
            text = f"unknown key{suggestion or _where_else(name)}"
        elif problem["type"] == "missing":
            text = "missing" + {
                "schema_version": f"; write `schema_version: {SCHEMA_VERSION}` (format of the file)",
                "version": "; write `version: 1` (of this recipe)",
            }.get(where, "; this key has no default")
        elif problem["type"] == "value_error":
            text = problem["msg"].removeprefix("Value error, ")
        else:
            shown = json.dumps(value, default=str)
            text = f"{problem['msg'][0].lower()}{problem['msg'][1:]}, got {shown if len(shown) < 80 else shown[:77] + '...'}"
            text = text.replace("input should be", "must be").replace("a valid array", "a list")
        lines[where] = f"{lines[where]}, or {text}" if where in lines and text not in lines[where] else text
    # `data.train` is no text, and its first source has a mistake: only the second helps.
    told = {where: text for where, text in lines.items() if not any(other.startswith(where + ".") for other in lines)}
    return [f"  {where}: {text}" for where, text in told.items()]


def parse_recipe(text: str, overrides: Sequence[str] = (), origin: str = "recipe") -> Recipe:
    """Validate a recipe's text.

    Args:
        text: YAML.
        overrides: `key=value` with dots, as on the command line; values are YAML.
        origin: What messages call it: the path.

    Raises:
        RecipeError: All mistakes in one message.
    """
    values = _read_yaml(text, origin)
    if not isinstance(values, dict):
        raise RecipeError(f"{origin} is not a valid recipe:\n  it holds {'nothing' if values is None else 'no keys'}")
    # A section written with all its lines commented out reads as null; it means its defaults.
    values = {key: {} if value is None and key in Recipe.model_fields else value for key, value in values.items()}
    for override in overrides:
        _apply_override(values, override)
    found = values.get("schema_version")
    if isinstance(found, int) and found != SCHEMA_VERSION:
        raise RecipeError(
            f"{origin} is written in schema_version {found}, and this program reads {SCHEMA_VERSION}. "
            + ("Update the program." if found > SCHEMA_VERSION else f"There is no version {found}.")
        )
    try:
        # Through JSON, where pydantic's strict mode takes a list for a tuple and an int for a float, and nothing else.
        return Recipe.model_validate_json(json.dumps(values, default=str))
    except ValidationError as error:
        raise RecipeError("\n".join([f"{origin} is not a valid recipe:", *_explain(error)])) from None


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read and validate a recipe file.

    Raises:
        RecipeError: The file is missing or unreadable, or all its mistakes in one message.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = [str(p.relative_to(REPOSITORY)) for p in sorted((REPOSITORY / "recipes").glob("*.yaml"))]
        raise RecipeError(f"There is no recipe {path}. Recipes here: {', '.join(near)}.") from None
    except IsADirectoryError:
        raise RecipeError(f"{path} is a folder, not a recipe file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} cannot be read: {error}.") from None
    return parse_recipe(text, overrides, origin=str(path))


def find_file(path: str) -> Path:
    """A path as the user wrote it: from the working directory, or else from this repository.

    Returns:
        The first that exists; the one from the working directory where neither does.
    """
    here, shipped = Path(path), REPOSITORY / path
    try:
        here = here.expanduser()
        return here if here.exists() or not shipped.exists() else shipped
    except (OSError, RuntimeError, ValueError):  # no name that a file can have: it is only not there
        return Path("no such file")
