"""What is tried and what is chosen, on machines of arithmetic; where the answer waits."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sft.data.prepare import prepare
from sft.data.prepared import Prepared
from sft.data.store import DocumentStore, SequenceIndex
from sft.launch.job import open_job
from sft.launch.tuning_result import (
    Candidate,
    Measurement,
    answer_file,
    candidates,
    choose,
    find_answer,
    is_searched,
    longest_first,
    next_candidate,
    worst,
    write_answer,
)
from sft.plan.hardware import Gpu, Hardware
from sft.plan.job import Job

MODES: list[bool | int | str] = [True, 2, False]
SIZES = [1, 2, 4, 8, 16, 32]
GIB = 2**30
H100 = Hardware(Gpu("NVIDIA H100", 80.0, 9.0), 2, 2, 16, 128.0)
MakeJob = Callable[..., Job]


def machine(
    at_rest: float, sequence: float, memory: float, overhead: float = 0.2
) -> Callable[[Candidate], Measurement]:
    """A GPU where activations are proportional to the sequences, and each pass costs some time beside the tokens'.

    Args:
        at_rest: GiB that weights and the optimizer's state take.
        sequence: GiB of a sequence's activations without checkpointing.
        memory: GiB that there are.
        overhead: Of a pass, where a sequence's computation without checkpointing is 1.
    """

    def measure(candidate: Candidate) -> Measurement:
        mode, size = candidate.gradient_checkpointing, candidate.micro_batch_size
        kept = 0.1 if mode is True else 0.55 if mode == 2 else 1.0
        work = 4 / 3 if mode is True else 7 / 6 if mode == 2 else 1.0
        used = (at_rest + sequence * kept * size) * GIB
        if used > memory * GIB:
            return Measurement(candidate, 1.0)
        return Measurement(candidate, 1.0, (work + overhead / size) / 1000, int(used), int(used), int(at_rest * GIB))

    return measure


def searched(measure: Callable[[Candidate], Measurement], limit: float, sizes: list[int] = SIZES) -> list[Measurement]:
    found: list[Measurement] = []
    while (candidate := next_candidate(MODES, sizes, found, limit)) is not None:
        found.append(measure(candidate))
        assert len(found) <= len(MODES) * len(sizes)
    return found


@pytest.mark.parametrize(("at_rest", "sequence"), list(product([5, 40, 70], [0.05, 1, 8, 20, 60, 300])))
@pytest.mark.parametrize("overhead", [0.0, 0.2, 2.0])
def test_the_search_finds_what_measuring_everything_would_find(
    at_rest: float, sequence: float, overhead: float
) -> None:
    measure, limit = machine(at_rest, sequence, 80, overhead), 0.92 * 80 * GIB
    found, everything = searched(measure, limit), [measure(Candidate(*one)) for one in product(MODES, SIZES)]
    best, ours = choose(everything, limit), choose(found, limit)
    if best is None:
        assert ours is None
        return
    assert ours is not None
    assert ours.used <= limit
    assert best.seconds_per_token is not None
    assert ours.seconds_per_token is not None
    # A micro-batch that was no faster than the one before ends the growth: 2 % each, at most.
    assert ours.seconds_per_token <= best.seconds_per_token * 1.05


@pytest.mark.parametrize(("at_rest", "sequence"), list(product([5, 40, 70, 79], [0.05, 1, 8, 20, 60, 300, 1000])))
def test_memory_runs_out_at_most_once_with_each_way_to_checkpoint(at_rest: float, sequence: float) -> None:
    """Each time costs a start of all processes; where even the least does not fit, it is once."""
    found = searched(machine(at_rest, sequence, 80), 0.92 * 80 * GIB)
    failed = [one.candidate for one in found if one.seconds_per_token is None]
    assert len(failed) <= 2
    if failed and failed[0] == Candidate(True, 1):
        assert len(found) == 1


@pytest.mark.parametrize("sequence", [1, 20, 300])
def test_a_search_goes_on_where_its_process_ended(sequence: float) -> None:
    measure, limit = machine(40, sequence, 80), 0.92 * 80 * GIB
    found = searched(measure, limit)
    for count in range(len(found)):
        following = next_candidate(MODES, SIZES, found[:count], limit)
        assert following == found[count].candidate
        assert type(following.gradient_checkpointing) is type(found[count].candidate.gradient_checkpointing)
    assert next_candidate(MODES, SIZES, found, limit) is None


def test_of_two_as_fast_the_smaller_is_chosen_and_of_those_that_do_not_fit_none() -> None:
    small, large = (Measurement(Candidate(True, n), 1.0, 1.0 - n / 1000, n * GIB, n * GIB, 0) for n in (1, 8))
    much = Measurement(Candidate(False, 8), 1.0, 0.5, 9 * GIB, 9 * GIB, 0)
    failed = Measurement(Candidate(False, 16), 1.0)
    assert choose([large, small, much, failed], 8 * GIB) == small
    assert choose([large, small, much, failed], 9 * GIB) == much
    assert choose([failed], 9 * GIB) is None
    assert choose([], 9 * GIB) is None


def test_what_one_rank_had_no_memory_for_does_not_fit() -> None:
    fitted = Measurement(Candidate(True, 1), 1.0, 1.0, 1, 1, 0)
    failed = Measurement(Candidate(True, 1), 1.0)
    other = Measurement(Candidate(2, 1), 1.0, 1.0, 1, 1, 0)
    assert worst([fitted, other, failed]) == [failed, other]
    assert worst([failed, fitted]) == [failed]


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
    index, lengths = (
        SequenceIndex.load(prepared.folder / "train.npz"),
        DocumentStore.open(prepared.folder).documents["length"],
    )
    sums = [
        (int(lengths[index.of(n)].sum()), int((lengths[index.of(n)].astype(int) ** 2).sum())) for n in range(len(index))
    ]
    assert [sums[n] for n in order] == sorted(sums, reverse=True)
    assert tokens.tolist() == [sums[n][0] for n in order]
    assert np.unique(order).size == len(index)


def test_what_is_searched_is_what_the_recipe_leaves_open(make_job: MakeJob) -> None:
    assert candidates(make_job()) == ([True, 2, False], [1, 2, 4])
    assert candidates(make_job("train.micro_batch_size=2")) == ([True, 2, False], [2])
    assert candidates(make_job("train.gradient_checkpointing=selective")) == (["selective"], [1, 2, 4])
    both = ["train.micro_batch_size=2", "train.gradient_checkpointing=true"]
    assert [is_searched(make_job(*keys)) for keys in ([], both[:1], both[1:], both)] == [True, True, True, False]


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


def test_an_answer_is_found_again_by_all_that_moves_time_or_memory(make_job: MakeJob, prepared: Prepared) -> None:
    first = answer_file(make_job(), prepared)
    assert {answer_file(make_job(key), prepared) for key in SAME} == {first}
    machines = [
        replace(H100, gpu=Gpu("NVIDIA H200", 80.0, 9.0)),
        replace(H100, gpu=Gpu("NVIDIA H100", 94.0, 9.0)),
        replace(H100, ranks=4, ranks_per_node=4),
        Hardware(None, 2, 2, 16, 128.0),
    ]
    files = [first, *(answer_file(make_job(key), prepared) for key in OTHER)]
    files += [answer_file(make_job(hardware=hardware), prepared) for hardware in machines]
    assert len(set(files)) == 1 + len(OTHER) + len(machines)


def planned(job: Job, prepared: Prepared) -> dict[str, Any]:
    plan = job.with_data(prepared.facts(), find_answer(job, prepared)).plan
    return {one["name"]: one for one in plan.decisions()}


def test_the_plan_takes_the_answer_and_says_that_it_was_measured(make_job: MakeJob, prepared: Prepared) -> None:
    job = make_job("train.global_batch_size=32")
    before = planned(job, prepared)
    found = [Measurement(Candidate(2, n), 1.0, 0.001 / n, n * GIB, n * GIB, 0) for n in (1, 2, 4)]
    write_answer(answer_file(job, prepared), "2 x NVIDIA H100", 3 * GIB, found)
    plan = planned(job, prepared)
    assert (plan["micro_batch_size"]["value"], plan["gradient_accumulation_steps"]["value"]) == (2, 8)
    assert plan["gradient_checkpointing"]["value"] == 2
    for name in ("micro_batch_size", "gradient_checkpointing"):
        assert "measured on this machine, the fastest of 3 that were tried: 2000 tokens/s" in plan[name]["reason"]
        assert "2.0 GiB used where 3.0 may be" in plan[name]["reason"]
    same = set(plan) - {"micro_batch_size", "gradient_accumulation_steps", "gradient_checkpointing"}
    assert {name: plan[name] for name in same} == {name: before[name] for name in same}


@pytest.mark.parametrize(("failed", "told"), [("it was killed", "it was killed"), ("", "nothing that was tried fits")])
def test_a_search_without_an_answer_leaves_the_arithmetic_and_the_plan_says_so(
    failed: str, told: str, make_job: MakeJob, prepared: Prepared
) -> None:
    job = make_job("train.global_batch_size=64")
    before = planned(job, prepared)
    write_answer(answer_file(job, prepared), "2 x NVIDIA H100", GIB, [Measurement(Candidate(True, 1), 1.0)], failed)
    plan = planned(job, prepared)
    assert [one["value"] for one in plan.values()] == [one["value"] for one in before.values()]
    for name in ("micro_batch_size", "gradient_checkpointing"):
        assert plan[name]["reason"] == f"{before[name]['reason']}; the search on this machine found no answer ({told})"


@pytest.mark.parametrize("text", ["", "{", "null", "[]", '{"chosen": 3}', '{"chosen": {}, "measured": []}'])
def test_an_answer_that_cannot_be_read_is_none(text: str, make_job: MakeJob, prepared: Prepared) -> None:
    job = make_job("train.global_batch_size=128")
    file = answer_file(job, prepared)
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    assert find_answer(job, prepared) is None
