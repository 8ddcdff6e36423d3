"""The recipe's `eval` section."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from sft.recipe_section import Positive, Section


class Turn(Section):
    """A turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    """Who speaks."""

    content: str
    """What is said."""


class Chat(Section):
    """Prompts that base and tuned model answer after training, and what is looked at in the answers: docs/chat.md."""

    prompts: tuple[str | tuple[Turn, ...], ...] | None = Field(default=None, min_length=1)
    """What to ask: a text, or the turns of a conversation that the model goes on with. None: eight of ours; the demo has its own."""

    max_new_tokens: int = Field(default=512, gt=0)
    """Longest answer in tokens, where the context has room for it. An answer of that length has not ended."""


def _chat_branch(value: Any) -> str:
    return "[false]" if value is False else "[section]"


# One branch is tried and told of, not both. A name with a bracket is none of the recipe's keys: sft/recipe_file.py.
ChatOrNot = Annotated[
    Annotated[Chat, Tag("[section]")] | Annotated[Literal[False], Tag("[false]")], Discriminator(_chat_branch)
]


class Evaluation(Section):
    """What lm-evaluation-harness measures, on the base and on the tuned model alike."""

    tasks: tuple[str, ...] = ()
    """Names of lm_eval tasks or groups, and paths of task files. `builtin:demo` is the demo's task."""

    suite: Literal["leaderboard"] | None = None
    """A named set of tasks, besides `tasks`."""

    include_path: str | None = None
    """A folder of task files that `tasks` may name."""

    limit: int | None = Field(default=None, gt=0)
    """Documents per task; None for all."""

    num_fewshot: int | None = Field(default=None, ge=0)
    """Examples in the prompt; None for each task's own number."""

    batch_size: Positive | Literal["auto"] = "auto"
    """Documents per forward pass. `auto`: lm_eval's search on a GPU, 32 on a CPU."""

    parallelize: bool | Literal["auto"] = "auto"
    """Spread the layers over all visible GPUs, which compute one after another. `auto`: where the weights do not fit on one."""

    max_gen_toks: int | None = Field(default=None, gt=0)
    """Longest answer in tokens; None for each task's own, or 1,024 where it has none."""

    apply_chat_template: bool = True
    """Ask through the tuned model's chat template."""

    system_instruction: str | None = None
    """System prompt."""

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Number format of the weights. `auto`: the one that the tuned model was saved in, for both models."""

    seed: int = Field(default=0, ge=0)
    """Of few-shot sampling."""

    confirm_run_unsafe_code: bool = False
    """Allow tasks that run the code a model wrote, on this machine."""

    chat: ChatOrNot = Chat()
    """Have base and tuned model answer some prompts after training, and look whether the answers end. `false`: not."""

    every_steps: Positive | None = None
    """Optimizer steps between evaluations during training, on the live model: docs/metrics.md. None: after it only."""

    every_tasks: tuple[str, ...] = ()
    """What is measured then; empty: tasks and suite."""

    every_limit: Positive = 50
    """Documents per task then."""

    @property
    def during(self) -> Evaluation | None:
        """The evaluation during training, as a section of its own; None where there is none."""
        if self.every_steps is None:
            return None
        own = {"tasks": self.every_tasks, "suite": None} if self.every_tasks else {}
        return self.model_copy(update={**own, "limit": self.every_limit})

    @model_validator(mode="after")
    def _something_to_measure(self) -> Evaluation:
        if self.every_steps is None and self.every_tasks:
            raise ValueError(
                "every_tasks does nothing without every_steps: give the optimizer steps between evaluations"
            )
        if self.every_steps is not None and not (self.every_tasks or self.tasks or self.suite):
            raise ValueError(
                f"every_steps={self.every_steps}, and there is nothing to measure: give every_tasks, or tasks"
            )
        return self
