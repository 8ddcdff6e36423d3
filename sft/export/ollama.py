"""An Ollama model: the Modelfile, with the chat template in Go, compared with the one of Jinja. Ollama itself is not needed here.

What Ollama imports is read off its source (convert/convert.go and convert/tokenizer.go on github.com/ollama/ollama, as of November 2026).
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft.errors import ExportError
from sft.export.generation import Context, config_folder, resolve_context, sampling, stop_tokens
from sft.export.gguf import CONVERTER, GGUF, check_convertible, convert, find_converter
from sft.export.go_template import Agreement, Around, agree, read_around, write_go
from sft.export.source import Exported, read_config

ARCHITECTURES = tuple(
    "LlamaForCausalLM MixtralForCausalLM GemmaForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM Phi3ForCausalLM Qwen2ForCausalLM "
    "Olmo3ForCausalLM CohereForCausalLM GptOssForCausalLM DeepseekV3ForCausalLM Glm4MoeLiteForCausalLM Lfm2ForCausalLM "
    "Ministral3ForCausalLM".split()
)
"""Of models of text alone, those that Ollama imports from safetensors."""

_ROTATIONS = {"LlamaForCausalLM": ("default", "linear", "llama3"), "Phi3ForCausalLM": ("default", "longrope")}
"""Ways to rotate positions that Ollama's import takes over; elsewhere the plain one."""

_WITH_GGUF = f"With llama.cpp installed its {CONVERTER} may know it: --gguf."
_PARAMETERS = {"repetition_penalty": "repeat_penalty"}


@dataclass(frozen=True)
class Import:
    """What Ollama is told, as far as it is known before the model is made."""

    source: Exported
    name: str
    context: Context
    converter: Path | None
    """llama.cpp's program; None: Ollama imports the safetensors itself."""

    def write(self, folder: Path, tokenizer: Any) -> None:
        """Write the Modelfile into a folder that holds the model.

        Raises:
            ExportError: The chat template cannot be one of Go's, or the conversion failed.
        """
        if self.converter is not None:
            convert(self.converter, folder, tokenizer)
        else:
            _check_vocabulary(folder)
        around, agreement = translate(tokenizer, folder)
        (folder / "Modelfile").write_text(self._modelfile(folder, tokenizer, around, agreement), encoding="utf-8")

    def _modelfile(self, folder: Path, tokenizer: Any, around: Around, agreement: Agreement) -> str:
        values = {_PARAMETERS.get(name, name): value for name, value in sampling(folder).items()}
        values.setdefault("repeat_penalty", 1.0)
        system = self.source.recipe.eval.system_instruction
        if system is not None and around.first_system is None:
            raise ExportError(
                "eval.system_instruction is set, and the chat template has no place for a system message: Ollama "
                "would drop it. Nothing was "
                "exported."
            )
        lines = [
            f"# ollama create {shlex.quote(self.name)} -f Modelfile",
            f"# The template writes what the model's own chat template writes, compared on {agreement.conversations} "
            f"kinds of conversations.",
            *(f"# Not the same: {one}." for one in agreement.differs),
            "# Tools are not in it: Ollama says so when they are asked for.",
            f"FROM {'./' + GGUF if self.converter else '.'}",
            f'TEMPLATE """{write_go(around)}"""',
            *(f"PARAMETER stop {_quoted(token)}" for token in stop_tokens(folder, tokenizer)),
            *(f"PARAMETER {name} {value:.12g}" for name, value in sorted(values.items())),
            f"# num_ctx: {self.context.reason}",
            f"PARAMETER num_ctx {self.context.length}",
            *([f"SYSTEM {_quoted(system)}"] if system else []),
        ]
        return "\n".join(lines) + "\n"

    def told(self, folder: Path) -> str:
        """What the user reads."""
        notes = [
            line[2:]
            for line in (folder / "Modelfile").read_text(encoding="utf-8").splitlines()
            if line.startswith("# Not the same")
        ]
        warnings = [tokenizer_warning(folder), bos_warning(folder)] if self.converter is None else []
        return "\n".join(
            [
                *notes,
                *filter(None, warnings),
                "To import it, on a machine with Ollama (it was not started here):",
                f"  cd {shlex.quote(str(folder))} && ollama create {shlex.quote(self.name)} -f Modelfile && ollama "
                f"run {shlex.quote(self.name)}",
            ]
        )


def resolve_import(source: Exported, length: int | None, name: str | None, gguf: bool) -> Import:
    """Decide what can be decided before the model is made.

    Raises:
        ExportError: Ollama imports no such model, or llama.cpp is not there.
    """
    converter = find_converter() if gguf else None
    if converter is None:
        _check_architecture(read_config(config_folder(source), "config.json"))
    elif source.holds_model:
        check_convertible(converter, source.folder)
    called = (name or source.title).lower()
    return Import(source, called, resolve_context(source, length), converter)


