"""Choose what answers: transformers, vLLM or a server, each as lm_eval's own class; and refuse what it cannot be asked.

Imports no torch.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from eval.models.generation import check_generation, special_tokens, task_problems
from eval.models.placement import Placement
from eval.models.server import check_two, find_served, probe, served_problems
from eval.models.target import Target
from eval.quiet import summary
from eval.tasks.load import LoadedTasks, leaves
from eval.tasks.settings import Settings
from sft.errors import EvaluationError
from sft.recipe.schema import Evaluation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OF_VLLM = ("tensor_parallel_size", "data_parallel_size", "gpu_memory_utilization")
OF_HF = ("parallelize", "processes")
INSTALL = "bash scripts/setup.sh && .venv/bin/python -m pip install -e"
# What lm_eval's clients of servers import.
CLIENT_PACKAGES = ("aiohttp", "requests", "tenacity")

Asking = tuple[Target, Settings, "PreTrainedTokenizerBase"]
"""A model, its settings, and the tokenizer that makes its prompts."""


def check_backend(evaluation: Evaluation, after_training: bool = False) -> None:
    """Refuse keys that contradict the backend, before anything loads.

    Args:
        evaluation: The recipe's `eval` section.
        after_training: Whether the evaluation follows a training that is about to start.

    Raises:
        EvaluationError: All contradictions in one message.
    """
    problems = contradictions(evaluation)
    if after_training and evaluation.backend == "server" and (evaluation.tasks or evaluation.suite):
        problems.append(
            "eval.backend=server, and no server has the tuned model when its training ends. Leave eval.backend out, or eval.tasks empty; "
            "once the model is served: bash scripts/eval.sh RUN backend=server server.base_url=..."
        )
    if problems:
        raise EvaluationError("\n".join(problems))


def contradictions(evaluation: Evaluation) -> list[str]:
    """What cannot be done as it is written; empty where all of it can."""
    backend = evaluation.backend
    keys: list[tuple[str, str, Any, Any]] = [(key, "vllm", getattr(evaluation, key), None) for key in OF_VLLM]
    keys += [(key, "hf", getattr(evaluation, key), "auto") for key in OF_HF]
    keys += [
        (f"server.{key}", "server", getattr(evaluation.server, key), None)
        for key in sorted(evaluation.server.model_fields_set)
    ]
    problems = [
        f"eval.{key}={value} is of eval.backend={of}, and eval.backend={backend}. Leave one of them out."
        for key, of, value, default in keys
        if of != backend and value != default
    ]
    if backend == "server":
        problems += _server_contradictions(evaluation)
    if backend == "vllm" and find_spec("vllm") is None:
        problems.append(
            f"eval.backend=vllm needs vLLM, which is not installed. On a machine with a GPU: {INSTALL} '.[vllm]'"
        )
    if backend == "vllm" and (evaluation.data_parallel_size or 1) > 1 and find_spec("ray") is None:
        problems.append(
            f"eval.data_parallel_size={evaluation.data_parallel_size} needs ray, which is not installed: .venv/bin/python -m pip "
            "install ray"
        )
    return problems


def _server_contradictions(evaluation: Evaluation) -> Iterator[str]:
    server = evaluation.server
    if server.base_url is None:
        yield (
            "eval.backend=server, and eval.server.base_url is not given. Name the server's address with its /v1: "
            "server.base_url=http://127.0.0.1:8000/v1"
        )
    if evaluation.dtype != "auto":
        yield f"eval.dtype={evaluation.dtype}, and a server has its weights loaded: it decides. Leave eval.dtype out."
    if server.api == "chat" and not evaluation.apply_chat_template:
        yield (
            "eval.server.api=chat sends messages, which the server puts into a chat template, and eval.apply_chat_template=false. Set "
            "eval.server.api=completions to ask without one."
        )
    if server.api == "chat" and isinstance(evaluation.batch_size, int) and evaluation.batch_size > 1:
        yield (
            f"eval.batch_size={evaluation.batch_size}, and a chat request holds one conversation. Leave eval.batch_size out; "
            "eval.server.num_concurrent is how many requests are under way at once."
        )
    if server.api_key_env is not None and not os.environ.get(server.api_key_env):
        yield (
            f"eval.server.api_key_env={server.api_key_env}, and there is no such environment variable, or it is empty. "
            f"Export it: export {server.api_key_env}=..."
        )
    missing = [name for name in CLIENT_PACKAGES if find_spec(name) is None]
    if missing:
        yield f"eval.backend=server needs packages that are not installed ({', '.join(missing)}): {INSTALL} ."


def place_backend(evaluation: Evaluation) -> Placement | None:
    """Where the layers are, where the backend decides; None for `hf`."""
    if evaluation.backend == "hf":
        return None
    return Placement(0, "the server decides" if evaluation.backend == "server" else "vLLM decides")


def find_backend(evaluation: Evaluation, path: str, *askings: Asking) -> list[Target]:
    """The models, with what their backend needs to know of them; probes a server.

    Args:
        evaluation: The recipe's `eval` section.
        path: The tuned model, whose tokenizer makes the prompts.
        askings: The base and the tuned model, or one.

    Raises:
        EvaluationError: The backend cannot measure one of them as asked.
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
    found = [find_served(evaluation.server, one.label, one.model, alone=len(targets) == 1) for one in targets]
    check_two(found)
    served = [
        probe(one, settings, tokenizer, path) for one, (_, settings, tokenizer) in zip(found, askings, strict=True)
    ]
    check_two(served)
    return [replace(target, served=one) for target, one in zip(targets, served, strict=True)]


def check_requests(tasks: LoadedTasks, *askings: Asking) -> None:
    """Refuse tasks that the backend cannot be asked, before any weights load.

    Args:
        tasks: From `load_tasks`.
        askings: With the targets of `find_backend`.

    Raises:
        EvaluationError: All of them in one message.
    """
    parts = [part for items in tasks.by_name.values() for part in leaves(items)]
    problems: list[str] = []
    for target, settings, tokenizer in askings:
        if settings.backend == "hf":
            continue
        special = special_tokens(tokenizer)
        for part in parts:
            problems += task_problems(part, settings, special)
            if target.served is not None:
                problems += served_problems(part, settings, special, target.served)
    if problems:
        raise EvaluationError("\n".join(dict.fromkeys(problems)))


def load_model(target: Target, tokenizer: PreTrainedTokenizerBase, settings: Settings, placement: Placement) -> Any:
    """lm_eval's model, with the generation config that both models share.

    Raises:
        EvaluationError: Its weights are missing or broken.
    """
    if settings.backend == "server":
        from eval.models.server_client import load_served

        assert target.served is not None, "find_backend has found it"
        return load_served(target.served, tokenizer, settings)
    from sft.model.weight_checks import check_weights

    check_weights(target.model, target.revision, target.trust_remote_code, f"The {target.label} model {target.model}")
    try:
        if settings.backend == "vllm":
            from eval.models.vllm import load_vllm

            return load_vllm(target, tokenizer, settings)
        from eval.models.hf import load_hf

        return load_hf(target, tokenizer, settings, placement)
    except Exception as error:  # each library raises another error for missing or broken weights
        traceback.print_exc()
        raise EvaluationError(f"The {target.label} model {target.model} cannot be loaded: {summary(error)}") from None
