import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from eval.harness.preload import describe, look_for_datasets
from eval.tasks.suites import TaskSelection, check_tasks
from sft.recipe.schema import Evaluation

ANSWERS = {
    "/gated/": (403, "GatedRepo"),
    "/hidden/": (404, "RepoNotFound"),
    "/broken/": (500, None),
    "/open/": (200, None),
}


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does where it is asked for leave to read a dataset."""

    def do_GET(self) -> None:
        status, code = next((answer for part, answer in ANSWERS.items() if part in self.path), (200, None))
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("HF_ENDPOINT", address)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE", "HF_DATASETS_CACHE"):
        monkeypatch.delenv(name, raising=False)
    yield address
    server.shutdown()
    server.server_close()


def selection(*datasets: str) -> TaskSelection:
    return TaskSelection((), (), datasets=tuple((f"task{number}", (name,)) for number, name in enumerate(datasets)))


@pytest.mark.slow
def test_the_hub_is_asked_for_each_dataset_beside_the_start(hub: str, capfd: pytest.CaptureFixture[str]) -> None:
    asking = look_for_datasets(selection("gated/a", "hidden/b", "broken/c", "open/d"))
    assert asking is not None
    assert asking.wait(timeout=60) == 0
    told = capfd.readouterr().err
    assert (
        "gated/a of task0 is out of reach: it is gated: accept its terms on https://huggingface.co/datasets/gated/a"
        in told
    )
    assert "hidden/b of task1 is out of reach: the hub has no such dataset" in told
    assert "broken/c of task2 is out of reach: the hub cannot be asked now" in told
    assert "open/d" not in told
    assert "The training goes on" in told


@pytest.mark.slow
def test_a_network_that_is_down_is_told_and_nothing_more(hub: str, capfd: pytest.CaptureFixture[str]) -> None:
    os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"
    asking = look_for_datasets(selection("open/d"))
    assert asking is not None
    assert asking.wait(timeout=60) == 0
    told = capfd.readouterr().err
    assert "open/d of task0 is out of reach: the hub cannot be asked now" in told
    assert "Traceback" not in told


def test_offline_the_caches_are_looked_at_and_nobody_is_asked(
    hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hub" / "datasets--open--here").mkdir(parents=True)
    (tmp_path / "datasets" / "open___prepared").mkdir(parents=True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert look_for_datasets(selection("open/here", "open/prepared", "open/far")) is None
    told = capsys.readouterr().err
    assert (
        "open/far of task2 is out of reach: it is not on this machine, and the hub is not asked (HF_HUB_OFFLINE)"
        in told
    )
    assert "open/here" not in told
    assert "open/prepared" not in told


def test_what_needs_no_dataset_asks_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = check_tasks(Evaluation(tasks=("builtin:demo",)), tmp_path)
    assert look_for_datasets(chosen) is None
    assert capsys.readouterr().err == ""


def test_a_suite_is_told_with_its_limit_its_needs_and_what_it_leaves_out() -> None:
    (quick,) = describe(Evaluation(suite="quick"))
    assert "the first 100 documents of each task" in quick
    (limited,) = describe(Evaluation(suite="quick", limit=7))
    assert "the first 7 documents of each task" in limited
    (leaderboard,) = describe(Evaluation(suite="leaderboard"))
    assert "all documents" in leaderboard
    assert "access to Idavidrein/gpqa, which is gated" in leaderboard
    assert "Left out: leaderboard_math_hard, which lm_eval cannot import without math-verify" in leaderboard
    assert describe(Evaluation(tasks=("gsm8k",))) == []
