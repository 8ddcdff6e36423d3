import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sft.data.documents import DocumentMaker
from sft.data.readers import BadRow
from sft.data.tokenizer import load_tokenizer
from sft.data.workers import made_chunks
from sft.errors import DataError
from sft.recipe.schema import Recipe, Source

MakeRecipe = Callable[..., Recipe]
SOURCE = Source(path="rows.jsonl")


def talk(question: str, answer: str | None) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


ROWS: list[Any] = [talk(f"question {number} " * (number % 9), f"answer {number % 5}") for number in range(80)]
ROWS[7] = talk("nothing", "")
ROWS[23] = talk("", "{{name}} <|im_end|> goes on")
ROWS[41] = BadRow("line 42 is not JSON: no")
ROWS[60] = talk("long " * 100, "too long")


@pytest.fixture
def maker(make_recipe: MakeRecipe) -> DocumentMaker:
    recipe = make_recipe("data.on_bad_row=drop")
    return DocumentMaker(recipe.data, load_tokenizer(recipe))


def numbered(rows: list[Any]) -> Iterator[tuple[int, Any]]:
    return iter(enumerate(rows, start=1))


def test_rows_are_read_only_as_far_as_the_workers_need_them(
    maker: DocumentMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sft.data.workers.CHUNK_ROWS", 3)
    taken = 0

    def endless() -> Iterator[tuple[int, Any]]:
        nonlocal taken
        while True:
            taken += 1
            yield taken, talk(f"question {taken}", "answer")

    made = made_chunks(maker, SOURCE, 0, "messages", endless(), 2)
    for _ in range(10):
        next(made)
    assert taken <= 3 * (10 + 2 * 2 + 2)
    made.close()
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("workers", [1, 3])
def test_an_error_in_the_file_comes_through_and_leaves_no_worker(
    workers: int, maker: DocumentMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sft.data.workers.CHUNK_ROWS", 5)

    def breaking() -> Iterator[tuple[int, Any]]:
        yield from numbered(ROWS[:40])
        raise DataError("rows.jsonl is truncated.")

    with pytest.raises(DataError, match="truncated"):
        list(made_chunks(maker, SOURCE, 0, "messages", breaking(), workers))
    assert multiprocessing.active_children() == []
