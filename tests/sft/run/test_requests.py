import os

import psutil
import pytest

from sft.run.requests import began


@pytest.mark.parametrize(
    ("environment", "by_launcher"),
    [
        ({}, False),
        ({"LOCAL_RANK": "0", "WORLD_SIZE": "1"}, False),  # as one process with DeepSpeed is told, without a launcher
        ({"TORCHELASTIC_RUN_ID": "none"}, True),  # one process under torchrun is no rank
        ({"LOCAL_RANK": "0", "WORLD_SIZE": "2"}, True),
    ],
)
def test_a_start_began_with_its_launcher_or_else_with_its_process(
    environment: dict[str, str], by_launcher: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert began() == psutil.Process(os.getppid() if by_launcher else os.getpid()).create_time()
