"""Settles how rows become tokens: chat template, padding, what is trained; then tokenizes the rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np

from sft.data.documents import Chunk, DocumentMaker, RowError
from sft.data.findings import check_findings, find_in_all
from sft.data.formats import renamed, to_example
from sft.data.mixture import mix
from sft.data.readers import BadRow, Row
from sft.data.template_checks import end_of_turn
from sft.data.tokenizer import find_chat_template, load_tokenizer, padding_choice
from sft.errors import DataError, ModelError
from sft.hub.names import model_path
from sft.init.draft import Draft
from sft.init.rows import Rows
from sft.recipe.schema import Data

_ANY_LENGTH = 2**30
_TRIED = 200
"""Rows that each chat template is tried on."""

_ENDS = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
_CHATML = ("<|im_start|>", "<|im_end|>")
_NEW_PADDING = "<|pad|>"


@dataclass(frozen=True)
class Tokenized:
    """Rows as documents, before any limit on their length."""

    lengths: np.ndarray
    """Tokens of each row that can be trained."""

    first_targets: np.ndarray
    """The position of the first target token of each."""

    trained: np.ndarray
    """Target tokens of each."""

    bad: int
    """Rows that cannot be read or rendered."""

    why_bad: str
    """Of the first of them."""

    dropped: dict[str, int]
    """Other rows that are not trained, by reason."""


def settle_tokenizer(draft: Draft, rows: Rows) -> Any:
    """Choose the chat template, the padding token and what is trained, so that the rows can be rendered.

    Returns:
        The tokenizer.

    Raises:
        DataError: Too many rows cannot be used, whatever the template.
        ModelError: The tokenizer cannot be loaded, or none of the templates renders the rows; the message says why of each.
    """
    _check_rows(rows, draft.recipe().data)
    failures: list[str] = []
    for template, loss_on, reason in _candidates(_raw_tokenizer(draft), draft, rows):
        tried = copy(draft)
        tried.decisions = dict(draft.decisions)
        if template is not None:
            tried.put("model.chat_template", template, reason)
        elif loss_on is not None:
            tried.put("data.loss_on", loss_on, f"{reason} ({failures[-1]})")
        elif reason:
            tried.put("eval.apply_chat_template", False, reason)
        try:
            _put_special_tokens(tried, _raw_tokenizer(draft))
            settled = load_tokenizer(tried.recipe())
            problem = _problem(settled, rows, tried.recipe().data)
        except ModelError as error:
            problem = str(error)
        if problem is None:
            draft.decisions = tried.decisions
            return settled
        failures.append(problem)
    reasons = "; ".join(dict.fromkeys(failures))
    raise ModelError(
        f"The chat template does not render these rows: {reasons}. Name a --model whose template does, or give another: "
        "model.chat_template=plain, or a .jinja file."
    )


def _raw_tokenizer(draft: Draft) -> Any:
    """The tokenizer as it is, with a padding token and an end where it has none: what it lacks is settled later."""
    from transformers import AutoTokenizer

    recipe = draft.recipe()
    model = recipe.model
    try:
        return AutoTokenizer.from_pretrained(
            model_path(recipe), revision=model.revision, trust_remote_code=model.trust_remote_code
        )
    except (OSError, ValueError, KeyError, ImportError):
        load_tokenizer(recipe)  # says why
        raise


def _candidates(tokenizer: Any, draft: Draft, rows: Rows) -> Iterator[tuple[str | None, str | None, str]]:
    """What to try, the best first: a chat template or None for the tokenizer's own, data.loss_on, and the reason."""
    if tokenizer.chat_template is not None or draft.has("model.chat_template"):
        yield None, None, ""
        yield None, "last_assistant", "the chat template cannot train earlier turns"
        return
    why = "the tokenizer has no chat template"
    if rows.format in ("text", "tokens"):
        yield None, None, f"{why}, and plain text needs none"
        return
    if all(token in tokenizer.get_vocab() for token in _CHATML):
        yield "chatml", None, f"{why}, and has ChatML's tokens"
    yield "plain", None, f"{why}; `plain` writes roles as words and ends each answer with the tokenizer's own EOS"


def _put_special_tokens(draft: Draft, tokenizer: Any) -> None:
    """An end and a padding token, where the tokenizer lacks them."""
    if draft.recipe().model.eos_token is not None:
        tokenizer.eos_token = draft.recipe().model.eos_token
    elif tokenizer.eos_token is None:
        end = next((token for token in _ENDS if token in tokenizer.get_vocab()), None)
        if end is None:
            raise ModelError(
                f"the tokenizer has no end-of-sequence token, and none of {', '.join(_ENDS)}. Give one: model.eos_token=TOKEN."
            )
        tokenizer.eos_token = end
        draft.put("model.eos_token", end, "the tokenizer names no end-of-sequence token; this one is in its vocabulary")
    model = draft.recipe().model
    if model.chat_template is not None:
        tokenizer.chat_template = find_chat_template(model.chat_template)
    if model.pad_token is not None:
        return
    stop = tokenizer.eos_token_id if not isinstance(tokenizer.chat_template, str) else end_of_turn(tokenizer)
    if tokenizer.pad_token_id not in (None, stop):
        return
    found = padding_choice(tokenizer, stop)
    if found is not None and tokenizer.pad_token_id is None:
        draft.put(
            "model.pad_token",
            found,
            "the tokenizer has no padding token; this one is in its vocabulary, and ends no turn",
        )
    if found is None:
        draft.put("model.new_tokens", [_NEW_PADDING], "a padding token: the vocabulary has none to spare")
        draft.put("model.pad_token", _NEW_PADDING)


