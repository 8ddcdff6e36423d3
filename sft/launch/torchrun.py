"""Start the processes of this machine with torchrun, in this process, and say in one message how they ended."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from shlex import join
from typing import Any, NoReturn

from sft.errors import EXIT_GATE, EXIT_USER_ERROR, PlanError, UserError
from sft.launch.forwarding import SAVING, Forwarding, tell_interruption
from sft.launch.out_of_memory import OutOfMemoryKills
from sft.launch.tuning_result import EXIT_DID_NOT_FIT
from sft.plan.topology import Topology
from sft.run.directory import Run
from sft.run.trust import OWN_RUN
from sft.signals import held_back
from sft.terminal import failure_text, launch_folder, run_of, show_first, shown_failure

FINAL = (EXIT_USER_ERROR, EXIT_GATE, EXIT_DID_NOT_FIT)
"""Exit statuses that starting again would not change."""


def torchrun_arguments(
    layout: Topology, program: Sequence[str], rendezvous: str = "static", restarts: int = 0
) -> list[str]:
    """What torchrun is called with.

    Args:
        layout: The processes.
        program: After torchrun's own arguments.
        rendezvous: How several machines find each other: static or c10d.
        restarts: How often all processes are started again after one has failed.
    """
    again = ["--max-restarts", str(restarts)] if restarts else []
    if layout.nodes == 1:
        # A free port of its own, so that two jobs on one machine do not meet.
        where = ["--standalone"] if "MASTER_PORT" not in os.environ else ["--master-port", str(layout.master_port)]
    elif rendezvous == "static":
        where = ["--nnodes", str(layout.nodes), "--node-rank", str(layout.node_rank)]
        where += ["--master-addr", layout.master_address, "--master-port", str(layout.master_port)]
    else:
        where = ["--nnodes", str(layout.nodes), "--rdzv-backend", "c10d", "--rdzv-id", f"sft-{layout.master_port}"]
        where += ["--rdzv-endpoint", f"{layout.master_address}:{layout.master_port}"]
        # Guessed from names otherwise, which fails where the first machine goes by another one.
        where += ["--rdzv-conf", f"is_host={int(layout.node_rank == 0)}"]
        where += ["--local-addr", _own_address(layout)]
    return [*where, *again, "--nproc-per-node", str(layout.per_node), *program]


def _own_address(layout: Topology) -> str:
    """The address under which the others reach this machine: the one on the way to the first. Sends nothing."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            layout.master_address, layout.master_port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as asked:
            asked.connect(address)
            return str(asked.getsockname()[0])
    except OSError as error:
        raise PlanError(
            f"MASTER_ADDR={layout.master_address}: this machine knows no way to it ({error.strerror}). Set it to the first machine's name "
            "or address, as the other machines see it."
        ) from None


def choose_rendezvous(layout: Topology, asked: str | None, restarts: int) -> str:
    """static, or c10d where the machines start again together.

    Raises:
        PlanError: static was asked for, with restarts of several machines.
    """
    if layout.nodes == 1:
        return "c10d"
    if restarts and asked == "static":
        raise PlanError(
            f"--max-restarts {restarts} on {layout.nodes} machines needs --rdzv c10d: with a static one a machine starts its own processes "
            "again and does not hear of the others'. Leave --rdzv out, or set it to c10d on every machine."
        )
    return asked or ("c10d" if restarts else "static")


def check_port(layout: Topology) -> None:
    """Refuse a port of the first machine that somebody listens on: torchrun would wait, or end in a traceback.

    Raises:
        PlanError: It is taken.
    """
    if layout.ranks == 1 or layout.node_rank != 0 or (layout.nodes == 1 and "MASTER_PORT" not in os.environ):
        return
    try:
        with socket.create_server(("", layout.master_port)):
            pass
    except OSError as error:
        raise PlanError(
            f"MASTER_PORT={layout.master_port} cannot be listened on here ({os.strerror(error.errno or 0)}): another job uses it, or did "
            f"until just now. Set another MASTER_PORT{' on every machine' if layout.nodes > 1 else ', or none: a free one is taken then'}."
        ) from None


