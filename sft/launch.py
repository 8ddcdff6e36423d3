"""Start a recipe: check it, say what will run, and start one process for each GPU.

Called by scripts/sft.sh. What it starts is what anyone can start by hand; the exact command is printed.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from shlex import join
from typing import NoReturn

from sft.errors import EXIT_USER_ERROR, PlanError, RecipeError, run_main
from sft.hardware import described_hardware, detect_hardware, visible_gpus
from sft.host_facts import host_facts
from sft.job import Job, open_job, open_recipe
from sft.ledger import check_limits
from sft.plan import print_plan
from sft.preflight import disk, refuse
from sft.prepare import prepared_data
from sft.prepared import Prepared, entry_folder, find_prepared
from sft.run_directory import check_start
from sft.search import EXIT_DID_NOT_FIT, search
from sft.search_cache import find_answer, is_searched

DEFAULT_RECIPE = "recipes/tiny.yaml"
DEFAULT_PORT = 29500
DEFAULT_START_TIMEOUT = 50
"""Seconds that the machines of a job wait for each other at the start."""


@dataclass(frozen=True)
class Layout:
    """The processes of the job."""

    per_node: int
    nodes: int = 1
    node_rank: int = 0
    master_address: str = "127.0.0.1"
    master_port: int = DEFAULT_PORT

    @property
    def ranks(self) -> int:
        """Processes of the whole job."""
        return self.per_node * self.nodes


def main(argv: Sequence[str]) -> None:
    """Check, print, start."""
    arguments = parse_command_line(argv)
    recipe = Path(arguments.recipe)
    if arguments.plan or arguments.on:
        hardware = described_hardware(arguments.on) if arguments.on else detect_hardware(*_ranks(read_layout()))
        job = open_job(recipe, arguments.overrides, hardware, to_run=False)
        prepared = find_prepared(entry_folder(job.recipe, job.model)) if Path(job.model.path).is_dir() else None
        job = job.with_data(prepared.facts(), find_answer(job, prepared)) if prepared else job
        print_plan(job.plan, f"{recipe.stem}: {job.recipe.model.name_or_path} on {hardware.device}")
        return
    if arguments.prepare or arguments.show is not None:
        look_at_data(recipe, arguments.overrides, arguments.show)
        return
    job, layout = job_and_layout(recipe, arguments.overrides)
    check_start(job)
    if layout.nodes > 1:
        meet_machines(job, layout)
    elif layout.ranks > 1:
        refuse([disk(job)])
    if arguments.preflight:
        set_threads(job, layout)
        start(layout, ["-m", "sft.preflight", str(job.recipe_path), *arguments.overrides])
    searched = job.hardware.gpu is not None and layout.nodes == 1 and is_searched(job)
    if layout.ranks > 1 or searched:
        # Before any rank is there to wait. On another machine that shares the folder, this waits for the first. A single
        # process has the data prepared while it imports.
        prepared = prepared_data(job.recipe, job.model, [str(job.recipe_path), *job.overrides])
        if searched:
            search_once(job, prepared)
    set_threads(job, layout)
    start(layout, ["-m", "sft.train", str(job.recipe_path), *arguments.overrides])


def set_threads(job: Job, layout: Layout) -> None:
    """Share the cores out among the processes of this machine."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, job.hardware.cpu_cores // layout.per_node)))
    # A thread that waits spins for microseconds only: on cores that others use too, long spinning takes them from the work.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def meet_machines(job: Job, layout: Layout) -> None:
    """Wait for the launchers of the other machines, before data is prepared or processes are started.

    Raises:
        PreflightError: One is missing, cannot be reached, or does not fit.
    """
    from sft.handshake import Machine, meet

    timeout = _number("START_TIMEOUT", DEFAULT_START_TIMEOUT, 1)
    facts = host_facts(job, layout.node_rank, entry_folder(job.recipe, job.model).name)
    machine = Machine(layout.node_rank, layout.nodes, layout.per_node, facts, time.time())
    output_dir = Path(job.recipe.output_dir).expanduser().resolve()
    meet(machine, layout.master_address, layout.master_port, output_dir, timeout, [disk(job)])


def job_and_layout(recipe: Path, overrides: Sequence[str]) -> tuple[Job, Layout]:
    """The recipe on this machine, with as many processes as the environment asks for."""
    layout = read_layout()
    return open_job(recipe, overrides, detect_hardware(*_ranks(layout))), layout


def search_once(job: Job, prepared: Prepared) -> None:
    """Measure, once for a recipe and a machine, what the recipe leaves `auto`."""
    found = find_answer(job, prepared)
    if found is None or found.micro_batch_size is None:
        search(job, prepared)


def look_at_data(recipe_path: Path, overrides: Sequence[str], count: int | None) -> None:
    """Prepare the data, on whatever machine, and show some of it."""
    from sft.show import show, summary_lines

    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # rows may hold what the terminal's encoding does not

    recipe, path, model = open_recipe(recipe_path, overrides)
    prepared = prepared_data(recipe, model, [str(path), *overrides], judge=count is None)
    if count is None:
        print("\n".join([*summary_lines(prepared), f"Prepared: {prepared.folder}"]))
        return
    from sft.tokenizer import load_tokenizer

    show(prepared, recipe, load_tokenizer(recipe), count)
    check_limits(prepared.ledger, recipe.data)


