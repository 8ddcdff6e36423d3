"""Which tasks a served model can be asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eval.models.answering import carried_by_openai, make_request
from eval.models.server import Served
from eval.tasks.settings import Settings

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask


def served_problems(
    task: ConfigurableTask, settings: Settings, special: dict[str, int], served: Served | None
) -> list[str]:
    """What a task asks that this server cannot do; none where there is no server."""
    if served is None:
        return []
    name, whose = task.task_name, f"{served.name} at {served.base_url}"
    if task.get_config("output_type") != "generate_until":
        if served.no_likelihoods is None:
            return []
        return [
            f"{name} scores given answers, and {served.no_likelihoods}. Use eval.backend=hf or vllm, or leave the task out."
        ]
    problems = []
    if served.api == "chat" and task.get_config("gen_prefix"):
        problems.append(
            f"{name} begins the answer itself, which a chat request cannot carry. Use eval.server.api=completions."
        )
    request = make_request(dict(task.get_config("generation_kwargs") or {}), settings, special)
    lost = carried_by_openai(request) if served.dialect == "openai" else None
    if lost is not None:
        problems.append(
            f"{name} is asked with {lost}, which {whose} does not take: it follows none of vLLM's keys. Use eval.backend=hf or vllm."
        )
    return problems
