import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sft.data.prepare import prepare
from sft.errors import DataError, RunError
from sft.hub.demo import Demo
from sft.launch.job import open_job
from sft.launch.open_run import open_run
from sft.plan.hardware import Hardware
from sft.plan.job import Job

MakeJob = Callable[..., Job]


def write(path: Path, count: int, *more: str) -> None:
    rows = [{"prompt": f"Question {number}", "completion": f"Answer {number}"} for number in range(count)]
    rows += [{"prompt": "?", "completion": text} for text in more]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def make_job(recipe_file: Path, demo: Demo, tmp_path: Path) -> MakeJob:
    """A run over rows.jsonl, on a CPU, whose data is prepared."""
    words = [f"model.name_or_path={demo.model}", f"output_dir={tmp_path / 'out'}"]
    words.append(f"data.train={tmp_path / 'rows.jsonl'}")

    def make(*overrides: str) -> Job:
        job = open_job(recipe_file, [*words, *overrides], Hardware(None, 1, 1, 2, 16.0))
        prepare(job.recipe, job.model)
        return job

    return make


def test_a_run_keeps_the_ledger_of_what_it_is_trained_on(make_job: MakeJob, tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", 9, "{{name}}")
    started = open_run(make_job())
    kept = json.loads(started.run.ledger_file.read_text())
    assert kept == started.prepared.ledger | {"findings": started.prepared.findings}
    assert [found["kind"] for found in kept["findings"]] == ["placeholder"]
    assert started.run.record["data_fingerprint"] == started.prepared.fingerprint


def test_data_beyond_a_limit_leaves_no_run(make_job: MakeJob, tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", 9, "Oslo " * 500)
    with pytest.raises(DataError, match=r"1 of 10 rows \(10.0%\) are longer"):
        open_run(make_job())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [".prepared"]


INTERRUPTED = """
import sys
from pathlib import Path
from sft.plan.hardware import Hardware
from sft.launch.job import open_job
from sft.checkpoint.manifest import write_manifest
from sft.files import write_json
from sft.launch.open_run import open_run
run = open_run(open_job(Path(sys.argv[1]), sys.argv[2:], Hardware(None, 1, 1, 2, 16.0))).run
(run.checkpoints / "checkpoint-5").mkdir()
write_manifest(run.checkpoints / "checkpoint-5")
write_json(run.plan_file, {"decisions": [], "deepspeed": None})
run.update(status="interrupted")
"""


def test_a_run_resumes_on_no_other_data(make_job: MakeJob, recipe_file: Path, tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", 9)
    overrides = make_job().overrides
    subprocess.run([sys.executable, "-c", INTERRUPTED, str(recipe_file), *overrides], check=True)
    write(tmp_path / "rows.jsonl", 8)
    with pytest.raises(RunError, match=r"The data, tokenizer or chat template .*train.resume=never"):
        open_run(make_job())
    assert open_run(make_job("train.resume=never")).run.last_checkpoint() is None