def parse_command_line(argv: Sequence[str]) -> argparse.Namespace:
    """Recipe, overrides and switches, in any order."""
    parser = argparse.ArgumentParser(
        prog="scripts/sft.sh",
        description="Train a recipe, evaluate base and tuned model, and write a report.",
        epilog="Environment: NPROC (processes on this machine), NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT; Slurm's are read too.",
    )
    parser.add_argument("recipe", nargs="?", default=DEFAULT_RECIPE, help=f"a YAML file (default: {DEFAULT_RECIPE})")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example train.learning_rate=1e-5")
    parser.add_argument("--plan", action="store_true", help="print every decision with its reason, and stop")
    parser.add_argument(
        "--preflight", action="store_true", help="check all machines and processes of the job, and stop"
    )
    parser.add_argument("--prepare", action="store_true", help="prepare the data for a later start, and stop")
    parser.add_argument(
        "--show", metavar="N", type=_rows, help="show N rows as the model gets them, the ledger and what was found"
    )
    parser.add_argument("--on", metavar="8x80GB", help="with --plan: plan for GPUs that are not here")
    arguments = parser.parse_intermixed_args(list(argv))
    if (
        "=" in arguments.recipe and not Path(arguments.recipe).exists()
    ):  # overrides alone: they change the default recipe
        arguments.overrides.insert(0, arguments.recipe)
        arguments.recipe = DEFAULT_RECIPE
    second = [word for word in arguments.overrides if "=" not in word]
    if second:
        raise RecipeError(f"'{second[0]}' is neither the recipe ({arguments.recipe}) nor an override. Write key=value.")
    return arguments


def _rows(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is no number of rows")
    return int(text)


def _number(name: str, default: int, least: int, most: int | None = None) -> int:
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    if not (text.isascii() and text.isdecimal()) or int(text) < least or (most is not None and int(text) > most):
        raise PlanError(
            f"{name}={text}: must be a whole number of at least {least}" + (f" and at most {most}." if most else ".")
        )
    return int(text)


def read_layout() -> Layout:
    """The processes that the environment asks for.

    NPROC, NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT; inside a Slurm job of several nodes, Slurm's. One process for
    each visible GPU, or one where there is none.

    Raises:
        PlanError: A value that makes no sense, or several machines without the address of the first.
    """
    gpus = len(visible_gpus())
    per_node = _number("NPROC", max(1, gpus), 1)
    slurm = "NNODES" not in os.environ and _number("SLURM_NNODES", 1, 1) > 1
    nodes = _number("SLURM_NNODES" if slurm else "NNODES", 1, 1)
    if slurm and _number("SLURM_NTASKS_PER_NODE", 1, 1) > 1:
        raise PlanError(
            "Slurm starts several tasks on each machine, and this launcher wants one: it starts the processes. Use --ntasks-per-node=1."
        )
    if nodes == 1:
        return Layout(per_node, master_port=_number("MASTER_PORT", DEFAULT_PORT, 1, 65535))
    node_rank = _number("SLURM_NODEID" if slurm else "NODE_RANK", -1, 0)
    if node_rank < 0:
        raise PlanError(
            f"NNODES={nodes}, and NODE_RANK is not set. Set it to 0 on the first machine, 1 on the second, and so on."
        )
    if node_rank >= nodes:
        raise PlanError(f"NODE_RANK={node_rank} with NNODES={nodes}: machines are numbered from 0 to {nodes - 1}.")
    address = os.environ.get("MASTER_ADDR") or (_first_slurm_host() if slurm else None)
    if not address:
        raise PlanError(
            f"NNODES={nodes}, and MASTER_ADDR is not set. Set it to the first machine's name or address, on every machine."
        )
    return Layout(per_node, nodes, node_rank, address, _number("MASTER_PORT", DEFAULT_PORT, 1, 65535))


def _first_slurm_host() -> str | None:
    try:
        return subprocess.run(
            ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()[0]
    except (OSError, KeyError, IndexError, subprocess.SubprocessError):
        return None


def _ranks(layout: Layout) -> tuple[int, int]:
    return layout.ranks, layout.per_node


def torchrun_arguments(layout: Layout, program: Sequence[str]) -> list[str]:
    """What torchrun is called with."""
    if layout.nodes == 1:
        # A free port of its own, so that two jobs on one machine do not meet.
        where = ["--standalone"] if "MASTER_PORT" not in os.environ else ["--master-port", str(layout.master_port)]
    else:
        where = ["--nnodes", str(layout.nodes), "--node-rank", str(layout.node_rank)]
        where += ["--master-addr", layout.master_address, "--master-port", str(layout.master_port)]
    return [*where, "--nproc-per-node", str(layout.per_node), *program]


def start(layout: Layout, program: Sequence[str]) -> NoReturn:
    """Run the program in every process, and exit as it does."""
    # Left by a cluster or an outer launcher, they would have each process wait for ranks that nobody starts.
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        os.environ.pop(name, None)
    threads = f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}"
    if layout.ranks == 1:
        command = [sys.executable, *program]
        print(f"{threads} {join(command)}", flush=True)
        os.execv(sys.executable, command)
    arguments = torchrun_arguments(layout, program)
    print(f"{threads} {join([str(Path(sys.executable).with_name('torchrun')), *arguments])}", flush=True)
    _torchrun(arguments)


def _torchrun(arguments: list[str]) -> NoReturn:
    """torchrun in this process: its own command line would turn every failure into a traceback and exit status 1."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    # The failed rank has said what is wrong; torchrun would say again that it failed.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        run(parse_args(arguments))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            print(f"Rank {rank} was ended by signal {-failure.exitcode}; the others were stopped.", file=sys.stderr)
            sys.exit(128 - failure.exitcode)
        if failure.exitcode not in (EXIT_USER_ERROR, EXIT_DID_NOT_FIT):
            print(f"Rank {rank} failed with exit status {failure.exitcode}; its error is above.", file=sys.stderr)
        sys.exit(failure.exitcode)
    except SignalException as signal:
        sys.exit(128 + int(signal.sigval))
    sys.exit(0)


if __name__ == "__main__":
    run_main(main)
