"""What the keys about the backend of an evaluation contradict, found before anything is loaded. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

from sft.errors import EvaluationError
from sft.recipe.schema import Evaluation

OF_VLLM = ("tensor_parallel_size", "data_parallel_size", "gpu_memory_utilization")
INSTALL_VLLM = "bash scripts/setup.sh && .venv/bin/python -m pip install -e '.[vllm]'"
INSTALL_API = "bash scripts/setup.sh && .venv/bin/python -m pip install -e ."
# What lm_eval's clients import.
CLIENT_PACKAGES = ("aiohttp", "requests", "tenacity")
ENDPOINTS = ("/completions", "/models", "/embeddings", "/responses")


def _of_another_backend(evaluation: Evaluation) -> Iterator[str]:
    """Keys that do nothing with this backend."""
    backend = evaluation.backend
    if backend != "vllm":
        for key in OF_VLLM:
            value = getattr(evaluation, key)
            if value is not None:
                yield f"eval.{key}={value} is of eval.backend=vllm, and eval.backend={backend}. Leave one of them out."
    if backend != "server":
        for key in sorted(evaluation.server.model_fields_set):
            value = getattr(evaluation.server, key)
            yield (
                f"eval.server.{key}={value} is of eval.backend=server, and eval.backend={backend}. Set eval.backend=server to ask a "
                "server, or leave the key out."
            )
    if backend != "hf" and evaluation.parallelize != "auto":
        instead = "eval.tensor_parallel_size shares them" if backend == "vllm" else "the server decides where they are"
        yield (
            f"eval.parallelize={str(evaluation.parallelize).lower()} places layers of eval.backend=hf, and eval.backend={backend}: "
            f"{instead}. Leave eval.parallelize out."
        )
    if backend != "hf" and evaluation.processes != "auto":
        yield (
            f"eval.processes={evaluation.processes} shares documents among processes of eval.backend=hf, and eval.backend={backend}. Leave "
            "eval.processes out."
        )


def _addresses(evaluation: Evaluation) -> Iterator[str]:
    server = evaluation.server
    if server.base_url is None:
        yield (
            "eval.backend=server, and eval.server.base_url is not given. Name the server's address with its /v1: "
            "server.base_url=http://127.0.0.1:8000/v1"
        )
    for key in ("base_url", "base_url_of_base"):
        address = (getattr(server, key) or "").rstrip("/")
        endpoint = next((path for path in ("/chat/completions", *ENDPOINTS) if address.endswith(path)), None)
        if endpoint is not None:
            yield (
                f"eval.server.{key}={address} names one endpoint. Name the address that all of them begin with: "
                f"{address.removesuffix(endpoint)}"
            )


def _of_server(evaluation: Evaluation) -> Iterator[str]:
    server = evaluation.server
    yield from _addresses(evaluation)
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
        yield f"eval.backend=server needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed: {INSTALL_API}"


def contradictions(evaluation: Evaluation) -> list[str]:
    """What cannot be done as it is written; empty where all of it can."""
    problems = list(_of_another_backend(evaluation))
    if evaluation.backend == "server":
        problems += _of_server(evaluation)
    if evaluation.backend == "vllm":
        if find_spec("vllm") is None:
            problems.append(
                f"eval.backend=vllm needs vLLM, which is not installed. On a machine with a GPU: {INSTALL_VLLM}"
            )
        if (evaluation.data_parallel_size or 1) > 1 and find_spec("ray") is None:
            problems.append(
                f"eval.data_parallel_size={evaluation.data_parallel_size} needs ray, which is not installed: .venv/bin/python -m pip "
                "install ray"
            )
    return problems


def check_backend(evaluation: Evaluation, after_training: bool = False) -> None:
    """Refuse what cannot be done as it is written.

    Args:
        evaluation: The recipe's `eval` section.
        after_training: A training is about to start, and the evaluation follows it.

    Raises:
        EvaluationError: All of it in one message.
    """
    problems = contradictions(evaluation)
    if after_training and evaluation.backend == "server" and (evaluation.tasks or evaluation.suite):
        problems.append(
            "eval.backend=server, and no server has the tuned model when its training ends. Leave eval.backend out, or eval.tasks empty; "
            "once the model is served: bash scripts/eval.sh RUN backend=server server.base_url=..."
        )
    if problems:
        raise EvaluationError("\n".join(problems))
