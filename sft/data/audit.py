"""What is found in the rows as a whole: before they are read for good, and once all are documents."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from sft.data.document_maker import DocumentMaker
from sft.data.findings import MEANING, SHORTEST_ANSWER, TOLD_FROM, Findings, found_in_row, script_of
from sft.data.formats import Conversation, Row, renamed, to_example
from sft.data.mixture import Mixture, first_documents
from sft.data.sources import place
from sft.data.store import DocumentStore
from sft.errors import DataError, ModelError
from sft.recipe.schema import Recipe, Source

_COMPARED = 1000
"""Characters of a row that are compared with what the tokenizer makes of them."""

_SHARED_QUESTION = 10
"""Rows that may share a question before it says nothing about one of them."""


def check_not_rendered(source: Source, format: str, rows: list[Row], recipe: Recipe, maker: DocumentMaker) -> None:
    """Refuse rows that were rendered elsewhere: read as text, or rendered once more with every header doubled.

    Raises:
        DataError: Half of the first rows or more spell special tokens, which no user types that often; or what the chat template
            writes before an answer, where special tokens are kept.
    """
    if format in ("text", "tokens"):
        return
    kept = recipe.data.special_tokens == "keep"
    header = maker.renderer.generation_prompt.partition("<think>")[0].strip() if maker.renderer is not None else ""
    spelled, whole = 0, format == "prompt_completion"
    for row in rows:
        with suppress(
            ValueError, KeyError, TypeError, AttributeError, RecursionError
        ):  # told when the row's turn comes
            named = renamed(row, source)
            example = to_example(named, format, recipe.data, source)
            whole = whole and isinstance(named["prompt"], str) and isinstance(named["completion"], str)
            if not kept:
                spelled += "special_tokens" in found_in_row(example, maker.control, True)
            elif isinstance(example, Conversation) and maker.control.found_in(header):
                spelled += any(header in message["content"] for message in example.messages)
    if spelled * 2 < len(rows) or spelled < 2:
        return
    remedy = "Take the special tokens out of the turns: the chat template writes them"
    if whole:
        keys = [] if kept else ["data.special_tokens=keep"]
        keys += ["chat: false of the source, so that they are not rendered again"] if source.chat else []
        remedy = f"Set {' and '.join(keys)}; or, if they are meant as text, take them out of the rows"
    raise DataError(
        f"{spelled} of the first {len(rows)} rows of {source.path} spell special tokens, as rows do that were rendered elsewhere; "
        f"{'the chat template would write them once more' if kept else 'they would be read as plain text'}. {remedy}."
    )


def check_tokenizer(
    source: Source, number: int, rows: list[tuple[int, str]], tokenizer: Any, findings: Findings
) -> None:
    """Compare text with what comes back from its tokens, and these with the tokens that the model's tokenizer.json makes of it.

    Args:
        source: Where the text is from.
        number: Of the source, from 0.
        rows: The first rows by number, as the tokenizer is given them.
        tokenizer: From load_tokenizer.
        findings: Where rows that differ are noted.

    Raises:
        ModelError: More than half of the rows lose letters.
    """
    texts = [text[:_COMPARED].encode("utf-8", "replace").decode() for _, text in rows]
    backend, of = tokenizer.backend_tokenizer, f"of the first {len(texts)} rows"
    tokens = [encoding.ids for encoding in backend.encode_batch(texts, add_special_tokens=False)]
    back = backend.decode_batch(tokens, skip_special_tokens=False)
    lost = [
        index for index, (text, again) in enumerate(zip(texts, back, strict=True)) if _letters(text) != _letters(again)
    ]
    if lost:
        before, after = _where_they_differ(_letters(texts[lost[0]]), _letters(back[lost[0]]))
        if len(lost) * 2 > len(texts):
            raise ModelError(
                f"The tokenizer loses text in {len(lost)} {of} of {source.path}: {before!r} becomes {after!r}. Give a model whose "
                "tokenizer has the letters of your data, and all of its tokenizer's files."
            )
        findings.details["lossy"] = f"{of}; {before!r} becomes {after!r}"
        for index in lost:
            findings.add("lossy", number, rows[index][0])
    if tokenizer.own_file is None:
        return
    own = _own_tokenizer(tokenizer.own_file, Path(tokenizer.own_file).stat().st_mtime_ns)
    added = [token for token in tokenizer.get_added_vocab() if own.token_to_id(token) is None]
    encodings = own.encode_batch(texts, add_special_tokens=False)
    for (row, _), text, ids, encoding in zip(rows, texts, tokens, encodings, strict=True):
        if encoding.ids != ids and not any(token in text for token in added):
            of_file, of_class = _where_they_differ(encoding.tokens, tokenizer.convert_ids_to_tokens(ids))
            findings.details.setdefault(
                "other_tokens", f"{of}; {of_file} by tokenizer.json, {of_class} by {type(tokenizer).__name__}"
            )
            findings.add("other_tokens", number, row)


@lru_cache(1)
def _own_tokenizer(file: str, modified: int) -> Tokenizer:
    """A tokenizer.json as it stands, read once for all sources."""
    own = Tokenizer.from_file(file)
    own.no_truncation()
    own.no_padding()
    return own


def _letters(text: str) -> str:
    """A text without what tokenizers may change: white space, and other code points for the same letter."""
    return "".join(unicodedata.normalize("NFKC", text).split())


def _where_they_differ(one: Sequence[Any], other: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """What stands in each from the first place where they differ, and a little before it."""
    at = next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
    return one[max(0, at - 3) : at + 9], other[max(0, at - 3) : at + 9]


def find_in_all(
    store: DocumentStore, mixture: Mixture, findings: Findings, tokenizer: Any, questions: np.ndarray
) -> None:
    """What only all rows together show.

    Args:
        store: All documents.
        mixture: What becomes of them.
        findings: What was found so far; added to.
        tokenizer: Reads the longest rows again.
        questions: Two digests for each document: its questions, and its first question and answer; empty where no row is held out.
    """
    first = first_documents(store.documents)
    rows = store.documents[first]
    repeated = np.isin(first, mixture.duplicate_rows)
    of_all = {"duplicate": repeated, "held_out_duplicate": mixture.dropped["held out too"][first]}
    if len(questions):
        held_out, trained = mixture.held_out[first], mixture.times[first] > 0
        asked, opening = questions[first].T
        of_all["held_out_near"] = _near(asked, held_out, trained) | _near(opening, held_out, trained)
    for kind, which in of_all.items():
        for row in rows[which]:
            findings.add(kind, int(row["source"]), int(row["row"]))
    scripts: Counter[str] = Counter()
    for source in np.unique(rows["source"]):
        own = np.flatnonzero(rows["source"] == source)
        _, at, times = np.unique(rows["answer"][own], return_index=True, return_counts=True)
        if len(own) >= 20 and times.max() > len(own) / 2:
            row = rows[own[at[times.argmax()]]]
            findings.add("same_answer", int(source), int(row["row"]), int(times.max()))
        length, count, number = findings.longest.get(int(source), (0, 0, 0))
        # Labels are equally long too, but few and repeated.
        if length >= SHORTEST_ANSWER and count >= max(10, len(own) / 5) and len(times) > len(own) / 2:
            findings.add("cut_off", int(source), number, count)
            findings.details["cut_off"] = f"{length} characters"
        for index in _far_longer(store.documents, first, own):
            findings.add("very_long", int(source), int(rows["row"][index]))
            scripts[script_of(tokenizer.decode(store.document(int(first[index]))[0][:2000]))] += 1
    findings.details["very_long"] = ", ".join(f"{count} in {script} script" for script, count in scripts.items())


def _near(questions: np.ndarray, held_out: np.ndarray, trained: np.ndarray) -> np.ndarray:
    """The held-out rows whose question is trained too; one that many rows share, such as a fixed instruction, does not count."""
    asked, times = np.unique(questions[trained], return_counts=True)
    near: np.ndarray = held_out & np.isin(questions, asked[times <= _SHARED_QUESTION])
    return near


def _far_longer(documents: np.ndarray, first: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Of the rows `own`, the few that have more than twenty times the tokens of the middle one."""
    whole = documents["length"].astype(np.int64) + documents["cut"] + documents["lost"]
    lengths = np.add.reduceat(whole, first)[own]
    long: np.ndarray = own[lengths > 20 * np.median(lengths)]
    return long if len(long) <= max(1, len(own) // 100) else long[:0]


def findings_json(findings: Findings, names: list[str], starts: list[Any], rows_in: list[int]) -> list[dict[str, Any]]:
    """The findings as ledger.json has them, the most frequent first.

    Args:
        findings: Of all sources.
        names: Of the sources.
        starts: Where the files of each source start.
        rows_in: Rows of each source.
    """

    def most(kind: str) -> dict[str, Any]:
        """The source of which the largest part of the rows has it."""
        counts = {source: count for (of, source), count in findings.by_source.items() if of == kind}
        source = max(counts, key=lambda number: counts[number] / max(rows_in[number], 1))
        return {"source": names[source], "count": counts[source], "rows": rows_in[source]}

    return [
        {
            "kind": kind,
            "meaning": MEANING[kind],
            "detail": findings.details.get(kind) or None,
            "count": count,
            "most": most(kind),
            "rows": [place(names[source], starts[source], row) for source, row in findings.rows.get(kind, [])],
        }
        for kind, count in findings.counts.most_common()
        if count and most(kind)["count"] >= TOLD_FROM.get(kind, 0) * most(kind)["rows"]
    ]
