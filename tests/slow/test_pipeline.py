"""Pipeline stages where the matrix of engines does not reach: more stages than the demo has layers, signals, packs of uneven length."""

from pathlib import Path

import pytest

from sft.recipe.schema import REPOSITORY
from sft.run.directory import Run
from tests.slow.conftest import losses
from tests.slow.engine_runs import (
    STEPS,
    EngineRuns,
    assert_same_training,
    assert_same_weights,
    lines,
    make_qwen3,
    norms,
)
from tests.slow.ranks import Ranks

pytestmark = pytest.mark.slow
FAULTS = REPOSITORY / "tests" / "slow" / "faults.py"


@pytest.mark.extra
def test_four_stages_of_an_untied_model_train_as_one_process_does(runs: EngineRuns) -> None:
    """With norms inside heads, the output head apart, and micro-batches of two packs whose lengths differ."""
    model = make_qwen3(Path(runs("1").record["base_model"]["path"]), runs.folder / "four-layers", layers=4)
    words = (f"model.name_or_path={model}", "train.max_steps=20")
    runs.train("1", "packed", "four-alone", *words)
    runs.train("4 pipeline parallel, 2 x 2", "packed", "four", *words, "train.pipeline_parallel_size=4")
    run, alone = (runs.named("packed", name) for name in ("four", "four-alone"))
    assert run.record["running"]["layers of stages"] == "0 | 1 | 2 | 3"
    assert len(losses(run)) == 20
    assert losses(run) == pytest.approx(losses(alone), abs=1e-5)
    assert norms(run) == pytest.approx(norms(alone), rel=1e-3)
    assert_same_weights(run, alone, 2e-4)
    assert {line["bubble"] for line in lines(run)} == {3 / 7}


def test_stages_that_a_signal_stops_save_and_resume_on_one_process(runs: EngineRuns, ranks: Ranks) -> None:
    """It reaches one stage, in the middle of a step."""
    words = [FAULTS, runs.recipe("packed"), "tracking.run_name=pipeline-stopped"]
    fault = {"AT": "step 3, micro-batch 2", "ON": "1", "DO": "SIGTERM"}
    printed = ranks.run(2, [*words, "train.pipeline_parallel_size=2"], expect=143, **fault)
    run = Run(runs.named("packed", "pipeline-stopped").path)
    saved = run.last_checkpoint()
    assert saved is not None and saved.name in ("checkpoint-3", "checkpoint-4")  # a busy machine hears it a step later
    assert printed["stderr"].count("Interrupted by SIGTERM") == 1
    assert sorted(path.name for path in saved.glob("optimizer*")) == ["optimizer_0.pt", "optimizer_1.pt"]
    assert "under pipeline parallel, 2 stages; it resumes with one process" in ranks.run(1, words)["stdout"]
    assert len(losses(run)) == STEPS
    assert_same_training(run, runs("1"))
