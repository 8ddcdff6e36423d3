"""Defines the section `eval` of a recipe: what to measure on the base and the tuned model, and how."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from sft.recipe.section import Positive, Section


class Server(Section):
    """An OpenAI-compatible server that serves the models; docs/evaluation-backends.md."""

    base_url: str | None = Field(default=None, pattern=r"^https?://[^\s/]+")
    """Address, including `/v1`, such as `http://127.0.0.1:8000/v1`."""

    base_url_of_base: str | None = Field(default=None, pattern=r"^https?://[^\s/]+")
    """Address of the server for the base model, if different."""

    base: str | None = None
    """Served name of a run's base model. None: its name or path."""

    tuned: str | None = None
    """Served name of a run's tuned model. None: the path of the run's `final`."""

    model: str | None = None
    """Served name of a single model. None: the name on the command line."""

    api: Literal["completions", "chat"] = "completions"
    """`completions`: build prompts here and send token ids. `chat`: send messages, and the server builds the prompt."""

    num_concurrent: Positive = 8
    """Concurrent requests."""

    timeout: Positive = 300
    """Seconds after which a request fails. Each is sent up to three times."""

    api_key_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Environment variable that holds the server's key, which is never written to a file. None: send no key."""


class Turn(Section):
    """A turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    """Who speaks."""

    content: str
    """The text."""


class Chat(Section):
    """Prompts that the base and the tuned model answer after training; docs/chat.md."""

    prompts: tuple[str | tuple[Turn, ...], ...] | None = Field(default=None, min_length=1)
    """Each is a text, or the turns of a conversation to continue. None: eight of ours; the demo has its own."""

    max_new_tokens: int = Field(default=512, gt=0)
    """Tokens of the longest answer, if the context has room. An answer that reaches this has not stopped on its own."""


def _chat_branch(value: Any) -> str:
    return "[false]" if value is False else "[section]"


# pydantic validates one branch, so that a mistake is reported once. A tag with a bracket is no key: sft/recipe/load.py.
ChatOrNot = Annotated[
    Annotated[Chat, Tag("[section]")] | Annotated[Literal[False], Tag("[false]")], Discriminator(_chat_branch)
]


class Gate(Section):
    """Requirements for the tuned model; if it fails one, the exit status is 3. Names are tasks, `overall`, or `task/metric`."""

    max_regression: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """Largest allowed drop from base to tuned by task, in the unit of its deciding metric: `{ifeval: 0.02, default: 0.05}`. `default`
    applies to tasks that are not named."""

    require: dict[str, float] = Field(default_factory=dict)
    """Minimum score of the tuned model by task: `{gsm8k: 0.40}`."""

    judge_by: Literal["score", "evidence"] = "score"
    """`score`: a larger drop fails, even one by chance. `evidence`: it fails only if its verdict is REGRESSED."""

    @model_validator(mode="after")
    def _requires_something(self) -> Gate:
        if not (self.max_regression or self.require):
            raise ValueError("requires nothing; name a task in max_regression or require")
        if "default" in self.require:
            raise ValueError("require has no `default`: name each task with its minimum score")
        return self


# No backend, since the model in training answers; no gate; and no generated code runs beside training.
_KEPT_DURING_TRAINING = (
    "include_path",
    "num_fewshot",
    "batch_size",
    "max_length",
    "max_gen_toks",
    "apply_chat_template",
    "system_instruction",
    "seed",
    "confirm_run_task_code",
)


class Evaluation(Section):
    """What lm-evaluation-harness measures, with the same settings for the base and the tuned model."""

    tasks: tuple[str, ...] = ()
    """Names of lm_eval tasks or groups, and paths of task files. `builtin:demo`: the demo's task."""

    suite: Literal["quick", "chat", "code", "leaderboard"] | None = None
    """A named set of tasks, in addition to `tasks`; docs/evaluation.md."""

    include_path: str | None = None
    """A folder of task files that `tasks` may name."""

    limit: int | None = Field(default=None, gt=0)
    """Documents per task. None: all, or the suite's number (100 for `quick`)."""

    num_fewshot: int | None = Field(default=None, ge=0)
    """Few-shot examples in the prompt. None: each task's own number."""

    batch_size: Positive | Literal["auto"] = "auto"
    """Documents per forward pass on each process. `auto`: lm_eval finds it on a GPU; 32 on a CPU. A server decides it itself."""

    backend: Literal["hf", "vllm", "server"] = "hf"
    """What runs the model: transformers, or a running server. `vllm` is refused: serve the model with vLLM and use `server`."""

    server: Server = Server()
    """The server, for `backend: server`."""

    tensor_parallel_size: Positive | None = None
    """No effect: an option of `vllm serve`."""

    data_parallel_size: Positive | None = None
    """No effect: an option of `vllm serve`."""

    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """No effect: an option of `vllm serve`."""

    max_length: Positive | None = None
    """Tokens of prompt and answer together. None: the model's context length."""

    parallelize: bool | Literal["auto"] = "auto"
    """Place the layers on all visible GPUs, which then compute one after another. `auto`: if the weights do not fit on one."""

    processes: Positive | Literal["auto"] = "auto"
    """Processes that share the documents, each with a full model. `auto`: one per visible GPU, if the model fits on one."""

    max_gen_toks: int | None = Field(default=None, gt=0)
    """Tokens of the longest answer. None: each task's own limit, or 1,024 if it has none."""

    apply_chat_template: bool = True
    """Apply the tuned model's chat template to prompts."""

    base_template: Literal["tuned", "own"] = "tuned"
    """Prompts of a base model with no chat template or a different one: through the tuned model's, or its own."""

    base_cache: bool = True
    """Reuse base model results that another run in this output_dir measured with the same settings."""

    system_instruction: str | None = None
    """System prompt."""

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Dtype of the weights. `auto`: the one the tuned model was saved in, for both models."""

    seed: int = Field(default=0, ge=0)
    """Seed of few-shot sampling."""

    confirm_run_unsafe_code: bool = False
    """Allow tasks that run model-written code on this machine, in a sandbox; docs/evaluation-code.md."""

    confirm_run_task_code: bool = False
    """Allow the Python code of your own task files: `!function`, and metrics loaded from the hub by name."""

    chat: ChatOrNot = Chat()
    """Have base and tuned model answer some prompts after training, and check that answers stop on their own. `false`: skip this."""

    gate: Gate | None = None
    """Requirements for the tuned model, for scripts and CI."""

    contamination: bool | Annotated[int, Field(ge=4)] = True
    """Search the training data for the tasks' documents, by n-grams of this many words; true is 13."""

    every_steps: Positive | None = None
    """Optimizer steps between evaluations of the live model during training, whatever `backend` says; docs/evaluation.md. None: only after
    training."""

    every_tasks: tuple[str, ...] = ()
    """Tasks of those evaluations. Empty: tasks and suite."""

    every_limit: Positive = 50
    """Documents per task in those evaluations."""

    @property
    def during(self) -> Evaluation | None:
        """The evaluation during training as a section of its own, or None."""
        if self.every_steps is None:
            return None
        kept = {name: getattr(self, name) for name in _KEPT_DURING_TRAINING if name in self.model_fields_set}
        requested = {"tasks": self.every_tasks} if self.every_tasks else {"tasks": self.tasks, "suite": self.suite}
        return Evaluation(**kept, **requested, limit=self.every_limit)

    @model_validator(mode="after")
    def _every_steps_measures_something(self) -> Evaluation:
        if self.every_steps is None and self.every_tasks:
            raise ValueError(
                "every_tasks has no effect without every_steps: set the optimizer steps between evaluations"
            )
        if self.every_steps is not None and not (self.every_tasks or self.tasks or self.suite):
            raise ValueError(
                f"every_steps={self.every_steps}, but there is nothing to measure: set every_tasks or tasks"
            )
        return self
