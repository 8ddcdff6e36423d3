"""The image of the Dockerfile trains, on one process and on two."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.extra]
FEW = ["train.max_steps=4", "eval.limit=2", "eval.chat=false"]


def test_the_image_runs_the_readmes_commands(tmp_path: Path) -> None:
    image = os.environ.get("SFT_IMAGE")
    if image is None or shutil.which("buildah") is None:
        pytest.skip(
            "buildah is not here, or SFT_IMAGE names no image: buildah bud --isolation chroot --network host -t NAME ."
        )
    container = subprocess.run(["buildah", "from", image], capture_output=True, text=True, check=True).stdout.strip()
    run = ["buildah", "run", "--isolation", "chroot", "-v", f"{tmp_path}:/workspace/outputs", container, "--", "env"]
    try:
        for processes, more in ((1, []), (2, ["train.deepspeed=zero3"])):
            words = [f"NPROC={processes}", "bash", "scripts/sft.sh", "recipes/tiny.yaml", *more, *FEW]
            done = subprocess.run([*run, *words], capture_output=True, text=True, check=False, timeout=400)
            assert done.returncode == 0, done.stdout + done.stderr
            record = json.loads((tmp_path / "tiny" / "latest" / "run.json").read_text())
            assert (record["status"], record["ranks"]) == ("finished", processes)
    finally:
        subprocess.run(["buildah", "rm", container], capture_output=True, check=False)
