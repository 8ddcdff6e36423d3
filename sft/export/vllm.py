"""Serving with vLLM: the command, with its reasons, as a script in the folder. vLLM itself is not needed here, and is not started."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft.errors import ExportError
from sft.export.generation import config_folder, resolve_context, sampling, text_config
from sft.export.source import Exported, read_config
from sft.plan.hardware import visible_gpus

SCRIPT = "serve.sh"
_DTYPES = {"float32": "float32", "float16": "float16", "bfloat16": "bfloat16"}
_WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
"""Of MLPs, in config.json; each GPU has an equal part of the width."""

_TRAINED_IN = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True)
class Serving:
    """What vLLM is told."""

    name: str
    gpus: int
    gpus_reason: str
    length: int
    length_reason: str
    dtype: str
    remote_code: bool

    def command(self, folder: str, override: dict[str, float], template: bool) -> list[str]:
        """One option a line.

        Args:
            folder: As the shell writes it.
            override: Sampling that vLLM would not find in the folder.
            template: The folder has a chat template.
        """
        lines = [
            f"vllm serve {folder}",
            f"--served-model-name {shlex.quote(self.name)}",
            f"--dtype {self.dtype}",
            f"--tensor-parallel-size {self.gpus}",
            f"--max-model-len {self.length}",
            "--generation-config auto",
        ]
        if override:
            lines.append(f"--override-generation-config {shlex.quote(json.dumps(override))}")
        if template:
            lines.append(f"--chat-template {folder}/chat_template.jinja")
        if self.remote_code:
            lines.append("--trust-remote-code")
        return lines

    def request(self) -> str:
        """The line that tries it."""
        body = {"model": self.name, "messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 64}
        return (
            "curl -s http://localhost:8000/v1/chat/completions -H 'Content-Type: application/json' "
            f"-d {shlex.quote(json.dumps(body))}"
        )

    def told(self, folder: Path) -> str:
        """What the user reads."""
        return "\n".join(
            [
                f"--tensor-parallel-size {self.gpus}: {self.gpus_reason}",
                f"--max-model-len {self.length}: {self.length_reason}",
                "To serve it, on a machine with vLLM and a GPU (it was not started here):",
                f"  bash {shlex.quote(str(folder / SCRIPT))}",
                f"  {self.request()}",
            ]
        )


def tensor_parallel_sizes(config: dict[str, Any]) -> list[int]:
    """Numbers of GPUs that vLLM can share a model out over.

    They divide the attention heads and the width of the MLP, and the key-value heads or are their multiple.

    >>> tensor_parallel_sizes({"num_attention_heads": 28, "num_key_value_heads": 4})
    [1, 2, 4, 28]
    >>> tensor_parallel_sizes({"num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944})
    [1, 2, 4]
    """
    heads = int(config.get("num_attention_heads") or 1)
    of_keys = int(config.get("num_key_value_heads") or heads)
    dividing = [count for count in range(1, heads + 1) if heads % count == 0]
    widths = [config.get(name) for name in _WIDTHS]
    dividing = [count for count in dividing if all(not isinstance(one, int) or one % count == 0 for one in widths)]
    return [count for count in dividing if of_keys % count == 0 or count % of_keys == 0]


def resolve_gpus(config: dict[str, Any], asked: int | None, here: int) -> tuple[int, str]:
    """How many GPUs share the model, and why.

    Args:
        config: The model's.
        asked: --gpus.
        here: Visible on this machine.

    Raises:
        ExportError: As many as were asked for cannot.
    """
    sizes = tensor_parallel_sizes(config)
    of_keys = config.get("num_key_value_heads") or config.get("num_attention_heads")
    heads = f"{config.get('num_attention_heads')} attention heads, {of_keys} of keys"
    if asked is not None:
        largest = max((size for size in sizes if size <= asked), default=None)
        if asked not in sizes:
            remedy = f"Set --gpus {largest}, or one of {', '.join(map(str, sizes))}." if largest else "Set 1 or more."
            width = f"the width of the MLP ({config.get('intermediate_size', 'not recorded')})"
            raise ExportError(
                f"--gpus {asked}: a model with {heads} cannot be shared out over {asked} GPUs: their number must divide the heads "
                f"and {width}. {remedy}"
            )
        return asked, f"as asked for; it divides the model's heads ({heads})"
    if not here:
        return 1, "no GPU is visible on this machine; say how many the other has: --gpus N"
    size = max(size for size in sizes if size <= here)
    most = "all" if size == here else f"the most of {here}"
    return size, f"{most} visible GPUs that divide the model's heads ({heads})"


def resolve_serving(source: Exported, gpus: int | None, length: int | None, name: str | None) -> Serving:
    """Decide everything about the command.

    Raises:
        ExportError: What was asked for cannot be.
    """
    config = text_config(config_folder(source))
    size, reason = resolve_gpus(config, gpus, len(visible_gpus()))
    context = resolve_context(source, length)
    saved = config.get("dtype") if source.holds_model else None
    dtype = _DTYPES.get(str(saved), _TRAINED_IN[source.precision])
    return Serving(
        name or source.title, size, reason, context.length, context.reason, dtype, source.base.trust_remote_code
    )


def not_found_by_vllm(folder: Path) -> dict[str, float]:
    """Sampling of `generate` that vLLM does not find in generation_config.json.

    vLLM reads no `do_sample`, and would draw with temperature 1 where `generate` is greedy; where a file names no top_k, `generate` takes
    50, and vLLM all tokens.

    Args:
        folder: Of the model.
    """
    values, config = sampling(folder), read_config(folder, "generation_config.json")
    if values["temperature"] == 0:
        return {"temperature": 0.0}
    return {"top_k": values["top_k"]} if config.get("top_k") is None else {}


def write_script(serving: Serving, folder: Path, tokenizer: Any) -> None:
    """Write serve.sh, and check that the folder has what vLLM reads.

    Raises:
        ExportError: Something is missing.
    """
    missing = [
        name
        for name in ("config.json", "generation_config.json", "tokenizer_config.json")
        if not (folder / name).is_file()
    ]
    if missing:
        raise ExportError(
            f"vLLM needs {', '.join(missing)}, and what the run has saved holds none. Nothing was exported."
        )
    template = (folder / "chat_template.jinja").is_file()
    if tokenizer.chat_template and not template:
        (folder / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")
        template = True
    lines = serving.command('"$folder"', not_found_by_vllm(folder), template)
    request = serving.request() if template else "no chat template: ask /v1/completions"
    text = [
        "#!/usr/bin/env bash",
        "# Serve the model in this folder with vLLM, which speaks OpenAI's protocol on port 8000. Needs a GPU and vLLM (pip install vllm).",
        f"#   --tensor-parallel-size {serving.gpus}: {serving.gpus_reason}",
        f"#   --max-model-len {serving.length}: {serving.length_reason}",
        "# More options can be given to this script. From another terminal:",
        f"#   {request}",
        "set -euo pipefail",
        'folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)',
        "exec " + " \\\n  ".join([*lines, '"$@"']),
        "",
    ]
    script = folder / SCRIPT
    script.write_text("\n".join(text), encoding="utf-8")
    script.chmod(0o755)
