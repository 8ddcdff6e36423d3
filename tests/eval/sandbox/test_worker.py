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
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from eval.sandbox.limits import LIMITS, Outcome
from eval.sandbox.runner import describe, prove_isolation, run_programs
from eval.tasks.load import LoadedTasks, load_tasks
from eval.tasks.suites import check_tasks
from sft.errors import EvaluationError
from sft.recipe.schema import REPOSITORY, Evaluation

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="generated code runs on Linux only")]
HUMANEVAL = REPOSITORY.parent / "shared" / "data" / "eval" / "HumanEval.jsonl.gz"
SHORT = replace(LIMITS, cpu_seconds=1, wall_seconds=20.0)
SECRET = "hf_thisIsWhatNobodyMayRead00"


def leftovers() -> list[int]:
    """Processes of ours that run generated code, wherever they hang in the tree."""
    found = []
    for process in psutil.process_iter():
        try:
            if "eval.sandbox.worker" in process.cmdline() and process.environ().get("PYTHONPATH") == str(REPOSITORY):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def under_way() -> bool:
    """Whether a program is in its folder."""
    for pid in leftovers():
        with suppress(psutil.Error):
            if psutil.Process(pid).cwd() not in (str(REPOSITORY), "/"):
                return True
    return False


def wait_until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for other processes; fails where it does not come to hold."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder for temporary files that each user can write to."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


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


