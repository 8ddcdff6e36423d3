"""The model that answers: transformers', vLLM's, or one on a server; each as lm_eval's own class."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from eval.answering import check_generation, special_tokens, task_problems
from eval.placement import Placement, change_whole
from eval.quiet import first_line
from eval.server import Served, find_served
from eval.settings import Reference, Settings
from sft.errors import EvaluationError
from sft.recipe import Evaluation

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


def load_model(target: Target, tokenizer: PreTrainedTokenizerBase, settings: Settings, placement: Placement) -> Any:
    """lm_eval's model, with the generation config that both models share."""
    if settings.backend == "server":
        from eval.backend_server import load_served

        assert target.served is not None, "find_backend has found it"
        return load_served(target.served, tokenizer, settings)
    try:
        if settings.backend == "vllm":
            from eval.backend_vllm import load_vllm

            return load_vllm(target.model, target.revision, target.trust_remote_code, tokenizer, settings, target.vllm)
        return _load_hf(target, tokenizer, settings, placement)
    except Exception as error:  # missing or broken weights come as a different error from each library
        traceback.print_exc()
        raise EvaluationError(
            f"The {target.label} model {target.model} cannot be loaded: {type(error).__name__}: {first_line(error)}"
        ) from None


def _load_hf(target: Target, tokenizer: PreTrainedTokenizerBase, settings: Settings, placement: Placement) -> HFLM:
    import torch
    from transformers import GenerationConfig

    from eval.data_parallel import DataParallelHFLM

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
        from sft.embeddings import embed_new_tokens

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


def find_backend(evaluation: Evaluation, settings: Settings, reference: Reference, *targets: Target) -> list[Target]:
    """The models with what their backend needs to know of them; a server is asked for them.

    Args:
        evaluation: The recipe's `eval` section.
        settings: Resolved from it.
        reference: The tuned model, whose tokenizer asks all of them.
        targets: The base and the tuned model, or one.

    Raises:
        EvaluationError: The backend cannot answer for one of them as asked.
    """
    if evaluation.backend == "hf":
        return list(targets)
    check_generation(settings)
    for target in targets:
        if target.new_tokens:
            raise EvaluationError(
                f"The base model {target.model} has no embeddings for {', '.join(target.new_tokens)}, which eval.backend=hf gives it as "
                f"the training did, and eval.backend={evaluation.backend} cannot. Use eval.backend=hf."
            )
    if evaluation.backend == "vllm":
        options = {"gpu_memory_utilization": evaluation.gpu_memory_utilization}
        return [
            replace(target, vllm={key: value for key, value in options.items() if value is not None})
            for target in targets
        ]
    from eval.server_probe import probe

    found = [replace(target, served=_find(evaluation, target, alone=len(targets) == 1)) for target in targets]
    _check_two(found)
    found = [replace(target, served=probe(target.served, settings, reference)) for target in found if target.served]
    dialects = {target.served.dialect for target in found if target.served}
    if len(dialects) > 1:
        raise EvaluationError(
            "One of the two servers takes stop_token_ids and the other does not: their answers would end at other tokens."
        )
    return found


def _find(evaluation: Evaluation, target: Target, alone: bool) -> Served:
    server = evaluation.server
    key = "model" if alone else target.label
    others = [other for other in ("model", "base", "tuned", "base_url_of_base") if getattr(server, other) is not None]
    wrong = [other for other in others if (other == "model") != alone]
    if wrong:
        what = (
            "one model is measured: eval.server.model names it"
            if alone
            else "a run has two models: eval.server.base and .tuned name them"
        )
        raise EvaluationError(f"eval.server.{wrong[0]} is given, and {what}.")
    assert server.base_url is not None, "check_backend refuses that"
    address = (server.base_url_of_base or server.base_url) if key == "base" else server.base_url
    return find_served(server, address, getattr(server, key) or target.model, key)


def _check_two(targets: list[Target]) -> None:
    places = {(target.served.base_url, target.served.name) for target in targets if target.served}
    if len(places) < len(targets):
        raise EvaluationError(
            f"The base and the tuned model would both be {places.pop()[1]}: eval.server.base and eval.server.tuned name the same model."
        )


def check_requests(tasks: Any, settings: Settings, reference: Reference, targets: list[Target]) -> None:
    """Refuse tasks that the backend cannot be asked, before any weight is loaded.

    Args:
        tasks: From `load_tasks`.
        settings: Of the evaluation.
        reference: Whose tokenizer asks.
        targets: From `find_backend`.

    Raises:
        EvaluationError: All of them in one message.
    """
    if settings.backend == "hf":
        return
    from eval.server_tasks import served_problems

    special = special_tokens(reference.tokenizer)
    leaves = tasks.leaves()
    problems = [problem for leaf in leaves for problem in task_problems(leaf, settings, special)]
    for target in targets:
        if target.served is not None:
            problems += [
                problem for leaf in leaves for problem in served_problems(leaf, settings, special, target.served)
            ]
    if problems:
        raise EvaluationError("\n".join(dict.fromkeys(problems)))