def start(
    layout: Topology,
    program: Sequence[str],
    rendezvous: str | None = None,
    restarts: int = 0,
    stopping: str = SAVING,
) -> NoReturn:
    """Run the program in every process, and exit as it does.

    Args:
        layout: The processes.
        program: What each of them runs, after the interpreter.
        rendezvous: static, c10d, or None for what fits.
        restarts: How often all processes are started again after one has failed.
        stopping: What they do when they are asked to stop, for the terminal.

    Raises:
        PlanError: The port is taken, or the machines cannot meet like this.
    """
    _clear_environment()
    threads = f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}"
    if layout.ranks == 1 and not restarts:
        command = [sys.executable, *program]
        print(f"{threads} {join(command)}", flush=True)
        with held_back():
            os.execv(sys.executable, command)
    check_port(layout)
    arguments = torchrun_arguments(layout, program, choose_rendezvous(layout, rendezvous, restarts), restarts)
    print(f"{threads} {join([str(Path(sys.executable).with_name('torchrun')), *arguments])}", flush=True)
    _torchrun(arguments, stopping)


def _clear_environment() -> None:
    # Left by a cluster or an outer launcher, they would have each process wait for ranks that nobody starts; torchrun reads
    # PET_* as arguments.
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        os.environ.pop(name, None)
    for name in [name for name in os.environ if name.startswith("PET_")]:
        del os.environ[name]


def _torchrun(arguments: list[str], stopping: str) -> NoReturn:
    """torchrun in this process: its own command line would turn every failure into a traceback and exit status 1."""
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.run import parse_args, run

    # The failed rank has said what is wrong; torchrun would say again that it failed.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # The ranks of a second start would otherwise meet in the store of the first, with the addresses of those that ended.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    # A rank that waits in C++ for one that is gone does not hear SIGTERM; torchrun sends SIGKILL then.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "15")
    kills, forwarding = OutOfMemoryKills(), Forwarding(stopping)
    _watch_failures(kills, forwarding)
    os.environ["SFT_LAUNCHER"] = str(os.getpid())
    folder = launch_folder(os.getpid())
    try:
        run(parse_args(arguments))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        status = forwarding.exit_status(error.failures)
        if status is not None:
            tell_interruption(forwarding, status)
            sys.exit(status)
        _record_failure()
        sys.exit(_status(error.failures[first_failure(error.failures)].exitcode))
    except SignalException as signal_:
        sys.exit(128 + int(signal_.sigval))
    except (RendezvousError, DistError) as error:
        print(f"\nThe machines of the job have lost each other: {error}. Look at what the others say.", file=sys.stderr)
        sys.exit(1)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(0)


def _status(exitcode: int) -> int:
    if exitcode in (-signal.SIGTERM, -signal.SIGINT):
        return 128 - exitcode
    return exitcode if exitcode > 0 else 1  # a rank that the system or a crash has ended is a lost one


def first_failure(failures: Mapping[int, Any]) -> int:
    """The rank that failed first: torchrun ends the others, and counts those that are quick to go among the failed.

    Args:
        failures: torchrun's, by rank.
    """

    def order(rank: int) -> tuple[bool, bool, bool, int, int]:
        failure = failures[rank]
        ended = failure.exitcode in (-signal.SIGTERM, 128 + signal.SIGTERM)
        # A rank that lost another ends with status 1, of which torchrun may hear in the same moment.
        return ended, failure.exitcode not in FINAL, failure.exitcode >= 0, failure.timestamp, rank

    return min(failures, key=order)


