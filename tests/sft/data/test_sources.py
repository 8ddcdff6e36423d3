import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
from huggingface_hub import close_session

from sft.data.readers import BadRow, read_rows
from sft.data.sources import local_files, open_source, place, source_files
from sft.errors import DataError
from sft.hub.demo import make_demo
from sft.hub.names import hub_answers, hub_commit
from sft.recipe.schema import Source
from tests.fake_hub import TOKEN, Repo, fake_hub


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


def test_local_data_is_found_and_a_hub_id_is_left_to_the_hub(folder: Path, tmp_path: Path) -> None:
    files = [folder / name for name in ("a.jsonl", "b.jsonl", "c.jsonl")]
    assert source_files(Source(path=str(files[0])), "") == files[:1]
    assert source_files(Source(path=str(folder)), "") == files
    assert source_files(Source(path=f"{folder}/[bc].jsonl"), "") == files[1:]
    assert source_files(Source(path="owner/data"), "") is None
    assert source_files(Source(path="builtin:demo"), str(tmp_path)) == [make_demo(tmp_path).train]
    for missing in (str(folder / "d.jsonl"), "d.jsonl", "./gone"):
        with pytest.raises(DataError, match=r"there is no file or folder .*looked in"):
            source_files(Source(path=missing), "")


@pytest.mark.parametrize("keys", [{"split": "test"}, {"split": "train[:10%]"}, {"revision": "main"}])
def test_a_local_source_refuses_what_files_do_not_have(keys: dict[str, Any], folder: Path) -> None:
    with pytest.raises(DataError, match=r"a.jsonl"):
        source_files(Source(path=str(folder / "a.jsonl"), **keys), "")


@pytest.mark.parametrize(
    ("split", "numbers"),
    [("train", range(7)), ("train[2:5]", range(2, 5)), ("train[5:]", range(5, 7))],
)
def test_a_row_keeps_its_number_and_its_place_in_its_file(split: str, numbers: range, folder: Path) -> None:
    opened = open_source(Source(path=str(folder), split=split), "")
    rows = [(number, row["text"]) for number, row in opened.rows if not isinstance(row, BadRow)]
    assert rows == [(number + 1, str(number)) for number in numbers]
    for number, text in rows:
        name, row = ("a.jsonl", number) if int(text) < 3 else ("c.jsonl", number - 3)
        assert place("data", opened.file_starts, number) == f"{folder}/{name}, row {row}"


# Folders and patterns


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def names(files: list[Path], folder: Path) -> list[str]:
    return [str(file.relative_to(folder)) for file in files]


def test_a_folder_stands_for_its_data_files_sorted(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no data file"):
        local_files(tmp_path)
    touch(tmp_path, "b.jsonl.gz", "a.parquet", "c.csv", "notes.txt", ".d.jsonl", "dataset_info.json")
    assert names(local_files(tmp_path), tmp_path) == ["a.parquet", "b.jsonl.gz", "c.csv"]
    assert local_files(tmp_path / "c.csv") == [tmp_path / "c.csv"]
    with pytest.raises(DataError, match=r"notes.txt is not a data file. Use one of .json"):
        local_files(tmp_path / "notes.txt")


SHARDS = [f"data/{split}-0000{n}-of-00002.parquet" for split in ("test", "train", "validation") for n in (0, 1)]
SFT_AND_GEN = [f"train_{name}-00000-of-00001.jsonl" for name in ("gen", "sft")]


@pytest.mark.parametrize(
    ("files", "split", "found"),
    [
        (SHARDS, "train", SHARDS[2:4]),
        (SHARDS, "validation", SHARDS[4:]),
        (["train.jsonl", "test.jsonl.gz"], "train", ["train.jsonl"]),
        (["my_train.jsonl", "my_dev.jsonl"], "val", ["my_dev.jsonl"]),
        (["train/a.json", "train/b.json", "test/a.json"], "train", ["train/a.json", "train/b.json"]),
        (["data/x.jsonl", "data/train_more.jsonl"], "train", ["data/train_more.jsonl", "data/x.jsonl"]),
        (SFT_AND_GEN, "train_sft", SFT_AND_GEN[1:]),
        (["contest.jsonl", "values.jsonl"], "train", ["contest.jsonl", "values.jsonl"]),
    ],
)
def test_only_the_files_of_the_split_are_read(files: list[str], split: str, found: list[str], tmp_path: Path) -> None:
    tmp_path /= "a[b]"
    touch(tmp_path, *files, "test.md", "train.log", "dataset_info.json", ".cache/train.jsonl")
    assert names(local_files(tmp_path, split), tmp_path) == found


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["a.jsonl", "test.jsonl.gz"], r"several splits \(test.jsonl.gz among them\) and files of none"),
        (SFT_AND_GEN, "no split `train`. It has: train_gen, train_sft"),
        (["dup/de/data/x.jsonl", "dup/en/data/x.jsonl"], r"several folders \(dup/de/data, dup/en/data\)"),
        (["d/x.jsonl", "d/d/x.jsonl"], r"several folders \(d, d/d\)"),
    ],
)
def test_a_folder_whose_split_is_not_clear_is_refused(files: list[str], words: str, tmp_path: Path) -> None:
    touch(tmp_path, *files)
    with pytest.raises(DataError, match=words):
        local_files(tmp_path)


