"""Code that a model wrote does no harm, whatever it does, and the next document is scored all the same.

Every attack runs with the limits of the worker. Where a limit were not to hold, the test's own harm is bounded: what is forked ends by
itself, and what is written is at most some megabytes.
"""

import gzip
import json
import os
import socket
import subprocess
import sys
import threading
import time
import venv
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from eval.sandbox.runner import LIMITS, WITHOUT_SANDBOX, check_isolation, describe, run_program, run_programs
from eval.tasks.load import LoadedTasks, load_tasks
from eval.tasks.suites import check_tasks
from sft.errors import EvaluationError
from sft.recipe.schema import REPOSITORY, Evaluation

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="generated code runs on Linux only")]
HUMANEVAL = REPOSITORY.parent / "shared" / "data" / "eval" / "HumanEval.jsonl.gz"
SHORT = replace(LIMITS, cpu_seconds=1, wall_seconds=20.0)
SECRET = "hf_thisIsWhatNobodyMayRead00"


@pytest.fixture(autouse=True)
def _leaves_no_process() -> Iterator[None]:
    """What a test has started is gone at its end; other tests of the session may have left processes of their own."""
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= before


def wait_until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for other processes; fails where it does not come to hold."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture
def doors(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Places that generated code may not reach: files, and a server that notes who comes."""
    server = socket.create_server(("127.0.0.1", 0))
    met: list[object] = []

    def listen() -> None:
        while True:
            try:
                met.append(server.accept())
            except OSError:
                return

    threading.Thread(target=listen, daemon=True).start()
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    files = [
        Path.home() / f".generated-code-{os.getpid()}",
        Path("/tmp", f"generated-code-{os.getpid()}"),
        tmp_path / "in-the-run",
    ]
    yield {"port": server.getsockname()[1], "met": met, "secret": secret, "files": files}
    server.close()
    written = [path for path in files if path.exists()]
    for path in written:
        path.unlink()
    assert not written
    assert not met
    assert secret.read_text() == SECRET
    assert secret.stat().st_mode & 0o777 != 0o777


BEYOND_LIMITS = {
    "an endless loop": ("while True: pass", "failed"),
    "an endless loop that ignores signals": (
        "import signal\nfor n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n    except OSError: pass\nwhile True: pass",
        "failed",
    ),
    "a fork bomb": (
        "import os, time\nfor n in range(400):\n    if os.fork() == 0:\n        time.sleep(5)\n        os._exit(0)\ntime.sleep(5)",
        "failed",
    ),
    "a thread bomb": (
        "import threading, time\nfor n in range(99): threading.Thread(target=time.sleep, args=(3,)).start()\n"
        "time.sleep(3)",
        "failed",
    ),
    "a memory bomb": ("held = bytearray(3 * 2**30)", "failed"),
    "a memory bomb of several processes": (
        "import os, time\nfor n in range(5):\n    if os.fork() == 0:\n        held = b'a' * (300 << 20)\n        time.sleep(15)\n"
        "        os._exit(0)\ntime.sleep(15)",
        "failed",
    ),
    "a write of 100 GB": (
        "with open('large', 'wb') as file:\n    for n in range(100): file.write(bytes(2**20))\n    file.truncate(100 * 10**9)",
        "failed",
    ),
}
ENDINGS = {
    "a daemon": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(30)\n    os._exit(0)",
        "passed",
    ),
    "a pool of processes": (
        "from multiprocessing import Pool\nwith Pool(2) as pool: assert pool.map(abs, [-1, 2]) == [1, 2]",
        "passed",
    ),
    "a signal to its parent": ("import os; os.kill(os.getppid(), 9)", "passed"),
    "a signal to everybody": ("import os; os.kill(-1, 9)", "failed"),
    "new namespaces": (
        "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0\nassert ctypes.CDLL(None).unshare(0x20000) == 0",
        "failed",
    ),
    "sys.exit before the asserts": ("import sys; sys.exit(0)", "failed"),
    "os._exit before the asserts": ("import os; os._exit(0)", "failed"),
    "another AssertionError": (
        "import builtins\nclass AssertionError(BaseException): pass\nbuiltins.AssertionError = KeyError\nassert False",
        "failed",
    ),
    "a crash": ("import ctypes; ctypes.string_at(0)", "failed"),
    "all descriptors closed": ("import os; os.closerange(0, 64)", "failed"),
    # In a folder of its own file system nothing is left of it; elsewhere it has to be removed.
    "folders three thousand deep": (
        "import os\nfor n in range(3000): os.mkdir('d'); os.chdir('d')\nassert False",
        "failed",
    ),
    "a process that goes on writing": (
        "import os, time\nif os.fork() == 0:\n    end = time.time() + 60\n    while time.time() < end:\n"
        "        for fd in range(3, 64):\n            try: os.write(fd, bytes(65536))\n            except OSError: pass\n"
        "time.sleep(0.5)\nos._exit(0)",
        "failed",
    ),
    "a name that is missing in an annotation": ("def first(given: List[int]) -> int: return given[0]", "failed"),
    "a process of its own that comes to the end": ("import os\nif os.fork() == 0: pass\nelse: os.wait()", "passed"),
    "no mistake": ("assert sorted([2, 1]) == [1, 2]", "passed"),
}


def attacks(doors: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """What a program does, and whether it may pass. Those that pass have done nothing wrong that shows."""
    home, temporary, run = (repr(str(path)) for path in doors["files"])
    secret = repr(str(doors["secret"]))
    looks = "os.environ.get('HF_TOKEN') or [1 for p in os.listdir('/proc') if p.isdigit() for t in [read(p)] if b'hf_thisIs' in t]"
    reaches = {
        "a write to the home folder": (f"open({home}, 'w').write('x')", "failed"),
        "a write to /tmp": (f"open({temporary}, 'w').write('x')", "passed"),
        "a write to the run": (f"open({run}, 'w').write('x')", "failed"),
        "a change of another's rights": (f"import os; os.chmod({secret}, 0o777)", "failed"),
        "a removal": (f"import os; os.remove({secret})", "failed"),
        "a read of what is outside": (f"open({secret}).read()", "failed"),
        "a read of the environment": (
            "import os\ndef read(p):\n    try: return open(f'/proc/{p}/environ', 'rb').read()\n    except OSError: return b''\n"
            f"try: found = {looks}\nexcept OSError: found = []\nassert not found",
            "passed",
        ),
        "a connection": (f"import socket; socket.create_connection(('127.0.0.1', {doors['port']}), 1)", "failed"),
    }
    return BEYOND_LIMITS | reaches | ENDINGS


def test_attacks_do_no_harm(doors: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    programs = attacks(doors)
    outcomes = run_programs([program for program, _ in programs.values()], SHORT)
    found = dict(zip(programs, outcomes, strict=True))
    assert not {name: one for name, one in found.items() if one.passed != (programs[name][1] == "passed")}


def test_a_killed_evaluation_leaves_no_process() -> None:
    program = "import os, time\ntry: os.fork() or os.setsid()\nexcept OSError: pass\ntime.sleep(50)"
    evaluation = subprocess.Popen(
        [sys.executable, "-c", f"from eval.sandbox.runner import run_program; run_program({program!r})"], cwd=REPOSITORY
    )
    started: list[psutil.Process] = []

    def runs() -> bool:
        started[:] = psutil.Process(evaluation.pid).children(recursive=True)
        return len(started) > 3  # bwrap's two, the program and its child

    wait_until(runs)
    evaluation.kill()
    evaluation.wait()
    wait_until(lambda: not any(process.is_running() for process in started))


def test_an_interpreter_under_tmp_is_there_although_the_programs_have_a_tmp_of_their_own(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv")
    path = os.pathsep.join([str(REPOSITORY), *(folder for folder in sys.path if folder.endswith("site-packages"))])
    done = subprocess.run(
        [tmp_path / "venv/bin/python", "-c", "from eval.sandbox.runner import run_program; print(run_program('').passed)"],
        env=os.environ | {"PYTHONPATH": path}, cwd=REPOSITORY, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "True", done.stderr


@pytest.fixture
def no_sandbox(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A bwrap that fails as it does where the kernel refuses namespaces."""
    monkeypatch.setattr("eval.sandbox.runner._bwrap", lambda: "/bin/false")
    check_isolation.cache_clear()
    yield
    check_isolation.cache_clear()


def test_without_a_sandbox_nothing_runs_unless_it_was_allowed(
    no_sandbox: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EvaluationError, match=f"set {WITHOUT_SANDBOX}=1"):
        run_programs(["x = 1"])
    monkeypatch.setenv(WITHOUT_SANDBOX, "1")
    assert check_isolation() == ""
    assert "WITHOUT A SANDBOX" in describe("")
    programs = ["x = 1", "assert False", "while True: pass", "held = bytearray(3 * 2**30)", "import os; os._exit(0)"]
    outcomes = run_programs(programs, SHORT)
    assert [one.passed for one in outcomes] == [True, False, False, False, False]


def test_what_cannot_be_run_is_no_score(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    broken = tmp_path / "bin" / "python"
    broken.write_text("#!/bin/sh\necho no such interpreter >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(EvaluationError, match="cannot be run here"):
        run_program("x = 1")


def test_the_same_programs_end_the_same_way(doors: dict[str, Any]) -> None:
    programs = [
        "import random; assert random.random() < 0.5",
        "assert list({'a', 'b', 'c'})[0] == 'b'",
        "assert hash('a') % 2",
    ] * 3
    first = run_programs(programs, SHORT)
    assert first == run_programs(programs, SHORT)
    assert [one.passed for one in first[:3]] == [one.passed for one in first[3:6]]


DOCS_TASK = (("yaml", "my_code.yaml"), ("python", "utils.py"))


def local_humaneval(folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    if not HUMANEVAL.is_file():
        pytest.skip(f"{HUMANEVAL} is not here")
    import lm_eval

    rows = gzip.decompress(HUMANEVAL.read_bytes()).decode()
    (folder / "humaneval.jsonl").write_text(rows)
    path = folder / "humaneval_local.yaml"
    task = {
        "include": str(Path(lm_eval.__file__).parent / "tasks" / "humaneval" / "humaneval.yaml"),
        "task": "humaneval_local",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "humaneval.jsonl")}},
    }
    path.write_text(yaml.safe_dump(task))
    return path, [json.loads(line) for line in rows.splitlines()]


@pytest.fixture
def humaneval(tmp_path: Path, settings: Any) -> tuple[LoadedTasks, list[dict[str, Any]]]:
    path, rows = local_humaneval(tmp_path)
    selection = check_tasks(Evaluation(tasks=(str(path),), confirm_run_unsafe_code=True), tmp_path)
    assert selection.runs_code
    return load_tasks(selection, settings("humaneval_local", max_gen_toks=8), True, tmp_path / "log"), rows


def score(
    tasks: LoadedTasks, answers: dict[str, str], limit: int | None = None, name: str = "humaneval_local"
) -> tuple[float, list[float]]:
    """lm_eval's own score of answers by prompt, and each document's."""
    import lm_eval
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

    class Known(LM):
        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            raise NotImplementedError

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            raise NotImplementedError

        def generate_until(self, requests: list[Any]) -> list[str]:
            return [answers[request.args[0]] for request in requests]

    results = lm_eval.simple_evaluate(
        Known(),
        tasks=tasks.by_name[name],
        task_manager=TaskManager(include_defaults=False),
        limit=limit,
        confirm_run_unsafe_code=True,
        log_samples=True,
        bootstrap_iters=0,
    )
    samples = sorted(results["samples"][name], key=lambda sample: sample["doc_id"])
    (mean,) = (value for key, value in results["results"][name].items() if key.startswith("pass@1,"))
    return mean, [sample["pass@1"] for sample in samples]


def test_humanevals_own_solutions_score_1(humaneval: tuple[LoadedTasks, list[dict[str, Any]]]) -> None:
    tasks, rows = humaneval
    assert score(tasks, {row["prompt"]: row["canonical_solution"] for row in rows}) == (1.0, [1.0] * 164)
    assert tasks.generated_code["outside_these_limits"] == []


def test_wrong_answers_score_0_and_an_attack_costs_its_own_document_only(
    humaneval: tuple[LoadedTasks, list[dict[str, Any]]], doors: dict[str, Any]
) -> None:
    tasks, rows = humaneval
    names = (
        "an endless loop",
        "a fork bomb",
        "a memory bomb",
        "a write of 100 GB",
        "a write to the home folder",
        "a signal to everybody",
    )
    harmful = [attacks(doors)[name][0] for name in names]
    wrong = ["    return None\n", "    raise SystemExit(0)\n", "    pass\n\nimport os\nos._exit(0)\n", "", "    (\n"]
    answers = [*wrong, *(f"    pass\n\n{program}\n" for program in harmful)]
    chosen = rows[: 2 * len(answers)]
    # Every second document is answered as it should be.
    given = {
        row["prompt"]: row["canonical_solution"] if number % 2 else answers[number // 2]
        for number, row in enumerate(chosen)
    }
    mean, each = score(tasks, given, limit=len(chosen))
    assert each == [0.0, 1.0] * len(answers)
    assert mean == 0.5


def test_the_task_that_the_docs_show_is_scored_within_the_limits(tmp_path: Path, settings: Any) -> None:
    shown = (REPOSITORY / "docs" / "evaluation-code.md").read_text()
    task, code = (shown.split(f"```{kind}\n# {file}")[1].split("```")[0] for kind, file in DOCS_TASK)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"ask": "def double(x):\n", "check": "assert double(2) == 4"}) + "\n")
    rows.write_text(rows.read_text() + rows.read_text().replace("double", "twice"))
    (tmp_path / "my_code.yaml").write_text("#" + task.replace("/data/my_code.jsonl", str(rows)))
    (tmp_path / "utils.py").write_text("#" + code)
    consents = {"confirm_run_unsafe_code": True, "confirm_run_task_code": True}
    selection = check_tasks(Evaluation(tasks=(str(tmp_path / "my_code.yaml"),), **consents), tmp_path)
    tasks = load_tasks(selection, settings("my_code"), True, tmp_path / "log")
    assert tasks.generated_code["outside_these_limits"] == []
    answers = {"def double(x):\n": "    return 2 * x\n", "def twice(x):\n": "    return x\n"}
    assert score(tasks, answers, name="my_code") == (0.5, [1.0, 0.0])


def test_a_task_that_runs_code_by_itself_is_named(
    tmp_path: Path, settings: Any, write_task: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_task("mine", unsafe_code=True)
    selection = check_tasks(Evaluation(tasks=(str(path),), confirm_run_unsafe_code=True), tmp_path)
    tasks = load_tasks(selection, settings("mine"), True, tmp_path / "log")
    assert tasks.generated_code["outside_these_limits"] == ["mine"]
    assert "mine runs the model's code by means of its own, OUTSIDE these limits" in capfd.readouterr().out


def test_a_run_records_what_held_the_code(run: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from eval.run import main

    path, _ = local_humaneval(tmp_path)
    main([str(run.path), f"tasks={path}", "limit=2", "confirm_run_unsafe_code=true", "max_gen_toks=8"])
    assert capfd.readouterr().out.count("Generated code runs in a sandbox") == 1
    for results in (run.path / "eval").rglob("results.json"):
        kept = json.loads(results.read_text())
        assert kept["generated_code"]["sandbox"].startswith("bubblewrap")
        assert kept["settings"]["generated_code"]["memory_bytes"] == LIMITS.memory_bytes
