"""What is tried and what is chosen, on machines of arithmetic; when a result is found again."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from sft.data.prepare import prepare
from sft.data.prepared import Prepared
from sft.data.store import DocumentStore, SequenceIndex
from sft.launch.job import open_job
from sft.launch.tuning_result import (
    Trial,
    choices,
    choose,
    find_result,
    is_tuned,
    longest_first,
    next_trial,
    read_journal,
    result_file,
    write_result,
)
from sft.plan.hardware import Gpu, Hardware
from sft.plan.job import Job

MODES: list[bool | int | str] = [True, 2, False]
SIZES = [1, 2, 4, 8, 16, 32]
GIB = 2**30
LIMIT = 0.92 * 80 * GIB
H100 = Hardware(Gpu("NVIDIA H100", 80.0, 9.0), 2, 2, 16, 128.0)
MakeJob = Callable[..., Job]
Measure = Callable[[Trial], Trial]


def machine(at_rest: float, sequence: float, overhead: float = 0.2) -> Measure:
    """A GPU of 80 GiB where activations are proportional to the sequences, and each pass costs some time beside the tokens'.

    Args:
        at_rest: GiB that weights and the optimizer's state take.
        sequence: GiB of a sequence's activations without checkpointing.
        overhead: Of a pass, where a sequence's computation without checkpointing is 1.
    """

    def measure(trial: Trial) -> Trial:
        kept, work = {"True": (0.1, 4 / 3), "2": (0.55, 7 / 6), "False": (1.0, 1.0)}[str(trial.gradient_checkpointing)]
        used = (at_rest + sequence * kept * trial.micro_batch_size) * GIB
        if used > 80 * GIB:
            return replace(trial, seconds=1.0)
        per_token = (work + overhead / trial.micro_batch_size) / 1000
        return replace(trial, seconds=1.0, seconds_per_token=per_token, used=int(used))

    return measure


def tuned(measure: Measure) -> list[Trial]:
    found: list[Trial] = []
    while (trial := next_trial(MODES, SIZES, found, LIMIT)) is not None:
        found.append(measure(trial))
        assert len(found) <= len(MODES) * len(SIZES)
    return found


@pytest.mark.parametrize(("at_rest", "sequence"), list(product([5, 40, 70], [0.05, 1, 8, 60, 300])))
@pytest.mark.parametrize("overhead", [0.0, 2.0])
def test_trials_find_what_measuring_everything_would_find(at_rest: float, sequence: float, overhead: float) -> None:
    measure = machine(at_rest, sequence, overhead)
    best, ours = choose([measure(Trial(*one)) for one in product(MODES, SIZES)], LIMIT), choose(tuned(measure), LIMIT)
    if best is None:
        assert ours is None
        return
    assert ours is not None
    assert best.seconds_per_token is not None
    assert ours.seconds_per_token is not None
    # A micro-batch that was no faster than the one before ends the growth: 2 % each, at most.
    assert ours.seconds_per_token <= best.seconds_per_token * 1.05


@pytest.mark.parametrize(("at_rest", "sequence"), list(product([5, 40, 79], [0.05, 1, 20, 300, 1000])))
def test_memory_runs_out_at_most_once_with_each_way_to_checkpoint(at_rest: float, sequence: float) -> None:
    """Each time costs a start of all processes; if even the least does not fit, it is once."""
    found = tuned(machine(at_rest, sequence))
    failed = [one for one in found if one.seconds_per_token is None]
    assert len({str(one.gradient_checkpointing) for one in failed}) == len(failed)
    if failed and failed[0].name == Trial(True, 1).name:
        assert len(found) == 1


@pytest.mark.parametrize("sequence", [1, 300])
def test_the_next_processes_continue_where_the_last_ended(sequence: float) -> None:
    found = tuned(machine(40, sequence))
    for count, trial in enumerate(found):
        following = next_trial(MODES, SIZES, found[:count], LIMIT)
        assert following is not None
        assert following.name == trial.name
    assert next_trial(MODES, SIZES, found, LIMIT) is None


def test_of_two_as_fast_the_smaller_is_chosen_and_none_that_does_not_fit() -> None:
    small, large = (Trial(True, n, 1.0, 1.0 - n / 1000, n * GIB) for n in (1, 8))
    much, failed = Trial(False, 8, 1.0, 0.5, 9 * GIB), Trial(False, 16, 1.0)
    assert choose([large, small, much, failed], 8 * GIB) == small
    assert choose([large, small, much, failed], 9 * GIB) == much
    assert choose([failed], 9 * GIB) is None
    assert choose([large, small, failed], 1.0) == small


def test_the_journal_keeps_types_skips_a_cut_line_and_believes_the_rank_without_memory(tmp_path: Path) -> None:
    found = [Trial(True, 1, 1.5, 0.25, 5), Trial(2, 8, 2.0, 0.1, 7), Trial("selective", 1, 1.0, 0.5, 5)]
    journal = tmp_path / "journal.jsonl"
    assert read_journal(journal) == []
    failed = Trial(2, 8, 3.0)
    lines = [json.dumps(asdict(one)) + "\n" for one in [*found, failed]]
    journal.write_text("".join(lines) + lines[0][:20])
    read = read_journal(journal)
    assert read == [found[0], failed, found[2]]
    assert [type(one.gradient_checkpointing) for one in read] == [bool, int, str]


@pytest.fixture
def make_job(recipe_file: Path, outputs: Path, tmp_path: Path) -> MakeJob:
    rows = tmp_path / "rows.jsonl"
    talks = [{"prompt": f"Count to {n}", "completion": " ".join(map(str, range(n)))} for n in range(3, 33)]
    rows.write_text("".join(json.dumps(talk) + "\n" for talk in talks))

    def make(*overrides: str, hardware: Hardware = H100) -> Job:
        return open_job(recipe_file, [f"output_dir={outputs}", f"data.train={rows}", *overrides], hardware)

    return make


@pytest.fixture
def prepared(make_job: MakeJob) -> Iterator[Prepared]:
    job = make_job()
    entry = prepare(job.recipe, job.model)
    yield entry
    shutil.rmtree(entry.folder.parent / "search", ignore_errors=True)


def test_the_longest_sequences_come_first_and_of_those_the_one_with_the_longest_documents(prepared: Prepared) -> None:
    order, tokens = longest_first(prepared.folder)
    index = SequenceIndex.load(prepared.folder / "train.npz")
    lengths = DocumentStore.open(prepared.folder).documents["length"].astype(int)
    sums = [(int(lengths[index.of(n)].sum()), int((lengths[index.of(n)] ** 2).sum())) for n in range(len(index))]
    assert [sums[n] for n in order] == sorted(sums, reverse=True)
    assert tokens.tolist() == [sums[n][0] for n in order]


def test_what_the_recipe_leaves_open_is_tuned(make_job: MakeJob) -> None:
    assert choices(make_job()) == ([True, 2, False], [1, 2, 4])
    assert choices(make_job("train.micro_batch_size=2")) == ([True, 2, False], [2])
    assert choices(make_job("train.gradient_checkpointing=selective")) == (["selective"], [1, 2, 4])
    both = ["train.micro_batch_size=2", "train.gradient_checkpointing=true"]
    assert [is_tuned(make_job(*keys)) for keys in ([], both[:1], both[1:], both)] == [True, True, True, False]


SAME = ["train.learning_rate=1.0", "train.seed=5", "train.num_train_epochs=3", "eval.limit=3", "train.save_steps=7"]
OTHER = [
    "train.global_batch_size=16",
    "train.micro_batch_size=2",
    "train.gradient_checkpointing=true",
    "train.precision=fp32",
    "train.deepspeed=zero2",
    "train.trainer_args.use_liger_kernel=false",
    "model.lora={}",
    "model.lora={r: 8}",
    "model.kernels=none",
    "model.attn_implementation=eager",
    "data.packing=false",
]


def test_a_result_is_found_again_by_all_that_moves_time_or_memory(make_job: MakeJob, prepared: Prepared) -> None:
    first = result_file(make_job(), prepared)
    assert {result_file(make_job(key), prepared) for key in SAME} == {first}
    machines = [
        replace(H100, gpu=Gpu("NVIDIA H200", 80.0, 9.0)),
        replace(H100, gpu=Gpu("NVIDIA H100", 94.0, 9.0)),
        replace(H100, ranks=4, ranks_per_node=4),
        Hardware(None, 2, 2, 16, 128.0),
    ]
    files = [first, *(result_file(make_job(key), prepared) for key in OTHER)]
    files += [result_file(make_job(hardware=hardware), prepared) for hardware in machines]
    assert len(set(files)) == 1 + len(OTHER) + len(machines)


def planned(job: Job, prepared: Prepared) -> dict[str, Any]:
    plan = job.with_data(prepared.facts(), find_result(job, prepared)).plan
    return {one["name"]: one for one in plan.decisions()}


def test_the_plan_takes_the_result_and_says_that_it_was_measured(make_job: MakeJob, prepared: Prepared) -> None:
    job = make_job("train.global_batch_size=32")
    before = planned(job, prepared)
    found = [Trial(2, n, 1.0, 0.001 / n, n * GIB) for n in (1, 2, 4)]
    write_result(result_file(job, prepared), "2 x NVIDIA H100", 3 * GIB, found)
    plan = planned(job, prepared)
    assert (plan["micro_batch_size"]["value"], plan["gradient_accumulation_steps"]["value"]) == (2, 8)
    assert plan["gradient_checkpointing"]["value"] == 2
    for name in ("micro_batch_size", "gradient_checkpointing"):
        assert "measured on this machine, the fastest of 3 trials: 2000 tokens/s" in plan[name]["reason"]
        assert "2.0 GiB of the 3.0 GiB" in plan[name]["reason"]
    tuned = {"micro_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "time", "memory"}
    same = set(plan) - tuned
    assert {name: plan[name] for name in same} == {name: before[name] for name in same}


@pytest.mark.parametrize(("failed", "why"), [("it was killed", "it was killed"), ("", "nothing that was tried fits")])
def test_tuning_without_a_result_leaves_the_arithmetic_and_the_plan_says_so(
    failed: str, why: str, make_job: MakeJob, prepared: Prepared
) -> None:
    job = make_job("train.global_batch_size=64")
    before = planned(job, prepared)
    write_result(result_file(job, prepared), "2 x NVIDIA H100", GIB, [Trial(True, 1, 1.0)], failed)
    plan = planned(job, prepared)
    assert [one["value"] for one in plan.values()] == [one["value"] for one in before.values()]
    assert plan["micro_batch_size"]["reason"].endswith(f"; auto-tuning on this machine found no setting ({why})")


@pytest.mark.parametrize("text", ["", "{", "null", "[]", '{"chosen": 3}', '{"chosen": {}, "measured": []}'])
def test_a_result_that_cannot_be_read_is_none(text: str, make_job: MakeJob, prepared: Prepared) -> None:
    job = make_job("train.global_batch_size=128")
    file = result_file(job, prepared)
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    assert find_result(job, prepared) is None
