import json
import socket
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from sft.data.readers import BadRow
from sft.data.sources import first_look, open_source, place, source_files, told_as
from sft.errors import DataError
from sft.hub.demo import make_demo
from sft.hub.names import hub_answers, hub_commit, looks_local
from sft.recipe.schema import Source

Rows = list[dict[str, Any]]


def write(path: Path, numbers: range) -> Path:
    path.write_text("".join(json.dumps({"text": str(number)}) + "\n" for number in numbers))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files of 3, 0 and 4 rows."""
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder / "a.jsonl", range(3))
    write(folder / "b.jsonl", range(0))
    write(folder / "c.jsonl", range(3, 7))
    return folder


def taken(source: Source) -> tuple[list[tuple[int, str]], Callable[[int], str]]:
    """Number and text of every row, and where rows stand."""
    opened = open_source(source, "")
    rows = [(number, row["text"]) for number, row in opened.rows if not isinstance(row, BadRow)]
    return rows, opened.where


@pytest.mark.parametrize("name", ["./m", "/m", "~/m", "a/b/c", "recipes"])
def test_these_are_paths(name: str) -> None:
    assert looks_local(name)


@pytest.mark.parametrize("name", ["owner/name", "gpt2"])
def test_these_are_ids_on_the_hub(name: str) -> None:
    assert not looks_local(name)


def test_local_data_is_found_and_a_hub_id_is_left_to_the_hub(folder: Path) -> None:
    (folder / "notes.txt").touch()
    files = [folder / name for name in ("a.jsonl", "b.jsonl", "c.jsonl")]
    assert source_files(Source(path=str(files[0])), "") == files[:1]
    assert source_files(Source(path=str(folder)), "") == files
    assert source_files(Source(path=f"{folder}/[bc].jsonl"), "") == files[1:]
    assert source_files(Source(path="owner/data"), "") is None
    for missing in (str(folder / "d.jsonl"), "d.jsonl", "./gone"):
        with pytest.raises(DataError, match=r"data.train: there is no file or folder .*looked in"):
            source_files(Source(path=missing), "")
    with pytest.raises(DataError, match=r"No file matches .*\*.parquet"):
        source_files(Source(path=f"{folder}/*.parquet"), "")


def test_the_demo_is_a_source(tmp_path: Path) -> None:
    assert source_files(Source(path="builtin:demo"), str(tmp_path)) == [make_demo(tmp_path).train]


@pytest.mark.parametrize(
    "keys", [{"split": "test"}, {"split": "train[:10%]"}, {"name": "x"}, {"revision": "main"}, {"streaming": True}]
)
def test_a_local_source_refuses_what_files_do_not_have(keys: dict[str, Any], folder: Path) -> None:
    with pytest.raises(DataError, match=r"data.train: .*a.jsonl"):
        source_files(Source(path=str(folder / "a.jsonl"), **keys), "")


def test_rows_of_several_files_are_numbered_through_and_found_in_their_file(folder: Path) -> None:
    rows, where = taken(Source(path=str(folder)))
    assert rows == [(number + 1, str(number)) for number in range(7)]
    assert where(1) == f"{folder}/a.jsonl, row 1"
    assert where(3) == f"{folder}/a.jsonl, row 3"
    assert where(4) == f"{folder}/c.jsonl, row 1"
    assert where(7) == f"{folder}/c.jsonl, row 4"


@pytest.mark.parametrize(
    ("split", "numbers"),
    [
        ("train", range(7)),
        ("train[2:5]", range(2, 5)),
        ("train[:4]", range(4)),
        ("train[5:]", range(5, 7)),
        ("train[:]", range(7)),
        ("train[:99]", range(7)),
        ("train[9:]", range(0)),
    ],
)
def test_a_slice_takes_rows_and_leaves_them_their_numbers(split: str, numbers: range, folder: Path) -> None:
    rows, where = taken(Source(path=str(folder), split=split))
    assert rows == [(number + 1, str(number)) for number in numbers]
    if rows:
        name, row = ("a.jsonl", numbers[0] + 1) if numbers[0] < 3 else ("c.jsonl", numbers[0] - 2)
        assert where(numbers[0] + 1) == f"{folder}/{name}, row {row}"


def test_a_broken_record_is_a_row_with_a_number(folder: Path) -> None:
    (folder / "a.jsonl").write_text('{"text": "0"}\nnot json\n{"text": "2"}\n')
    opened = open_source(Source(path=str(folder / "a.jsonl")), "")
    kinds = [(number, type(row)) for number, row in opened.rows]
    assert kinds == [(1, dict), (2, BadRow), (3, dict)]


@pytest.mark.parametrize(
    ("starts", "row", "told"),
    [
        ([], 5, "owner/data, row 5"),
        ([(0, "a")], 5, "a, row 5"),
        ([(0, "a"), (4, "b")], 4, "a, row 4"),
        ([(0, "a"), (4, "b")], 5, "b, row 1"),
        ([(0, "z"), (4, "b"), (4, "a"), (9, "c")], 5, "a, row 1"),  # b is empty; files are not always in order of name
        ([(0, "z"), (0, "a")], 1, "a, row 1"),
    ],
)
def test_a_row_stands_in_the_file_that_was_begun_last_before_it(
    starts: list[tuple[int, str]], row: int, told: str
) -> None:
    assert place("owner/data", starts, row) == told


def test_a_message_names_its_key_and_keeps_a_path_that_holds_the_same_words() -> None:
    with (
        pytest.raises(DataError, match=r"^data.held_out: there is no file or folder my/data.train/x.jsonl"),
        told_as("data.held_out"),
    ):
        source_files(Source(path="my/data.train/x.jsonl"), "")


def test_an_empty_file_before_another_gives_no_row_its_name(tmp_path: Path) -> None:
    """The order of paths is not that of their text: `x/` comes before `x-1/`, and `/` behind `-`."""
    for name in ("x", "x-1"):
        (tmp_path / name).mkdir()
    write(tmp_path / "x" / "rows.jsonl", range(0))
    write(tmp_path / "x-1" / "rows.jsonl", range(2))
    rows, where = taken(Source(path=f"{tmp_path}/*/*.jsonl"))
    assert len(rows) == 2
    assert where(1) == f"{tmp_path}/x-1/rows.jsonl, row 1"


def test_a_first_look_is_into_the_first_file_with_rows(folder: Path) -> None:
    files = [folder / name for name in ("b.jsonl", "c.jsonl", "a.jsonl")]
    assert first_look(files, 2) == [{"text": "3"}, {"text": "4"}]
    with pytest.raises(DataError, match=r"b.jsonl holds no rows"):
        first_look(files[:1], 2)
    (folder / "b.jsonl").write_text("no\n")
    with pytest.raises(DataError, match=r"b.jsonl: none of its first rows can be read: line 1 is not JSON"):
        first_look(files, 2)


def test_offline_nobody_asks_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert not hub_answers()
    assert hub_commit(Source(path="owner/data", revision="abc")) == "abc"
    reference = tmp_path / "datasets--owner--data" / "refs" / "main"
    reference.parent.mkdir(parents=True)
    reference.write_text("0123abcd\n")
    assert hub_commit(Source(path="owner/data")) == "0123abcd"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A hub that knows the commit of a dataset and nothing else; what it was asked."""
    asked: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def handle_one_request(self) -> None:
            self.raw_requestline = self.rfile.readline()
            if self.parse_request():
                self.answer()

        def answer(self) -> None:
            asked.append(self.path)
            known = self.path.partition("?")[0] == "/api/datasets/owner/data"
            body = json.dumps({"id": "owner/data", "sha": "0123abcd" * 5, "siblings": []} if known else {}).encode()
            self.send_response(200 if known else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body if self.command == "GET" else b"")

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
    monkeypatch.setattr("datasets.config.HF_ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    yield asked
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_hub_is_asked_once_for_a_commit_and_that_commit_is_loaded(hub: list[str]) -> None:
    commits = {hub_commit(Source(path="owner/data")) for _ in range(3)}
    assert commits == {"0123abcd" * 5}
    assert hub.count("/api/datasets/owner/data") == 1
    before = len(hub)
    with pytest.raises(DataError, match=r"data.train: owner/data is no local path"):
        next(open_source(Source(path="owner/data"), "").rows)
    assert all("0123abcd" * 5 in path for path in hub[before:] if "owner/data" in path), hub[before:]
    assert len(hub) > before


def test_the_hub_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.delenv(name, raising=False)
        assert [hub_answers() for _ in range(3)] == [True] * 3
        server.settimeout(0.2)
        server.accept()[0].close()
        with pytest.raises(TimeoutError):
            server.accept()
