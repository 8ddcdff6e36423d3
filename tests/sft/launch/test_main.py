import json
import re
from pathlib import Path

import pytest

from sft import cli
from sft.data.prepared import entry_folder, find_prepared
from sft.errors import DataError, UserError
from sft.launch.job import open_job
from sft.launch.main import planned_job
from sft.launch.topology import Topology, read_topology
from sft.plan.hardware import Hardware


def set_all(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    for word in text.split(" ") if text else []:
        name, _, value = word.partition("=")
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("environment", "topology"),
    [
        ("", Topology(1)),
        ("NPROC=auto MASTER_PORT=4242", Topology(1, master_port=4242)),
        ("NPROC=8 NNODES=2 NODE_RANK=0 MASTER_ADDR=host0 MASTER_PORT=4242", Topology(8, 2, 0, "host0", 4242)),
        ("NPROC=4 SLURM_NNODES=2 SLURM_NODEID=1 SLURM_JOB_NODELIST=node[07-08]", Topology(4, 2, 1, "node07")),
        ("SLURM_NNODES=2 SLURM_NODEID=1 SLURM_JOB_NODELIST=n[1,3]-ib.cluster,m", Topology(1, 2, 1, "n1-ib.cluster")),
        ("SLURM_NNODES=4 SLURM_STEP_NUM_NODES=1 SLURM_NODEID=0", Topology(1)),  # a step on one machine of four
        (
            "SLURM_NNODES=2 SLURM_NODEID=0 SLURM_JOB_NODELIST=node[07-08] SLURM_JOB_ID=51234",
            Topology(1, 2, 0, "node07", 21234),
        ),
        (
            "PET_NNODES=2 PET_NODE_RANK=1 PET_MASTER_ADDR=m PET_MASTER_PORT=7 PET_NPROC_PER_NODE=4",
            Topology(4, 2, 1, "m", 7),
        ),
        ("PET_NNODES=1 PET_NODE_RANK=0 PET_NPROC_PER_NODE=auto", Topology(1)),
        (
            "SKYPILOT_NUM_NODES=2 SKYPILOT_NODE_RANK=1 SKYPILOT_NODE_IPS=10.0.0.1\n10.0.0.2",
            Topology(1, 2, 1, "10.0.0.1"),
        ),
        ("NNODES=1 SLURM_NNODES=2 SLURM_NODEID=1", Topology(1)),  # what the user says counts before what Slurm says
    ],
)
def test_the_processes_that_the_environment_asks_for(
    environment: str, topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_all(monkeypatch, environment)
    assert read_topology() == topology
    assert topology.ranks == topology.per_node * topology.nodes


def test_a_plan_is_printed_and_nothing_is_started(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cli.run(["train", str(recipe_file), "--plan"])
    here = capsys.readouterr().out
    assert "CPU" in here.splitlines()[0]
    assert "one process" in here
    cli.run(["train", str(recipe_file), "--on", "4x24GB"])
    there = capsys.readouterr().out
    assert "4 x GPU (24 GiB)" in there
    assert "DDP" in there
    monkeypatch.setenv("NPROC", "2")
    cli.run(["train", str(recipe_file), "--plan"])
    assert "2 processes" in capsys.readouterr().out
    assert not (tmp_path / "outputs" / "mine").exists()
    assert not (tmp_path / "outputs" / ".prepared").exists()


@pytest.mark.slow
def test_data_is_prepared_once_for_every_start(recipe_file: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n' * 5)
    words = [str(recipe_file), f"output_dir={tmp_path / 'outputs'}", f"data.train={rows}"]
    cli.run(["train", *words, "--prepare"])
    for other in ([], ["train.learning_rate=1e-3"], ["train.global_batch_size=4"]):
        job = open_job(recipe_file, [*words[1:], *other], Hardware(None, 1, 1, 2, 16.0))
        assert find_prepared(entry_folder(job.recipe, job.model)) is not None


@pytest.mark.slow
def test_data_beyond_a_limit_starts_nothing(recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, outputs = tmp_path / "rows.jsonl", tmp_path / "outputs"
    rows.write_text('{"prompt": "a", "completion": "b"}\n' * 5 + json.dumps({"prompt": "a" * 200, "completion": "b"}))
    words = [str(recipe_file), f"output_dir={outputs}", f"data.train={rows}"]
    for switch, processes in (("--show=1", "1"), (None, "2")):
        monkeypatch.setenv("NPROC", processes)
        with pytest.raises(DataError, match=r"1 of 6 rows \(16.7%\)"):
            cli.run(["train", *words, *([switch] if switch else [])])
    assert not list(outputs.glob("mine/*"))
    cli.run(["prepare", *words, "data.max_overlong_fraction=0.2"])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.trainer_args.dataloader_num_workers=-1", "num_workers"),
        ("model.pad_token=<|nothing|>", "model.pad_token"),
        ("data.loss_on=completion", "which has no completion"),
    ],
)
def test_the_plan_refuses_what_the_start_refuses(override: str, words: str, recipe_file: Path, outputs: Path) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        planned_job(recipe_file, [f"output_dir={outputs}", override])
