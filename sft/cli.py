"""The command `sft`: init, train, plan, show, prepare, convert, eval, chat, export and diff. The scripts in scripts/ call it.

For completion of commands, options and recipe keys, add to ~/.bashrc: eval "$(_SFT_COMPLETE=bash_source sft)" (or zsh_source, fish_source).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from sft.errors import RecipeError
from sft.program import run_main

COMMAND: dict[str, Any] = {"no_args_is_help": True}
PASSED_ON: dict[str, Any] = {"context_settings": {"ignore_unknown_options": True, "help_option_names": []}}
"""For commands whose program reads its own options, --help among them."""


def main() -> None:
    """What the console command `sft` runs."""
    # For the processes that this one starts: no modules from the working directory, and ninja and torchrun from this environment.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    run_main(run)


def run(argv: Sequence[str]) -> None:
    """Run one command line. Raises UserError, or SystemExit with status 2 if the command line is wrong."""
    try:
        sft.main(args=list(argv), prog_name="sft", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        raise SystemExit(error.exit_code) from None


def _keys(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Keys of the recipe, for the shell's completion."""
    from sft.recipe.changes import recipe_keys

    return [f"{key}=" for key in recipe_keys() if key.startswith(incomplete)]


def recipe_and_overrides(words: Sequence[str]) -> tuple[str, list[str]]:
    """The recipe or run, and the overrides, in any order. Raises RecipeError if there is no recipe, or more than one."""
    named = [word for word in words if "=" not in word or os.path.exists(word)]  # noqa: PTH110 (no error for a long name)
    if not named:
        raise RecipeError("Name a recipe or a run's folder, for example recipes/tiny.yaml.")
    if len(named) > 1:
        raise RecipeError(f"'{named[1]}' is neither the recipe ({named[0]}) nor an override. Write key=value.")
    return named[0], [word for word in words if word != named[0]]


def _recipe_arguments(command: Callable[..., None]) -> Callable[..., None]:
    return click.argument("words", nargs=-1, metavar="RECIPE [KEY=VALUE]...", type=click.Path(), shell_complete=_keys)(
        command
    )


