"""Turns rows into documents: rendered, tokenized, with a loss mask, none longer than data.max_length.

Keeps the promise that every token is accounted for, row by row: a row's tokens are in its documents, truncated, or dropped for a
reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from sft.data.conversation import Message
from sft.data.findings import FINDINGS, Findings, found_in_row
from sft.data.formats import IGNORED, Conversation, Text, Tokens, has_zero_weight, renamed, to_example
from sft.data.readers import BadRow, Row
from sft.data.render import ChatRenderer, Span
from sft.data.sources import Numbered
from sft.data.special_tokens import SpecialTokens, tokens_without_mark
from sft.data.store import DOCUMENT
from sft.data.template_checks import check_nothing_is_lost, check_turns_are_closed
from sft.recipe.schema import Data, Source

LENGTHS = 2 ** np.arange(3, 33, 0.5)
"""Upper ends of the length histogram's bins, in tokens."""


class RowError(Exception):
    """A row that stops the preparation."""

    def __init__(self, row: int, reason: str, remedy: str) -> None:
        super().__init__(row, reason, remedy)  # all of them: it crosses processes
        self.row, self.reason, self.remedy = row, reason, remedy


@dataclass
class Counts:
    """The rows and tokens of one source, and what became no document."""

    rows_in: int = 0
    tokens_in: int = 0
    """Of all rows that were tokenized."""

    dropped_rows: Counter[str] = field(default_factory=Counter)
    dropped_tokens: Counter[str] = field(default_factory=Counter)
    lengths: np.ndarray = field(default_factory=lambda: np.zeros(len(LENGTHS), np.int64))
    """Rows by length in the bins of LENGTHS, dropped ones included."""

    def merge(self, other: Counts) -> None:
        """Add the counts of later rows."""
        self.rows_in += other.rows_in
        self.tokens_in += other.tokens_in
        self.dropped_rows += other.dropped_rows
        self.dropped_tokens += other.dropped_tokens
        self.lengths += other.lengths


@dataclass
class Chunk:
    """What some rows of one source became."""

    source: int
    counts: Counts = field(default_factory=Counts)
    findings: Findings = field(default_factory=Findings)
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    """All documents one after another."""

    trained: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))
    """The loss mask: 1 where a token is a target."""

    documents: np.ndarray = field(default_factory=lambda: np.zeros(0, DOCUMENT))

    def find(self, kind: str, row: int) -> None:
        """Note a finding."""
        self.findings.add(kind, self.source, row)

    def drop(self, reason: str, row: int, tokens: int = 0) -> None:
        """Count a row that is not used."""
        self.counts.dropped_rows[reason] += 1
        self.counts.dropped_tokens[reason] += tokens
        self.find(reason, row)


Ids = tuple[np.ndarray, np.ndarray]
"""Token ids (int32) and loss mask (uint8) of one document."""


@dataclass(frozen=True)
class _Text:
    """A row ready for the tokenizer."""

    text: str
    spans: list[Span]
    """Characters whose tokens are targets."""

    is_escaped: bool = False
    """Whether special tokens hold a mark, whose own tokens are taken out."""


