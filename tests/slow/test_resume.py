"""Resumed equals uninterrupted: with the same ranks and engine in every bit that is written, elsewhere within rounding.

Each row takes a run of engine_runs.py and a copy of it that has lost everything after the checkpoint of step 8: what a kill leaves.
Epochs are of 6 steps, so that the checkpoint is inside the second.
"""

import json
import shutil
from collections import Counter
from math import cos, pi
from pathlib import Path
from random import Random

import pytest
from _pytest.mark import ParameterSet

from sft.checkpoint.manifest import NAME, fault, files_in, read_manifest
from sft.recipe.schema import REPOSITORY
from sft.run.directory import Run
from tests.slow.conftest import decisions, losses, write_recipe
from tests.slow.engine_runs import (
    ENGINES,
    SAVED,
    STEPS,
    EngineRuns,
    assert_identical,
    assert_same_training,
    assert_same_weights,
    lines,
    weights,
)
from tests.slow.ranks import Ranks

pytestmark = pytest.mark.slow
FAULTS = REPOSITORY / "tests" / "slow" / "faults.py"

DROPOUT = "packed, adapters with dropout"
WHERE_IT_WAS: list[tuple[str, ...]] = [
    ("1", "packed"),
    ("1", "padded, adapters"),
    ("1", "packed, bf16"),
    ("2 DDP", DROPOUT),
    ("2 DDP", "packed, nf4 and adapters"),
    ("2 DDP", "packed, DoRA"),
    ("1", "packed, pissa"),
    ("2 ZeRO-3", "packed, partly frozen"),
    ("2 ZeRO-2", "packed"),
    ("2 ZeRO-2", "padded"),
    ("2 ZeRO-3", "padded"),
    ("2 ZeRO-3", "packed, new tokens"),
    ("2 FSDP2", "packed"),
    ("2 FSDP2", DROPOUT),
    ("2 FSDP2, full checkpoints", "packed"),
    ("2 tensor parallel", "padded"),
    ("2 ZeRO-2, sequence parallel", "padded"),
    ("2 pipeline parallel", "packed"),
]
REPEATED = {
    ("1", "padded, adapters"),
    ("2 DDP", "packed, nf4 and adapters"),  # test_qlora.py
    ("2 DDP", "packed, DoRA"),
    ("2 ZeRO-2", "padded"),
    ("2 FSDP2", DROPOUT),
    ("1 ZeRO-2", "2 ZeRO-2", "packed"),
    ("2 ZeRO-2 offload", "1", "packed"),
    ("2 ZeRO-2", "2 tensor parallel", "packed"),
    ("2 ZeRO-2", "2 pipeline parallel", "padded"),
    ("2 FSDP2", "2 pipeline parallel", "padded, adapters"),
    ("1", "2 ZeRO-3", "padded, adapters"),
    ("2 FSDP2", "1", "padded, adapters"),
    ("2 ZeRO-3", "2 FSDP2", "packed, nf4 and adapters"),
    ("1", "2 ZeRO-2", "packed, bf16"),
}
"""Whose law another row holds too."""


def cases(all_of_them: list[tuple[str, ...]]) -> list[ParameterSet]:
    """Rows, of which the repeated ones are `extra`."""
    return [pytest.param(*case, marks=pytest.mark.extra if case in REPEATED else ()) for case in all_of_them]


@pytest.mark.parametrize(("name", "kind"), cases(WHERE_IT_WAS))
def test_resumed_equals_uninterrupted(name: str, kind: str, runs: EngineRuns) -> None:
    uninterrupted = runs(name, kind)
    run = runs.killed_after_step(SAVED, uninterrupted, f"{uninterrupted.path.name}-killed")
    printed = runs.train(name, kind, run.path.name)
    assert f"it resumes from checkpoint-{SAVED}" in printed["stdout"]
    assert_identical(run, uninterrupted)
    first, second = run.record["sessions"]
    assert (first["status"], first["last_step"]) == ("killed", SAVED + 2)
    assert (second["status"], second["checkpoint"]) == ("finished", f"checkpoint-{SAVED}")
    assert run.record["started"] == uninterrupted.record["started"]
    assert run.record["timings"]["train_seconds"] == pytest.approx(first["seconds"] + second["seconds"])


