from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from sft.checkpoint.manifest import write_manifest
from sft.checkpoint.resume import Writer, choose_checkpoint, lost_lines, resolve_resume, writer_here
from sft.errors import RunError
from sft.files import write_json
from sft.launch.job import open_job
from sft.plan.hardware import Hardware
from sft.plan.job import Job
from sft.run.directory import Run

NAMES = ("checkpoint-9", "checkpoint-10", "checkpoint-20", "checkpoint-30.tmp", ".incomplete", "checkpoint-x")
Make = Callable[..., Job]
ZERO2, ZERO3, FSDP = "train.deepspeed=zero2", "train.deepspeed=zero3", "train.fsdp={}"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path)
    for name in NAMES:
        (run.checkpoints / name).mkdir(parents=True)
        (run.checkpoints / name / "weights").write_text(name)
        write_manifest(run.checkpoints / name)
    return run


def test_the_newest_that_verifies_is_chosen_and_newer_ones_are_named_and_lose_their_name(run: Run) -> None:
    choice = choose_checkpoint(run)
    assert (choice.checkpoint, choice.step, choice.skipped) == (run.checkpoints / "checkpoint-20", 20, {})
    (run.checkpoints / "checkpoint-20" / "weights").write_text("checkpoint-21")
    (run.checkpoints / "checkpoint-10" / "weights").unlink()
    choice = choose_checkpoint(run)
    assert choice.step == 9
    assert choice.lines() == [
        "Skipped checkpoint-20, now checkpoint-20.unusable: weights has changed since it was written: its checksum differs",
        "Skipped checkpoint-10, now checkpoint-10.unusable: weights is missing",
        "This run is unfinished: it resumes from checkpoint-9. train.resume=never starts a new one.",
    ]
    assert run.last_checkpoint() == choice.checkpoint
    assert (run.checkpoints / "checkpoint-20.unusable" / "weights").is_file()


def test_a_checkpoint_under_another_name_is_skipped(run: Run) -> None:
    write_manifest(run.checkpoints / "checkpoint-20", {"step": 15})
    choice = choose_checkpoint(run)
    assert choice.step == 10
    assert "checkpoint-15" in choice.skipped["checkpoint-20"]


@pytest.mark.parametrize(
    ("written", "missing"),
    [
        ('{"step": 1}\n{"step": 10}\n{"step": 20, "lo', None),  # cut off behind the checkpoint
        ("not json\n5\n[]\n{}\n\xff\n", "2 of the 2 lines"),
    ],
)
def test_lines_that_metrics_lost_are_named(written: str, missing: str | None, run: Run) -> None:
    checkpoint = run.checkpoints / "checkpoint-10"
    history = [{"step": 1, "loss": 2.0}, {"step": 10, "loss": 1.0}, {"step": 10, "eval_loss": 1.0}]
    write_json(checkpoint / "trainer_state.json", {"log_history": history})
    run.metrics_file.write_bytes(written.encode("latin-1"))
    found = lost_lines(run, checkpoint)
    assert found is None if missing is None else found is not None and missing in found


def test_a_run_whose_checkpoints_are_all_damaged_never_starts_over_unasked(run: Run) -> None:
    for checkpoint in run.all_checkpoints():
        (checkpoint / "weights").unlink()
    with pytest.raises(RunError) as refused:
        choose_checkpoint(run)
    assert str(refused.value).splitlines()[1:4] == [f"  checkpoint-{step}: weights is missing" for step in (20, 10, 9)]
    assert "train.resume=never" in str(refused.value)
    assert len(run.all_checkpoints()) == 3


@pytest.fixture
def job(recipe_file: Path) -> Make:
    def make(ranks: int, *overrides: str) -> Job:
        return open_job(recipe_file, overrides, Hardware(None, ranks, ranks, 2, 16.0))

    return make


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint-20"


def wrote(checkpoint: Path, writer: Writer) -> Path:
    checkpoint.mkdir(exist_ok=True)
    write_manifest(checkpoint, {"writer": asdict(writer)})
    return checkpoint


@pytest.mark.parametrize(("ranks", "overrides"), [(1, ()), (2, ()), (2, (ZERO3,)), (2, (FSDP,))])
def test_the_same_ranks_and_engine_load_their_own_files_without_a_word(
    ranks: int, overrides: tuple[str, ...], checkpoint: Path, job: Make
) -> None:
    here = job(ranks, *overrides)
    writer = replace(writer_here(here), parameters=("a", "b"))
    plan = resolve_resume(wrote(checkpoint, writer), here)
    assert (plan.reshards, plan.random_state, plan.words) == (False, True, "")
    assert plan.writer == writer


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ((2,), (1,)),
        ((1,), (2,)),
        ((2, ZERO2), (2, ZERO3)),
        ((2, ZERO3), (2, FSDP)),
        ((2, ZERO2), (2, "train.deepspeed=zero2_offload")),
        ((2, FSDP), (2, "train.fsdp={state_dict_type: full}")),
        ((2, ZERO2), (2, ZERO2, "train.sequence_parallel_size=2", "data.packing=false")),
        ((2, ZERO2, "train.precision=fp32"), (2, ZERO2, "train.precision=bf16")),
    ],
)
def test_other_ranks_another_engine_or_precision_reshard_and_say_so(
    then: tuple[int, str], now: tuple[int, str], checkpoint: Path, job: Make
) -> None:
    plan = resolve_resume(wrote(checkpoint, writer_here(job(*then))), job(*now))
    assert plan.reshards
    assert plan.random_state == (then[0] == now[0])
    assert "checkpoint-20 was written by" in plan.words
    assert "resharded from full tensors" in plan.words
    assert ("new random stream" in plan.words) == (then[0] != now[0])


def test_torch_reshards_fsdp2s_own_shards(checkpoint: Path, job: Make) -> None:
    plan = resolve_resume(wrote(checkpoint, writer_here(job(2, FSDP))), job(4, FSDP))
    assert (plan.reshards, plan.random_state) == (False, False)
    assert plan.words.startswith(
        "checkpoint-20 was written by 2 ranks under FSDP2; it resumes with 4 ranks under FSDP2."
    )


@pytest.mark.parametrize(
    ("then", "now", "because"),
    [
        ({"deepspeed": "zero3_nvme"}, {"deepspeed": "zero3_nvme"}, "NVMe"),
        ({"deepspeed": "zero2"}, {"deepspeed": "zero3_nvme"}, "NVMe"),
        ({"precision": "fp16"}, {"deepspeed": "zero2"}, "loss scale"),
        ({"engine": "ZeRO-0"}, {"deepspeed": "zero2"}, "without ZeRO"),
    ],
)
def test_what_cannot_be_exact_is_refused_with_its_reason(
    then: dict[str, str], now: dict[str, str], because: str, checkpoint: Path, job: Make
) -> None:
    changes = {key: value for key, value in then.items() if key != "deepspeed"}
    writer = replace(writer_here(job(2, f"train.deepspeed={then.get('deepspeed', 'zero2')}")), **changes)
    with pytest.raises(RunError, match=because) as refused:
        resolve_resume(
            wrote(checkpoint, replace(writer, ranks=4 if changes else 2)), job(2, f"train.deepspeed={now['deepspeed']}")
        )
    assert "train.resume=never" in str(refused.value)
