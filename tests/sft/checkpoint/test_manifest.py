from pathlib import Path

import pytest

from sft.checkpoint.manifest import NAME, entries, fault, files_in, files_of_rank, read_manifest, size, write_manifest

FILES = ["model.safetensors", "global_step5/zero_pp_rank_1_mp_rank_00_optim_states.pt", "merges.txt"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What a checkpoint looks like, in small."""
    (tmp_path / "global_step5").mkdir()
    for name in FILES[:2]:
        (tmp_path / name).write_bytes(bytes(range(256)) * 9)
    (tmp_path / FILES[2]).touch()
    write_manifest(tmp_path, {"step": 5, "ranks": 2, "recipe": {"schema_version": 1}})
    return tmp_path


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_the_manifest_says_what_is_in_the_checkpoint(folder: Path) -> None:
    manifest = read_manifest(folder)
    assert (manifest["step"], manifest["ranks"], manifest["recipe"]) == (5, 2, {"schema_version": 1})
    assert sorted(manifest["files"]) == sorted(FILES)
    assert sum(entry["bytes"] for entry in manifest["files"].values()) == size(folder) - (folder / NAME).stat().st_size


@pytest.mark.parametrize("name", FILES[:2])
def test_one_flipped_bit_a_missing_file_and_another_size_are_named(folder: Path, name: str) -> None:
    assert fault(folder) is None
    for place in (0, 100, -1):
        flip(folder / name, place)
        assert fault(folder) == f"{name} has changed since it was written: its checksum differs"
        flip(folder / name, place)
    (folder / name).write_bytes(bytes(1000))
    assert fault(folder) == f"{name} has 1,000 bytes and should have 2,304"
    (folder / name).unlink()
    assert fault(folder) == f"{name} is missing"


def test_one_flipped_bit_anywhere_in_the_manifest_is_found(folder: Path) -> None:
    for place in range((folder / NAME).stat().st_size - 1):  # the last is the line's end
        flip(folder / NAME, place)
        assert fault(folder) == f"{NAME} is damaged", place
        flip(folder / NAME, place)
    assert fault(folder) is None


@pytest.mark.parametrize("name", ["optimizer.bin", ".metadata", "global_step5/zero_pp_rank_2_optim_states.pt", "link"])
def test_a_file_that_was_not_written_by_the_run_is_a_fault(folder: Path, name: str) -> None:
    """Libraries look for files by name and pattern, and some would unpickle this one."""
    (folder / name).symlink_to("/tmp") if name == "link" else (folder / name).write_bytes(b"another's")
    assert fault(folder) == f"{name} is in it, and was not when it was written"


def test_what_file_systems_leave_is_no_fault(folder: Path) -> None:
    (folder / ".nfs00000000075a6e0b").touch()
    assert fault(folder) is None


@pytest.mark.parametrize("content", [None, b"", b"[]", b"null", b"{}", b"\xff\xfe", b'{"files": 3, "checksum": ""}'])
def test_without_a_readable_manifest_a_checkpoint_is_not_used(folder: Path, content: bytes | None) -> None:
    (folder / NAME).unlink()
    if content is not None:
        (folder / NAME).write_bytes(content)
    assert fault(folder) == (
        f"{NAME} is damaged" if content is not None else f"{NAME} cannot be read: No such file or directory"
    )


def test_a_manifest_of_a_later_format_is_not_guessed_at(folder: Path) -> None:
    write_manifest(folder, {"format": 2})
    assert fault(folder) == f"{NAME} has format 2, and this version reads 1"


def test_each_file_is_summed_by_one_rank_and_together_they_give_the_manifest_of_one(folder: Path) -> None:
    names = [
        "config.json",
        "rng_state_0.pth",
        "rng_state_1.pth",
        "optimizer_0/__0_0.distcp",
        "optimizer_0/__1_0.distcp",
        "optimizer_0/.metadata",
        "global_step5/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
        "global_step5/mp_rank_00_model_states.pt",
        "rng_state_7.pth",
    ]
    by_rank = [files_of_rank(names, rank, 2) for rank in range(2)]
    assert by_rank[1] == [name for name in names if "rank_1" in name or "state_1" in name or "__1" in name]
    assert sorted(by_rank[0] + by_rank[1]) == sorted(names)
    sums = [entries(folder, files_of_rank(files_in(folder), rank, 2)) for rank in range(2)]
    assert sums[1] | sums[0] == read_manifest(folder)["files"]
