"""pass@k on programs that run in a sandbox, in the place of the metric `code_eval` that lm_eval would download.

That one runs programs in forks of the evaluation itself, with a time limit only.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.sandbox.runner import LIMITS, Outcome, check_isolation, describe, run_programs
from sft.errors import EvaluationError

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask

Scores = dict[str, float]

CODE_METRIC = "code_eval"
"""The metric that runs what the model wrote, whatever the task says of itself."""


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The chance that one of k samples is correct, drawn without replacement: unbiased (Chen et al. 2021).

    >>> [round(pass_at_k(4, 2, k), 3) for k in (1, 2, 3)]
    [0.5, 0.833, 1.0]
    """
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


class CodeEval:
    """What lm_eval's code tasks take for the metric `code_eval`."""

    name = CODE_METRIC

    def compute(
        self,
        predictions: Sequence[Sequence[str]],
        references: Sequence[str],
        k: Sequence[int] = (1, 10, 100),
        **_: object,
    ) -> tuple[Scores, dict[int, list[tuple[int, dict[str, Any]]]]]:
        """Score candidates by running each with its test, as `evaluate`'s code_eval does.

        Returns:
            `pass@k` over the problems, for each k that there are candidates for, and per problem how each candidate ended.

        Raises:
            ValueError: Nobody has allowed to run generated code, as `evaluate`'s own says it.
        """
        if os.environ.get("HF_ALLOW_CODE_EVAL") != "1":
            raise ValueError(
                "It runs Python code that the model writes. To allow that, set eval.confirm_run_unsafe_code=true."
            )
        programs = [
            f"{candidate}\n{test}"
            for candidates, test in zip(predictions, references, strict=True)
            for candidate in candidates
        ]
        ended = iter(run_programs(programs))
        problems = [[next(ended) for _ in candidates] for candidates in predictions]
        counts = [(len(outcomes), sum(one.passed for one in outcomes)) for outcomes in problems]
        ks = [number for number in k if all(number <= n for n, _ in counts)]
        scores = {f"pass@{number}": sum(pass_at_k(n, c, number) for n, c in counts) / len(counts) for number in ks}
        return scores, {number: _as_evaluate(outcomes) for number, outcomes in enumerate(problems)}


def _as_evaluate(outcomes: Sequence[Outcome]) -> list[tuple[int, dict[str, Any]]]:
    return [
        (number, {"passed": one.passed, "result": one.detail or "passed", "completion_id": number})
        for number, one in enumerate(outcomes)
    ]


def score_code_within_limits() -> None:
    """Have `evaluate.load("code_eval")` be ours: what lm_eval's code tasks call, in their own modules and by metric name."""
    import evaluate

    if getattr(evaluate.load, "gives_code_metric", False):
        return
    load: Callable[..., object] = evaluate.load

    def load_metric(path: str, *arguments: object, **options: object) -> object:
        if path.rpartition("/")[2] == CODE_METRIC:
            return CodeEval()
        # `evaluate` would run a folder of that name in the working directory before it looks for its own metric.
        if "/" not in path and (Path(path).is_file() or Path(path, f"{path}.py").is_file()):
            raise EvaluationError(
                f"The metric {path} would be the Python program {Path.cwd() / path}, which lies in the working directory. Rename it, or "
                "start from another folder."
            )
        return load(path, *arguments, **options)

    load_metric.gives_code_metric = True  # type: ignore[attr-defined]
    evaluate.load = load_metric


def runs_within_limits(task: ConfigurableTask) -> bool:
    """Whether a task scores code by this metric: one of its functions, or a function's module, holds it."""
    # lm_eval keeps a function's `__call__`, which knows the function as its `__self__`.
    given = [*task._metric_fn_list.values(), task.config.process_results]
    functions = [getattr(function, "__self__", function) for function in given]
    held = [value for function in functions for value in (function, *getattr(function, "__globals__", {}).values())]
    return any(isinstance(value, CodeEval) for value in held)


def prepare_code_tasks(tasks: Sequence[ConfigurableTask]) -> dict[str, Any]:
    """Print what holds the code that these tasks run; returns what the results keep of it."""
    sandbox = check_isolation()
    outside = [task.task_name for task in tasks if not runs_within_limits(task)]
    for name in outside:
        print(f"{name} runs the model's code by means of its own, OUTSIDE these limits, as lm_eval wrote it.")
    print(describe(sandbox), flush=True)
    return {"sandbox": sandbox, "outside_these_limits": outside}


def code_settings() -> dict[str, Any]:
    """What decides a score of generated code beside the model."""
    return asdict(LIMITS) | {"python": platform.python_version()}
