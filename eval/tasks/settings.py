"""What the base and the tuned model are asked with: everything that could move a score, in one value with one hash.

Both are asked through the tuned run's tokenizer and chat template, in one number format, and stop at the same tokens.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from eval.quiet import first_line
from eval.reference import Reference, context_of
from eval.sandbox.metric import code_settings
from eval.tasks.suites import TaskSelection
from sft.errors import EvaluationError
from sft.recipe.schema import Evaluation

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

# lm_eval's own 256 cuts the reasoning of a chat model before its answer.
ANSWER_TOKENS = 1024
# Whose versions may move a score, by backend.
PACKAGES = {
    "hf": ("lm_eval", "transformers", "torch"),
    "vllm": ("lm_eval", "transformers", "torch", "vllm"),
    "server": ("lm_eval", "transformers"),
}
OF_THE_SERVER = "the server's"
# On a CPU lm_eval's search for a batch size would take longer than it saves.
CPU_BATCH_SIZE = 32
# lm_eval decides the length of each answer; transformers would follow these keys of a generation config instead.
LENGTH_KEYS = ("max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time")


@dataclass(frozen=True)
class Settings:
    """All that decides a score besides the weights. Two evaluations compare only where these are equal."""

    tasks: dict[str, str | None]
    """Name of each task, group or tag; the SHA-256 of its definition where it is not lm_eval's own."""

    limit: int | None
    num_fewshot: int | None
    fewshot_as_multiturn: bool
    system_instruction: str | None

    apply_chat_template: bool
    chat_template_sha256: str | None

    enable_thinking: bool | None
    """False where the chat template can think: training renders its answers without thoughts. None: it cannot."""

    add_bos_token: bool | None
    """False with a chat template, which writes its own: training adds none to it either. None: the tokenizer's way."""

    dtype: str

    max_length: int | None
    """Tokens of prompt and answer together: the model's context."""

    max_gen_toks: int | None
    """Longest answer in tokens, for every task; None for each task's own."""

    default_max_gen_toks: int
    """Longest answer in tokens where neither the recipe nor the task says."""

    generation: dict[str, Any]
    """The tuned model's generation config, its lengths left out."""

    stop_token_ids: tuple[int, ...]
    seed: int

    batch_size: int | str
    """Documents per forward pass. Sums are rounded in another order in another batch, which moves scores of half-precision models."""

    base_template: str
    """`tuned` or `own`: whose prompts a base model is asked with."""

    tokenizer_sha256: str

    backend: str
    backend_settings: dict[str, Any]
    """What decides a score with this backend alone; a server's address does not."""

    device: str
    """`cuda` or `cpu`: they round differently."""

    versions: dict[str, str]

    loaded: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Per task what it says of itself once it is loaded: version, number of examples, checksums of its documents and examples, and how it
    generates. Empty until then."""

    generated_code: dict[str, Any] | None = None
    """What the programs that the model writes may use; None where no task runs any."""

    @property
    def hash(self) -> str:
        """SHA-256 of all settings."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def template_sha256(template: str | dict[str, str]) -> str:
    """Of a chat template, or of several by name."""
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _check_chat_template(reference: Reference, evaluation: Evaluation) -> str | None:
    if not evaluation.apply_chat_template:
        return None
    template = reference.tokenizer.chat_template
    if template is None:
        raise EvaluationError(
            f"eval.apply_chat_template=true, and the tokenizer of {reference.path} has no chat template. Set "
            "eval.apply_chat_template=false to ask without one."
        )
    if evaluation.system_instruction is not None:
        turns = [{"role": "system", "content": evaluation.system_instruction}, {"role": "user", "content": "?"}]
        try:
            rendered = str(reference.tokenizer.apply_chat_template(turns, tokenize=False))
        except Exception as error:  # a template may raise anything; lm_eval would drop the system turn and go on
            rendered = first_line(error)
        if evaluation.system_instruction not in rendered:
            raise EvaluationError(
                f"eval.system_instruction is set, and the chat template of {reference.path} takes no system turn. "
                "Leave eval.system_instruction out."
            )
    return template_sha256(template)


def _can_think(reference: Reference) -> bool:
    return "enable_thinking" in str(reference.tokenizer.chat_template)


