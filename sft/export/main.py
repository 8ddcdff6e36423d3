"""Exports what a run has trained: bash scripts/export.sh RUN --to merged|vllm|gguf|ollama|hub

Each target is a folder that is complete by itself; docs/export.md describes them. Reads the command line.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from sft.errors import ExportError, did_you_mean
from sft.export.source import check_unchanged, find_exported, find_run_to_export
from sft.program import shown_command
from sft.run.trust import ACCEPT, check_model_code
from sft.terminal import visible_line

EXAMPLES = """\
  sft export outputs/tiny/latest --to merged          weights, tokenizer, template, card: one folder
  sft export outputs/tiny/latest --to vllm --gpus 2   and serve.sh, with the command for two GPUs
  sft export outputs/tiny/latest --to gguf            one file for llama.cpp, by its convert_hf_to_gguf.py
  sft export outputs/tiny/latest --to ollama          and a Modelfile
  sft export outputs/tiny/latest --to hub --repo-id me/tiny --dry-run            what would be uploaded, with sizes
  sft export outputs/tiny/latest --to hub --repo-id me/tiny --checkpoints all    private; a branch per checkpoint"""
TARGETS = ("merged", "vllm", "gguf", "ollama", "hub")
_ONLY = (
    dict.fromkeys(("repo_id", "revision", "checkpoints", "public", "dry_run"), ("hub",))
    | {"max_length": ("vllm", "ollama"), "name": ("vllm", "gguf", "ollama")}
    | {"gpus": ("vllm",), "gguf": ("ollama",), "output": ("merged", "vllm", "gguf", "ollama")}
)
"""Options that only some targets have."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ExportError(f"{message}. See {shown_command('export', '--help')}.")


def parse_command_line(argv: Sequence[str]) -> argparse.Namespace:
    """Read and check the command line. Raises ExportError where it contradicts itself."""
    parser = _Parser(
        prog="sft export", epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="a run's folder, such as outputs/tiny/latest")
    add("--to", required=True, metavar="|".join(TARGETS))
    add("--output", type=Path, help="the folder to make (default: exports/RECIPE-RUN-TARGET)")
    add("--checkpoint", type=int, metavar="N", help="export checkpoint-N instead of final/")
    add(
        "--license",
        metavar="ID",
        help="for the card, as the hub spells it: apache-2.0, llama3.1, ... (the base's applies)",
    )
    add("--gpus", type=int, metavar="N", help="vllm: GPUs of the server (default: of this machine)")
    add("--max-length", type=int, metavar="N", help="vllm, ollama: tokens of context (default: the model's)")
    add("--name", help="vllm, gguf, ollama: the model's name there (default: the recipe's)")
    add("--gguf", action="store_true", help="ollama: convert with llama.cpp's convert_hf_to_gguf.py")
    add("--repo-id", metavar="OWNER/NAME", help="hub: the repository")
    add("--revision", help="hub: a branch other than main")
    add("--checkpoints", metavar="all|N,M", help="hub: also these, each on a branch checkpoint-N")
    add("--public", action="store_true", help="hub: anybody may read it")
    add("--dry-run", action="store_true", help="hub: list what would be uploaded, without network")
    add(ACCEPT, action="store_true", help="export final/ as you edited it")
    add("--trust-remote-code", action="store_true", help="run the Python files of the run's model")
    arguments = parser.parse_args(argv)
    if arguments.to not in TARGETS:
        known = ", ".join(TARGETS)
        raise ExportError(
            f"--to {arguments.to} is not a target{did_you_mean(arguments.to, list(TARGETS), '.')} There are: {known}."
        )
    if arguments.name is not None and visible_line(arguments.name) != arguments.name:
        raise ExportError(f"--name {visible_line(arguments.name)} has invisible characters. Leave them out.")
    for name, targets in _ONLY.items():
        if getattr(arguments, name) and arguments.to not in targets:
            option = f"--{name.replace('_', '-')}"
            raise ExportError(
                f"{option} belongs to --to {' and '.join(targets)}, not to --to {arguments.to}. Leave it out."
            )
    return arguments


def main(argv: Sequence[str]) -> None:
    """Export a run."""
    arguments = parse_command_line(argv)
    # transformers and peft announce changes of their own.
    warnings.simplefilter("ignore", FutureWarning)
    run = find_run_to_export(arguments.run)
    check_model_code(run.path, run.recipe().model.trust_remote_code, arguments.trust_remote_code, "--trust-remote-code")
    if arguments.to == "hub":
        from sft.export.hub import upload

        upload(run, arguments)
        return
    from sft.export.gguf import GGUF, GgufModel
    from sft.export.model import check_output, make_folder
    from sft.export.model_card import write_card
    from sft.export.ollama import OllamaModel
    from sft.export.serving import VllmServer

    source = find_exported(run, arguments.checkpoint)
    output = arguments.output or Path("exports") / f"{source.name}-{arguments.to}"
    check_output(output, run.path)
    target: VllmServer | GgufModel | OllamaModel | None = None
    if arguments.to == "vllm":
        target = VllmServer(source, arguments.gpus, arguments.max_length, arguments.name)
    if arguments.to == "gguf":
        target = GgufModel(source, arguments.name)
    if arguments.to == "ollama":
        target = OllamaModel(source, arguments.max_length, arguments.name, arguments.gguf)
    check_unchanged(source, arguments.accept_edits)

    def finish(folder: Path, tokenizer: Any) -> None:
        if target is not None:
            target.write(folder, tokenizer)
        write_card(source, folder, tokenizer, arguments.license)

    make_folder(source, output, finish)
    print(f"{output}: complete" + ("." if (output / GGUF).is_file() else ", and loads by from_pretrained."))
    print(target.usage(output) if target else f"Load it: AutoModelForCausalLM.from_pretrained({str(output)!r})")
