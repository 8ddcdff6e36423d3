"""Start the ranks of this node with torchrun, in this process, and report in one message how they ended.

torchrun brings the nodes together, passes signals on, and ends all ranks when one fails. Ours: the first failure is named once, a job that
failed restarts (unless it would fail again), and the exit status says how the ranks ended.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from shlex import join
from typing import Any, NoReturn

import psutil

from sft import signals
from sft.errors import EXIT_LOST_RANK, PlanError, PreflightError, UserError
from sft.launch.topology import Topology
from sft.parallel.process_group import lost_ranks_remedy
from sft.plan.hardware import whole_number
from sft.program import end_with_parent, run_main
from sft.run.directory import Run
from sft.run.trust import OWN_RUN
from sft.terminal import FAILURE, failure_text, final_status, launch_folder, run_of, show_first, shown_failure

_START_TIMEOUT = 50  # seconds that the nodes of a job wait for each other at the start; START_TIMEOUT changes it
_SAVE_SECONDS = "3600"  # that the ranks may save after a signal; torchrun's 30 are less than a large checkpoint takes
_KILL_SECONDS = 3.0  # that the ranks may take to end after a second signal
_STORE_SECONDS = 15.0  # that another node's restart waits for node 0 to end, which may have been sooner
_RESTARTS = "SFT_RESTARTS"  # environment variable: how often this job has restarted
_ENDED_BY_A_SIGNAL = {*signals.EXITS, *(-number for number in signals.SIGNALS)}
_KILLED = ", most often by the kernel because memory ran out (dmesg says so; then start fewer processes with NPROC, or see docs/memory.md)"


def check_rendezvous(topology: Topology) -> None:
    """Refuse an address of node 0 that nobody knows, and a port that another program uses (PlanError): torchrun would wait, or crash."""
    # In Kubernetes a name may take a minute to be known.
    if topology.nodes > 1 and not {"KUBERNETES_SERVICE_HOST", "PET_NNODES"} & set(os.environ):
        try:
            socket.getaddrinfo(topology.master_address, topology.master_port)
        except OSError as error:
            raise PlanError(
                f"MASTER_ADDR={topology.master_address}: no address is known for that name here ({error.strerror}). Set it to the first "
                f"machine's name or address, as this machine sees it (on the first: hostname -I).{_slurm(topology)}"
            ) from None
    if topology.ranks == 1 or topology.node_rank != 0 or (topology.nodes == 1 and "MASTER_PORT" not in os.environ):
        return
    try:
        with socket.create_server(("", topology.master_port)):
            pass
    except OSError as error:
        elsewhere = " on every machine" if topology.nodes > 1 else ", or none: a free one is taken then"
        raise PlanError(
            f"MASTER_PORT={topology.master_port} cannot be listened on here ({os.strerror(error.errno or 0)}): another job uses it, or did "
            f"until just now. Set another MASTER_PORT{elsewhere}.{_slurm(topology)}"
        ) from None


def _slurm(topology: Topology) -> str:
    # The user did not set Slurm's variables and may not know of them.
    return f"\n{topology.slurm}" if topology.slurm else ""


def torchrun_arguments(topology: Topology, program: Sequence[str], timeout: int = _START_TIMEOUT) -> list[str]:
    """What torchrun is called with, for a program that each process runs after its interpreter."""
    if topology.nodes == 1:
        # A free port of its own, so that two jobs on one machine do not meet.
        place = ["--standalone"] if "MASTER_PORT" not in os.environ else ["--master-port", str(topology.master_port)]
        # The name of this machine may have no address: in a container, say. torch would wait for one.
        place += ["--local-addr", "127.0.0.1"]
    else:
        place = ["--nnodes", str(topology.nodes), "--node-rank", str(topology.node_rank)]
        place += ["--master-addr", topology.master_address, "--master-port", str(topology.master_port)]
        place += ["--rdzv-conf", f"timeout={timeout}"]
    return [*place, "--nproc-per-node", str(topology.per_node), *program]


def start(
    topology: Topology, program: Sequence[str], restarts: int = 0, lost_after: int = 0, restarted: bool = False
) -> NoReturn:
    """Run the program in every process, and exit as it does. Raises PreflightError if the nodes do not meet.

    Args:
        topology: The processes.
        program: What each of them runs, after the interpreter.
        restarts: How often all processes restart after one has failed.
        lost_after: Seconds after which the other nodes notice a failure; a restart waits that much longer for them.
        restarted: This is a restart.
    """
    clear_environment()
    check_rendezvous(topology)
    timeout = whole_number("START_TIMEOUT", _START_TIMEOUT, 1) + (lost_after if restarted else 0)
    arguments = torchrun_arguments(topology, program, timeout)
    threads = f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']} " if "OMP_NUM_THREADS" in os.environ else ""
    print(f"{threads}{join([str(Path(sys.executable).with_name('torchrun')), *arguments])}", flush=True)
    status, may_restart = _run_ranks(arguments, topology, timeout)
    if status and may_restart and restarts:
        _restart(topology, program, restarts - 1, lost_after)
    shutil.rmtree(launch_folder(os.getpid()), ignore_errors=True)
    sys.exit(status)


def clear_environment() -> None:
    """Remove what a cluster or an outer launcher has left: ranks would wait for others, and torchrun reads PET_* as arguments."""
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK") or name.startswith("PET_"):
            del os.environ[name]


def _run_ranks(arguments: list[str], topology: Topology, timeout: int) -> tuple[int, bool]:
    """Run torchrun in this process; returns the exit status, and whether a restart may help.

    torchrun's own command line would turn every failure into a traceback and exit status 1.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.run import parse_args, run

    # The failed rank reports what is wrong; torchrun would repeat that it failed.
    elastic = "torch.distributed.elastic"
    for name in (elastic, f"{elastic}.agent.server.api"):  # the second has a level of its own
        logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _SAVE_SECONDS)
    os.environ["SFT_LAUNCHER"] = str(os.getpid())
    # What is ignored stays so: nohup.
    heard = [number.name for number in signals.SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    signals.hold(_on_signal)
    try:
        run(parse_args(["--signals-to-handle", ",".join(heard), *arguments]))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        signals.ignore()
        return _report_failures(error.failures)
    except SignalException as stopped:
        signals.ignore()
        return _record_interruption(stopped.sigval), False
    except (DistError, RendezvousError) as error:
        signals.ignore()
        reason = str(error).strip().splitlines()[0]
        raise PreflightError(
            f"The {topology.nodes} machines of this job did not meet within START_TIMEOUT={timeout} s: {reason}. Start the same command on "
            f"each with MASTER_ADDR={topology.master_address}, MASTER_PORT={topology.master_port} and a NODE_RANK of its own, from 0 to "
            f"{topology.nodes - 1}. Check the address, a firewall, and START_TIMEOUT=600 for machines that start minutes apart."
            f"{_slurm(topology)}"
        ) from None
    return 0, False


def _on_signal(number: signal.Signals, again: bool) -> None:
    """Answer a signal, in another thread; torchrun passes it on to the ranks."""
    ranks = psutil.Process().children()
    if not ranks:  # still waiting for the other nodes
        print(f"\nInterrupted by {number.name}. The same command starts again.", file=sys.stderr, flush=True)
        os._exit(signals.exit_status(number))
    if not again:
        note = "stopping; in training, after the current step and with a checkpoint. A second signal ends it at once."
        print(f"\n{number.name}: {note}", file=sys.stderr)
        return
    time.sleep(_KILL_SECONDS)
    for rank in ranks:
        with suppress(psutil.NoSuchProcess):
            rank.kill()


def _record_interruption(number: signal.Signals) -> int:
    """The exit status after a signal. If no rank could record that it was interrupted, record it."""
    run = _run()
    if run is not None and run.record["status"] == "failed":
        return EXIT_LOST_RANK
    if run is not None and run.record["status"] == "running":
        error = f"Interrupted by {number.name}"
        run.update(status="interrupted", error=error)
        print(f"\n{error}. {run.next_start}.", file=sys.stderr, flush=True)
    return signals.exit_status(number)


def first_failure(failures: Mapping[int, Any]) -> int:
    """The rank that failed first: torchrun ends the others, and counts them among the failed."""

    ended = (-signal.SIGTERM, 128 + signal.SIGTERM)
    has_reported = any(one.exitcode > EXIT_LOST_RANK and one.exitcode not in ended for one in failures.values())

    def order(rank: int) -> tuple[bool, bool, bool, int, int]:
        failure = failures[rank]
        # A rank that lost another ends with status 1, of which torchrun may hear in the same moment; on GPUs NCCL aborts it.
        lost = failure.exitcode == EXIT_LOST_RANK or (failure.exitcode == -signal.SIGABRT and has_reported)
        return failure.exitcode in ended, lost, failure.exitcode >= 0, failure.timestamp, rank

    return min(failures, key=order)


def _report_failures(failures: Mapping[int, Any]) -> tuple[int, bool]:
    """Name the first failure if its rank could not; returns the exit status, and whether a restart may help."""
    codes = {failure.exitcode for failure in failures.values()}
    if codes <= _ENDED_BY_A_SIGNAL:  # the ranks agreed to stop, and have said so
        return (130 if 130 in codes else 143), False
    rank, launcher, run = first_failure(failures), os.getpid(), _run()
    code = failures[rank].exitcode
    if code < 0:
        if (shown_failure(launcher=launcher) or "").startswith("Interrupted by"):
            # torchrun ended another rank for this one, and that rank spoke first.
            (launch_folder(launcher) / FAILURE).unlink(missing_ok=True)
        why = _KILLED if -code == signal.SIGKILL else ""
        ended = f"was ended by signal {-code} ({signal.Signals(-code).name}){why}; the others are stopped."
        if -code == signal.SIGABRT and (where := _where_nccl_says(rank, run)):
            remedy = lost_ranks_remedy(run.recipe().train.ddp_timeout if run else None, run)
            ended = f"lost the other ranks: NCCL's watchdog ended it, because a collective failed or took too long ({where}). {remedy}"
        show_first(failure_text(rank, ended), launcher)
    elif code == EXIT_LOST_RANK and shown_failure(launcher=launcher) is None:
        log = f" Its log: {run.path / 'logs' / f'rank-{rank}.log'}" if run and rank else ""
        print(f"\nRank {rank} on {socket.gethostname()} ended with exit status {code}.{log}", file=sys.stderr)
    failure = shown_failure(run.path) if run else None
    if run is not None and failure is not None:
        with suppress(OSError, UserError):
            run.update(status="failed", error=failure[-2000:])
        if run.last_checkpoint() is not None and run.next_start not in failure:
            print(f"{run.next_start}.", file=sys.stderr)
    if code in (EXIT_LOST_RANK, -signal.SIGABRT) and run is not None and (known := final_status(run.path)) is not None:
        return known, False  # this node's ranks only lost one of another node
    # Any other status would be the same again: a mistake of the user's, a gate.
    return (code if code > 0 else EXIT_LOST_RANK), code < 0 or code == EXIT_LOST_RANK


def _where_nccl_says(rank: int, run: Run | None) -> Path | None:
    """The file in which NCCL's watchdog, a thread of torch's, says that it has ended a rank of this node; None where it has not.

    It says so on standard error, which of all ranks but rank 0 is a file, and writes the flight recorder's first.
    """
    log = (run.path / "logs" if run else launch_folder(os.getpid())) / f"rank-{rank}.log"
    record = Path(os.environ.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(log.with_name("flight-recorder-"))) + str(rank))
    with suppress(OSError):
        if "watchdog" in log.read_text(errors="replace").rpartition(f"] rank {rank} on ")[2].lower():
            return log
    with suppress(OSError):
        if record.stat().st_mtime >= psutil.Process().create_time():
            return record
    return None