def _dtype(evaluation: Evaluation, config: PreTrainedConfig) -> str:
    if evaluation.backend == "server":
        return OF_THE_SERVER
    saved = str(getattr(config, "dtype", None) or "auto").removeprefix("torch.")
    return saved if evaluation.dtype == "auto" else evaluation.dtype


def _length(evaluation: Evaluation, config: PreTrainedConfig) -> int | None:
    """Tokens of prompt and answer together."""
    context = context_of(config)
    if evaluation.max_length is not None and context is not None and evaluation.max_length > context:
        raise EvaluationError(
            f"eval.max_length={evaluation.max_length} is more than the model's context of {context} tokens."
        )
    return evaluation.max_length or context


def _batch_size(evaluation: Evaluation, on_gpu: bool) -> int | str:
    by_search = evaluation.batch_size == "auto" and evaluation.backend == "hf" and not on_gpu
    return CPU_BATCH_SIZE if by_search else evaluation.batch_size


def _backend_settings(evaluation: Evaluation) -> dict[str, Any]:
    if evaluation.backend == "server":
        return {"api": evaluation.server.api}
    if evaluation.backend == "vllm":
        sizes = (evaluation.tensor_parallel_size or 1, evaluation.data_parallel_size or 1)
        return dict(zip(("tensor_parallel_size", "data_parallel_size"), sizes, strict=True))
    return {}


def _stop_token_ids(reference: Reference) -> tuple[int, ...]:
    ids = reference.generation_config.eos_token_id
    ids = {ids} if isinstance(ids, int) else set(ids or ())
    # lm_eval stops at the tokenizer's end-of-turn token as well.
    return tuple(sorted({*ids, reference.tokenizer.eos_token_id} - {None}))


def _tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """Of what decides how text becomes tokens. Not of the tokenizer's files: those name versions and folders."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    # Truncation and padding are what the last call asked for.
    rules = json.loads(backend.to_str()) | {"truncation": None, "padding": None} if backend is not None else {}
    values = [
        rules,
        sorted(tokenizer.get_vocab().items()),
        tokenizer.all_special_tokens,
        tokenizer.eos_token,
        tokenizer.bos_token,
    ]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def resolve_settings(evaluation: Evaluation, selection: TaskSelection, reference: Reference, on_gpu: bool) -> Settings:
    """Decide everything that the recipe's `eval` section left open.

    Raises:
        EvaluationError: The tokenizer has no chat template, or one that drops the system instruction.
    """
    generation = reference.generation_config.to_diff_dict()
    context = _length(evaluation, reference.config)
    return Settings(
        tasks={task.name: task.definition for task in selection.tasks},
        limit=selection.suite_limit if evaluation.limit is None else evaluation.limit,
        num_fewshot=evaluation.num_fewshot,
        fewshot_as_multiturn=evaluation.apply_chat_template,
        system_instruction=evaluation.system_instruction,
        apply_chat_template=evaluation.apply_chat_template,
        chat_template_sha256=_check_chat_template(reference, evaluation),
        enable_thinking=False if evaluation.apply_chat_template and _can_think(reference) else None,
        add_bos_token=False if evaluation.apply_chat_template else None,
        dtype=_dtype(evaluation, reference.config),
        max_length=context,
        max_gen_toks=evaluation.max_gen_toks,
        # At least half of a small context is left for the prompt.
        default_max_gen_toks=min(ANSWER_TOKENS, (context or 2 * ANSWER_TOKENS) // 2),
        generation={
            key: value
            for key, value in generation.items()
            if key not in (*LENGTH_KEYS, "eos_token_id", "pad_token_id", "transformers_version", "_from_model_config")
        },
        stop_token_ids=_stop_token_ids(reference),
        seed=evaluation.seed,
        batch_size=_batch_size(evaluation, on_gpu),
        base_template=evaluation.base_template,
        tokenizer_sha256=_tokenizer_sha256(reference.tokenizer),
        backend=evaluation.backend,
        backend_settings=_backend_settings(evaluation),
        device=OF_THE_SERVER if evaluation.backend == "server" else "cuda" if on_gpu else "cpu",
        versions={package: version(package) for package in PACKAGES[evaluation.backend]},
        generated_code=code_settings() if selection.runs_code else None,
    )