def attacks(doors: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """What a program does, and how it has to end. Those that pass have done nothing wrong that shows."""
    home, temporary, run = (repr(str(path)) for path in doors["files"])
    secret = repr(str(doors["secret"]))
    looks = "os.environ.get('HF_TOKEN') or [1 for p in os.listdir('/proc') if p.isdigit() for t in [read(p)] if b'hf_thisIs' in t]"
    return {
        "an endless loop": ("while True: pass", "cpu time"),
        "an endless loop that ignores signals": (
            "import signal\nfor n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n    except OSError: pass\nwhile True: pass",
            "cpu time",
        ),
        "a fork bomb": (
            "import os, time\nfor n in range(400):\n    if os.fork() == 0:\n        time.sleep(5)\n        os._exit(0)",
            "failed",
        ),
        "a thread bomb": (
            "import threading, time\nfor n in range(2000): threading.Thread(target=time.sleep, args=(3,), daemon=True).start()",
            "failed",
        ),
        "a memory bomb": ("held = bytearray(3 * 2**30)", "memory"),
        "a memory bomb of several processes": (
            "import os, time\nfor n in range(5):\n    if os.fork() == 0:\n        held = b'a' * (300 << 20)\n        time.sleep(15)\n"
            "        os._exit(0)\ntime.sleep(15)\nassert False",
            "memory",
        ),
        "a write of 100 GB": (
            "with open('large', 'wb') as file:\n    for n in range(100): file.write(bytes(2**20))\n    file.truncate(100 * 10**9)",
            "failed",
        ),
        "a write to the home folder": (f"open({home}, 'w').write('x')", "failed"),
        "a write to /tmp": (f"open({temporary}, 'w').write('x')", "failed"),
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
        "a unix socket": ("import socket; socket.socket(socket.AF_UNIX)", "failed"),
        "a daemon": (
            "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(30)\n    os._exit(0)",
            "passed",
        ),
        "a signal to its parent": ("import os; os.kill(os.getppid(), 9)", "failed"),
        "a signal to everybody": ("import os; os.kill(-1, 9)", "failed"),
        "a stop of its parent": ("import os, signal; os.kill(os.getppid(), signal.SIGSTOP)", "failed"),
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
        "another excepthook": ("import sys\nsys.excepthook = lambda *_: None\nassert False", "failed"),
        "a crash": ("import ctypes; ctypes.string_at(0)", "killed"),
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
        "a temporary file": ("import tempfile\nwith tempfile.TemporaryFile() as file: file.write(b'x')", "passed"),
        "a name that is missing in an annotation": ("def first(given: List[int]) -> int: return given[0]", "failed"),
        "a process of its own that leaves": ("import os, sys\nif os.fork() == 0: sys.exit(0)\nos.wait()", "passed"),
        "a process of its own that comes to the end": ("import os\nif os.fork() == 0: pass\nelse: os.wait()", "passed"),
        "a process of its own that comes to the end alone": ("import os\nif os.fork(): os._exit(0)", "failed"),
        "no mistake": ("assert sorted([2, 1]) == [1, 2]", "passed"),
    }


def test_attacks_do_no_harm(doors: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    programs = attacks(doors)
    outcomes = run_programs([program for program, _ in programs.values()], SHORT)
    endings = {name: (one.ending, one.detail) for name, one in zip(programs, outcomes, strict=True)}
    assert {name: ending for name, (ending, _) in endings.items()} == {
        name: expected for name, (_, expected) in programs.items()
    }, endings
    assert leftovers() == []


@pytest.mark.parametrize("words", [["sighted"], ["nobody"], ["nobody", "sighted"]], ids=" ".join)
def test_attacks_do_no_harm_to_whom_or_where_they_run(words: list[str], doors: dict[str, Any]) -> None:
    """As another user than root, and in a container that allows no namespaces: Landlock, the filter and the limits remain."""
    programs = attacks(doors)
    doors["secret"].parent.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-m", "tests.slow.run_generated", *words],
        input=json.dumps({"limits": asdict(SHORT), "programs": [program for program, _ in programs.values()]}),
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "HF_TOKEN": SECRET},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    if "skip" in told:
        pytest.skip(told["skip"])
    found = {name: one["ending"] for name, one in zip(programs, told["endings"], strict=True)}
    wrong = {
        name: (ending, programs[name][1], one["detail"])
        for (name, ending), one in zip(found.items(), told["endings"], strict=True)
        if ending != programs[name][1]
        and not (programs[name][1] != "passed" and ending in ("failed", "memory", "cpu time"))
    }
    # Where root's processes cannot be counted, a program has one, so that a daemon is refused.
    alone = "1, which may" in told["isolation"]["enforced"]["processes"]
    forking = {"a daemon", "a process of its own that leaves", "a process of its own that comes to the end"}
    assert set(wrong) <= (forking if alone else set()), wrong
    assert leftovers() == []


@pytest.mark.parametrize("words", [[], ["sighted"], ["nobody", "sighted"]], ids=" ".join)
def test_a_killed_evaluation_leaves_no_process_and_no_file(words: list[str], open_folder: Path) -> None:
    program = "import os, time\nopen('file', 'w').close()\ntry: os.fork() or os.setsid()\nexcept OSError: pass\ntime.sleep(50)"
    evaluation = subprocess.Popen(
        [sys.executable, "-m", "tests.slow.run_generated", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "TMPDIR": str(open_folder)},
        cwd=REPOSITORY,
    )
    assert evaluation.stdin is not None
    evaluation.stdin.write(json.dumps({"limits": asdict(LIMITS), "programs": [program]}).encode())
    evaluation.stdin.close()
    wait_until(under_way)
    assert list(open_folder.iterdir())
    evaluation.kill()
    evaluation.wait()
    wait_until(lambda: not leftovers() and not list(open_folder.iterdir()))


def test_a_pool_of_processes_works_where_there_are_namespaces() -> None:
    if "other processes" not in prove_isolation().enforced:
        pytest.skip("no namespaces here")
    pool = "from multiprocessing import Pool\nwith Pool(2) as pool: assert pool.map(abs, [-1, 2]) == [1, 2]"
    assert run_programs([pool]) == [Outcome("passed", "")]


def test_where_the_users_others_are_counted_along_they_take_no_program_its_processes() -> None:
    """As before Linux 5.14: twenty more processes of its user than it may have."""
    script = """
import os, subprocess, tempfile
from dataclasses import replace
from pathlib import Path
from eval.code_confinement import NOBODY, find_means
from eval.code_limits import LIMITS
from eval.code_worker import run_program

with tempfile.TemporaryDirectory() as root:
    Path(root).chmod(0o711)
    means = replace(find_means(root, LIMITS), count_of_its_own=False)
    user = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if means.nobody else {}
    others = [subprocess.Popen(["sleep", "30"], **user) for _ in range(LIMITS.processes + 20)]
    ended = run_program("import threading; threading.Thread(target=print).start()", LIMITS, means, root)
    assert ended["ending"] == "passed", ended
    bomb = "import os, time\\nfor n in range(400): os.fork() or (time.sleep(5), os._exit(0))"
    assert run_program(bomb, LIMITS, means, root)["ending"] in ("failed", "memory")
"""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_cannot_be_run_is_no_score(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    broken = tmp_path / "bin" / "python"
    broken.write_text("#!/bin/sh\necho no such interpreter >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(EvaluationError, match="cannot be run here: no such interpreter"):
        run_programs(["x = 1"])


def test_the_same_programs_end_the_same_way(doors: dict[str, Any]) -> None:
    programs = [
        "import random; assert random.random() < 0.5",
        "assert list({'a', 'b', 'c'})[0] == 'b'",
        "assert hash('a') % 2",
    ] * 3
    first = run_programs(programs, SHORT)
    assert first == run_programs(programs, SHORT)
    assert [one.ending for one in first[:3]] == [one.ending for one in first[3:6]]


def test_what_is_enforced_is_said_and_what_is_not_too() -> None:
    isolation = prove_isolation()
    told = describe(isolation)
    for name in ("processor time", "wall time", "memory", "processes", "file size", "open files", "environment"):
        assert name in {**isolation.enforced, **isolation.not_enforced}
        assert name in told
    assert ("NOT enforced" in told) == bool(isolation.not_enforced)


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
    assert leftovers() == []


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
    assert capfd.readouterr().out.count("Generated code runs within limits") == 1
    for results in (run.path / "eval").rglob("results.json"):
        kept = json.loads(results.read_text())
        assert sum(kept["generated_code"]["endings"].values()) == 2
        assert kept["generated_code"]["enforced"]["processor time"].startswith("5 s")
        assert kept["settings"]["generated_code"]["memory_bytes"] == LIMITS.memory_bytes