def test_ranks_that_fill_a_step_with_dummies_resume_in_the_same_epoch(runs: EngineRuns) -> None:
    run = runs.killed_after_step(SAVED, runs("3 DDP, filled"), "filled-killed")
    runs.train("3 DDP, filled", "packed", run.path.name)
    # DDP of three ranks may add up in another order after a start; another epoch's order is off by hundredths.
    assert_same_training(run, runs("3 DDP, filled"))


ELSEWHERE: list[tuple[str, ...]] = [
    ("2 DDP", "1", "packed"),
    ("1", "2 ZeRO-3", "packed"),
    ("1 ZeRO-2", "2 ZeRO-2", "packed"),
    ("2 ZeRO-2", "4 ZeRO-2", "packed"),
    ("2 ZeRO-3", "2 FSDP2", "packed"),
    ("2 FSDP2", "2 ZeRO-2", "packed"),
    ("2 FSDP2, full checkpoints", "2 DDP", "packed"),
    ("2 ZeRO-1", "2 ZeRO-3 offload", "packed"),
    ("2 ZeRO-2 offload", "1", "packed"),
    ("2 tensor parallel", "1", "packed"),
    ("2 ZeRO-2", "2 tensor parallel", "packed"),
    ("2 ZeRO-2, sequence parallel", "1", "packed"),
    ("2 pipeline parallel", "1", "packed"),
    ("2 pipeline parallel", "3 pipeline parallel", "packed"),
    ("2 ZeRO-2", "2 pipeline parallel", "padded"),
    ("2 ZeRO-3", "2 ZeRO-2, sequence parallel", "packed"),
    ("1", "2 ZeRO-3", "padded, adapters"),
    # FSDP2 saves the weights of adapters under other names than their moments.
    ("2 ZeRO-3", "2 FSDP2", "padded, adapters"),
    ("2 FSDP2", "1", "padded, adapters"),
    ("2 pipeline parallel", "1", "padded, adapters"),
    ("2 FSDP2", "2 pipeline parallel", "padded, adapters"),
    ("2 ZeRO-3", "2 FSDP2", "packed, nf4 and adapters"),
    ("2 FSDP2", "1", "packed, nf4 and adapters"),
    ("2 ZeRO-2", "2 FSDP2", "packed, partly frozen"),
    ("1", "2 ZeRO-2", "packed, bf16"),
    ("2 ZeRO-2", "2 FSDP2", "packed, bf16"),
]


@pytest.mark.parametrize(("source", "target", "kind"), cases(ELSEWHERE))
def test_a_run_resumed_on_other_ranks_or_another_engine_equals_one_that_stayed(
    source: str, target: str, kind: str, runs: EngineRuns
) -> None:
    run = runs.killed_after_step(SAVED, runs(source, kind), f"{kind}-from-{source}-to-{target}")
    assert "resharded from full tensors" in runs.train(target, kind, run.path.name)["stdout"]
    if "bf16" in kind:  # engines round at other places; fp32 copies that were lost would show as more
        assert len(losses(run)) == STEPS
        assert losses(run) == pytest.approx(losses(runs("1", kind)), abs=0.03)
    else:
        assert_same_training(run, runs("1", kind), loss=1e-4 if "offload" in source + target else 1e-5)


def test_fsdp2s_own_shards_resume_on_twice_the_ranks(runs: EngineRuns) -> None:
    run = runs.killed_after_step(SAVED, runs("2 FSDP2"), "from-2-FSDP2-to-4")
    runs.train("4 FSDP2, hybrid", "packed", run.path.name, "train.fsdp={}")
    assert run.record["ranks"] == 4
    assert_same_training(run, runs("1"))


