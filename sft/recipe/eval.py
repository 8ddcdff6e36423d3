"""The recipe's `eval` section."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from sft.recipe.section import Positive, Section


class Server(Section):
    """An OpenAI-compatible server that has the models; docs/evaluation-backends.md."""

    base_url: str | None = Field(default=None, pattern=r"^https?://[^\s/]+")
    """Address with its `/v1`, such as `http://127.0.0.1:8000/v1`."""

    base_url_of_base: str | None = Field(default=None, pattern=r"^https?://[^\s/]+")
    """Address of the server that has the base model, where that is another one."""

    base: str | None = None
    """Name that the base model of a run is served under. None: its name or path."""

    tuned: str | None = None
    """Name that the tuned model of a run is served under. None: the path of the run's `final`."""

    model: str | None = None
    """Name that a single model is served under. None: what was named to be measured."""

    api: Literal["completions", "chat"] = "completions"
    """`completions`: prompts are made here and sent as token ids. `chat`: messages are sent, and the server makes the prompt."""

    num_concurrent: Positive = 8
    """Requests under way at once."""

    timeout: Positive = 300
    """Seconds until a request without an answer has failed; it is sent three times."""

    api_key_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Environment variable with the server's key. None: no key is sent. The key itself is never written down."""


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


# One branch is tried and told of, not both. A name with a bracket is none of the recipe's keys: sft/recipe/load.py.
ChatOrNot = Annotated[
    Annotated[Chat, Tag("[section]")] | Annotated[Literal[False], Tag("[false]")], Discriminator(_chat_branch)
]


class Gate(Section):
    """What the tuned model must hold for exit status 0; else it is 3. Names are tasks, `overall`, or `task/metric`."""

    max_regression: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """Largest drop from base to tuned by task, in the unit of the metric that decides: `{ifeval: 0.02, default: 0.05}`; `default` is
    for each task that is not named."""

    require: dict[str, float] = Field(default_factory=dict)
    """Score that the tuned model must reach, by task: `{gsm8k: 0.40}`."""

    judge_by: Literal["score", "evidence"] = "score"
    """`score`: a larger drop fails, be it by chance. `evidence`: only one whose verdict is REGRESSED, so `default: 0` is any such."""

    @model_validator(mode="after")
    def _asks_for_something(self) -> Gate:
        if not (self.max_regression or self.require):
            raise ValueError("asks for nothing; name a task in max_regression or require")
        if "default" in self.require:
            raise ValueError("require has no `default`: name each task with the score that it must reach")
        return self


# No backend, since the live model answers; no gate; and no generated code is run beside a training.
_ALSO_DURING = (
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
    """What lm-evaluation-harness measures, on the base and on the tuned model alike."""

    tasks: tuple[str, ...] = ()
    """Names of lm_eval tasks or groups, and paths of task files. `builtin:demo` is the demo's task."""

    suite: Literal["quick", "chat", "code", "leaderboard"] | None = None
    """A named set of tasks, besides `tasks`: docs/evaluation-suites.md."""

    include_path: str | None = None
    """A folder of task files that `tasks` may name."""

    limit: int | None = Field(default=None, gt=0)
    """Documents per task; None for all, or for the suite's number: `quick` has 100."""

    num_fewshot: int | None = Field(default=None, ge=0)
    """Examples in the prompt; None for each task's own number."""

    batch_size: Positive | Literal["auto"] = "auto"
    """Documents per forward pass, on each process. `auto`: lm_eval's search on a GPU, 32 on a CPU."""

    backend: Literal["hf", "vllm", "server"] = "hf"
    """What the model answers with: transformers, vLLM in this process (needs its extra), or a server that runs already."""

    server: Server = Server()
    """Which server, for `backend: server`."""

    tensor_parallel_size: Positive | None = None
    """GPUs that share each layer of one model, for `backend: vllm`. None: one."""

    data_parallel_size: Positive | None = None
    """Copies of the model that share the documents, for `backend: vllm`; needs the package ray. None: one."""

    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Share of each GPU's memory that vLLM takes, for `backend: vllm`. None: vLLM's own."""

    max_length: Positive | None = None
    """Tokens of prompt and answer together. None: the model's context."""

    parallelize: bool | Literal["auto"] = "auto"
    """Spread the layers over all visible GPUs, which compute one after another. `auto`: where the weights do not fit on one."""

    processes: Positive | Literal["auto"] = "auto"
    """Processes that share the documents, each with the whole model. `auto`: one for each visible GPU, where the model fits on one."""

    max_gen_toks: int | None = Field(default=None, gt=0)
    """Longest answer in tokens; None for each task's own, or 1,024 where it has none."""

    apply_chat_template: bool = True
    """Ask through the tuned model's chat template."""

    base_template: Literal["tuned", "own"] = "tuned"
    """How a base model without chat template (or with another one) is asked: through the tuned model's, or with its own prompts."""

    base_cache: bool = True
    """Use results of the base model that another run of this output_dir has measured under the same settings; false measures it again."""

    system_instruction: str | None = None
    """System prompt."""

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Number format of the weights. `auto`: the one that the tuned model was saved in, for both models."""

    seed: int = Field(default=0, ge=0)
    """Of few-shot sampling."""

    confirm_run_unsafe_code: bool = False
    """Allow tasks that run the code a model wrote, on this machine, within limits: docs/evaluation-code.md."""

    confirm_run_task_code: bool = False
    """Allow the Python code that task files of one's own bring along: `!function`, and metrics that are loaded by a name on the hub."""

    chat: ChatOrNot = Chat()
    """Have base and tuned model answer some prompts after training, and look whether the answers end. `false`: not."""

    gate: Gate | None = None
    """What the tuned model must hold, for scripts and CI."""

    contamination: bool | Annotated[int, Field(ge=4)] = True
    """Look for the tasks' documents in the training data, by so many words in a row; true is 13."""

    every_steps: Positive | None = None
    """Optimizer steps between evaluations during training, on the live model, whatever `backend` says: docs/metrics.md. None: after it
    only."""

    every_tasks: tuple[str, ...] = ()
    """What is measured then; empty: tasks and suite."""

    every_limit: Positive = 50
    """Documents per task then."""

    @property
    def during(self) -> Evaluation | None:
        """The evaluation during training, as a section of its own; None where there is none."""
        if self.every_steps is None:
            return None
        kept = {name: getattr(self, name) for name in _ALSO_DURING if name in self.model_fields_set}
        asked = {"tasks": self.every_tasks} if self.every_tasks else {"tasks": self.tasks, "suite": self.suite}
        return Evaluation(**kept, **asked, limit=self.every_limit)

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
