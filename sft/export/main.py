"""Hand over what a run has trained: bash scripts/export.sh RUN --to merged|vllm|ollama|hub

Each target is a folder that is complete by itself; docs/export.md says what is in it. This module reads the command line.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from sft.errors import ExportError, did_you_mean
from sft.export.folder import Made, check_output, make_folder
from sft.export.source import Exported, check_unchanged, find_exported, find_run_to_export
from sft.run.trust import ACCEPT, check_model_code
from sft.visible import visible_line

EXAMPLES = """\
  sft export outputs/tiny/latest --to merged          weights, tokenizer, template, card: one folder
  sft export outputs/tiny/latest --to vllm --gpus 2   and serve.sh, with the command for two GPUs
  sft export outputs/tiny/latest --to ollama          and a Modelfile
  sft export outputs/tiny/latest --to hub --repo-id me/tiny --dry-run            what would be uploaded, with sizes
  sft export outputs/tiny/latest --to hub --repo-id me/tiny --checkpoints all    private; a branch per checkpoint"""
TARGETS = ("merged", "vllm", "ollama", "hub")
_ONLY = {
    "gpus": ("vllm",),
    "max_length": ("vllm", "ollama"),
    "name": ("vllm", "ollama"),
    "gguf": ("ollama",),
    "repo_id": ("hub",),
    "revision": ("hub",),
    "checkpoints": ("hub",),
    "public": ("hub",),
    "dry_run": ("hub",),
    "output": ("merged", "vllm", "ollama"),
}
"""Options that only some targets have."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ExportError(f"{message}. See bash scripts/export.sh --help.")


def parse_command_line(argv: Sequence[str]) -> argparse.Namespace:
    """The command line, checked as far as it can be by itself.

    Raises:
        ExportError: It does not make sense.
    """
    parser = _Parser(
        prog="sft export", epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("run", metavar="RUN", help="a run's folder, such as outputs/tiny/latest")
    parser.add_argument("--to", required=True, metavar="|".join(TARGETS))
    parser.add_argument("--output", type=Path, help="the folder to make (default: exports/RECIPE-RUN-TARGET)")
    parser.add_argument("--checkpoint", type=int, metavar="N", help="export checkpoint-N instead of final/")
    parser.add_argument(
        "--license", metavar="ID", help="the base's, as the hub spells it, for the card: apache-2.0, llama3.1, ..."
    )
    parser.add_argument(
        "--gpus", type=int, metavar="N", help="vllm: GPUs of the machine that will serve (default: of this one)"
    )
    parser.add_argument(
        "--max-length", type=int, metavar="N", help="vllm, ollama: tokens of context (default: the model's own)"
    )
    parser.add_argument("--name", help="vllm, ollama: what the model is called there (default: the recipe's name)")
    parser.add_argument("--gguf", action="store_true", help="ollama: convert by llama.cpp's convert_hf_to_gguf.py")
    parser.add_argument("--repo-id", metavar="OWNER/NAME", help="hub: the repository")
    parser.add_argument("--revision", help="hub: a branch other than main")
    parser.add_argument("--checkpoints", metavar="all|N,M", help="hub: also these, each on a branch checkpoint-N")
    parser.add_argument("--public", action="store_true", help="hub: anybody may read it")
    parser.add_argument("--dry-run", action="store_true", help="hub: list what would be uploaded; contacts nobody")
    parser.add_argument(ACCEPT, action="store_true", help="final/ was edited on purpose: export it as it is now")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the Python files of the run's model")
    arguments = parser.parse_args(argv)
    if arguments.to not in TARGETS:
        raise ExportError(
            f"--to {arguments.to} is no target{did_you_mean(arguments.to, list(TARGETS), '.')} There are: {', '.join(TARGETS)}."
        )
    if arguments.name is not None and visible_line(arguments.name) != arguments.name:
        raise ExportError(
            f"--name {visible_line(arguments.name)} has characters that nobody sees. Name the model in letters that can be seen."
        )
    for name, targets in _ONLY.items():
        if getattr(arguments, name) and arguments.to not in targets:
            option = f"--{name.replace('_', '-')}"
            raise ExportError(
                f"{option} belongs to --to {' and '.join(targets)}, and --to {arguments.to} has no use for it. Leave it out."
            )
    return arguments


def main(argv: Sequence[str]) -> None:
    """Check, make, tell."""
    arguments = parse_command_line(argv)
    # transformers and peft speak of names of their own that will change.
    warnings.simplefilter("ignore", FutureWarning)
    run = find_run_to_export(arguments.run)
    trusted: bool = arguments.trust_remote_code
    check_model_code(run.path, run.recipe().model.trust_remote_code, trusted, "--trust-remote-code")
    if arguments.to == "hub":
        from sft.export.hub import upload

        upload(run, arguments)
        return
    source = find_exported(run, arguments.checkpoint)
    output = arguments.output or Path("exports") / f"{source.name}-{arguments.to}"
    check_output(output, run.path)
    check_unchanged(source, arguments.accept_edits)
    finish, tell = _target(source, arguments)
    made = make_folder(source, output, finish, copies=2 if arguments.gguf else 1)
    print(f"{made.folder}: {made.checked}.")
    print(tell(made))


Finish = Callable[[Path, Any], None]
Tell = Callable[[Made], str]


def _target(source: Exported, arguments: argparse.Namespace) -> tuple[Finish, Tell]:
    """What a target writes beside the model, and what the user is told."""
    from sft.export.model_card import write_card

    if arguments.to == "vllm":
        from sft.export.vllm import resolve_serving, write_script

        serving = resolve_serving(source, arguments.gpus, arguments.max_length, arguments.name)

        def finish(folder: Path, tokenizer: Any) -> None:
            write_script(serving, folder, tokenizer)
            write_card(source, folder, tokenizer, arguments.license)

        return finish, lambda made: serving.told(made.folder)
    if arguments.to == "ollama":
        from sft.export.ollama import resolve_import

        importing = resolve_import(source, arguments.max_length, arguments.name, arguments.gguf)

        def finish_ollama(folder: Path, tokenizer: Any) -> None:
            importing.write(folder, tokenizer)
            write_card(source, folder, tokenizer, arguments.license)

        return finish_ollama, lambda made: importing.told(made.folder)
    return (
        lambda folder, tokenizer: write_card(source, folder, tokenizer, arguments.license),
        lambda made: (
            f"To load it: AutoModelForCausalLM.from_pretrained({str(made.folder)!r}), or see {made.folder / 'README.md'}."
        ),
    )
