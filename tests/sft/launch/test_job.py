import subprocess
import sys
from math import ceil
from pathlib import Path

import pytest

from sft.cli import run
from sft.data.prepare import prepare
from sft.errors import ModelError
from sft.launch.job import open_job
from sft.plan.hardware import Hardware, described_hardware
from sft.recipe.schema import REPOSITORY

CPU = Hardware(None, 1, 1, 2, 16.0)


@pytest.fixture
def path(recipe_file: Path, outputs: Path) -> Path:
    recipe_file.write_text(recipe_file.read_text() + f"output_dir: {outputs}\n")
    return recipe_file


def test_the_plan_counts_data_that_is_prepared_and_estimates_the_rest(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{n}", "completion": "b"}}\n' for n in range(100)))
    overrides = [f"data.train={tmp_path / 'rows.jsonl'}", "data.held_out=0.5", "data.packing=false"]
    job = open_job(path, overrides, CPU)
    assert "estimated" in job.plan.steps_per_epoch.reason
    prepared = prepare(job.recipe, job.model)
    counted = job.with_data(prepared.facts()).plan
    assert counted.steps_per_epoch.value == ceil(prepared.sequences / 8)
    run(["plan", str(path), *overrides])
    assert counted.steps_per_epoch.reason in capsys.readouterr().out


def test_a_plan_alone_needs_no_model_at_hand(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub = ["model.name_or_path=some-owner/no-such-model", "data.train=some-owner/no-such-data"]
    assert open_job(path, hub, described_hardware("8x80GB"), to_run=False).plan.precision.value == "bf16"
    with pytest.raises(
        ModelError, match=r"some-owner/no-such-model: .* not in the hub's cache, and the hub does not answer"
    ):
        open_job(path, hub, described_hardware("8x80GB"))


def test_what_prepares_data_learns_of_the_model_without_torch(path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from sft.launch.job import open_recipe;"
        f"model = open_recipe(Path({str(path)!r}), [], for_data=True)[2];"
        "print(model.model_type, model.vocab_size, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    facts = open_job(path, [], CPU).model
    assert done.stdout.split() == [facts.model_type, str(facts.vocab_size), "False"], done.stderr
