"""A wheel, built through a source distribution and installed outside of the checkout, trains, evaluates and exports."""

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from sft.recipe.schema import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.extra]


def build(kind: str, source: Path, output: Path) -> Path:
    """Build a wheel or an sdist with the setuptools that is installed; returns the file."""
    words = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(output)!r}))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", words], cwd=source, capture_output=True, text=True, check=True
    )
    return output / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """From the files that git knows, in a folder of their own: a build writes into its source."""
    folder = tmp_path_factory.mktemp("built")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("the repository is no git checkout")
    archive = subprocess.run(
        ["tar", "-c", "--null", "-T", "-"], cwd=REPOSITORY, input=listed.stdout, capture_output=True, check=True
    )
    (folder / "source").mkdir()
    subprocess.run(["tar", "-x"], cwd=folder / "source", input=archive.stdout, check=True)
    for junk in ("outputs/tiny/run.json", "tests/data.jsonl", "scripts/__pycache__/docs_hooks.cpython-311.pyc"):
        (folder / "source" / junk).parent.mkdir(parents=True, exist_ok=True)
        (folder / "source" / junk).touch()
    return build("sdist", folder / "source", folder)


@pytest.fixture(scope="module")
def installed(sdist: Path) -> Path:
    """The command `sft` of a wheel in an environment of its own, which sees the packages of this one, but not this checkout."""
    folder = sdist.parent
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    wheel = build("wheel", next((folder / "unpacked").iterdir()), folder)
    venv.create(folder / "venv", with_pip=True, symlinks=True)
    python = folder / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel], check=True)
    words = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "venv" / "bin" / "sft"


def sft(command: Path, folder: Path, *words: str, typed: str | None = None, status: int = 0) -> str:
    """Run `sft` as a user outside of the checkout would, without an activated environment."""
    own = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    own |= {"PATH": "/usr/local/bin:/usr/bin:/bin", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [command, *words], cwd=folder, env=own, input=typed, capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def test_the_source_distribution_has_what_a_checkout_needs_and_no_tests(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    for needed in (
        "requirements.lock",
        "scripts/sft.sh",
        "scripts/slurm/sft.sbatch",
        "docs/index.md",
        "recipes/tiny.yaml",
    ):
        assert needed in files
    assert not [
        file for file in files if file.startswith(("tests", "outputs", "benchmarks", ".")) or "__pycache__" in file
    ]


def test_a_wheel_has_the_packages_alone(installed: Path) -> None:
    (wheel,) = installed.parents[2].glob("*.whl")
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"sft", "eval"}


def test_a_shipped_recipe_trains_outside_of_the_checkout(installed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "my work"
    folder.mkdir()
    # The user's own repository is not the program's.
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    assert "There is no recipe recipes/typo.yaml. Shipped: " in sft(
        installed, folder, "train", "recipes/typo.yaml", status=2
    )
    few = ["train.max_steps=8", "train.save_steps=4", "train.warmup_steps=1", "eval.limit=4", "eval.chat=false"]
    printed = sft(installed, folder, "train", "recipes/tiny.yaml", *few)
    assert "scripts/" not in printed
    run = (folder / "outputs" / "tiny" / "latest").resolve()
    assert (run / "final" / "model.safetensors").is_file()
    record = json.loads((run / "run.json").read_text())
    assert record["git"]["commit"] is None
    assert record["recipe_path"].endswith("site-packages/sft/shipped/recipes/tiny.yaml")
    report = (run / "report.md").read_text()
    assert f"train '{run}'" in report
    assert "scripts/" not in report
    assert "ZeRO-2" in sft(installed, folder, "plan", "qwen3b", "--on", "8x80GB")
    assert "zero2" in sft(installed, folder, "plan", "tiny", "train.deepspeed=ds_configs/zero2.json", *few)
    assert "Prepared in" in sft(installed, folder, "show", "tiny", "-n", "1", *few)
    assert "demo_extraction" in sft(installed, folder, "eval", "outputs/tiny/latest", "limit=2")
    assert "tuned:" in sft(installed, folder, "chat", "outputs/tiny/latest", typed="Anna took the train to Nice.\n")
    sft(installed, folder, "export", "outputs/tiny/latest", "--to", "merged", "--output", "given")
    assert (folder / "given" / "config.json").is_file()
    assert "Repeats" in sft(installed, folder, "train", "outputs/tiny/latest", "train.max_steps=4")
    rows = "".join(f"what is {number} plus 1,it is {number + 1} of course\n" for number in range(200))
    (folder / "faq.csv").write_text("question,answer\n" + rows)
    sft(installed, folder, "init", "faq.csv", "--model", str(run / "final"))
    text = (folder / "faq.yaml").read_text()
    assert "scripts/" not in text
    assert "shipped/recipes/recipe.schema.json" in text
    sft(installed, folder, "plan", "faq.yaml")
    (folder / "trl.yaml").write_text(
        "model_name_or_path: a/b\ndataset_name: c/d\nlearning_rate: 1e-5\ndeepspeed: zero2.json\n"
    )
    assert "ds_configs/zero2.json" in sft(installed, folder, "convert", "trl.yaml", "--gpus", "2")
    made = {path.name for path in folder.iterdir()}
    assert made == {".git", "faq.csv", "faq.yaml", "faq_eval", "given", "outputs", "trl.yaml"}