def _plan_options(command: Callable[..., None]) -> Callable[..., None]:
    options = (
        click.option(
            "--on", metavar="8x80GB|8xH100", help="Plan for other GPUs than this machine's, by memory or name."
        ),
        click.option("--price", metavar="2.5", type=float, help="Plan what training costs at this price per GPU-hour."),
        click.option(
            "--fit",
            metavar="[N]",
            is_flag=False,
            flag_value="0",
            help="List changes that make it fit, or show the plan with the Nth.",
        ),
        click.option(
            "--write", metavar="FILE", type=click.Path(path_type=Path), help="With --fit: write the changed recipe."
        ),
        click.option(
            "--json", "as_json", is_flag=True, help="Print the plan as JSON: decisions, memory, time, warnings."
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def _plan(
    words: Sequence[str], on: str | None, price: float | None, fit: str | None, write: Path | None, as_json: bool
) -> None:
    if write is not None and fit is None:
        raise RecipeError("--write writes a recipe with a change that --fit finds: give both.")
    if fit is not None and (as_json or price is not None):
        raise RecipeError(
            "--fit lists changes; --json and --price are for one plan. Give them with the changed recipe."
        )
    if fit is None:
        from sft.launch.main import show_plan

        show_plan(*recipe_and_overrides(words), on, price, as_json)
        return
    from sft.launch.fit import show_fit

    # What follows --fit and is no number is a word of its own.
    number, words = (int(fit), words) if fit.isdecimal() else (0, [fit, *words])
    show_fit(*recipe_and_overrides(words), on, number, write)


@click.group(no_args_is_help=True)
@click.version_option(package_name="sft-recipes")
def sft() -> None:
    """Supervised fine-tuning from one recipe file."""


@sft.command(**COMMAND)
@click.argument("data", type=click.Path())
@click.argument("words", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=_keys)
@click.option("--model", metavar="FOLDER|HUB_ID", help="The model to train (default: a small, open one).")
@click.option("--gpus", metavar="8x80GB", help="The GPUs to write it for (default: this machine).")
@click.option("--columns", metavar="prompt=NAME,...", help="Which columns hold what, if their names do not say.")
@click.option(
    "-o", "--output", metavar="FILE", type=click.Path(path_type=Path), help="The recipe (default: DATA's name)."
)
def init(
    data: str, words: tuple[str, ...], model: str | None, gpus: str | None, columns: str | None, output: Path | None
) -> None:
    """Inspect a dataset and write a ready-to-run recipe. Each value has its reason beside it.

    DATA is a file (.csv, .json, .jsonl, .parquet, .arrow), a folder, a pattern or a dataset on the hub. An eval split and a task made
    from it go to a folder next to the recipe. KEY=VALUE fixes a key of the recipe; the rest follows from it.

    \b
      sft init reviews.csv --model Qwen/Qwen2.5-0.5B
      sft init chats.jsonl --gpus 8x80GB -o recipes/chats.yaml
      sft init faq.csv --columns prompt=Frage,completion=Antwort train.num_train_epochs=1
    """
    from sft.init.main import main as write_recipe

    write_recipe(data, model, gpus, columns, output, words)


@sft.command(**COMMAND)
@_recipe_arguments
@click.option("--plan", "plans", is_flag=True, help="Print every decision with its reason, and stop.")
@_plan_options
@click.option("--preflight", is_flag=True, help="Check all nodes and processes of the job, and stop.")
@click.option("--prepare", "prepares", is_flag=True, help="Prepare the data for a later start, and stop.")
@click.option(
    "--show", "rows", metavar="N", type=click.IntRange(0), help="Show N rows as the model gets them, and stop."
)
@click.option(
    "--max-restarts",
    metavar="N",
    type=click.IntRange(0),
    default=0,
    help="After a failure, restart from the newest checkpoint up to N times (default: 0).",
)
def train(
    words: tuple[str, ...],
    plans: bool,
    preflight: bool,
    prepares: bool,
    rows: int | None,
    max_restarts: int,
    **plan_options: Any,
) -> None:
    """Train a recipe, evaluate base and tuned model, write a report.

    RECIPE is a YAML file, or the folder of a run: an unfinished run resumes, a finished one is trained again in a new run.

    \b
      sft train recipes/tiny.yaml
      sft train recipes/tiny.yaml train.learning_rate=1e-3
      sft train outputs/tiny/latest
      NPROC=2 sft train recipes/tiny.yaml --max-restarts 3
      NNODES=2 NODE_RANK=0 MASTER_ADDR=host0 sft train recipes/qwen3b.yaml

    Environment: NPROC (processes on this node; default, or auto: one for each GPU), NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT. Slurm,
    Kubernetes (PyTorchJob) and SkyPilot set their own: scripts/slurm, scripts/kubernetes, scripts/skypilot.
    """
    if plans or any(value is not None and value is not False for value in plan_options.values()):
        _plan(words, **plan_options)
        return
    from sft.launch.main import start

    recipe, overrides = recipe_and_overrides(words)
    if prepares or rows is not None:
        _look_at_data(recipe, overrides, rows)
    else:
        start(recipe, overrides, preflight, max_restarts)


@sft.command(**COMMAND)
@_recipe_arguments
@_plan_options
def plan(words: tuple[str, ...], **plan_options: Any) -> None:
    """Print every decision with its reason. Starts nothing.

    \b
      sft plan recipes/qwen3b.yaml
      sft plan recipes/qwen3b.yaml --on 8x80GB
      sft plan recipes/qwen3b.yaml --on 8xH100 --price 2.5
      sft plan recipes/qwen3b.yaml --on 8xH100 --json
      sft plan recipes/qwen3b.yaml --on 1x24GB --fit
      sft plan recipes/qwen3b.yaml --on 1x24GB --fit 2 --write qwen3b_small.yaml
    """
    _plan(words, **plan_options)


@sft.command(**COMMAND)
@_recipe_arguments
@click.option("-n", "--rows", metavar="N", type=click.IntRange(0), default=3, show_default=True, help="Rows to show.")
def show(words: tuple[str, ...], rows: int) -> None:
    """Show rows as the model gets them, token ledger and findings.

    \b
      sft show recipes/tiny.yaml
      sft show recipes/tiny.yaml -n 10 data.max_length=512
    """
    _look_at_data(*recipe_and_overrides(words), rows)


@sft.command(**COMMAND)
@_recipe_arguments
def prepare(words: tuple[str, ...]) -> None:
    """Prepare the data for a later start, on any machine.

    \b
      sft prepare recipes/qwen3b.yaml
    """
    _look_at_data(*recipe_and_overrides(words), None)


def _look_at_data(recipe: str, overrides: Sequence[str], rows: int | None) -> None:
    from sft.launch.main import look_at_data

    look_at_data(recipe, overrides, rows)


@sft.command(**COMMAND)
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", metavar="RECIPE", type=click.Path(path_type=Path), help="Write the recipe to this file."
)
@click.option(
    "--gpus", metavar="N", type=click.IntRange(1), help="GPUs that the file was used on, to compute the global batch."
)
@click.option("--json", "as_json", is_flag=True, help="Print the lists as JSON: tool, carried, changed, dropped.")
def convert(file: Path, output: Path | None, gpus: int | None, as_json: bool) -> None:
    """Convert another tool's training config to a recipe. Accounts for each of its keys.

    FILE is a config of trl, the alignment-handbook, axolotl, LLaMA-Factory or torchtune, or transformers' TrainingArguments as JSON.
    Exit status: 0 converted, 2 refused.

    \b
      sft convert llama3_lora.yml --gpus 8 -o recipes/llama3_lora.yaml
      sft convert config.yaml --gpus 1 --json
    """
    from sft.convert.main import main as convert_file

    convert_file(file, output, gpus, as_json)


@sft.command("eval", **COMMAND)
@click.argument("words", nargs=-1, required=True, metavar="RUN|MODEL [KEY=VALUE]...", type=click.Path())
def evaluate(words: tuple[str, ...]) -> None:
    """Evaluate a run, or any model. A run's base and tuned model get the same settings, and are compared.

    \b
      sft eval outputs/tiny/latest
      sft eval outputs/tiny/latest tasks=gsm8k limit=100
      sft eval Qwen/Qwen2.5-0.5B-Instruct tasks=arc_easy,gsm8k limit=10
      sft eval outputs/tiny/latest backend=server server.base_url=http://127.0.0.1:8000/v1 server.base=base server.tuned=tuned

    The keys are those of a recipe's `eval` section: tasks, suite, include_path, limit, num_fewshot, batch_size, max_gen_toks,
    apply_chat_template, system_instruction, dtype, seed, backend, server, gate, contamination and more (sft/recipe/eval.py). Exit status
    3: the tuned model does not pass the gate.
    """
    from eval.run import main as measure

    measure(list(words))


@sft.command(**PASSED_ON)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def chat(words: tuple[str, ...]) -> None:
    """Chat with a run's model, or any other, in the terminal."""
    # A program of its own: there, Ctrl-C stops an answer and not the program.
    _become("eval.chat.terminal", words)


@sft.command(**PASSED_ON)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def export(words: tuple[str, ...]) -> None:
    """Export a run's model: merged, for vLLM, Ollama or the hub."""
    _become("sft.export", words)


def _become(module: str, words: Sequence[str]) -> None:
    from sft.signals import close, held_back

    close()
    with held_back():
        os.execv(sys.executable, [sys.executable, "-m", module, *(words or ["--help"])])


@sft.command(**COMMAND)
@click.argument("run_a", type=click.Path())
@click.argument("run_b", type=click.Path())
def diff(run_a: str, run_b: str) -> None:
    """List what differs between two runs. Exit status: 0 nothing, 1 something.

    \b
      sft diff outputs/tiny/latest outputs/tiny/first
    """
    from sft.run.diff import main as compare

    compare([run_a, run_b])


if __name__ == "__main__":
    main()
