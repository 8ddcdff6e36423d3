"""Writes serve.sh for vLLM. Imports no torch."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from sft.errors import ExportError
from sft.export.source import Exported, read_config, text_config
from sft.plan.hardware import visible_gpus

SCRIPT = "serve.sh"
_DEFAULTS: dict[str, float] = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "repetition_penalty": 1.0}
"""What `generate` samples with where generation_config.json is silent. Servers have other defaults."""

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")


def sampling(folder: Path) -> dict[str, float]:
    """Sampling as transformers' `generate` does it in this folder; temperature 0 is greedy."""
    config = read_config(folder, "generation_config.json")
    if not config.get("do_sample"):
        return {"temperature": 0.0, "repetition_penalty": config.get("repetition_penalty") or 1.0}
    values = {name: config.get(name) for name in (*_DEFAULTS, "min_p")}
    return _DEFAULTS | {name: value for name, value in values.items() if value is not None}


def stop_tokens(folder: Path, tokenizer: Any) -> list[str]:
    """The tokens that generation stops at, as text."""
    ids = read_config(folder, "generation_config.json").get("eos_token_id")
    found = [tokenizer.eos_token_id, *(ids if isinstance(ids, list) else [ids])]
    return [tokenizer.convert_ids_to_tokens(one) for one in dict.fromkeys(found) if one is not None]


def context_length(source: Exported, requested: int | None) -> tuple[int, str]:
    """How many tokens a conversation may have, and why. Raises ExportError where more are requested than the model can."""
    trained, most = source.recipe.data.max_length, text_config(source).get("max_position_embeddings")
    note = f"trained on at most {trained} tokens (data.max_length)"
    if requested is None:
        if isinstance(most, int):
            return most, f"the model's context; {note}"
        return trained, "data.max_length: config.json states no context length"
    if requested < 1 or (isinstance(most, int) and requested > most):
        raise ExportError(f"--max-length {requested}: must be from 1 to {most}, the model's context length.")
    return requested, f"--max-length; {note}"


def tensor_parallel_size(config: dict[str, Any], requested: int | None, visible: int) -> tuple[int, str]:
    """How many GPUs serve the model, and why. They divide the attention heads, the width of the MLP, and the key-value heads.

    Raises ExportError where vLLM cannot split the model over as many as requested.

    >>> tensor_parallel_size({"num_attention_heads": 28, "num_key_value_heads": 4}, None, 8)[0]
    4
    """
    heads = int(config.get("num_attention_heads") or 1)
    keys = int(config.get("num_key_value_heads") or heads)
    divided = [heads, *(config[name] for name in _WIDTHS if isinstance(config.get(name), int))]
    sizes = [size for size in range(1, heads + 1) if not any(number % size for number in divided)]
    sizes = [size for size in sizes if keys % size == 0 or size % keys == 0]
    if requested is None and not visible:
        return 1, "this machine has no GPU; for a server with more: --gpus N"
    if requested is None:
        return max(
            size for size in sizes if size <= visible
        ), f"the most of {visible} visible GPUs that divide the model"
    if requested not in sizes:
        raise ExportError(
            f"--gpus {requested}: vLLM cannot split {heads} attention heads and an MLP of width {config.get('intermediate_size')} over "
            f"{requested} GPUs. Possible: {', '.join(map(str, sizes))}."
        )
    return requested, "--gpus"


def missing_sampling(folder: Path) -> dict[str, float]:
    """Sampling of `generate` that vLLM does not find in generation_config.json.

    vLLM does not read `do_sample`, and would sample with temperature 1 where `generate` is greedy. Where the file names no top_k,
    `generate` takes 50, and vLLM all tokens.
    """
    values, config = sampling(folder), read_config(folder, "generation_config.json")
    if values["temperature"] == 0:
        return {"temperature": 0.0}
    return {"top_k": values["top_k"]} if config.get("top_k") is None else {}


class VllmServer:
    """serve.sh: the command for vLLM with its reasons. vLLM is neither needed here nor started."""

    def __init__(self, source: Exported, gpus: int | None, max_length: int | None, name: str | None) -> None:
        config = text_config(source)
        self.name = name or source.title
        self.gpus, gpus_reason = tensor_parallel_size(config, gpus, len(visible_gpus()))
        self.length, length_reason = context_length(source, max_length)
        self.reasons = [
            f"--tensor-parallel-size {self.gpus}: {gpus_reason}",
            f"--max-model-len {self.length}: {length_reason}",
        ]
        self.dtype = str((config.get("dtype") if source.holds_model else None) or _DTYPES[source.precision])
        self.trust_remote_code = source.base.trust_remote_code
        body = {"model": self.name, "messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 64}
        header = "-H 'Content-Type: application/json'"
        self.request = f"curl -s http://localhost:8000/v1/chat/completions {header} -d {shlex.quote(json.dumps(body))}"

    def write(self, folder: Path, tokenizer: Any) -> None:
        """Write serve.sh, and the chat template where only the tokenizer holds it."""
        template = folder / "chat_template.jinja"
        if tokenizer.chat_template and not template.is_file():
            template.write_text(tokenizer.chat_template, encoding="utf-8")
        missing = missing_sampling(folder)
        command = [
            'exec vllm serve "$folder"',
            f"--served-model-name {shlex.quote(self.name)}",
            f"--dtype {self.dtype}",
            f"--tensor-parallel-size {self.gpus}",
            f"--max-model-len {self.length}",
            "--generation-config auto",
            *([f"--override-generation-config {shlex.quote(json.dumps(missing))}"] if missing else []),
            *(['--chat-template "$folder"/chat_template.jinja'] if template.is_file() else []),
            *(["--trust-remote-code"] if self.trust_remote_code else []),
            '"$@"',
        ]
        lines = [
            "#!/usr/bin/env bash",
            "# Serve the model in this folder with vLLM, which speaks OpenAI's protocol on port 8000. Needs a GPU and `pip install vllm`.",
            *(f"#   {reason}" for reason in self.reasons),
            "# Options given to this script are passed on. Try it from another terminal:",
            f"#   {self.request if template.is_file() else 'no chat template: use /v1/completions'}",
            "set -euo pipefail",
            'folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)',
            " \\\n  ".join(command),
        ]
        script = folder / SCRIPT
        script.write_text("\n".join(lines) + "\n", encoding="utf-8")
        script.chmod(0o755)

    def usage(self, folder: Path) -> str:
        """What the user reads."""
        serve = "Serve it on a machine with vLLM and a GPU (it was not started here):"
        return "\n".join([*self.reasons, serve, f"  bash {shlex.quote(str(folder / SCRIPT))}", f"  {self.request}"])
