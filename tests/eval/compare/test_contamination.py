from typing import Any

import numpy as np

from eval.compare.comparison import compare
from eval.compare.contamination import Search, check_contamination
from sft.data.store import DOCUMENT, DocumentWriter, SequenceIndex
from sft.files import write_json
from sft.run.directory import Run
from tests.eval.compare.lm_eval_files import results, sampled

LONG = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"


def found(documents: list[list[str]], texts: list[str], size: int = 13) -> list[bool]:
    search = Search(documents, size)
    search.scan(texts)
    return [bool(hit) for hit in search.found()]


def test_thirteen_words_in_a_row_are_found_in_any_dress() -> None:
    dressed = "And then: ONE, two; three (four) five--six seven eight nine ten eleven twelve 'thirteen', and no more."
    assert found([[LONG], ["what else is there to be said of the weather in this town today"]], [dressed]) == [
        True,
        False,
    ]
    assert found([[LONG]], [dressed.replace("seven", "7")]) == [False]


def test_words_of_two_texts_or_two_fields_are_not_in_a_row() -> None:
    half = LONG.split()
    assert found([[LONG]], [" ".join(half[:7]), " ".join(half[7:])]) == [False]
    assert found([[" ".join(half[:7]), " ".join(half[7:])]], [LONG]) == [True]  # a whole field of it
    assert found([[" ".join(half[:3]), " ".join(half[7:10])]], [LONG]) == [False]


def test_a_short_document_is_found_as_a_whole() -> None:
    assert found([["Who wrote the first novel?"]], ["He asked: who wrote the first novel? Nobody knew."]) == [True]
    assert found([["Who wrote the first novel?"]], ["He asked who wrote the first poem."]) == [False]


def test_a_document_of_a_few_words_is_not_searched_for_and_is_counted() -> None:
    search = Search([["Number 3?", "3"], [LONG]], 13)
    search.scan(["Number 3? 3"])
    assert search.too_short.tolist() == [True, False]
    assert search.found().tolist() == [False, False]


def test_the_words_of_the_task_itself_are_no_finding() -> None:
    introduction = "if you follow these instructions do you return to the starting point always or not"
    documents = [[f"{introduction} take {number} steps"] for number in range(11)]
    assert not any(found(documents, [introduction]))
    assert found(documents, [f"{introduction} take 4 steps"]).count(True) == 1
    assert all(found(documents[:10], [introduction]))


class Words:
    """A tokenizer whose ids are its words'."""

    def __init__(self, texts: list[str]) -> None:
        self.known = sorted({word for text in texts for word in text.split()})

    def ids(self, text: str) -> list[int]:
        return [self.known.index(word) for word in text.split()]

    def batch_decode(self, ids: list[list[int]], skip_special_tokens: bool) -> list[str]:
        assert skip_special_tokens
        return [" ".join(self.known[one] for one in row) for row in ids]


def prepare(run: Run, texts: list[str], trained: list[int]) -> Words:
    """Prepared data as a training has left it."""
    tokenizer, folder = Words(texts), run.path.parents[1] / ".prepared" / "key"
    folder.mkdir(parents=True)
    rows = [np.array(tokenizer.ids(text), np.int32) for text in texts]
    documents = np.zeros(len(rows), DOCUMENT)
    documents["length"] = [len(row) for row in rows]
    tokens = np.concatenate(rows)
    with DocumentWriter(folder) as writer:
        writer.write(tokens, np.ones(len(tokens), np.uint8), documents)
    SequenceIndex(np.array(trained), np.arange(1, len(trained) + 1)).save(folder / "train.npz")
    SequenceIndex(np.array([], int), np.array([], int)).save(folder / "held_out.npz")
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    counted = {"ledger": {}, "findings": [], "sequences": {}}
    write_json(folder / "prepared.json", {"fingerprint": "abc", "sizes": sizes} | counted)
    run.update(data_fingerprint="abc")
    return tokenizer


def check(run: Run, tokenizer: Words, texts: dict[str, list[str]], wanted: bool | int = True) -> dict[str, Any] | None:
    """The contamination of tasks with these documents, of which each second is answered right."""
    samples = {
        task: [
            row | {"doc": {"text": text}}
            for row, text in zip(sampled([n % 2 for n in range(len(some))]), some, strict=True)
        ]
        for task, some in texts.items()
    }
    scores = {task: {"acc,none": sum(row["acc"] for row in rows) / len(rows)} for task, rows in samples.items()}
    metrics = compare(results(scores), results(scores), samples, samples).metrics
    return check_contamination(wanted, run, tokenizer, metrics, results(scores), samples)  # type: ignore[arg-type]


MINE = [LONG, "a text that nobody has ever written down before today", "b", LONG + " more"]


def test_documents_that_were_trained_on_are_counted(run: Run) -> None:
    tokenizer = prepare(run, ["nothing of it at all", f"so then {LONG}", MINE[1]], [0, 1])
    contamination = check(run, tokenizer, {"mine": MINE})
    # The third text is held out: it is prepared, and not trained on.
    mine = {"documents": 4, "found": 2, "too_short": 1}
    assert contamination == {"ngram": 13, "tasks": {"mine": mine}}
    assert check(run, tokenizer, {"mine": MINE}, False) is None


def test_documents_that_several_tasks_share_are_found_in_each(run: Run) -> None:
    tokenizer = prepare(run, ["nothing of it at all", LONG], [0, 1])
    contamination = check(run, tokenizer, {f"template{number}": [LONG, "x"] for number in range(12)})
    assert contamination is not None
    assert [task["found"] for task in contamination["tasks"].values()] == [1] * 12


def test_a_document_is_found_in_the_task_of_a_group_that_it_belongs_to(run: Run) -> None:
    tokenizer = prepare(run, ["nothing of it at all", LONG], [0, 1])
    # Right are the second of `one` and the second of `other`; `one` alone has a document that was trained on, its first.
    samples = {name: sampled([0, 1]) for name in ("one", "other")}
    for name, texts in (("one", [LONG, "x"]), ("other", ["y", "z"])):
        samples[name] = [row | {"doc": {"text": text}} for row, text in zip(samples[name], texts, strict=True)]
    measured = results({name: {"acc,none": 0.5} for name in ("all", *samples)}) | {
        "group_subtasks": {"all": [*samples]}
    }
    metrics = compare(measured, measured, samples, samples).metrics
    contamination = check_contamination(True, run, tokenizer, metrics, measured, samples)  # type: ignore[arg-type]
    assert contamination is not None
    found = contamination["tasks"]["all"]
    assert (found["documents"], found["found"]) == (4, 1)


def test_data_that_is_gone_is_said_to_be_gone(run: Run) -> None:
    gone = check(run, Words([]), {"mine": MINE}, 8)
    assert gone is not None
    assert (gone["ngram"], gone["tasks"]) == (8, {})
    assert "is no longer in its output_dir" in gone["reason"]
