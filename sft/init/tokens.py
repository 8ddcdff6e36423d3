"""Chooses the chat template and the padding token that the tokenizer lacks, and tokenizes the rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sft.data.documents import Chunk, DocumentMaker, RowError
from sft.data.findings import check_findings, find_in_all
from sft.data.ledger import check_limits, make_ledger
from sft.data.mixture import mix
from sft.data.template_checks import end_of_turn
from sft.data.tokenizer import find_chat_template, load_tokenizer, padding_choice, read_tokenizer
from sft.errors import DataError
from sft.init.draft import Draft
from sft.init.rows import Rows

_CHATML = ("<|im_start|>", "<|im_end|>")
_NEW_PADDING = "<|pad|>"
_NO_LIMITS = {"max_length": 2**30, "pack_length": None, "held_out": None}


@dataclass(frozen=True)
class Tokenized:
    """Rows as documents, before any limit on their length."""

    lengths: np.ndarray
    """Tokens of each row that can be trained."""

    bad: int
    """Rows that cannot be read or rendered."""

    why_bad: str
    """Of the first of them."""


def settle_tokenizer(draft: Draft, rows: Rows) -> Any:
    """Choose the chat template and the padding token where the tokenizer has none.

    Returns:
        The tokenizer.

    Raises:
        ModelError: It cannot be loaded, or lacks something else.
    """
    tokenizer = read_tokenizer(draft.recipe())
    model = draft.recipe().model
    if tokenizer.chat_template is None and model.chat_template is None:
        why = "the tokenizer has no chat template"
        if rows.format in ("text", "tokens"):
            draft.put("eval.apply_chat_template", False, f"{why}, and {rows.format} needs none")
        elif all(token in tokenizer.get_vocab() for token in _CHATML):
            draft.put("model.chat_template", "chatml", f"{why}, and has ChatML's tokens")
        else:
            reason = "`plain` writes roles as words and ends each answer with the tokenizer's own EOS"
            draft.put("model.chat_template", "plain", f"{why}; {reason}")
    template = draft.recipe().model.chat_template
    if template is not None:
        tokenizer.chat_template = find_chat_template(template)
    if model.eos_token is not None:
        tokenizer.eos_token = model.eos_token
    if model.pad_token is None:
        _put_padding(draft, tokenizer)
    return load_tokenizer(draft.recipe())


def _put_padding(draft: Draft, tokenizer: Any) -> None:
    stop = end_of_turn(tokenizer) if isinstance(tokenizer.chat_template, str) else tokenizer.eos_token_id
    if tokenizer.pad_token_id not in (None, stop):
        return
    found = padding_choice(tokenizer, stop)
    if found is None:
        draft.put("model.new_tokens", [_NEW_PADDING], "a padding token: the vocabulary has none to spare")
        draft.put("model.pad_token", _NEW_PADDING)
    elif tokenizer.pad_token_id is None:
        draft.put("model.pad_token", found, "the tokenizer has none; this one is in its vocabulary and ends no turn")


def tokenize(draft: Draft, tokenizer: Any, rows: Rows) -> Tokenized:
    """Tokenize every row that was read.

    Raises:
        DataError: The rows would stop a start: too many cannot be used, or have one finding.
    """
    data, source, why = draft.recipe().data.model_copy(update=_NO_LIMITS), rows.source, ""

    def make(on_bad_row: str) -> Chunk:
        maker = DocumentMaker(data.model_copy(update={"on_bad_row": on_bad_row}), tokenizer)
        return maker.make(source, 0, rows.format, rows.numbered)

    try:
        chunk = make("error")
    except RowError as error:
        why, chunk = f"row {error.row}: {error.reason}", make("drop")
    mixture = mix(chunk.documents, [source], data)
    find_in_all(chunk.documents, mixture, chunk.findings)
    ledger = make_ledger([source.path], [rows.format], [chunk.counts], chunk.documents, mixture, None, 0)
    try:
        check_limits(ledger, data)
        check_findings(chunk.findings.as_json([source.path], [[]], [len(rows.numbered)]), data)
    except DataError as error:
        raise DataError(f"{source.path}: {error}" + (f"\nThe first bad row: {why}." if why else "")) from None
    return Tokenized(chunk.documents["length"], chunk.counts.dropped_rows["bad_row"], why)
