"""The model that answers: transformers', vLLM's, or one on a server; each as lm_eval's own class."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from eval.models.answering import check_generation, special_tokens, task_problems
from eval.models.placement import Placement, change_whole
from eval.models.server import Served
from eval.models.server_tasks import served_problems
from eval.quiet import summary
from eval.tasks.load import LoadedTasks, leaves
from eval.tasks.settings import Settings
from sft.errors import EvaluationError
from sft.recipe.schema import Evaluation

if TYPE_CHECKING:
    from lm_eval.models.huggingface import HFLM
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Target:
    """A model to measure."""

    label: str
    """How lines on the terminal begin: base, tuned."""

    model: str
    """A folder or an id on the hub."""

    revision: str | None = None
    trust_remote_code: bool = False

    new_tokens: tuple[str, ...] = ()
    """Tokens that the tokenizer has beside the model's own: their embeddings are what the training started from."""

    served: Served | None = None
    """Where a server has it."""

    vllm: dict[str, Any] = field(default_factory=dict)
    """What vLLM is told beside the settings."""


Asking = tuple[Target, Settings, "PreTrainedTokenizerBase"]
"""A model, how it is asked, and the tokenizer that makes the prompts."""


def load_model(target: Target, tokenizer: PreTrainedTokenizerBase, settings: Settings, placement: Placement) -> Any:
    """lm_eval's model, with the generation config that both models share."""
    if settings.backend == "server":
        from eval.models.server_client import load_served

        assert target.served is not None, "find_backend has found it"
        return load_served(target.served, tokenizer, settings)
    from sft.model.load import check_weights

    check_weights(target.model, target.revision, target.trust_remote_code, f"The {target.label} model {target.model}")
    try:
        if settings.backend == "vllm":
            from eval.models.vllm import load_vllm

            return load_vllm(target.model, target.revision, target.trust_remote_code, tokenizer, settings, target.vllm)
        return _load_hf(target, tokenizer, settings, placement)
    except Exception as error:  # missing or broken weights come as a different error from each library
        traceback.print_exc()
        raise EvaluationError(f"The {target.label} model {target.model} cannot be loaded: {summary(error)}") from None


def _load_hf(target: Target, tokenizer: PreTrainedTokenizerBase, settings: Settings, placement: Placement) -> HFLM:
    import torch
    from transformers import GenerationConfig

    from eval.models.data_parallel import DataParallelHFLM

    model = DataParallelHFLM(
        pretrained=target.model,
        revision=target.revision or "main",
        tokenizer=tokenizer,
        dtype=settings.dtype,
        max_length=settings.max_length,
        batch_size=settings.batch_size,
        add_bos_token=settings.add_bos_token,
        enable_thinking=settings.enable_thinking,
        device="cuda" if torch.cuda.is_available() else "cpu",
        parallelize=placement.spread,
        trust_remote_code=target.trust_remote_code,
    )
    if target.new_tokens:
        from sft.model.new_tokens import embed_new_tokens

        change_whole(model.model, lambda: embed_new_tokens(model.model, tokenizer, target.new_tokens, target.model))
    # The base model's own would stop it at another token, or repeat less. Its lengths would overrule lm_eval's.
    model.model.generation_config = GenerationConfig(
        **settings.generation, eos_token_id=list(settings.stop_token_ids), pad_token_id=model.tokenizer.pad_token_id
    )
    return model


def place_backend(evaluation: Evaluation) -> Placement | None:
    """Where the layers are, where that is not this process's to decide; None for `hf`."""
    if evaluation.backend == "hf":
        return None
    return Placement(0, "the server decides" if evaluation.backend == "server" else "vLLM decides")


def find_backend(evaluation: Evaluation, path: str, *askings: Asking) -> list[Target]:
    """The models with what their backend needs to know of them; a server is asked for them.

    Args:
        evaluation: The recipe's `eval` section.
        path: Of the tuned model, whose tokenizer asks all of them.
        askings: The base and the tuned model, or one.

    Raises:
        EvaluationError: The backend cannot answer for one of them as asked.
    """
    targets = [target for target, _, _ in askings]
    if evaluation.backend == "hf":
        return targets
    for target, settings, _ in askings:
        check_generation(settings)
        if target.new_tokens:
            raise EvaluationError(
                f"The base model {target.model} has no embeddings for {', '.join(target.new_tokens)}, which eval.backend=hf gives it as "
                f"the training did, and eval.backend={evaluation.backend} cannot. Use eval.backend=hf."
            )
    if evaluation.backend == "vllm":
        memory = evaluation.gpu_memory_utilization
        options = {} if memory is None else {"gpu_memory_utilization": memory}
        return [replace(target, vllm=options) for target in targets]
    from eval.models.server_probe import check_two, find, probe

    found = [find(evaluation.server, target.label, target.model, alone=len(targets) == 1) for target in targets]
    check_two(found)
    probed = [
        probe(one, settings, tokenizer, path) for one, (_, settings, tokenizer) in zip(found, askings, strict=True)
    ]
    if len({one.dialect for one in probed}) > 1:
        raise EvaluationError(
            "One of the two servers takes stop_token_ids and the other does not: their answers would end at other tokens."
        )
    return [replace(target, served=one) for target, one in zip(targets, probed, strict=True)]


def check_requests(tasks: LoadedTasks, *askings: Asking) -> None:
    """Refuse tasks that the backend cannot be asked, before any weight is loaded.

    Args:
        tasks: From `load_tasks`.
        askings: With the targets of `find_backend`.

    Raises:
        EvaluationError: All of them in one message.
    """
    parts = [part for items in tasks.by_name.values() for part in leaves(items)]
    problems: list[str] = []
    for target, settings, tokenizer in askings:
        if settings.backend != "hf":
            special = special_tokens(tokenizer)
            problems += [problem for part in parts for problem in task_problems(part, settings, special)]
            problems += [
                problem for part in parts for problem in served_problems(part, settings, special, target.served)
            ]
    if problems:
        raise EvaluationError("\n".join(dict.fromkeys(problems)))
