"""Stands where the package vllm would: the names that lm_eval takes from it, answering with transformers on a CPU.

It shows what reaches the engine and what becomes of its answers. That the real vLLM takes the same is not tested.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.tiny_server import Served

VERSION = "0.30.0"
MODULES = (
    *("vllm", "vllm.lora", "vllm.lora.request", "vllm.tokenizers", "vllm.renderers", "vllm.renderers.hf"),
    *("vllm.engine", "vllm.engine.arg_utils", "ray"),
)


@dataclass
class SamplingParams:
    """The fields of vLLM's that are given here, with its defaults."""

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True


class LLM:
    """vLLM's engine: takes the arguments that its EngineArgs has, of those that are given here."""

    made: list[LLM] = []  # noqa: RUF012

    def __init__(
        self,
        model: str,
        tokenizer: str,
        max_model_len: int,
        generation_config: str = "auto",
        gpu_memory_utilization: float = 0.9,
        tensor_parallel_size: int = 1,
        **others: Any,
    ) -> None:
        known = "revision dtype tokenizer_mode tokenizer_revision trust_remote_code max_num_seqs quantization seed enable_lora"
        assert others.keys() <= {*known.split(), "max_lora_rank"}, others
        self.arguments = {
            "generation_config": generation_config,
            "tensor_parallel_size": tensor_parallel_size,
            **others,
        }
        self.arguments |= {
            "tokenizer": tokenizer,
            "max_model_len": max_model_len,
            "gpu_memory_utilization": gpu_memory_utilization,
        }
        self.served = Served(model)
        self.asked: list[SamplingParams] = []
        self.ended = False
        core = SimpleNamespace(shutdown=lambda: setattr(self, "ended", True))
        self.llm_engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=max_model_len), engine_core=core)
        LLM.made.append(self)

    def generate(
        self, prompts: list[dict[str, list[int]]], sampling_params: list[SamplingParams], **_: Any
    ) -> list[Any]:
        self.asked += sampling_params
        return [
            self._answer(one["prompt_token_ids"], asked) for one, asked in zip(prompts, sampling_params, strict=True)
        ]

    def _answer(self, prompt: list[int], asked: SamplingParams) -> Any:
        assert len(prompt) + asked.max_tokens <= self.llm_engine.model_config.max_model_len
        text, ids, _ = self.served.answer(prompt, asdict(asked))
        output = SimpleNamespace(outputs=[SimpleNamespace(text=text, token_ids=ids)], prompt_logprobs=None)
        if asked.prompt_logprobs is not None:
            scores, _ = self.served.score(prompt, as_ids=True)
            named = [
                None if one is None else {int(name.split(":")[1]): value for name, value in one.items()}
                for one in scores["top_logprobs"]
            ]
            output.prompt_logprobs = [
                None if one is None else {token: SimpleNamespace(logprob=value) for token, value in one.items()}
                for one in named[: len(prompt)]
            ]
        return output


def _get_tokenizer(name: str, tokenizer_mode: str, trust_remote_code: bool, revision: str | None, **more: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name, **more)


def install(folder: Path) -> None:
    """Put it where `import vllm` looks.

    Args:
        folder: On sys.path; gets the metadata that tell the version.
    """
    metadata = folder / f"vllm-{VERSION}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}\n")
    for name in MODULES:
        module = sys.modules[name] = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__path__ = []
    vllm: Any = sys.modules["vllm"]
    vllm.LLM, vllm.SamplingParams = LLM, SamplingParams
    vllm.TokensPrompt = lambda prompt_token_ids: {"prompt_token_ids": prompt_token_ids}
    tokenizers: Any = sys.modules["vllm.tokenizers"]
    tokenizers.get_tokenizer = _get_tokenizer
    renderers: Any = sys.modules["vllm.renderers.hf"]
    renderers.resolve_chat_template = lambda **_: None
    lora: Any = sys.modules["vllm.lora.request"]
    lora.LoRARequest = type("LoRARequest", (), {})
    arguments: Any = sys.modules["vllm.engine.arg_utils"]
    arguments.EngineArgs = lambda **_: SimpleNamespace(create_model_config=lambda: None)
    ray: Any = sys.modules["ray"]
    ray.remote = lambda **_: lambda function: SimpleNamespace(remote=function)
    ray.get, ray.shutdown = lambda results: results, lambda: None
    LLM.made.clear()


def remove() -> None:
    """As if it had not been there; lm_eval's module that has imported it stays, and is used by the next test."""
    for name in MODULES:
        sys.modules.pop(name, None)
