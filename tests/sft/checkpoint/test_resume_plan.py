import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sft.checkpoint.manifest import is_damaged, write_manifest
from sft.checkpoint.resume_plan import FILE, Writer, resolve_continuation, write_writer, writer_here, writer_of
from sft.errors import RunError
from sft.files import write_json
from sft.launch.job import open_job
from sft.plan.hardware import Hardware
from sft.plan.job import Job
from sft.run.directory import Run

Make = Callable[..., Job]
ZERO2, ZERO3, FSDP = "train.deepspeed=zero2", "train.deepspeed=zero3", "train.fsdp={}"


@pytest.fixture
def job(recipe_file: Path) -> Make:
    def make(ranks: int, *overrides: str) -> Job:
        return open_job(recipe_file, overrides, Hardware(None, ranks, ranks, 2, 16.0))

    return make


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "run")
    (run.checkpoints / "checkpoint-20").mkdir(parents=True)
    return run


def wrote(run: Run, writer: Writer) -> Path:
    checkpoint = run.checkpoints / "checkpoint-20"
    write_writer(checkpoint, writer)
    return checkpoint


def test_a_checkpoint_tells_what_wrote_it(run: Run, job: Make) -> None:
    for one in (job(1), job(2, ZERO3), job(4, FSDP)):
        writer = replace(writer_here(one), parameters=("a", "b"))
        assert writer_of(wrote(run, writer), run) == writer


@pytest.mark.parametrize("overrides", [(), (ZERO2,), (ZERO3,), (FSDP,)])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_same_ranks_and_engine_go_on_with_their_own_files_and_say_nothing(
    ranks: int, overrides: tuple[str, ...], run: Run, job: Make
) -> None:
    here = job(ranks, *overrides)
    found = resolve_continuation(wrote(run, writer_here(here)), run, here)
    assert (found.whole, found.random_state, found.words) == (False, True, "")


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ((2,), (1,)),
        ((1,), (2,)),
        ((2, ZERO2), (4, ZERO2)),
        ((2, ZERO2), (2, ZERO3)),
        ((2, ZERO3), (2,)),
        ((2, ZERO3), (2, FSDP)),
        ((2, ZERO2), (2, "train.deepspeed=zero2_offload")),
        ((2, FSDP), (2, "train.fsdp={state_dict_type: full}")),
        ((2, ZERO2), (2, ZERO2, "train.sequence_parallel_size=2", "data.packing=false")),
    ],
)
def test_other_ranks_or_another_engine_go_on_through_whole_tensors_and_say_so(
    then: tuple[int, str], now: tuple[int, str], run: Run, job: Make
) -> None:
    here = job(*now)
    found = resolve_continuation(wrote(run, writer_here(job(*then))), run, here)
    assert found.whole
    assert found.random_state == (then[0] == now[0])
    assert "checkpoint-20 was written by" in found.words
    assert "through whole tensors" in found.words
    assert ("new random stream" in found.words) == (then[0] != now[0])


@pytest.mark.parametrize(("ranks", "engine"), [(1, ()), (2, ()), (2, (ZERO2,))])
def test_another_precision_goes_on_through_whole_tensors_and_fp16_does_not(
    ranks: int, engine: tuple[str, ...], run: Run, job: Make
) -> None:
    fp32, bf16 = (job(ranks, *engine, f"train.precision={name}") for name in ("fp32", "bf16"))
    for then, now in ((fp32, bf16), (bf16, fp32)):
        assert resolve_continuation(wrote(run, writer_here(then)), run, now).whole
        with pytest.raises(RunError, match="loss scale"):
            resolve_continuation(wrote(run, replace(writer_here(then), precision="fp16")), run, now)


def test_shares_of_fsdp2_go_on_with_any_number_of_ranks_by_themselves(run: Run, job: Make) -> None:
    found = resolve_continuation(wrote(run, writer_here(job(2, FSDP))), run, job(4, FSDP))
    assert (found.whole, found.random_state) == (False, False)
    assert found.words.startswith(
        "checkpoint-20 was written by 2 ranks under FSDP2; it goes on with 4 ranks under FSDP2."
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
    then: dict[str, str], now: dict[str, str], because: str, run: Run, job: Make
) -> None:
    words = {
        name: [f"train.{key}={value}" for key, value in one.items() if key == "deepspeed"]
        for name, one in (("then", then), ("now", now))
    }
    changes = {key: value for key, value in then.items() if key != "deepspeed"}
    writer = replace(writer_here(job(2, *(words["then"] or [ZERO2]))), **changes)
    with pytest.raises(RunError, match=because) as refused:
        resolve_continuation(wrote(run, replace(writer, ranks=4 if changes else 2)), run, job(2, *words["now"]))
    assert "train.resume=never" in str(refused.value)


def test_a_checkpoint_of_an_older_version_goes_on_as_it_was_and_not_otherwise(run: Run, job: Make) -> None:
    checkpoint, here = run.checkpoints / "checkpoint-20", job(2, ZERO2)
    assert here.deepspeed is not None
    write_json(run.plan_file, {"decisions": here.plan.decisions(), "deepspeed": here.deepspeed.config})
    run.update(ranks=2)
    assert not resolve_continuation(checkpoint, run, here).whole
    for other in (job(4, ZERO2), job(2)):
        with pytest.raises(RunError, match="older version"):
            resolve_continuation(checkpoint, run, other)


def test_a_damaged_record_is_told_with_the_checkpoint_to_remove(run: Run, job: Make) -> None:
    checkpoint = wrote(run, writer_here(job(2)))
    for text in ("{", json.dumps({"engine": "DDP"}), json.dumps({"unknown": 1, "parameters": []})):
        (checkpoint / FILE).write_text(text)
        with pytest.raises(RunError, match="damaged"):
            resolve_continuation(checkpoint, run, job(2))


def test_a_record_that_has_changed_or_is_gone_is_noticed_before_it_is_believed(run: Run, job: Make) -> None:
    checkpoint = wrote(run, writer_here(job(2, ZERO2)))
    assert not is_damaged(checkpoint, FILE)  # no manifest tells
    write_manifest(checkpoint)
    assert not is_damaged(checkpoint, FILE)
    written = (checkpoint / FILE).read_text()
    (checkpoint / FILE).write_text(written.replace("ZeRO-2", "ZeRO-0"))
    assert is_damaged(checkpoint, FILE)
    (checkpoint / FILE).unlink()
    assert is_damaged(checkpoint, FILE)
