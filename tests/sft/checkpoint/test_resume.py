from pathlib import Path
from types import SimpleNamespace

import pytest

from sft.checkpoint.manifest import write_manifest
from sft.checkpoint.resume import changed_tokens, checkpoints_of, choose_checkpoint, lost_lines
from sft.errors import RunError
from sft.files import write_json
from sft.run.directory import Run

NAMES = ("checkpoint-9", "checkpoint-10", "checkpoint-20", "checkpoint-30.tmp", ".incomplete", "checkpoint-x")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path)
    for name in NAMES:
        (run.checkpoints / name).mkdir(parents=True)
        (run.checkpoints / name / "weights").write_text(name)
        write_manifest(run.checkpoints / name)
    return run


def test_checkpoints_are_in_the_order_of_their_steps(run: Run) -> None:
    assert [path.name for path in checkpoints_of(run)] == ["checkpoint-20", "checkpoint-10", "checkpoint-9"]


def test_the_newest_that_verifies_is_chosen_and_the_others_are_named(run: Run) -> None:
    choice = choose_checkpoint(run)
    assert (choice.checkpoint, choice.step, choice.passed_over) == (run.checkpoints / "checkpoint-20", 20, {})
    (run.checkpoints / "checkpoint-20" / "weights").write_text("checkpoint-21")
    (run.checkpoints / "checkpoint-10" / "weights").unlink()
    choice = choose_checkpoint(run)
    assert choice.step == 9
    assert choice.lines() == [
        "passed over: checkpoint-20: weights has changed since it was written: its checksum differs",
        "passed over: checkpoint-10: weights is missing",
        "This run was not finished: it goes on from checkpoint-9. train.resume=never starts another.",
    ]


def test_a_checkpoint_under_another_name_is_passed_over(run: Run) -> None:
    write_manifest(run.checkpoints / "checkpoint-20", {"step": 15})
    choice = choose_checkpoint(run)
    assert choice.step == 10
    assert "checkpoint-15" in choice.passed_over["checkpoint-20"]


@pytest.mark.parametrize(
    ("written", "missing"),
    [
        ('{"step": 1}\n{"step": 10}\n', None),
        ('{"step": 1}\n{"step": 10}\n{"step": 20, "lo', None),  # cut off behind the checkpoint
        ('{"step": 10}\n', "1 of the 2 lines"),
        ("not json\n5\n[]\n{}\n\xff\n", "2 of the 2 lines"),
        (None, "2 of the 2 lines"),
    ],
)
def test_lines_that_metrics_lost_are_named(written: str | None, missing: str | None, run: Run) -> None:
    checkpoint = run.checkpoints / "checkpoint-10"
    history = [{"step": 1, "loss": 2.0}, {"step": 10, "loss": 1.0}, {"step": 10, "eval_loss": 1.0}]
    write_json(checkpoint / "trainer_state.json", {"log_history": history})
    if written is not None:
        run.metrics_file.write_bytes(written.encode("latin-1"))
    found = lost_lines(run, checkpoint)
    assert found is None if missing is None else found is not None and missing in found


def test_other_special_tokens_than_the_checkpoints_are_named(run: Run) -> None:
    checkpoint = run.checkpoints / "checkpoint-10"
    now = SimpleNamespace(pad_token="<pad>", eos_token="</s>", bos_token=None)
    assert changed_tokens(checkpoint, now) == []
    write_json(
        checkpoint / "tokenizer_config.json",
        {"pad_token": {"content": "<pad>"}, "eos_token": "<end>", "bos_token": None},
    )
    (line,) = changed_tokens(checkpoint, now)
    assert "'<end>'" in line
    assert "'</s>'" in line


def test_a_run_whose_checkpoints_are_all_damaged_never_starts_over_unasked(run: Run) -> None:
    for checkpoint in checkpoints_of(run):
        (checkpoint / "weights").unlink()
    with pytest.raises(RunError) as refused:
        choose_checkpoint(run)
    assert str(refused.value).splitlines() == [
        f"{run.path} is unfinished, and none of its checkpoints can be used:",
        "  checkpoint-20: weights is missing",
        "  checkpoint-10: weights is missing",
        "  checkpoint-9: weights is missing",
        "Bring one back from a copy. Or start over, which is never done unasked: train.resume=never makes a new run, and leaves "
        "this one as it is.",
    ]


def test_a_run_without_checkpoints_starts_at_the_first_step(tmp_path: Path) -> None:
    choice = choose_checkpoint(Run(tmp_path))
    assert (choice.checkpoint, choice.step, choice.lines()) == (None, 0, [])
