"""Real ranks that need not import anything: this process has imported everything, and forks one child for each rank.

Imports are most of the time of a small training. A child is a process like any other: it joins a group of its own, builds an
engine of its own, and leaves nothing behind for the next. What is not tried this way is a launcher.

It reads a job a line of JSON, and answers each with a line: the exit status.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sft.parallel.environment import LAUNCHED, free_port
from sft.program import end_with_parent
from sft.terminal import launch_folder

IMPORTED = (
    "deepspeed trl trl.trainer.sft_trainer peft accelerate transformers.models.qwen2.modeling_qwen2 datasets eval.tasks.suites "
    # DeepSpeed imports it, and with it torch's compiler, where it looks at its optimizer: more than half of a short ZeRO-2 training.
    "deepspeed.runtime.zero.muon.muon_optimizer "
    "sft.launch.rank sft.train.main sft.train.arguments sft.train.runtime_check sft.model.load sft.train.batches sft.data.store "
    "sft.train.eval_loss sft.train.metrics sft.train.profiling sft.model.compiled_layers sft.model.new_tokens "
    "sft.checkpoint.save_verification eval.harness.during_training "
    "lm_eval.evaluator "
    "lm_eval.models.huggingface"
).split()


class Ranks:
    """A process that forks ranks, as those who give it jobs see it."""

    def __init__(self) -> None:
        self.process = self._start()
        self.prepared: set[tuple[str, ...]] = set()

    def _start(self) -> subprocess.Popen[str]:
        launched = (*LAUNCHED, "TORCHELASTIC_RUN_ID")  # what a test in this process may have set
        environment = {name: value for name, value in os.environ.items() if name not in launched} | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "DS_ACCELERATOR": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
        }
        return subprocess.Popen(
            [sys.executable, "-m", "tests.slow.ranks"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )

    def run(
        self,
        ranks: int,
        words: Sequence[str | Path],
        expect: int | None = 0,
        finish: bool = False,
        nodes: int = 1,
        grace: float = 60,
        **environment: str,
    ) -> dict[str, str]:
        """Run a program on so many ranks, and fail with its output where it fails.

        Args:
            ranks: Processes; one is a process by itself, without a group.
            words: A module (`sft.train`) or a file, and its arguments.
            expect: Exit status of the first rank that fails, or 0. None: any.
            finish: Rank 0 continues with evaluation and report, as it does for a user; a process of its own.
            nodes: Machines that the launcher would tell them of, of as many ranks each.
            grace: Seconds that the others have to end by themselves once the first has failed.
            environment: Beside what a launcher sets.

        Returns:
            `stdout` and `stderr` of all ranks together, and the `status`.
        """
        words = [str(word) for word in words]
        if words[1:] and words[1].endswith(".yaml") and "prepare" not in words[0]:
            self._prepare(words[1:])
        how = {"ranks": ranks, "finish": finish, "nodes": nodes, "grace": grace}
        job = how | {"words": words}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            self.process.stdin.write(json.dumps(job | {"folder": folder, "environment": environment}) + "\n")
            self.process.stdin.flush()
            try:
                status = self.process.stdout.readline()
            except BaseException:  # the test's time is up: the ranks end with the process that forked them
                self.process.kill()
                self.process.wait()
                self.process = self._start()
                raise
            printed = {name: (Path(folder) / name).read_text(errors="replace") for name in ("stdout", "stderr")}
        assert expect is None or status == f"{expect}\n", status + printed["stdout"][-4000:] + printed["stderr"][-4000:]
        return printed | {"status": status.strip()}

    def _prepare(self, words: list[str]) -> None:
        """Prepare the data of a training, which would start a process for it that imports everything."""
        deciding = tuple(word for word in words if word.startswith(("data.", "model.", "output_dir", words[0])))
        if deciding not in self.prepared:
            self.prepared.add(deciding)
            self.run(1, ["sft.launch.prepare", *words], expect=None)

    def close(self) -> None:
        """End it."""
        self.process.communicate()


def _environment(job: dict[str, Any], rank: int, port: int) -> dict[str, str]:
    """What torchrun would set; nothing for a process by itself."""
    ranks = job["ranks"]
    per_node = ranks // job["nodes"]
    launched = {
        "RANK": rank,
        "LOCAL_RANK": rank % per_node,
        "GROUP_RANK": rank // per_node,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": per_node,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    return {name: str(value) for name, value in launched.items() if ranks > 1} | job["environment"]


def _replace(module: str, name: str, value: object) -> None:
    """One that is not there any more would only make everything slower, without a word."""
    assert hasattr(sys.modules[module], name), f"{module} has no {name} to replace: has it moved?"
    setattr(sys.modules[module], name, value)


def _become_rank(job: dict[str, Any], environment: dict[str, str], folder: Path, parent: int) -> None:
    """The child: run the program as `python -m` or `python FILE` would."""
    end_with_parent(parent, signal.SIGKILL)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        path = Path(os.devnull) if name == "stdin" else folder / name
        os.dup2(os.open(path, os.O_RDONLY if name == "stdin" else os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ |= environment
    if not job["finish"]:
        for module in ("sft.launch.rank", "sft.launch.evaluation"):
            _replace(module, "become_evaluation", lambda run: None)
    program, *sys.argv[1:] = job["words"]
    sys.argv[0] = program
    if program.endswith(".py"):
        sys.path.insert(0, str(Path(program).parent))
        runpy.run_path(program, run_name="__main__")
    else:
        # runpy warns about a module that is imported already. A package is not run: its __main__ is.
        if not hasattr(sys.modules.get(program), "__path__"):
            sys.modules.pop(program, None)
        runpy.run_module(program, run_name="__main__", alter_sys=True)


def _fork(job: dict[str, Any], rank: int, port: int, folder: Path) -> int:
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        _become_rank(job, _environment(job, rank, port), folder, parent)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        # Leaving by sys.exit would go through the parent's own `with` and `finally`.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run(job: dict[str, Any]) -> int:
    """Fork the ranks and wait: the first that fails ends the others, as under torchrun."""
    port, folder = free_port(), Path(job["folder"])
    children = {_fork(job, rank, port, folder) for rank in range(job["ranks"])}
    first = 0
    while children:
        child, waited = os.wait()
        if child not in children:
            continue
        children.discard(child)
        status = os.waitstatus_to_exitcode(waited)
        if status and not first:
            first = status
            deadline = time.monotonic() + job["grace"]
            while children and time.monotonic() < deadline:
                child, waited = os.waitpid(-1, os.WNOHANG)
                children.discard(child)
                time.sleep(0.05)
            for child in children:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)  # what it still writes must not silence the next job
            children.clear()
    shutil.rmtree(launch_folder(os.getpid()), ignore_errors=True)  # as our launcher does
    return first


def main() -> None:
    """Import, then answer jobs until there are no more."""
    # What libraries print when they are imported is no answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in IMPORTED:
        importlib.import_module(name)
    faulthandler.enable()
    gc.collect()
    gc.freeze()  # children share these pages as long as nobody looks through them for garbage
    for line in sys.stdin:
        print(_run(json.loads(line)), file=answers, flush=True)
    os._exit(0)  # what is frozen would be printed as leaked


if __name__ == "__main__":
    main()
