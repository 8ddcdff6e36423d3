"""From rows to documents: rendered, tokenized and masked, a chunk of rows at a time.

Chunks add up, in order, to what sft/data/store.py writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from typing import Any

import numpy as np

from sft.data.chat import ChatRenderer, Rendered, Span
from sft.data.chunk_building import Building, Encodable, Given, Stop
from sft.data.documents import LENGTHS, Chunk, Counts
from sft.data.findings import MEANING, Findings, found_in_row
from sft.data.formats import IGNORED, Conversation, Row, Text, Tokens, has_zero_weight, renamed, to_example
from sft.data.lost_content import check_nothing_is_lost
from sft.data.overlong import Overlong, pieces_of
from sft.data.readers import BadRow
from sft.data.special_tokens import ControlTokens, break_up, unused_mark
from sft.data.token_ranges import token_range, without_mark
from sft.recipe.schema import Data, Source


class _Refused(ValueError):
    """A row with a finding that the recipe refuses."""


class DocumentMaker:
    """Makes documents of rows.

    Args:
        data: The recipe's section.
        tokenizer: From load_tokenizer.
    """

    def __init__(self, data: Data, tokenizer: Any) -> None:
        self.data, self.tokenizer = data, tokenizer
        self.backend = tokenizer.backend_tokenizer
        self.backend.no_truncation()
        self.backend.no_padding()
        self.vocabulary = len(tokenizer)
        self.eos: str | None = tokenizer.eos_token
        self.adds_eos = self.backend.encode("a").ids[-1:] == [tokenizer.eos_token_id]
        self.bos_id: int | None = tokenizer.bos_token_id
        added = tokenizer.added_tokens_decoder.items()
        self.special_ids = {tokenizer.eos_token_id, *(number for number, token in added if token.special)}
        self.renderer = ChatRenderer(tokenizer) if tokenizer.chat_template is not None else None
        self.control = ControlTokens(tokenizer)
        self.added = frozenset(tokenizer.added_tokens_decoder)

    def make(self, source: Source, number: int, format: str, rows: Sequence[tuple[int, Row | BadRow]]) -> Chunk:
        """Documents of a chunk of rows.

        Args:
            source: Where the rows are from.
            number: Of the source, from 0.
            format: Of sft.data.formats.FORMATS.
            rows: With their numbers in the source, from 1.
        """
        chunk = Building(number, Counts(rows_in=len(rows)), Findings())
        items: list[Encodable | Given] = []
        stopped: Stop | None = None
        try:
            for row_number, row in rows:
                with self._bad_rows_told(chunk, row_number):
                    if isinstance(row, dict) and has_zero_weight(renamed(row, source)):
                        chunk.drop("zero weight", row_number)
                        continue
                    item = self._ready(row, row_number, source, format, chunk)
                    if item is None:
                        chunk.drop("no answer to train on", row_number)
                    else:
                        if isinstance(item, Encodable):
                            item.text.encode()  # half a surrogate pair is no text
                        items.append(item)
        except Stop as stop:
            stopped = stop  # an earlier row may turn out too long
        try:
            for item, encoding in self._encoded(items):
                with self._bad_rows_told(chunk, item.row):
                    self._add(item, encoding, chunk)
        except Stop as stop:
            stopped = stop
        return chunk.done(None if stopped is None else (stopped.row, stopped.reason))

    @contextmanager
    def _bad_rows_told(self, chunk: Building, row: int) -> Iterator[None]:
        try:
            yield
        except Overlong as error:
            raise Stop(row, f"{error}. Raise it, or set data.overlong to drop, truncate or split") from None
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            if self.data.on_bad_row == "error":
                raise Stop(row, f"{error}. Correct or remove the row, or set data.on_bad_row=drop") from None
            chunk.drop("refused by data.refuse" if isinstance(error, _Refused) else "bad row", row)

    def _ready(
        self, row: Row | BadRow, row_number: int, source: Source, format: str, chunk: Building
    ) -> Encodable | Given | None:
        if isinstance(row, BadRow):
            raise ValueError(row.reason)
        try:
            example = to_example(renamed(row, source), format, self.data, source)
        except KeyError as error:
            raise ValueError(
                f"it has no column {error}, as rows of the format {format} do, but {', '.join(row)}"
            ) from None
        if isinstance(example, Tokens):
            ids, mask = self._given(example)
            if mask.any() and int(ids[mask == 1][-1]) not in self.special_ids:
                chunk.findings.add("no_end", chunk.source, row_number)
            return Given(row_number, ids, mask)
        # A text that was rendered elsewhere holds its special tokens on purpose.
        escape = self.data.special_tokens == "escape" and format != "text"
        found = found_in_row(example, self.control, escape)
        refused = [kind for kind in found if kind.removesuffix("_kept") in self.data.refuse]
        if refused:
            for kind in refused:
                chunk.findings.add(kind, chunk.source, row_number)
            raise _Refused(f"{', '.join(MEANING[kind] for kind in refused)} (data.refuse: {', '.join(refused)})")
        if format == "text" and "special_tokens_kept" in found:
            found.remove("special_tokens_kept")
        for kind in found:
            chunk.findings.add(kind, chunk.source, row_number)
        breaks = "special_tokens" in found
        if isinstance(example, Text):
            if example.prompt:
                chunk.findings.measure(len(example.completion), chunk.source, row_number)
            return self._text(example, row_number, escape, breaks)
        try:
            item = self._conversation(example, row_number, escape, breaks)
        except ValueError as error:
            # Templates say in their own words what they cannot render.
            raise ValueError(f"{error}{'; its roles are out of order' if 'role_order' in found else ''}") from None
        if item is not None and self.renderer is not None:
            chunk.findings.measure(len(example.messages[-1]["content"]), chunk.source, row_number)
            if self.renderer.with_ids(example.messages) != example.messages:
                chunk.findings.add("made_ids", chunk.source, row_number)
            without = self.renderer.finding_without_thoughts
            if without is not None and not any(
                message.get("reasoning_content") or "</think>" in message["content"] for message in example.messages
            ):
                chunk.findings.add(without, chunk.source, row_number)
        return item

    def texts(self, source: Source, format: str, rows: Sequence[tuple[int, Row | BadRow]]) -> list[tuple[int, str]]:
        """What the tokenizer is given of rows, with their numbers; those that cannot be used, or spell special tokens, are left out."""
        items = []
        for number, row in rows:
            with suppress(ValueError, TypeError, AttributeError, RecursionError):
                items.append(self._ready(row, number, source, format, Building(0, Counts(), Findings())))
        return [(item.row, item.text) for item in items if isinstance(item, Encodable) and item.mark is None]

    def _given(self, row: Tokens) -> tuple[np.ndarray, np.ndarray]:
        wrong = next((token for token in row.input_ids if not 0 <= token < self.vocabulary), None)
        if wrong is not None:
            raise ValueError(f"input_ids holds {wrong}, and the tokenizer has {self.vocabulary} tokens")
        ids = np.array(row.input_ids, np.int32)
        if row.labels is None:
            return ids, np.ones(len(ids), np.uint8)
        try:
            labels = np.array(row.labels, np.int64)
        except OverflowError:
            labels = np.full(len(ids), -1, np.int64)
        mask = labels != IGNORED
        if (labels[mask] != ids[mask]).any():
            raise ValueError("labels differ from input_ids elsewhere than in -100; give them unshifted")
        return ids, mask.astype(np.uint8)

    def _text(self, example: Text, row_number: int, escape: bool, breaks: bool) -> Encodable | None:
        prompt, completion = example.prompt, example.completion
        if escape:
            completion = self.control.without_end(completion)
        if not completion.strip():
            return None
        mark = None
        if breaks:
            mark = unused_mark(prompt + completion)
            # Together: a token may begin in the one and end in the other.
            whole = self.control.broken_up(prompt + completion, mark)
            at = _behind(whole, len(prompt), mark)
            prompt, completion = whole[:at], whole[at:]
        assert self.eos is not None
        if completion.rstrip().endswith(self.eos):  # rendered elsewhere, maybe with a line break behind
            completion = completion.rstrip().removesuffix(self.eos)
        completion += "" if self.adds_eos else self.eos
        start = 0 if self.data.loss_on == "all" else len(prompt)
        return Encodable(row_number, prompt + completion, [(start, len(prompt + completion))], True, mark)

    def _conversation(self, example: Conversation, row_number: int, escape: bool, breaks: bool) -> Encodable | None:
        assert self.renderer is not None
        messages, tools, arguments = example.messages, example.tools, example.template_arguments
        if escape:
            messages = [
                message | {"content": self.control.without_end(message["content"])}
                if message["role"] == "assistant"
                else message
                for message in messages
            ]
        answered = [
            bool(keep and (message["content"].strip() or message.get("tool_calls")))
            for keep, message in zip(example.trained, messages, strict=True)
        ]
        if not any(answered):
            return None
        mark = None
        if breaks:
            messages = self.renderer.as_the_template_reads(messages, tools)
            mark = unused_mark(json.dumps([messages, tools, arguments], ensure_ascii=False, default=str))
            messages, tools, arguments = (break_up(part, self.control, mark) for part in (messages, tools, arguments))
        every = self.data.loss_on == "all"  # the other turns are needed to leave them out
        rendered = self.renderer.render(messages, tools, arguments, None if every else answered)
        check_nothing_is_lost(messages, answered, rendered.text)
        spans = self._trained_spans(example, rendered)
        opening = ""
        if self.data.held_out is not None:
            answer = next(at for at, message in enumerate(messages) if message["role"] == "assistant")
            opening = "\n".join(
                f"{turn['content']}{turn.get('tool_calls', '')}" for turn in example.messages[: answer + 1]
            )
        # The template has written the special tokens, BOS included: the tokenizer must not add another.
        return Encodable(row_number, rendered.text, spans, False, mark, opening)

    def _trained_spans(self, example: Conversation, rendered: Rendered) -> list[Span]:
        """The characters whose tokens are trained.

        Raises:
            ValueError: The template leaves a turn open.
        """
        assert self.renderer is not None
        open_ends = [
            rendered.text[end - 20 : end]
            for _, end in rendered.spans
            if not rendered.text.endswith(self.renderer.added, 0, end)
        ]
        if open_ends:
            raise ValueError(f"the chat template leaves the assistant's turn open: {open_ends[0]!r}")
        if self.data.loss_on != "all":
            return rendered.spans
        # All but the turns that the row itself takes out of the loss.
        turns = [index for index, message in enumerate(example.messages) if message["role"] == "assistant"]
        edges = [0]
        for span, index in zip(rendered.spans, turns, strict=True):
            edges += [] if example.trained[index] else span
        edges.append(len(rendered.text))
        return [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end]

    def _encoded(self, items: Sequence[Encodable | Given]) -> Iterator[tuple[Encodable | Given, Any]]:
        """The rows in their order, each with its encoding; the tokenizer takes them all at once."""
        texts = [item for item in items if isinstance(item, Encodable)]
        encodings: dict[int, Any] = {}
        for special in (False, True):
            batch = [item for item in texts if item.special == special]
            encoded = self.backend.encode_batch([item.text for item in batch], add_special_tokens=special)
            encodings |= {item.row: encoding for item, encoding in zip(batch, encoded, strict=True)}
        for item in items:
            yield item, encodings.get(item.row)

    def _tokens_and_mask(self, item: Encodable, encoding: Any) -> tuple[np.ndarray, np.ndarray]:
        ids = np.array(encoding.ids, np.int32)
        mask = np.zeros(len(ids), np.uint8)
        for start, end in item.spans:
            first, stop = token_range(encoding, start, end, self.added)
            mask[first:stop] = 1
        if self.adds_eos and item.special:
            mask[-1:] = 1
        if item.mark is not None:
            kept = without_mark(encoding, item.text, item.mark)
            ids, mask = ids[kept], mask[kept]
        if item.special and self.bos_id is not None and len(ids) > 1 and ids[0] == ids[1] == self.bos_id:
            ids, mask = ids[1:], mask[1:]  # the text brings its own
        return ids, mask

    def _add(self, item: Encodable | Given, encoding: Any, chunk: Building) -> None:
        ids, mask = (item.ids, item.mask) if isinstance(item, Given) else self._tokens_and_mask(item, encoding)
        mask[:1] = 0  # nothing predicts the first token
        chunk.counts.lengths[np.searchsorted(LENGTHS, len(ids))] += 1
        chunk.counts.tokens_in += len(ids)
        pieces, cut, lost, reason = pieces_of(ids, mask, self.data)
        if reason is not None:
            chunk.drop(reason, item.row, len(ids))
        if cut or len(pieces) > 1:
            chunk.findings.add("truncated" if cut else "split", chunk.source, item.row)
        digest, answer = _digest(ids), _digest(ids[mask == 1])
        if self.data.held_out is not None:
            chunk.questions += [_questions(item, ids, mask)] * len(pieces)
        for piece, kept in pieces:
            chunk.parts.append((piece, kept))
            chunk.records.append((len(piece), int(kept.sum()), cut, lost, chunk.source, item.row, digest, answer))
            lost = 0


def _behind(broken: str, characters: int, mark: str) -> int:
    """Where in a broken-up text the first `characters` of the unbroken one end."""
    at = 0
    while characters:
        characters -= broken[at] != mark
        at += 1
    return at


def _questions(item: Encodable | Given, ids: np.ndarray, mask: np.ndarray) -> tuple[int, int]:
    """Digests of what a row has besides its answers, and of its opening; of all of it where it has nothing besides.

    Case and white space do not count.
    """
    if isinstance(item, Given):
        digest = _digest(ids[mask == 0] if (mask[1:] == 0).any() else ids)
        return digest, digest
    edges = [0, *(edge for span in item.spans for edge in span), len(item.text)]
    asked = "".join(item.text[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True))
    asked = (asked if asked.strip() else item.text).replace(item.mark or "\0", "")
    question, opening = (
        int.from_bytes(blake2b("".join(text.casefold().split()).encode(), digest_size=8).digest(), "little")
        for text in (asked, item.opening or asked)
    )
    return question, opening


def _digest(ids: np.ndarray) -> int:
    return int.from_bytes(blake2b(ids.tobytes(), digest_size=8).digest(), "little")