def test_a_run_resumes_in_another_precision_where_that_is_allowed(runs: EngineRuns) -> None:
    run = runs.killed_after_step(SAVED, runs("1"), "to-bf16")
    to_bf16 = ("train.precision=bf16", "train.resume_allow_changes=[train.precision]")
    assert "resharded from full tensors" in runs.train("1", "packed", run.path.name, *to_bf16)["stdout"]
    assert decisions(run)["weights"] == "bf16 with an fp32 copy"
    assert losses(run)[:SAVED] == losses(runs("1"))[:SAVED]
    assert losses(run) == pytest.approx(losses(runs("1")), abs=0.03)


def test_a_resume_between_two_lines_leaves_no_step_out(runs: EngineRuns) -> None:
    """The checkpoint comes where no line is due: it gets one, and the fingerprints add up."""
    # The eval loss would give each saved step a line, too.
    words = ("train.logging_steps=5", "train.save_steps=3", "train.max_steps=8", "train.eval_steps=8")
    runs.train("1", "packed", "between", *words)
    undisturbed = runs.named("packed", "between")
    run = runs.killed_after_step(3, undisturbed, "between-killed")
    run.metrics_file.write_text("".join(undisturbed.metrics_file.read_text().splitlines(keepends=True)[:2]))
    runs.train("1", "packed", run.path.name, *words)
    of_steps = [int(line["batch"], 16) for line in lines(runs("1"))]
    ends = [1, 3, 5, 6, 8]
    assert [line["step"] for line in lines(run)] == ends
    for line, before in zip(lines(run), [0, *ends], strict=False):
        assert int(line["batch"], 16) == sum(of_steps[before : line["step"]]) % 2**64


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["1", "2 ZeRO-2", "2 FSDP2"])
def test_damage_to_any_file_of_a_checkpoint_is_found_and_the_file_is_named(
    name: str, runs: EngineRuns, tmp_path: Path
) -> None:
    checkpoint = tmp_path / f"checkpoint-{SAVED}"
    shutil.copytree(runs(name).checkpoints / checkpoint.name, checkpoint)
    manifest = read_manifest(checkpoint)
    assert (manifest["step"], manifest["ranks"]) == (SAVED, ENGINES[name].ranks)
    assert fault(checkpoint) is None
    assert not (checkpoint / "training_args.bin").exists()
    for file, path in [*files_in(checkpoint).items(), (NAME, checkpoint / NAME)]:
        content = path.read_bytes()
        flip_a_bit(path)
        assert file in (fault(checkpoint) or ""), f"{file} with a bit flipped"
        path.write_bytes(content[: len(content) // 2])
        assert file in (fault(checkpoint) or ""), f"{file} cut short"
        path.unlink()
        assert file in (fault(checkpoint) or ""), f"{file} deleted"
        path.write_bytes(content)
    assert fault(checkpoint) is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tensorboard's own, where it reads
def test_a_damaged_checkpoint_is_skipped_and_allowed_changes_take_effect(runs: EngineRuns) -> None:
    always = ("train.warmup_steps=0", "tracking.report_to=[wandb, tensorboard]")
    before = (*always, "train.max_steps=8", "train.save_steps=4")
    runs.train("2 ZeRO-2", "packed", "changed", *before)
    killed = runs.killed_after_step(8, runs.named("packed", "changed"), "changed-killed")
    flip_a_bit(next((killed.checkpoints / "checkpoint-8").rglob("*optim*.pt")))
    # Without the other checkpoint there is nothing left to resume from.
    ruined = Run(killed.path.with_name("changed-ruined"))
    shutil.copytree(killed.path, ruined.path)
    (ruined.checkpoints / "checkpoint-4" / "trainer_state.json").unlink()
    for resume in ("auto", "must"):
        words = (*before, f"train.resume={resume}")
        printed = runs.train("2 ZeRO-2", "packed", ruined.path.name, *words, expect=2)["stderr"]
        assert "none of its checkpoints can be used:\n  checkpoint-8: " in printed
        assert "checkpoint-4: trainer_state.json is missing" in printed
        assert "Traceback" not in printed
    assert ruined.record["status"] == "running"
    changes = ("train.max_steps=10", "train.learning_rate=2e-3", "train.save_steps=3")
    allowed = "train.resume_allow_changes=[train.max_steps, train.learning_rate]"
    printed = runs.train("2 ZeRO-2", "packed", killed.path.name, *always, *changes, allowed)["stdout"]
    assert "Skipped checkpoint-8, " in printed
    assert "it resumes from checkpoint-4" in printed
    assert [line["learning_rate"] for line in lines(killed)] == pytest.approx(
        [1e-3 / 2 * (1 + cos(pi * step / 8)) for step in range(4)]
        + [2e-3 / 2 * (1 + cos(pi * step / 10)) for step in range(4, 10)]
    )
    assert {path.name for path in killed.checkpoints.iterdir()} >= {"checkpoint-6", "checkpoint-9", "checkpoint-10"}
    session = killed.record["sessions"][-1]
    assert session["changes"]["train.max_steps"] == [8, 10]
    assert "checkpoint-8" in session["passed_over"]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(killed.path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 11))
    folders = [path.name for path in (killed.path / "wandb").glob("offline-run-*")]
    assert len(folders) == 2
    assert all(folder.endswith(f"-{killed.record['wandb_id']}") for folder in folders)


@pytest.mark.extra
@pytest.mark.parametrize("kills", [6, 50])
def test_a_training_that_is_killed_again_and_again_ends_as_an_undisturbed_one(
    kills: int, ranks: Ranks, tmp_path: Path
) -> None:
    """At random moments of a run that saves after every step, so that about half of them are inside a save."""
    recipe = write_recipe(
        tmp_path / "job.yaml",
        train={
            "deepspeed": "zero2",
            "global_batch_size": 8,
            "micro_batch_size": 4,
            "learning_rate": 1e-3,
            "max_steps": 6 * kills,
            "save_steps": 1,
            "logging_steps": 1,
        },
    )
    seldom, run = "train.save_steps=1000", Run(tmp_path / "outputs" / "job" / "killed")
    ranks.run(2, ["sft.train", recipe, seldom, "tracking.run_name=undisturbed"])
    chance, left = Random(0), Counter[str]()
    for number in range(kills):
        moment = {"AT": f"{chance.uniform(0, 0.5)} s", "DO": "SIGKILL", "ON": str(chance.randrange(2))}
        words = [FAULTS, recipe, "tracking.run_name=killed"]
        status = ranks.run(2, words, expect=None, grace=1, **moment)["status"]
        assert status in ("-9", "1"), f"kill {number + 1}"
        faults = {path.name: fault(path) for path in run.checkpoints.glob("checkpoint-*")}
        assert not any(faults.values()), faults
        left.update(path.name.partition("-")[0] for path in run.checkpoints.glob(".*"))
    ranks.run(2, ["sft.train", recipe, seldom, "tracking.run_name=killed"])
    assert lines(run) == lines(Run(run.path.with_name("undisturbed")))
    assert_same_weights(run, Run(run.path.with_name("undisturbed")), 0)
    assert kills < 50 or left, "no kill met a save"


def test_a_finished_run_is_neither_resumed_nor_overwritten(runs: EngineRuns) -> None:
    run = runs("1")
    run.update(evaluation="finished")  # which these runs leave out
    before = {name: weight.sum().item() for name, weight in weights(run).items()}
    for resume in ("auto", "must"):
        words = ["sft.train", runs.recipe("packed"), f"train.resume={resume}", f"tracking.run_name={run.path.name}"]
        printed = runs.ranks.run(1, words, expect=2)["stderr"]
        assert ("train.resume=must" if resume == "must" else "exists and is never overwritten") in printed
        assert "Traceback" not in printed
    assert {name: weight.sum().item() for name, weight in weights(run).items()} == before
    assert json.loads((run.path / "run.json").read_text())["status"] == "finished"