def _run() -> Run | None:
    folder = run_of(os.getpid())
    return Run(folder) if folder is not None else None


def _restart(topology: Topology, program: Sequence[str], restarts: int, lost_after: int) -> NoReturn:
    """Become a new launcher: nothing of the failed start, such as addresses in its store, is left."""
    print(f"Restarting all processes; restarts left: {restarts}.", file=sys.stderr, flush=True)
    os.environ[_RESTARTS] = str(int(os.environ.get(_RESTARTS, "0")) + 1)
    run = _run()
    if run is not None:  # another start may have made a newer one meanwhile
        os.environ[OWN_RUN] = str(run.path)
    shutil.rmtree(launch_folder(os.getpid()), ignore_errors=True)
    if topology.nodes > 1 and topology.node_rank:
        _wait_until_the_old_store_is_gone(topology)
    words = [json.dumps(asdict(topology) | {"slurm": None}), str(restarts), str(lost_after), *program]
    with signals.held_back():
        os.execv(sys.executable, [sys.executable, "-m", "sft.launch.torchrun", *words])


def _wait_until_the_old_store_is_gone(topology: Topology) -> None:
    """On the other nodes: a restart that reaches node 0 before its launcher has ended would take the addresses of the failed start."""
    assert topology.master_address is not None and topology.master_port is not None
    deadline = time.monotonic() + _STORE_SECONDS
    while time.monotonic() < deadline:
        try:
            socket.create_connection((topology.master_address, topology.master_port), timeout=1).close()
        except OSError:
            return
        time.sleep(0.1)


def main(argv: Sequence[str]) -> None:
    """Start a program: the topology as JSON, how many restarts are left, how long a failure goes unnoticed, and the program."""
    if os.environ.get("SFT_PARENT") == str(os.getppid()):
        end_with_parent(os.getppid(), signal.SIGTERM)
    topology, restarts, lost_after, *program = argv
    start(Topology(**json.loads(topology)), program, int(restarts), int(lost_after), restarted=True)


if __name__ == "__main__":
    run_main(main)