class DocumentMaker:
    """Makes documents of rows."""

    def __init__(self, data: Data, tokenizer: Any) -> None:
        self.data, self.tokenizer = data, tokenizer
        self.backend = tokenizer.backend_tokenizer
        self.backend.no_truncation()
        self.backend.no_padding()
        self.vocabulary = len(tokenizer)
        self.eos: str = tokenizer.eos_token
        self.adds_eos = self.backend.encode("a").ids[-1:] == [tokenizer.eos_token_id]
        self.bos_id: int | None = tokenizer.bos_token_id
        added = tokenizer.added_tokens_decoder
        self.added = frozenset(added)
        self.special_ids = {tokenizer.eos_token_id, *(number for number, token in added.items() if token.special)}
        # Several tokenizers have their EOS or padding token stand for unknown text too.
        used = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id}
        self.unknown_id = None if tokenizer.unk_token_id in used else tokenizer.unk_token_id
        self.renderer = ChatRenderer(tokenizer) if tokenizer.chat_template is not None else None
        self.special_tokens = SpecialTokens(tokenizer)

    def make(self, source: Source, number: int, format: str, rows: Sequence[Numbered]) -> Chunk:
        """Make documents of rows of one source, given with their numbers in it, from 1. Raises RowError where one stops it."""
        chunk = Chunk(number)
        chunk.counts.rows_in += len(rows)
        # The chat template writes the special tokens, BOS included: the tokenizer must not add another.
        adds_special_tokens = format == "text" or not source.chat
        items: list[tuple[int, _Text | Ids]] = []
        for row_number, row in rows:
            with self._row_errors(chunk, row_number):
                item = self._ready(row, row_number, source, format, chunk)
                if item is not None:
                    items.append((row_number, item))
        texts = [item.text for _, item in items if isinstance(item, _Text)]
        encodings = iter(self.backend.encode_batch(texts, add_special_tokens=adds_special_tokens))
        documents: list[tuple[Ids, Any]] = []
        for row_number, item in items:
            encoding = next(encodings) if isinstance(item, _Text) else None
            with self._row_errors(chunk, row_number):
                if isinstance(item, _Text):
                    item = self._tokens_and_mask(item, encoding, adds_special_tokens)
                    if self.unknown_id is not None and self.unknown_id in item[0]:
                        chunk.find("unknown_token", row_number)
                documents += self._documents(row_number, *item, chunk)
        if documents:
            parts, records = zip(*documents, strict=True)
            chunk.tokens, chunk.trained = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
            chunk.documents = np.array(list(records), DOCUMENT)
        return chunk

    @contextmanager
    def _row_errors(self, chunk: Chunk, row: int) -> Iterator[None]:
        """Drop a bad row or stop at it, as data.on_bad_row says."""
        try:
            yield
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            if self.data.on_bad_row == "error":
                raise RowError(row, str(error), "Correct or remove the row, or set data.on_bad_row=drop.") from None
            chunk.drop("bad_row", row)

    # From a row to text

    def _ready(
        self, row: Row | BadRow | None, number: int, source: Source, format: str, chunk: Chunk
    ) -> _Text | Ids | None:
        """The row as the tokenizer gets it, or as it came if it is tokenized; None if it is dropped."""
        if row is None:
            chunk.drop("function", number)
            return None
        if isinstance(row, BadRow):
            raise ValueError(row.reason)
        row = renamed(row, source)
        if has_zero_weight(row):
            chunk.drop("zero_weight", number)
            return None
        example = to_example(row, format, self.data, source)
        if isinstance(example, Tokens):
            ids, mask = self._given(example)
            if mask.any() and int(ids[mask == 1][-1]) not in self.special_ids:
                chunk.find("no_end", number)
            return ids, mask
        # Text that was rendered elsewhere holds its special tokens on purpose.
        escape = self.data.special_tokens == "escape" and format != "text"
        found = found_in_row(example, self.special_tokens, escape)
        refused = [kind for kind in found if kind.removesuffix("_kept") in self.data.refuse]
        if format == "text" and "special_tokens_kept" in found and not refused:
            found.remove("special_tokens_kept")
        for kind in refused or found:
            chunk.find(kind, number)
        if refused:
            meanings = ", ".join(FINDINGS[kind].meaning for kind in refused)
            raise ValueError(f"{meanings} (data.refuse: {', '.join(refused)})")
        has_special = "special_tokens" in found
        if isinstance(example, Text):
            item = self._text(example, escape, has_special)
        else:
            item = self._conversation(example, escape, has_special)
            if item is not None and self._lacks_reasoning(example.messages):
                chunk.find("prompt_thinks", number)
        if item is None:
            chunk.drop("no_answer", number)
            return None
        item.text.encode()  # half a surrogate pair is not text
        return item

    def _given(self, row: Tokens) -> Ids:
        wrong = next((token for token in row.input_ids if not 0 <= token < self.vocabulary), None)
        if wrong is not None:
            raise ValueError(f"input_ids holds {wrong}, and the tokenizer has {self.vocabulary} tokens")
        if any(label not in (IGNORED, token) for label, token in zip(row.labels, row.input_ids, strict=True)):
            raise ValueError("labels differ from input_ids elsewhere than in -100; give them unshifted")
        return np.array(row.input_ids, np.int32), np.array([label != IGNORED for label in row.labels], np.uint8)

    def _text(self, example: Text, escape: bool, has_special: bool) -> _Text | None:
        prompt, completion = example.prompt, example.completion
        if escape:
            completion = self.special_tokens.without_end(completion)
        if not completion.strip():
            return None
        if has_special:
            prompt, completion = map(self.special_tokens.escaped, (prompt, completion))
            if self.special_tokens.found_in(prompt + completion):
                raise ValueError("a special token begins in its prompt and ends in its completion")
        if completion.rstrip().endswith(self.eos):  # rendered elsewhere, maybe with a line break behind
            completion = completion.rstrip().removesuffix(self.eos)
        text = prompt + completion + ("" if self.adds_eos else self.eos)
        return _Text(text, [(0 if self.data.loss_on == "all" else len(prompt), len(text))], has_special)

    def _conversation(self, example: Conversation, escape: bool, has_special: bool) -> _Text | None:
        assert self.renderer is not None
        messages, tools, arguments = example.messages, example.tools, example.template_arguments
        if escape:
            messages = list(map(self._without_end, messages))
        answered = [
            bool(keep and (message["content"].strip() or message.get("tool_calls")))
            for keep, message in zip(example.trained, messages, strict=True)
        ]
        if not any(answered):
            return None
        every = self.data.loss_on == "all"
        if every and any(
            message["role"] == "assistant" and not keep for message, keep in zip(messages, example.trained, strict=True)
        ):
            raise ValueError("it takes a turn of the assistant out of the loss, and data.loss_on=all trains every turn")
        messages = self.renderer.adapted(messages, tools)
        if has_special:
            messages, tools, arguments = self.special_tokens.escaped([messages, tools, arguments])
        rendered = self.renderer.render(messages, tools, arguments, answered)
        check_nothing_is_lost(messages, answered, rendered.text)
        check_turns_are_closed(rendered, self.renderer.added)
        return _Text(rendered.text, [(0, len(rendered.text))] if every else rendered.spans, has_special)

    def _without_end(self, message: Message) -> Message:
        if message["role"] != "assistant":
            return message
        return message | {"content": self.special_tokens.without_end(message["content"])}

    def _lacks_reasoning(self, messages: list[Message]) -> bool:
        """Whether the generation prompt opens reasoning that none of the answers has."""
        assert self.renderer is not None
        return self.renderer.generation_prompt.rstrip().endswith("<think>") and not any(
            message.get("reasoning_content") or "</think>" in message["content"] for message in messages
        )

    # From text to documents

    def _tokens_and_mask(self, item: _Text, encoding: Any, adds_special_tokens: bool) -> Ids:
        ids = np.array(encoding.ids, np.int32)
        mask = np.zeros(len(ids), np.uint8)
        for start, end in item.spans:
            first, stop = token_range(encoding, start, end, self.added)
            mask[first:stop] = 1
        if self.adds_eos and adds_special_tokens:
            mask[-1:] = 1
        if item.is_escaped:
            kept = tokens_without_mark(encoding, item.text)
            ids, mask = ids[kept], mask[kept]
        if adds_special_tokens and self.bos_id is not None and len(ids) > 1 and ids[0] == ids[1] == self.bos_id:
            ids, mask = ids[1:], mask[1:]  # the text brings its own
        return ids, mask

    def _documents(self, row: int, ids: np.ndarray, mask: np.ndarray, chunk: Chunk) -> Iterator[tuple[Ids, Any]]:
        """The documents of one row and their records: none longer than max_length, each with a target token."""
        mask[:1] = 0  # nothing predicts the first token
        length, limit, overlong, cut = len(ids), self.data.max_length, self.data.overlong, 0
        chunk.counts.lengths[np.searchsorted(LENGTHS, length)] += 1
        chunk.counts.tokens_in += length
        if not mask.any():
            return chunk.drop("no_target_tokens", row, length)
        pieces = [(ids, mask)]
        if length > limit:
            if overlong == "error":
                too_long = f"{length} tokens, more than data.max_length={limit}"
                raise RowError(row, too_long, "Raise it, or set data.overlong to drop, truncate or split.")
            if overlong == "drop":
                return chunk.drop("too_long", row, length)
            starts = range(0, length, limit) if overlong == "split" else [0]
            pieces = [(ids[start : start + limit], mask[start : start + limit].copy()) for start in starts]
            for _, kept in pieces:
                kept[0] = 0  # nothing in the piece predicts its first token
            pieces = [(piece, kept) for piece, kept in pieces if kept.any()]
            if not pieces:
                return chunk.drop("targets_past_max_length", row, length)
            chunk.find("truncated" if overlong == "truncate" else "split", row)
            cut = length - limit if overlong == "truncate" else 0
        digest, answer = _digest(ids), _digest(ids[mask == 1])
        # Pieces without a target are counted on the row's first document.
        lost = length - cut - sum(len(piece) for piece, _ in pieces)
        for piece, kept in pieces:
            yield (piece, kept), (len(piece), int(kept.sum()), cut, lost, chunk.source, row, digest, answer)
            lost = 0


def token_range(encoding: Any, start: int, end: int, added: Container[int] = ()) -> tuple[int, int]:
    """The tokens that any of the characters start to end belong to, as a range with the end exclusive.

    One of the ids `added` that begins before `start` is not among them: some added tokens take the white space around them with
    them (`rstrip`), such as the header before an answer that begins with a space.
    """
    # Single characters: all offsets at once are a Python object for every token.
    first = next((token for at in range(start, end) if (token := encoding.char_to_token(at)) is not None), None)
    if first is None:
        return 0, 0
    begins, ends = encoding.token_to_chars(first)
    if begins < start and encoding.ids[first] in added:
        return token_range(encoding, ends, end, added)
    stop = next(token for at in range(end - 1, start - 1, -1) if (token := encoding.char_to_token(at)) is not None) + 1
    # A character may be several tokens.
    while (place := encoding.token_to_chars(stop) if stop < len(encoding) else None) and place[0] < min(end, place[1]):
        stop += 1
    return first, stop


def _digest(ids: np.ndarray) -> int:
    return int.from_bytes(blake2b(ids.tobytes(), digest_size=8).digest(), "little")
