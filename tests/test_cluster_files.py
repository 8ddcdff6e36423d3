"""The files for clusters call the launcher, with nothing in between."""

import re

import pytest
import yaml

from sft import cli
from sft.recipe.schema import REPOSITORY

SCRIPTS = REPOSITORY / "scripts"


def commands(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]


@pytest.mark.parametrize(("file", "entry"), [("sft.sbatch", "scripts/sft.sh"), ("eval.sbatch", "scripts/eval.sh")])
def test_a_slurm_script_starts_one_task_a_machine_with_the_entry_that_everybody_uses(file: str, entry: str) -> None:
    text = (SCRIPTS / "slurm" / file).read_text()
    (line,) = [line for line in commands(text) if line.removeprefix("exec ").startswith("srun ")]
    assert f" bash {entry} " in line
    # Since 22.05 srun takes no share of the cores from sbatch by itself.
    assert '${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"}' in line
    # Another machine's end is no reason to end rank 0, which may save or evaluate: a cluster may say otherwise.
    assert file == "eval.sbatch" or "--kill-on-bad-exit=0 --wait=0" in line
    options = re.findall(r"^#SBATCH (--\S+)", text, flags=re.MULTILINE)
    assert {"--requeue", "--open-mode=append"} <= set(options)
    assert {"--ntasks-per-node=1", "--ntasks=1"} & set(options)


def test_both_kinds_of_pod_start_the_launcher() -> None:
    job = yaml.safe_load((SCRIPTS / "kubernetes" / "pytorchjob.yaml").read_text())
    for kind in ("Master", "Worker"):
        (container,) = job["spec"]["pytorchReplicaSpecs"][kind]["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"
        assert container["command"] == ["bash", "scripts/sft.sh"]
        recipe, overrides = cli.recipe_and_overrides(container["args"])
        assert (REPOSITORY / recipe).is_file()
        assert overrides == ["output_dir=/outputs"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {"outputs", "shm"}


def test_the_skypilot_task_starts_the_launcher() -> None:
    task = yaml.safe_load((SCRIPTS / "skypilot" / "sft.yaml").read_text())
    assert commands(task["run"]) == ['bash scripts/sft.sh "$RECIPE" "output_dir=$OUTPUT_DIR"']
    assert commands(task["setup"]) == ["bash scripts/setup.sh"]
    assert (REPOSITORY / task["envs"]["RECIPE"]).is_file()
    assert task["envs"]["OUTPUT_DIR"] in task["file_mounts"]
