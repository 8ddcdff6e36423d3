"""The section `data` of a recipe: what is trained on, and how rows become sequences."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from sft.recipe.section import Fraction, Section

Column = Literal[
    "messages",
    "conversations",
    "prompt",
    "completion",
    "instruction",
    "input",
    "output",
    "response",
    "history",
    "system",
    "tools",
    "text",
    "input_ids",
    "labels",
    "chat_template_kwargs",
]
"""What rows are read by."""

Finding = Literal[
    "role_order",
    "empty_turn",
    "last_turn",
    "special_tokens",
    "end_token",
    "undecodable",
    "mojibake",
    "escaped",
    "placeholder",
    "rendered",
    "echo",
    "dialogue",
    "missing_value",
]
OfAllRows = Literal[
    "role_order",
    "empty_turn",
    "last_turn",
    "special_tokens",
    "undecodable",
    "mojibake",
    "escaped",
    "unknown_token",
    "placeholder",
    "rendered",
    "echo",
    "dialogue",
    "missing_value",
    "same_answer",
    "duplicate",
    "held_out_duplicate",
]


class Source(Section):
    """One dataset of a list."""

    path: str = Field(min_length=1)
    """A local .json, .jsonl, .csv, .parquet or .arrow file (text also .gz or .zst), a folder of them or one that `save_to_disk`
    wrote, a pattern such as `chats/*.jsonl`, an id on the hub, or `builtin:demo`."""

    name: str | None = None
    """Configuration of a hub dataset."""

    split: str = "train"
    """Split of a hub dataset or of a `save_to_disk` folder; slices such as `train[:1000]` work on files too."""

    revision: str | None = None
    """Branch, tag or commit on the hub."""

    streaming: bool = False
    """Read a hub dataset from the network instead of downloading it first."""

    format: Literal["messages", "sharegpt", "prompt_completion", "alpaca", "text", "tokens"] | None = None
    """What the rows are. None: found out from their columns, and said."""

    columns: dict[Column, str] = Field(default_factory=dict)
    """Columns under another name: ours to theirs, such as {instruction: question, output: answer}."""

    chat: bool = True
    """Put prompt and completion given as text through the chat template. False: as they stand, ended by the EOS token."""

    weight: float | None = Field(default=None, gt=0)
    """Share of this source in the rows of the mixture, relative to the others' weights; as many rows as the scarcest allows."""

    rows: int | None = Field(default=None, gt=0)
    """Take this many rows, drawn by data.seed."""

    epochs: float = Field(default=1.0, gt=0)
    """Times each row is seen in one pass over the mixture; 0.5 draws half of them."""


class Data(Section):
    """What it is trained on."""

    train: Annotated[str, Field(min_length=1)] | Annotated[tuple[Source, ...], Field(min_length=1)]
    """One path or hub id, or a list of sources."""

    held_out: (
        Annotated[float, Field(gt=0, lt=1)]
        | Annotated[str, Field(min_length=1)]
        | Annotated[tuple[Source, ...], Field(min_length=1)]
        | None
    ) = None
    """Rows that are never trained and whose loss is measured: a fraction of `train`, or other sources."""

    max_length: int = Field(default=2048, gt=1)
    """Tokens of the longest document."""

    packing: bool = True
    """Put several documents into one sequence, a pack; they do not see each other."""

    pack_length: int | None = Field(default=None, gt=1)
    """Tokens of a pack, at least max_length. None: max_length. A larger pack holds more documents and leaves less space free."""

    loss_on: Literal["auto", "assistant", "completion", "last_assistant", "all"] = "auto"
    """Tokens that are trained, each answer with its end-of-turn token. `auto`: every turn of the assistant; of rows with a
    prompt, the completion. Plain text is trained whole, and tokens as they are labelled, whatever is set here."""

    reasoning: Literal["keep", "drop"] = "keep"
    """Thoughts of the assistant (`reasoning_content`, `<think>` blocks): trained as part of the turn, or left out."""

    special_tokens: Literal["escape", "keep"] = "escape"
    """Strings in a row that spell a special token: `escape` has them read as plain text, and cut off where an answer ends
    with one; `keep` lets them become control tokens, for text with `chat: false`."""

    overlong: Literal["drop", "truncate", "split", "error"] = "drop"
    """What happens to a document longer than max_length. Counted in the ledger."""

    max_overlong_fraction: Fraction = 0.05
    """More rows than this dropped for their length stop the run."""

    on_bad_row: Literal["error", "drop"] = "error"
    """A row that cannot be read or rendered: stop with its number, or drop and count it."""

    refuse: tuple[Finding, ...] = ()
    """Findings that make a row a bad one too; otherwise they are notes."""

    allow: tuple[OfAllRows, ...] = ()
    """Findings that nearly all rows of a source may have. Others then stop the run: the rows were made wrongly."""

    max_dropped_fraction: Fraction = 0.1
    """More rows than this dropped for other reasons (bad rows, no answer) stop the run; duplicates do not count."""

    min_trained_fraction: Fraction = 0.0
    """Fewer trained tokens than this fraction of all used tokens stop the run."""

    deduplicate: bool = False
    """Train on the first of identical rows only."""

    seed: int = Field(default=0, ge=0)
    """Of what is drawn: the mixture, the held-out rows, the places in packs."""

    @model_validator(mode="after")
    def _weights_of_all_or_none(self) -> Data:
        sources = self.train if isinstance(self.train, tuple) else ()
        weighted = [source.weight is not None for source in sources]
        if any(weighted) and not all(weighted):
            raise ValueError("give `weight` to all sources of `train`, or to none")
        if isinstance(self.held_out, str) and re.fullmatch(r"[\d.,]+ *%?", self.held_out):
            raise ValueError(
                f"held_out={self.held_out} is neither a fraction nor a path; five per cent are written 0.05"
            )
        held_out = self.held_out if isinstance(self.held_out, tuple) else ()
        if any(source.weight or source.rows or source.epochs != 1 for source in held_out):
            raise ValueError("held_out sources are taken whole: weight, rows and epochs are for `train`")
        if any(source.weight is not None and source.rows is not None for source in sources):
            raise ValueError("`rows` and `weight` of a source both say how much is taken: give one")
        return self

    @model_validator(mode="after")
    def _packs_that_hold_any_document(self) -> Data:
        if self.pack_length is not None and not self.packing:
            raise ValueError(
                f"pack_length={self.pack_length} is the length of a pack, and packing is false: leave one of them out"
            )
        if self.pack_length is not None and self.pack_length < self.max_length:
            raise ValueError(
                f"pack_length={self.pack_length} is less than max_length={self.max_length}, so that a document may fit in no pack: "
                f"raise pack_length to {self.max_length} or more, or lower max_length"
            )
        return self
