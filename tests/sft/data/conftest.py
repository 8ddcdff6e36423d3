"""Tokenizers, and documents made of rows given in a test."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sft.data.documents import Chunk, DocumentMaker
from sft.data.tokenizer import load_tokenizer
from sft.recipe.schema import Recipe, Source

OVERRIDES = {
    "gpt2": ["model.chat_template=plain", "model.new_tokens=[<|pad|>]", "model.pad_token=<|pad|>"],
    "stories260k_hf": ["model.chat_template=plain", "model.pad_token=<unk>"],
}
MODELS = ("demo", "qwen3", "minimind", "gpt2", "stories260k_hf")


@pytest.fixture(scope="session")
def tokenizer_of(make_recipe: Callable[..., Recipe], real_model: Callable[[str], Path]) -> Callable[..., Any]:
    """The demo's tokenizer or a real one, with further overrides."""

    @cache
    def load(name: str, *overrides: str) -> Any:
        model = [] if name == "demo" else [f"model.name_or_path={real_model(name)}"]
        return load_tokenizer(make_recipe(*model, *(overrides or OVERRIDES.get(name, []))))

    return load


@pytest.fixture(scope="session")
def made(make_recipe: Callable[..., Recipe], tokenizer_of: Callable[..., Any]) -> Callable[..., Chunk]:
    """Documents of rows, by a tokenizer or one of that name; `data` are keys of the recipe's section."""

    def make(tokenizer: Any, rows: list[Any], format: str = "messages", chat: bool = True, **data: object) -> Chunk:
        overrides = [f"data.{key}={value}" for key, value in ({"max_length": 4096} | data).items()]
        tokenizer = tokenizer_of(tokenizer) if isinstance(tokenizer, str) else tokenizer
        maker = DocumentMaker(make_recipe(*overrides).data, tokenizer)
        return maker.make(Source(path="rows", chat=chat), 3, format, list(enumerate(rows, start=1)))

    return make


def turns(*contents: str | None, system: str = "") -> list[dict[str, Any]]:
    """Messages of a user and an assistant in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": content} for at, content in enumerate(contents)]
    return [{"role": "system", "content": system}, *messages] if system else messages


def talk(*contents: str | None, **columns: Any) -> dict[str, Any]:
    """A row of a conversation."""
    return {"messages": turns(*contents), **columns}


def documents(chunk: Chunk) -> list[tuple[list[int], list[int]]]:
    """Token ids and loss mask of each document."""
    ends = np.cumsum(chunk.documents["length"])
    assert (ends[-1] if len(ends) else 0) == len(chunk.tokens) == len(chunk.trained)
    pieces = zip(np.split(chunk.tokens, ends)[:-1], np.split(chunk.trained, ends)[:-1], strict=True)
    return [(ids.tolist(), mask.tolist()) for ids, mask in pieces]


def trained_runs(chunk: Chunk, tokenizer: Any) -> list[list[str]]:
    """What each document's target tokens spell, stretch by stretch."""
    found = []
    for ids, mask in documents(chunk):
        edges = np.flatnonzero(np.diff(mask, prepend=0, append=0)).reshape(-1, 2)
        found.append([tokenizer.decode(ids[start:stop]) for start, stop in edges])
    return found