def _record_failure() -> None:
    """Have run.json tell the first failure, where the first rank knew only that it lost another; and say how to go on."""
    folder = run_of(os.getpid())
    failure = shown_failure(folder) if folder else None
    if folder is None or failure is None:
        return
    run = Run(folder)
    with suppress(OSError, UserError):
        run.update(status="failed", error=failure[-2000:])
    if run.last_checkpoint() is not None:
        print(f"{run.next_start}.", file=sys.stderr)


def _watch_failures(kills: OutOfMemoryKills, forwarding: Forwarding) -> None:
    """Have torchrun's agent say at once who failed, and not start again what would fail again.

    torchrun decides by nothing but the count of restarts, and offers no place to ask: so the class that it makes is replaced.
    """
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
    from torch.distributed.launcher import api

    agent: Any = vars(api)["LocalElasticAgent"]

    class Agent(agent):  # type: ignore[misc]
        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
            with held_back():
                started: dict[int, Any] = super()._start_workers(worker_group)
                # torchrun's own way is to wait for half a minute, and to kill then.
                forwarding.begin(list(self._pcontext.pids().values()))
            close = self._pcontext.close

            def continue_and_close(*arguments: Any, **named: Any) -> None:
                # torchrun closes the rest when one has failed. A stopped rank does not react to its SIGTERM, and costs half a minute.
                for pid in self._pcontext.pids().values():
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)
                close(*arguments, **named)

            self._pcontext.close = continue_and_close
            return started

        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            result: RunResult = super()._monitor_workers(worker_group)
            self.has_failed = result.is_failed()
            if result.is_failed() and forwarding.exit_status(result.failures) is not None:
                self._remaining_restarts = 0
            elif result.is_failed():
                first = first_failure(result.failures)
                if any(failure.exitcode in FINAL for failure in result.failures.values()):
                    self._remaining_restarts = 0
                tell_failure(first, result.failures[first].exitcode, kills)
                if self._remaining_restarts > 0:
                    most = worker_group.spec.max_restarts
                    number = most - self._remaining_restarts + 1
                    print(f"Starting all processes again, {number} of {most}.", file=sys.stderr)
            return result

        def _restart_workers(self, worker_group: WorkerGroup) -> None:
            if not self.has_failed:
                tell_of_another_machine()
            go_on_in_the_run()
            shutil.rmtree(launch_folder(os.getpid()), ignore_errors=True)
            forwarding.end()
            super()._restart_workers(worker_group)

    vars(api)["LocalElasticAgent"] = Agent


def go_on_in_the_run() -> None:
    """Tell the processes that are started next which run is this job's: another start may have made a newer one meanwhile."""
    run = run_of(os.getpid())
    if run is not None:
        os.environ[OWN_RUN] = str(run)


def tell_failure(rank: int, exitcode: int, kills: OutOfMemoryKills) -> None:
    """Name the process that failed, where it could not do so itself.

    Args:
        rank: Of the process, in the job.
        exitcode: Its status; negative is a signal.
        kills: Counts the kernel's kills since the start.
    """
    run = run_of(os.getpid())
    if exitcode >= 0:
        if exitcode not in FINAL and shown_failure(launcher=os.getpid()) is None:
            log = f" Its log: {run / 'logs' / f'rank-{rank}.log'}" if run and rank else ""
            print(f"\nRank {rank} on {socket.gethostname()} ended with exit status {exitcode}.{log}", file=sys.stderr)
        return
    number = -exitcode
    name = signal.Signals(number).name if number in list(signal.Signals) else "unknown"
    text = f"was ended by signal {number} ({name}){kills.explanation() if number == signal.SIGKILL else ''}; the others are stopped."
    show_first(failure_text(rank, text), os.getpid())


def tell_of_another_machine() -> None:
    """Say why all processes start again though none of this machine has failed."""
    run = run_of(os.getpid())
    failure = shown_failure(run) if run else None
    text = f"\n{failure}" if failure else ""
    print(f"{text}\nAnother machine of the job starts its processes again, and this one does too.", file=sys.stderr)
