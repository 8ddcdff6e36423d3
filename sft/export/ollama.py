"""Writes an Ollama model: a Modelfile whose template in Go renders what the model's chat template renders. Ollama is not needed here.

What Ollama imports is read off its source (convert/convert.go and convert/tokenizer.go of github.com/ollama/ollama, November 2026).
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sft.data.render import with_fixed_date
from sft.errors import ExportError
from sft.export.gguf import CONVERTER, GGUF, GgufModel
from sft.export.go_template import Markup, Message, read_markup
from sft.export.serving import context_length, sampling, stop_tokens
from sft.export.source import Exported, read_config, text_config

ROPE_TYPES = dict.fromkeys(
    (
        "MixtralForCausalLM GemmaForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM Qwen2ForCausalLM Olmo3ForCausalLM CohereForCausalLM "
        "GptOssForCausalLM DeepseekV3ForCausalLM Glm4MoeLiteForCausalLM Lfm2ForCausalLM Ministral3ForCausalLM"
    ).split(),
    ("default",),
) | {"LlamaForCausalLM": ("default", "linear", "llama3"), "Phi3ForCausalLM": ("default", "longrope")}
"""Text models that Ollama imports from safetensors, and the rope types that it keeps; others it silently drops."""

_USE_GGUF = f"llama.cpp's {CONVERTER} may know it: --gguf."

_DIFFERENCES = (
    "Ollama's template is simpler than the tokenizer's: it ignores tools, and keeps white space around messages and reasoning in earlier "
    "answers. Where the tokenizer's writes today's date, it writes the fixed one of the training."
)


class OllamaModel:
    """Modelfile and template. Raises ExportError where Ollama imports no such model, or llama.cpp is missing."""

    def __init__(self, source: Exported, max_length: int | None, name: str | None, gguf: bool) -> None:
        self.source, self.name = source, (name or source.title).lower()
        self.length, self.length_reason = context_length(source, max_length)
        self.gguf = GgufModel(source, name) if gguf else None
        if self.gguf is None:
            check_architecture(text_config(source))

    def write(self, folder: Path, tokenizer: Any) -> None:
        """Write the Modelfile, and with --gguf the GGUF file, into a folder that holds the model.

        Raises ExportError where the chat template cannot be written in Go, or the conversion failed.
        """
        if self.gguf is not None:
            self.gguf.write(folder, tokenizer)
        else:
            check_vocabulary(folder)
        markup = chat_markup(tokenizer, folder)
        system = self.source.recipe.eval.system_instruction
        if system is not None and not markup.has_system:
            raise ExportError(
                "eval.system_instruction is set, and the chat template has no place for it: Ollama would drop it."
            )
        values = sampling(folder)
        values["repeat_penalty"] = values.pop("repetition_penalty")
        lines = [
            f"# ollama create {shlex.quote(self.name)} -f Modelfile",
            f"# {_DIFFERENCES}",
            *([] if markup.has_system else ["# System messages are dropped: the chat template has no place for them."]),
            f"FROM {'./' + GGUF if self.gguf else '.'}",
            f'TEMPLATE """{markup.go()}"""',
            *(f"PARAMETER stop {_quoted(token)}" for token in stop_tokens(folder, tokenizer)),
            *(f"PARAMETER {name} {value:.12g}" for name, value in sorted(values.items())),
            f"# num_ctx: {self.length_reason}",
            f"PARAMETER num_ctx {self.length}",
            *([f"SYSTEM {_quoted(system)}"] if system else []),
        ]
        (folder / "Modelfile").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def usage(self, folder: Path) -> str:
        """What the user reads."""
        name = shlex.quote(self.name)
        command = f"  cd {shlex.quote(str(folder))} && ollama create {name} -f Modelfile && ollama run {name}"
        return f"{_DIFFERENCES}\nImport it on a machine with Ollama (it was not started here):\n{command}"


def check_architecture(config: dict[str, Any]) -> None:
    """Raise ExportError for what Ollama does not import from safetensors, or imports with other positions."""
    name = (config.get("architectures") or ["none"])[0]
    if name not in ROPE_TYPES:
        raise ExportError(f"Ollama does not import {name} from safetensors, but {', '.join(ROPE_TYPES)}. {_USE_GGUF}")
    rope = (config.get("rope_parameters") or config.get("rope_scaling") or {}).get("rope_type", "default")
    if rope not in ROPE_TYPES[name]:
        kept = " and ".join(ROPE_TYPES[name])
        raise ExportError(
            f"The model's rope_type is {rope!r}, and Ollama's import of {name} silently keeps {kept} only. {_USE_GGUF}"
        )


def check_vocabulary(folder: Path) -> None:
    """Raise ExportError for SentencePiece without tokenizer.model: Ollama would read tokenizer.json as one of GPT-2's kind."""
    model = read_config(folder, "tokenizer.json").get("model") or {}
    if not (folder / "tokenizer.model").is_file() and (model.get("type") != "BPE" or model.get("byte_fallback")):
        raise ExportError(
            f"tokenizer.json holds a SentencePiece vocabulary ({model.get('type')}), which Ollama reads from tokenizer.model only, and "
            f"there is none. {_USE_GGUF}"
        )


def chat_markup(tokenizer: Any, folder: Path) -> Markup:
    """What the chat template writes.

    Raises ExportError where there is no chat template, or Go's would render another prompt.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    if not tokenizer.chat_template:
        raise ExportError("The model has no chat template, so there is none to write for Ollama. Use --to merged.")
    template, bos = with_fixed_date(tokenizer.chat_template), tokenizer.bos_token or ""
    adds_bos = bool(bos) and read_config(folder, "tokenizer_config.json").get("add_bos_token") is True

    def render(messages: Sequence[Message]) -> str:
        variables = {"chat_template": template, "add_generation_prompt": True, **tokenizer.special_tokens_map}
        try:
            text: str = render_jinja_template([list(messages)], **variables)[0][0]
        except Exception as error:  # a template is somebody else's program
            raise ValueError(f"it refuses a conversation: {error}") from None
        if adds_bos and not text.startswith(bos):
            raise ValueError(f"Ollama begins each prompt with {bos} (add_bos_token), and it does not")
        return text.removeprefix(bos) if adds_bos else text

    try:
        return read_markup(render)
    except ValueError as error:
        raise ExportError(
            f"The chat template cannot be written for Ollama: {error}. Use --to vllm, which reads it itself."
        ) from None


def _quoted(text: str) -> str:
    if '"""' in text:
        raise ExportError(f"A Modelfile cannot hold three quotes in a row, and {text[:60]!r} does.")
    return f'"""{text}"""'
