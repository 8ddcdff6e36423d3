"""Chooses what answers, transformers or a server, and refuses what it cannot do. Imports no torch."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from eval.models.generation import CARRIED, NO_EFFECT
from eval.models.placement import Placement
from eval.models.served import check_two, find_served, probe, task_problems
from eval.models.target import Target
from eval.tasks.load import LoadedTasks, leaves
from eval.tasks.output import summary
from eval.tasks.settings import Settings
from sft.errors import EvaluationError
from sft.program import shown_command
from sft.recipe.schema import Evaluation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_VLLM = (
    "eval.backend=vllm: vLLM answers as a server now. Serve the model (vllm serve MODEL) and measure it with backend=server "
    "server.base_url=http://127.0.0.1:8000/v1; docs/evaluation-backends.md. A recipe that trains leaves eval.backend out."
)
OF_VLLM = ("tensor_parallel_size", "data_parallel_size", "gpu_memory_utilization")
"""Keys of a vLLM that ran in this process; now they are options of `vllm serve`."""

Asking = tuple[Target, Settings, "PreTrainedTokenizerBase"]
"""A model, its settings, and the tokenizer that makes its prompts."""


def check_backend(evaluation: Evaluation, after_training: bool = False) -> None:
    """Refuse keys that contradict the backend, before anything loads; all of them in one message."""
    if problems := [*_contradictions(evaluation, after_training)]:
        raise EvaluationError("\n".join(problems))


def _contradictions(evaluation: Evaluation, after_training: bool) -> Iterator[str]:
    backend, server = evaluation.backend, evaluation.server
    if backend == "vllm":
        yield NO_VLLM
    for key in OF_VLLM:
        if (value := getattr(evaluation, key)) is not None:
            yield f"eval.{key}={value} has no effect: give it to `vllm serve`. Leave it out."
    if backend != "server":
        for key in sorted(server.model_fields_set):
            if (value := getattr(server, key)) is not None:
                yield f"eval.server.{key}={value} is of eval.backend=server, and eval.backend={backend}. Leave one of them out."
        return
    if after_training and (evaluation.tasks or evaluation.suite):
        yield (
            "eval.backend=server, and no server has the tuned model when its training ends. Leave eval.backend out, or eval.tasks empty; "
            f"once the model is served: {shown_command('eval', 'RUN', 'backend=server')} server.base_url=..."
        )
    for key in ("parallelize", "processes", "dtype", "batch_size"):
        if (value := getattr(evaluation, key)) != "auto":
            yield f"eval.{key}={value}, and the server decides it. Leave eval.{key} out."
    if server.base_url is None:
        yield (
            "eval.backend=server, and eval.server.base_url is not given. Name the server's address with its /v1: "
            "server.base_url=http://127.0.0.1:8000/v1"
        )
    if server.api == "chat" and not evaluation.apply_chat_template:
        yield (
            "eval.server.api=chat sends messages, which the server puts into a chat template, and eval.apply_chat_template=false. Set "
            "eval.server.api=completions to ask without one."
        )
    if server.api_key_env is not None and not os.environ.get(server.api_key_env):
        yield (
            f"eval.server.api_key_env={server.api_key_env}, and there is no such environment variable, or it is empty. "
            f"Export it: export {server.api_key_env}=..."
        )


def find_backend(evaluation: Evaluation, path: str, *askings: Asking) -> list[Target]:
    """Find the models, one or base and tuned, on their server and probe it; without one, return them as they are.

    `path` is the tuned model, whose tokenizer makes the prompts.
    """
    targets = [target for target, _, _ in askings]
    if evaluation.backend == "hf":
        return targets
    for target, settings, _ in askings:
        if unknown := sorted(settings.generation.keys() - CARRIED - NO_EFFECT):
            raise EvaluationError(
                f"The tuned model's generation config has {', '.join(unknown)}, which eval.backend=server cannot follow. Use "
                "eval.backend=hf."
            )
        if target.new_tokens:
            raise EvaluationError(
                f"The base model {target.model} has no embeddings for {', '.join(target.new_tokens)}, which eval.backend=hf gives it as "
                "the training did, and a server cannot. Use eval.backend=hf."
            )
    found = [find_served(evaluation.server, one.label, one.model, alone=len(targets) == 1) for one in targets]
    check_two(found)
    return [
        replace(target, served=probe(one, settings, tokenizer, path))
        for one, (target, settings, tokenizer) in zip(found, askings, strict=True)
    ]


def check_requests(tasks: LoadedTasks, *askings: Asking) -> None:
    """Refuse tasks that the server cannot be asked, all in one message; the targets are those of `find_backend`."""
    problems = [
        problem
        for target, settings, tokenizer in askings
        if target.served is not None
        for items in tasks.by_name.values()
        for part in leaves(items)
        for problem in task_problems(part, settings, tokenizer, target.served)
    ]
    if problems:
        raise EvaluationError("\n".join(dict.fromkeys(problems)))


def load_model(target: Target, tokenizer: PreTrainedTokenizerBase, settings: Settings, placement: Placement) -> Any:
    """lm_eval's model, with the generation config that both models share.

    Raises:
        EvaluationError: Its weights are missing or broken.
    """
    if target.served is not None:
        from eval.models.server import ServedModel

        return ServedModel(target.served, tokenizer, settings)
    from sft.model.weight_checks import check_weights

    check_weights(target.model, target.revision, target.trust_remote_code, f"The {target.label} model {target.model}")
    from eval.models.hf import load_hf

    try:
        return load_hf(target, tokenizer, settings, placement)
    except EvaluationError:
        raise
    except Exception as error:  # each library raises another error for missing or broken weights
        traceback.print_exc()
        raise EvaluationError(f"The {target.label} model {target.model} cannot be loaded: {summary(error)}") from None