def _check_architecture(config: dict[str, Any]) -> None:
    named = (config.get("architectures") or ["none"])[0]
    if named not in ARCHITECTURES:
        raise ExportError(
            f"Ollama imports no {named} from safetensors. It does {', '.join(ARCHITECTURES)} (its convert/convert.go). {_WITH_GGUF}"
        )
    rotation = (config.get("rope_parameters") or config.get("rope_scaling") or {}).get("rope_type", "default")
    known = _ROTATIONS.get(named, ("default",))
    if rotation not in known:
        raise ExportError(
            f"The model rotates positions by {rotation!r}, and Ollama's import of {named} takes over {' and '.join(known)} only, without a "
            f"word. {_WITH_GGUF}"
        )


def _check_vocabulary(folder: Path) -> None:
    """Refuse a vocabulary of SentencePiece without its own file: Ollama would read tokenizer.json as one of GPT-2's kind.

    Raises:
        ExportError: It is one.
    """
    if (folder / "tokenizer.model").is_file():
        return
    model = read_config(folder, "tokenizer.json").get("model") or {}
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        kind = f"{model.get('type')}{' with byte_fallback' if model.get('byte_fallback') else ''}"
        raise ExportError(
            f"tokenizer.json holds a vocabulary of SentencePiece's kind ({kind}), which Ollama reads from "
            f"tokenizer.model only, and there is "
            f"none. {_WITH_GGUF}"
        )


def tokenizer_warning(folder: Path) -> str | None:
    """What is not known about how Ollama cuts texts; None where it knows this tokenizer's way."""
    from hashlib import sha256

    steps = (read_config(folder, "tokenizer.json").get("pre_tokenizer") or {}).get("pretokenizers") or []
    patterns = "".join((step.get("pattern") or {}).get("Regex", "") for step in steps if step.get("type") == "Split")
    if sha256(patterns.encode()).hexdigest() in _KNOWN_PATTERNS:
        return None
    return (
        "Warning: Ollama tells by a tokenizer's patterns how it cuts texts into words, and those of this one are not "
        "among those of Llama 3, "
        "Qwen 2 and DeepSeek: it takes its default, and rare texts may become other tokens."
    )


def bos_warning(folder: Path) -> str | None:
    """What is not known about the beginning of a prompt; None where Ollama's import finds a BOS, and notes whether it is added."""
    named = read_config(folder, "tokenizer_config.json").get("bos_token")
    added = read_config(folder, "tokenizer.json").get("added_tokens") or []
    if (named.get("content") if isinstance(named, dict) else named) in [one.get("content") for one in added]:
        return None
    return (
        "Warning: the tokenizer has no BOS, and Ollama's import then notes nothing about one. Some of its engines take that "
        "for yes, and put token 0 before each prompt (add_bos_token in its model/models). Compare prompt_eval_count of an "
        "answer with the tokens that were sent."
    )


_KNOWN_PATTERNS = (
    "d98f9631be1e9607a9848c26c1f9eac1aa9fc21ac6ba82a2fc0741af9780a48f",
    "03df5c5863ad70781dcfdef491ead25140f895fe8010964be0daefe27be32b02",
    "21cde974d587f0d54dc8d56b183cc1e6239600172035c68fbd6d4b9f8da0576e",
    "1ff7f41064896984db5d1bb6ff64fa4bc29007d08c1b439e505b7392777a319e",
)
"""SHA-256 of the patterns of Llama 3, DeepSeek (two) and Qwen 2, by which Ollama's import knows them."""


def translate(tokenizer: Any, folder: Path) -> tuple[Around, Agreement]:
    """The chat template as one of Go, compared.

    Args:
        tokenizer: Of the model.
        folder: That Ollama imports.

    Raises:
        ExportError: There is none, or it cannot be.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    from sft.data.render import with_fixed_date

    if not tokenizer.chat_template:
        raise ExportError(
            "The model has no chat template, and Ollama would have nothing to translate. Nothing was exported."
        )
    template = with_fixed_date(tokenizer.chat_template)
    bos = tokenizer.bos_token or ""
    adds_bos = bool(bos) and read_config(folder, "tokenizer_config.json").get("add_bos_token") is True

    def apply(messages: Any, prompt: bool) -> str:
        try:
            text: str = render_jinja_template(
                [list(messages)],
                chat_template=template,
                add_generation_prompt=prompt,
                **tokenizer.special_tokens_map,
            )[0][0]
        except Exception as error:  # a template is a program of somebody else's
            raise ValueError(f"it refuses one: {error}") from None
        if adds_bos and not text.startswith(bos):
            raise ValueError(f"Ollama begins each prompt with {bos} (add_bos_token), which it does not write")
        return text.removeprefix(bos) if adds_bos else text

    try:
        around = read_around(apply, "" if adds_bos else bos)
        agreement = agree(around, apply)
    except ValueError as error:
        raise ExportError(
            f"The chat template cannot be written for Ollama: {error}. A wrong one would be worse than none: nothing "
            f"was exported. Use --to vllm, "
            "which reads the template itself."
        ) from None
    if template != tokenizer.chat_template:
        dated = "the date of today, for which it writes the 26th of July 2024, as in the training"
        agreement = Agreement(agreement.conversations, (*agreement.differs, dated))
    return around, agreement


def _quoted(text: str) -> str:
    if '"""' in text:
        raise ExportError(
            f"A Modelfile cannot hold three quotes in a row, and {text[:60]!r} does. Nothing was exported."
        )
    return f'"""{text}"""'
