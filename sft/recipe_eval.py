"""The recipe's `eval` section."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sft.recipe_section import Positive, Section


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
