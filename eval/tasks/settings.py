"""Resolves the settings of an evaluation: everything that can move a score besides the weights, in one value with one hash.

Base and tuned are measured with the tuned model's tokenizer and chat template, in one dtype, and stop at the same tokens.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from eval.sandbox.metric import code_settings
from eval.tasks.output import first_line
from eval.tasks.reference import Reference, context_of
from eval.tasks.suites import TaskSelection
from sft.errors import EvaluationError
from sft.recipe.schema import Evaluation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# lm_eval's own 256 cuts off a chat model's reasoning before its answer.
ANSWER_TOKENS = 1024
# Packages whose versions can move a score, by backend.
PACKAGES = {"hf": ("lm_eval", "transformers", "torch"), "server": ("lm_eval", "transformers")}
OF_THE_SERVER = "the server's"
# On a CPU lm_eval's search for a batch size would take longer than it saves.
CPU_BATCH_SIZE = 32
# lm_eval decides the length of each answer; transformers would follow these keys of a generation config instead.
LENGTH_KEYS = ("max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time")
NO_SETTINGS = (*LENGTH_KEYS, "eos_token_id", "pad_token_id", "transformers_version", "_from_model_config")


@dataclass(frozen=True)
class Settings:
    """Two evaluations are compared only where all of these are equal."""

    tasks: tuple[str, ...]
    """Tasks, groups and tags; `loaded` has their definitions."""

    limit: int | None
    """Documents per task."""

    num_fewshot: int | None
    fewshot_as_multiturn: bool
    system_instruction: str | None
    apply_chat_template: bool
    chat_template_sha256: str | None

    enable_thinking: bool | None
    """False where the chat template supports reasoning, which training renders without. None: it does not."""

    add_bos_token: bool | None
    """False with a chat template, which writes its own, as in training. None: the tokenizer's default."""

    dtype: str

    max_length: int | None
    """Tokens of prompt and answer together: the model's context."""

    max_gen_toks: int | None
    """Longest answer in tokens, for every task; None for each task's own."""

    default_max_gen_toks: int
    """Longest answer in tokens where neither the recipe nor the task sets one."""

    generation: dict[str, Any]
    """The tuned model's generation config without its lengths."""

    stop_token_ids: tuple[int, ...]
    seed: int

    batch_size: int | str
    """Documents per forward pass. Another batch rounds differently, which moves scores of half-precision models."""

    base_template: str
    """`tuned` or `own`: whose chat template the base model is prompted with."""

    tokenizer_sha256: str
    backend: str

    backend_settings: dict[str, Any]
    """What moves a score with this backend alone; a server's address does not."""

    device: str
    """`cuda` or `cpu`: they round differently."""

    versions: dict[str, str]

    loaded: dict[str, dict[str, Any]] = field(default_factory=dict)
    """From `task_facts`: per task its version, number of examples, generation arguments, and checksums of definition, documents and
    examples. Empty until the tasks are loaded."""

    generated_code: dict[str, Any] | None = None
    """The limits on programs that the model writes; None where no task runs any."""

    @property
    def hash(self) -> str:
        """SHA-256 of all settings."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def resolve_settings(evaluation: Evaluation, selection: TaskSelection, reference: Reference, on_gpu: bool) -> Settings:
    """Decide everything that the recipe's `eval` section leaves open; the reference is the tuned model.

    Raises:
        EvaluationError: It has no chat template, or one that drops the system instruction; or max_length is beyond the context.
    """
    served, chat, tokenizer = evaluation.backend == "server", evaluation.apply_chat_template, reference.tokenizer
    context = context_of(reference.config)
    wanted = evaluation.max_length
    if wanted is not None and context is not None and wanted > context:
        raise EvaluationError(f"eval.max_length={wanted} is more than the model's context of {context} tokens.")
    context = wanted or context
    saved_dtype = str(getattr(reference.config, "dtype", None) or "auto").removeprefix("torch.")
    generation = reference.generation_config.to_diff_dict()
    searched = evaluation.batch_size == "auto" and not served
    return Settings(
        tasks=tuple(task.name for task in selection.tasks),
        limit=selection.limit,
        num_fewshot=evaluation.num_fewshot,
        fewshot_as_multiturn=chat,
        system_instruction=evaluation.system_instruction,
        apply_chat_template=chat,
        chat_template_sha256=_check_chat_template(reference, evaluation) if chat else None,
        enable_thinking=False if chat and "enable_thinking" in str(tokenizer.chat_template) else None,
        add_bos_token=False if chat else None,
        dtype=OF_THE_SERVER if served else saved_dtype if evaluation.dtype == "auto" else evaluation.dtype,
        max_length=context,
        max_gen_toks=evaluation.max_gen_toks,
        # At least half of a small context is left for the prompt.
        default_max_gen_toks=min(ANSWER_TOKENS, (context or 2 * ANSWER_TOKENS) // 2),
        generation={key: value for key, value in generation.items() if key not in NO_SETTINGS},
        stop_token_ids=_stop_token_ids(reference),
        seed=evaluation.seed,
        batch_size=CPU_BATCH_SIZE if searched and not on_gpu else evaluation.batch_size,
        base_template=evaluation.base_template,
        tokenizer_sha256=_tokenizer_sha256(tokenizer),
        backend=evaluation.backend,
        backend_settings={"api": evaluation.server.api} if served else {},
        device=OF_THE_SERVER if served else "cuda" if on_gpu else "cpu",
        versions={package: version(package) for package in PACKAGES[evaluation.backend]},
        generated_code=code_settings() if selection.runs_code else None,
    )


def template_sha256(template: str | dict[str, str]) -> str:
    """SHA-256 of a chat template, or of several by name."""
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _check_chat_template(reference: Reference, evaluation: Evaluation) -> str:
    """The checksum of the template, which must render the system instruction."""
    template, instruction = reference.tokenizer.chat_template, evaluation.system_instruction
    if template is None:
        raise EvaluationError(
            f"eval.apply_chat_template=true, and the tokenizer of {reference.path} has no chat template. Set "
            "eval.apply_chat_template=false to ask without one."
        )
    if instruction is not None:
        turns = [{"role": "system", "content": instruction}, {"role": "user", "content": "?"}]
        try:
            rendered = str(reference.tokenizer.apply_chat_template(turns, tokenize=False))
        except Exception as error:  # a template may raise anything; lm_eval would drop the system turn and go on
            rendered = first_line(error)
        if instruction not in rendered:
            raise EvaluationError(
                f"eval.system_instruction is set, and the chat template of {reference.path} takes no system turn. "
                "Leave eval.system_instruction out."
            )
    return template_sha256(template)


def _stop_token_ids(reference: Reference) -> tuple[int, ...]:
    ids = reference.generation_config.eos_token_id
    ids = {ids} if isinstance(ids, int) else set(ids or ())
    # lm_eval stops at the tokenizer's end-of-turn token as well.
    return tuple(sorted({*ids, reference.tokenizer.eos_token_id} - {None}))


def _tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of what decides how text becomes tokens. Not of the tokenizer's files: those name versions and folders."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    # Truncation and padding are what the last call asked for.
    rules = json.loads(backend.to_str()) | {"truncation": None, "padding": None} if backend is not None else {}
    special = [tokenizer.all_special_tokens, tokenizer.eos_token, tokenizer.bos_token]
    values = [rules, sorted(tokenizer.get_vocab().items()), *special]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
