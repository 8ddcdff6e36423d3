"""Defines the section `data` of a recipe: what to train on, and how rows become sequences."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from sft.recipe.section import FREE, Fraction, Section

# fmt: off
Column = Literal[
    "messages", "conversations", "prompt", "completion", "instruction", "input", "output", "response", "history",
    "system", "tools", "text", "input_ids", "labels", "chat_template_kwargs",
]
"""Columns that rows are read from."""

Finding = Literal[
    "role_order", "empty_turn", "last_turn", "special_tokens", "end_token", "undecodable", "mojibake", "escaped",
    "placeholder", "rendered", "echo", "dialogue", "missing_value",
]
FindingOfAllRows = Literal[
    "role_order", "empty_turn", "last_turn", "special_tokens", "undecodable", "mojibake", "escaped", "unknown_token",
    "placeholder", "rendered", "echo", "dialogue", "missing_value", "same_answer", "duplicate", "held_out_duplicate",
]
# fmt: on


def _reference(value: str) -> str:
    if not re.fullmatch(r"[^:]+\.py:[A-Za-z_]\w*", value):
        raise ValueError(f"must be file.py:name, got {value}")
    return value


Function = Annotated[str, AfterValidator(_reference)]
"""`file.py:name`, the file relative to the recipe's folder."""


class Source(Section):
    """One dataset of a list."""

    path: str = Field(min_length=1)
    """A local .json, .jsonl, .csv, .parquet or .arrow file (text also .gz or .zst), a folder of them or one written by `save_to_disk`,
    a pattern such as `chats/*.jsonl`, a dataset id on the hub, or `builtin:demo`."""

    name: str | None = None
    """Configuration of a hub dataset."""

    split: str = "train"
    """Split of a hub dataset or of a `save_to_disk` folder. Slices such as `train[:1000]` work on files too."""

    revision: str | None = None
    """Branch, tag or commit on the hub."""

    streaming: bool = False
    """Stream a hub dataset instead of downloading it first."""

    format: Literal["messages", "sharegpt", "prompt_completion", "alpaca", "text", "tokens"] | None = None
    """Format of the rows. None: detected from their columns, and printed."""

    columns: dict[Column, str] = Field(default_factory=dict)
    """Renamed columns, our name to theirs, such as {instruction: question, output: answer}."""

    function: Function | None = None
    """Python that converts the rows of this source, as `file.py:name`. None: that of `data.function`."""

    chat: bool = True
    """Apply the chat template to prompt and completion given as text. False: keep them as they are, ended by the EOS token."""

    weight: float | None = Field(default=None, gt=0)
    """Proportion of this source in the mixture, relative to the other weights. The scarcest source decides how many rows there are."""

    rows: int | None = Field(default=None, gt=0)
    """Take this many rows, drawn with data.seed."""

    epochs: float = Field(default=1.0, gt=0)
    """How often each row occurs in one pass over the mixture; 0.5 draws half of them."""


def _source(value: object) -> object:
    """A path in a list is a source with no more than that."""
    return {"path": value} if isinstance(value, str) else value


_SourceOrPath = Annotated[Source, BeforeValidator(_source, json_schema_input_type=str | Source)]
Sources = Annotated[tuple[_SourceOrPath, ...], Field(min_length=1)]


class Data(Section):
    """What to train on."""

    train: Annotated[str, Field(min_length=1)] | Sources
    """One path or hub id, or a list of them; with keys of its own a dataset is written `{path: a.jsonl, epochs: 2}`."""

    held_out: Annotated[float, Field(gt=0, lt=1)] | Annotated[str, Field(min_length=1)] | Sources | None = None
    """The eval split, never trained on: a fraction of `train`, or other sources."""

    function: Function | None = None
    """Python that converts each row before its format is recognized, as `file.py:name` relative to the recipe's folder. It takes a dict and
    returns a dict, a list of dicts, or None to leave the row out; docs/own-python.md."""

    max_length: int = Field(default=2048, gt=1)
    """Tokens of the longest document."""

    packing: bool = True
    """Put several documents into one sequence, a pack. They do not attend to each other."""

    pack_length: int | None = Field(default=None, gt=1)
    """Tokens of a pack, at least max_length. None: max_length. A longer pack holds more documents and leaves less space unused."""

    loss_on: Literal["auto", "assistant", "completion", "last_assistant", "all"] = "auto"
    """Target tokens, each answer with its end-of-turn token. `auto`: the completion of rows with a prompt, else every assistant turn.
    Plain text is always trained in full; tokenized rows follow their labels."""

    reasoning: Literal["keep", "drop"] = "keep"
    """Reasoning content of the assistant (`reasoning_content`, `<think>` blocks): train it as part of the turn, or drop it."""

    special_tokens: Literal["escape", "keep"] = "escape"
    """Strings in a row that spell a special token. `escape`: tokenize them as plain text, and cut them off at the end of an answer.
    `keep`: let them become special tokens, for text with `chat: false`."""

    overlong: Literal["drop", "truncate", "split", "error"] = "drop"
    """What to do with a document longer than max_length. The ledger counts it."""

    max_overlong_fraction: Annotated[Fraction, FREE] = 0.05
    """Stop the run if a larger fraction of rows is dropped for its length."""

    on_bad_row: Literal["error", "drop"] = "error"
    """A row that cannot be read or rendered: stop with its number, or drop and count it."""

    refuse: tuple[Finding, ...] = ()
    """Findings that make a row a bad row. Without this they are only reported."""

    allow: Annotated[tuple[FindingOfAllRows, ...], FREE] = ()
    """Findings that most rows of a source may share. Any other finding that common stops the run: the data was probably built wrongly."""

    max_dropped_fraction: Annotated[Fraction, FREE] = 0.1
    """Stop the run if a larger fraction of rows is dropped for other reasons (bad rows, no answer). Duplicates do not count."""

    min_trained_fraction: Annotated[Fraction, FREE] = 0.0
    """Stop the run if a smaller fraction of the used tokens are target tokens."""

    deduplicate: bool = False
    """Train only on the first of identical rows."""

    seed: int = Field(default=0, ge=0)
    """Seed of the mixture, the eval split, and the placement in packs."""

    @model_validator(mode="after")
    def _sources_agree(self) -> Data:
        sources = self.train if isinstance(self.train, tuple) else ()
        weighted = [source.weight is not None for source in sources]
        if any(weighted) and not all(weighted):
            raise ValueError("give `weight` to all sources of `train`, or to none")
        if any(source.weight is not None and source.rows is not None for source in sources):
            raise ValueError("`rows` and `weight` of a source both say how much to take: give one")
        if isinstance(self.held_out, str) and re.fullmatch(r"[\d.,]+ *%?", self.held_out):
            raise ValueError(f"held_out={self.held_out} is neither a fraction nor a path; write five percent as 0.05")
        held_out = self.held_out if isinstance(self.held_out, tuple) else ()
        if any(source.weight or source.rows or source.epochs != 1 for source in held_out):
            raise ValueError("held_out sources are used in full: weight, rows and epochs are for `train`")
        return self

    @model_validator(mode="after")
    def _packs_hold_any_document(self) -> Data:
        pack, document = self.pack_length, self.max_length
        if pack is not None and not self.packing:
            raise ValueError(f"pack_length={pack} has no effect while packing is false: remove one of them")
        if pack is not None and pack < document:
            raise ValueError(
                f"pack_length={pack} is less than max_length={document}, so a document may fit in no pack: raise pack_length to {document} "
                "or more, or lower max_length"
            )
        return self