def _without_limits(data: Data, **changed: Any) -> Data:
    return data.model_copy(update={"max_length": _ANY_LENGTH, "pack_length": None, **changed})


def _problem(tokenizer: Any, rows: Rows, data: Data) -> str | None:
    """Why too many of the first rows cannot be rendered; None where they can."""
    tried = [(number, row) for number, row in rows.numbered if not isinstance(row, BadRow)][:_TRIED]
    if tokenizer.chat_template is None and rows.format not in ("text", "tokens"):
        return "the tokenizer has no chat template"
    maker = DocumentMaker(_without_limits(data, on_bad_row="drop"), tokenizer)
    bad = maker.make(rows.source, 0, rows.format, tried).counts.dropped_rows["bad_row"]
    return _first_bad(tokenizer, rows, tried, data) if bad > data.max_dropped_fraction * len(tried) else None


def _check_rows(rows: Rows, data: Data) -> None:
    """Refuse rows that no chat template could help, such as rows with images."""
    first, bad, tried = "", 0, rows.good[:_TRIED]
    for number, row in enumerate(tried, start=1):
        try:
            to_example(renamed(row, rows.source), rows.format, data, rows.source)
        except (ValueError, TypeError, AttributeError) as error:
            first, bad = first or f"row {number}: {error}", bad + 1
    if bad > data.max_dropped_fraction * len(tried):
        raise DataError(
            f"{rows.source.path}: {bad} of its first {len(tried)} rows cannot be used (the first: {first})."
        )


def _first_bad(tokenizer: Any, rows: Rows, numbered: Sequence[tuple[int, Row | BadRow]], data: Data) -> str:
    maker = DocumentMaker(_without_limits(data, on_bad_row="error"), tokenizer)
    try:
        for number, row in numbered:
            maker.make(rows.source, 0, rows.format, [(number, row)])
    except RowError as error:
        return f"row {error.row}: {error.reason.partition('. Correct or remove the row')[0]}"
    return ""


def tokenize(draft: Draft, tokenizer: Any, rows: Rows) -> Tokenized:
    """Tokenize every row that was read.

    Raises:
        DataError: None can be trained, too many are bad, or nearly all have a finding that stops a training.
    """
    data, name = draft.recipe().data, rows.source.path
    maker = DocumentMaker(_without_limits(data, on_bad_row="drop"), tokenizer)
    chunk = maker.make(rows.source, 0, rows.format, rows.numbered)
    total, dropped = len(rows.numbered), dict(chunk.counts.dropped_rows)
    bad = dropped.pop("bad_row", 0)
    why = _first_bad(tokenizer, rows, rows.numbered, data) if bad else ""
    if not len(chunk.documents):
        reasons = ", ".join(f"{count} x {reason.replace('_', ' ')}" for reason, count in dropped.items())
        raise DataError(f"{name}: none of its {total} rows can be trained: {why or reasons}.")
    if sum(chunk.counts.dropped_rows.values()) > data.max_dropped_fraction * total:
        reasons = ", ".join(
            f"{count} x {reason.replace('_', ' ')}" for reason, count in chunk.counts.dropped_rows.items()
        )
        raise DataError(
            f"{name}: too many of its {total} rows cannot be trained: {reasons}{f' (the first: {why})' if why else ''}. Correct them, or "
            "give data.max_dropped_fraction=1 to leave them out."
        )
    find_in_all(
        chunk.documents, mix(chunk.documents, [rows.source], data.model_copy(update={"held_out": None})), chunk.findings
    )
    try:
        check_findings(chunk.findings.as_json([name], [[]], [total]), data)
    except DataError as error:  # there is no recipe yet that shows the rows
        text = str(error).replace("Look at them with --show and correct them.", "Correct them.")
        raise DataError(text.replace(", set data.allow", ", add to the command data.allow")) from None
    return Tokenized(chunk.documents["length"], _first_targets(chunk), chunk.documents["trained"], bad, why, dropped)


def _first_targets(chunk: Chunk) -> np.ndarray:
    starts = np.concatenate([[0], np.cumsum(chunk.documents["length"])[:-1]])
    targets = np.flatnonzero(chunk.trained)
    return np.asarray(targets[np.searchsorted(targets, starts)] - starts)
