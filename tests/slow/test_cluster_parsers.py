"""The files for clusters, read by the libraries of those who run them: Kubeflow's and Kubernetes' models, and SkyPilot."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from sft.parallel.environment import free_port
from sft.recipe.schema import REPOSITORY
from tests.slow.beside import python_with
from tests.slow.conftest import Start, latest, write_recipe

pytestmark = [pytest.mark.slow, pytest.mark.extra]
SCRIPTS = REPOSITORY / "scripts"

# What the models of the clients give back is what they know: another key is lost, another type refused.
_PYTORCHJOB = """
import json, sys
from types import SimpleNamespace
from kubeflow.training import ApiClient, KubeflowOrgV1PyTorchJob  # registers the models
import kubernetes.client
job = json.load(sys.stdin)
pods = [spec.pop("template") for spec in job["spec"]["pytorchReplicaSpecs"].values()]
def through(client, value, kind):
    return client.sanitize_for_serialization(client.deserialize(SimpleNamespace(data=json.dumps(value)), kind))
found = through(ApiClient(), job, KubeflowOrgV1PyTorchJob)
templates = [through(kubernetes.client.ApiClient(), pod, "V1PodTemplateSpec") for pod in pods]
for spec, template in zip(found["spec"]["pytorchReplicaSpecs"].values(), templates):
    spec["template"] = template
print(json.dumps(found))
"""
_TASK = """
import json, sys, yaml
from sky import Task
config = yaml.safe_load(sys.stdin)
task = Task.from_yaml_config(config, env_overrides=[("RECIPE", sys.argv[1]), ("OUTPUT_DIR", sys.argv[2])],
                             secrets_overrides=[("HF_TOKEN", "x")])
(resources,) = task.resources
print(json.dumps([task.num_nodes, resources.accelerators, dict(task.envs), task.run, task.setup, sorted(task.secrets)]))
"""


def parsed(python: Path, program: str, text: str, folder: Path, *words: str, status: int = 0) -> str:
    """What a program of another environment prints last; its settings go to the folder."""
    own = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    own |= {"HOME": str(folder), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    done = subprocess.run(
        [python, "-c", program, *words],
        env=own,
        cwd=REPOSITORY,
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode != 0) == (status != 0), done.stderr[-3000:]
    return done.stdout.strip().rpartition("\n")[2] if status == 0 else done.stderr


def test_kubeflows_and_kubernetes_models_know_every_key_of_the_pytorchjob(tmp_path: Path) -> None:
    python, text = python_with("kubeflow_training"), (SCRIPTS / "kubernetes" / "pytorchjob.yaml").read_text()
    text = text.replace(
        "nvidia.com/gpu: 8}", 'nvidia.com/gpu: "8"}'
    )  # a quantity: either is one, and the models have text
    job = yaml.safe_load(text)
    assert json.loads(parsed(python, _PYTORCHJOB, json.dumps(job), tmp_path)) == job
    wrong = yaml.safe_load(text.replace("terminationGracePeriodSeconds", "terminationGraceSeconds"))
    assert json.loads(parsed(python, _PYTORCHJOB, json.dumps(wrong), tmp_path)) != wrong


def test_the_task_that_skypilot_reads_trains_on_two_nodes(tmp_path: Path, start: Start) -> None:
    python, text = python_with("skypilot"), (SCRIPTS / "skypilot" / "sft.yaml").read_text()
    assert "acceleratorz" in parsed(
        python, _TASK, text.replace("accelerators", "acceleratorz"), tmp_path, "x", "y", status=1
    )
    recipe = write_recipe(tmp_path / "job.yaml", train={"global_batch_size": 8, "max_steps": 2, "save_strategy": "no"})
    printed = parsed(python, _TASK, text, tmp_path, str(recipe), str(tmp_path / "outputs"))
    nodes, accelerators, variables, run, setup, secrets = json.loads(printed)
    assert (nodes, accelerators, setup.strip(), secrets) == (2, {"H100": 8}, "bash scripts/setup.sh", ["HF_TOKEN"])
    variables |= {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2",
        "MASTER_PORT": str(free_port()),
    }
    # SkyPilot sets this in each task: of the recipe's own machine here, which has none.
    variables |= {"SKYPILOT_NUM_GPUS_PER_NODE": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    words = ["bash", "-c", f"cd {REPOSITORY}; {run}"]
    jobs = [start(words, **variables, SKYPILOT_NODE_RANK=str(rank)) for rank in (0, 1)]
    printed = "".join(job.communicate()[0] for job in jobs)
    assert [job.returncode for job in jobs] == [0, 0], printed
    assert (latest(recipe).record["status"], latest(recipe).record["ranks"]) == ("finished", 2)
