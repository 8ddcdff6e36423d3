from pathlib import Path

import pytest

from sft.files import disk_was_full, read_json, remove, write_json


def test_a_json_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    write_json(file, {"a": "ünï", "path": tmp_path})
    assert read_json(file) == {"a": "ünï", "path": str(tmp_path)}
    with pytest.raises(TypeError):
        write_json(file, {("no", "key"): 1})
    assert read_json(file)["a"] == "ünï"
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_half_a_surrogate_pair_is_written_and_read_again(tmp_path: Path) -> None:
    write_json(tmp_path / "chat.json", {"text": "half \ud83d, full \U0001f600"})
    assert read_json(tmp_path / "chat.json") == {"text": "half \ud83d, full \U0001f600"}


def test_removing_a_link_leaves_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    (tmp_path / "final").symlink_to("kept")
    remove(tmp_path / "final")
    assert not (tmp_path / "final").is_symlink()
    assert (tmp_path / "kept" / "file").exists()
    remove(tmp_path / "kept")
    remove(tmp_path / "never was")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_found_behind_the_error_that_a_library_raised() -> None:
    try:
        try:
            raise OSError(28, "No space left on device")
        except OSError as full:
            raise RuntimeError("cannot write the tensor") from full
    except RuntimeError as error:
        assert disk_was_full(error)
    assert disk_was_full(RuntimeError("[enforce fail at inline_container.cc:603] . unexpected pos 64 vs 0"))
    assert not disk_was_full(ValueError("no"))
