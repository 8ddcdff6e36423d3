"""The suites: named sets of lm_eval's tasks, with what each leaves out and needs. Plain values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Suite:
    """A named set of tasks."""

    purpose: str
    tasks: tuple[str, ...]

    limit: int | None = None
    """Documents per task where eval.limit says nothing. Of the evaluation's settings, as eval.limit is."""

    without_template: tuple[str, ...] = ()
    """The tasks in their place where eval.apply_chat_template=false; none: the same."""

    needs: str = ""
    """What not every machine has."""

    left_out: str = ""
    """What one might expect in it, and why it is not there."""


SUITES: dict[str, Suite] = {
    # One that is asked by likelihood for knowledge and one for common sense, one that reasons aloud, one that follows
    # instructions: what fine-tuning breaks first, and no dataset that needs an account.
    "quick": Suite(
        "a first look: large losses show, small differences do not",
        ("arc_challenge", "hellaswag", "gsm8k", "ifeval"),
        limit=100,
    ),
    "chat": Suite(
        "answers that the model writes, without examples in the prompt",
        ("ifeval", "gsm8k_cot_zeroshot", "arc_challenge_chat"),
        left_out="truthfulqa_gen, whose metrics are scripts from the hub; math500, which needs lm_eval's extra `math`",
    ),
    # humaneval_instruct asks in words and takes the code out of the answer's ```, humaneval has the model go on with a file, which no chat
    # model does. mbpp shows by three examples what an answer looks like, in a chat as turns.
    "code": Suite(
        "programs that the model writes, run within limits: needs eval.confirm_run_unsafe_code=true",
        ("humaneval_instruct", "mbpp"),
        without_template=("humaneval", "mbpp"),
        left_out=(
            "mbpp_instruct, where lm_eval takes the first word of an answer for the name of its language: a right answer that begins "
            "with `def` or `import` counts as wrong"
        ),
    ),
    "leaderboard": Suite(
        "the tasks of the Open LLM Leaderboard",
        ("leaderboard_bbh", "leaderboard_gpqa", "leaderboard_ifeval", "leaderboard_mmlu_pro", "leaderboard_musr"),
        needs="for leaderboard_gpqa, an account on the hub with access to Idavidrein/gpqa, which is gated",
        left_out=(
            "leaderboard_math_hard, which lm_eval cannot import without math-verify, sympy and antlr4-python3-runtime==4.11 "
            "(its extra `math`); this project installs its extra `ifeval` alone"
        ),
    ),
}


def tasks_of(suite: str | None, apply_chat_template: bool) -> tuple[str, ...]:
    """The tasks of a suite.

    >>> tasks_of("code", True), tasks_of("code", False), tasks_of(None, True)
    (('humaneval_instruct', 'mbpp'), ('humaneval', 'mbpp'), ())
    """
    if suite is None:
        return ()
    chosen = SUITES[suite]
    return chosen.tasks if apply_chat_template else chosen.without_template or chosen.tasks


def limit_of(suite: str | None) -> int | None:
    """Documents per task where eval.limit says nothing."""
    return None if suite is None else SUITES[suite].limit


def describe_suite(suite: str, tasks: tuple[str, ...], limit: int | None) -> str:
    """A line or two for the user: what will be measured, and what not.

    >>> print(describe_suite("quick", ("gsm8k",), 100))
    eval.suite=quick (a first look: large losses show, small differences do not): gsm8k; the first 100 documents of each task.
    """
    chosen = SUITES[suite]
    documents = "all documents" if limit is None else f"the first {limit:,} documents of each task"
    line = f"eval.suite={suite} ({chosen.purpose}): {', '.join(tasks)}; {documents}."
    line += f"\n  Needs: {chosen.needs}." if chosen.needs else ""
    return line + (f"\n  Left out: {chosen.left_out}." if chosen.left_out else "")