def test_a_pattern_stands_for_its_matches_sorted(tmp_path: Path) -> None:
    touch(tmp_path, "data/b.jsonl", "data/a.jsonl", "data/c.parquet", "data/x/y/d.parquet", "data/x/.cache/e.parquet")
    touch(tmp_path, "data/notes.txt", "data/[1].jsonl")
    matches = {
        "data/?.jsonl": ["data/a.jsonl", "data/b.jsonl"],
        "data/**/**/*.parquet": ["data/c.parquet", "data/x/y/d.parquet"],
        "data/[1].jsonl": ["data/[1].jsonl"],  # a file of that name goes before a pattern
    }
    for pattern, found in matches.items():
        assert names(local_files(tmp_path / pattern), tmp_path) == found
    for pattern in ("data/*.csv", "nothing/*.jsonl", "data/*.txt"):
        with pytest.raises(DataError, match="no data file matches"):
            local_files(tmp_path / pattern)


def test_what_datasets_saves_is_read(tmp_path: Path) -> None:
    rows = [{"a": number, "b": [{"c": str(number)}]} for number in range(2500)]
    dataset = datasets.Dataset.from_list(rows)
    saved = datasets.DatasetDict({"train": dataset, "test": dataset.select([3, 1])})
    saved.save_to_disk(tmp_path / "saved", num_shards={"train": 3, "test": 1})
    assert [row for file in local_files(tmp_path / "saved") for row in read_rows(file)] == rows
    assert [row for file in local_files(tmp_path / "saved", "test") for row in read_rows(file)] == [rows[3], rows[1]]
    with pytest.raises(DataError, match=r"has no split `valid`. It has: train, test."):
        local_files(tmp_path / "saved", "valid")
    local_files(tmp_path / "saved")[1].unlink()
    with pytest.raises(DataError, match=r"data-00001-of-00003.arrow"):
        local_files(tmp_path / "saved")


# The hub


def test_offline_the_hub_is_not_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
    """A hub that knows the commit of a dataset without files; what it was asked."""
    with fake_hub() as hub:
        hub.repos["owner/data"] = Repo(private=False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        for offline in ("huggingface_hub.constants.HF_HUB_OFFLINE", "datasets.config.HF_HUB_OFFLINE"):
            monkeypatch.setattr(offline, False)
        for endpoint in ("huggingface_hub.constants.ENDPOINT", "datasets.config.HF_ENDPOINT"):
            monkeypatch.setattr(endpoint, hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HTTP_PROXY", "http_proxy"):
            monkeypatch.delenv(name, raising=False)
        yield hub.asked
        close_session()


def test_the_hub_is_asked_once_for_a_commit_and_that_commit_is_loaded(hub: list[str]) -> None:
    commits = {hub_commit(Source(path="owner/data")) for _ in range(3)}
    assert commits == {"0" * 40}
    assert hub.count("GET /api/datasets/owner/data") == 1
    before = len(hub)
    with pytest.raises(DataError, match=r"owner/data is not a local path"):
        next(open_source(Source(path="owner/data"), "").rows)
    assert all("0" * 40 in path for path in hub[before:] if "owner/data" in path), hub[before:]
    assert len(hub) > before
