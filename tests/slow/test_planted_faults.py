"""Faults that real users make are named, or do no harm: one table of plant, command, exit status and words."""

import shlex
from pathlib import Path

import pytest

from sft.hub.demo import Demo
from tests.slow.conftest import rows
from tests.slow.planted_faults import FAULTS, make_folder, told
from tests.slow.ranks import Ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

TABLE = {f"{area}: {name}": fault for area, faults in FAULTS.items() for name, fault in faults.items()}
IN_CI = [
    "weights: a NaN in one layer",
    "config: rope_scaling without its factor",
    "tokenizer: no files",
    "template: drops the system turn",
    "roles: preferences",
    "encoding: Latin-1",
    "splits: a folder of splits",
    "numbers: train.warmup_ratio=0.03",
    "environment: a precision left over from accelerate",
    "resume: rows in another order",
    "evaluation: a target that no document has",
    "export: no tokenizer",
]


def _run(ranks: Ranks, words: list[str], environment: dict[str, str]) -> dict[str, str]:
    if (
        words[0] == "sft.train"
    ):  # which starts this one in a process of its own, without the imports that are here already
        prepared = ranks.run(1, ["sft.launch.prepare", *words[1:]], expect=None, **environment)
        if prepared["status"] != "0":
            return prepared
    return ranks.run(1, words, expect=None, **environment)


@pytest.mark.parametrize("name", rows(TABLE, IN_CI))
def test_a_planted_fault_is_told(name: str, tmp_path: Path, demo: Demo, ranks: Ranks) -> None:
    fault = TABLE[name]
    make_folder(tmp_path, demo)
    for command in fault.before:
        assert _run(ranks, shlex.split(command.format(folder=tmp_path)), {})["status"] == "0"
    fault.plant(tmp_path)
    words = shlex.split(fault.command.format(folder=tmp_path))
    environment = {name: value.format(folder=tmp_path) for name, value in fault.environment.items()}
    printed = _run(ranks, words, environment)
    assert printed["status"] == str(fault.status), printed
    message = printed["stderr"] + printed["stdout"]
    assert "Traceback" not in message
    assert [part for part in fault.told if not told(message, part)] == [], message
