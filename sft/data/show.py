"""The prepared data as a person sees it: a few lines before every training, all of it with --show."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from sft.data.ledger import histogram
from sft.data.prepared import Prepared
from sft.data.readers import split_of
from sft.data.sources import place
from sft.data.special_tokens import ControlTokens
from sft.data.store import DocumentStore, SequenceIndex
from sft.recipe.schema import Recipe
from sft.visible import visible, visible_line

_TRAINED, _MASKED, _SPECIAL, _PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[7m", "\x1b[0m"


def summary_lines(prepared: Prepared) -> list[str]:
    """The ledger in a line, each finding in another."""
    rows, tokens = prepared.ledger["total"]["rows"], prepared.ledger["total"]["tokens"]
    packing = prepared.ledger["packing"]
    used = tokens["trained"] + tokens["masked"]
    dropped = "".join(f", {count} dropped ({reason})" for reason, count in rows["dropped"].items())
    held_out = f", {rows['held_out']} held out" if rows["held_out"] else ""
    packs = f"; {packing['packs']} packs, {packing['fill']:.1%} full" if packing else ""
    line = (
        f"Data: {rows['used']} of {rows['in']} rows used{held_out}{dropped}; {used} tokens, {tokens['trained']} of them trained, "
        f"{tokens['truncated']} truncated, {tokens['dropped']} dropped{packs}."
    )
    not_read = [
        f"Not read: {visible_line(f'{columns} of {path}')}" for path, columns in prepared.summary["not_read"].items()
    ]
    return [line, *not_read, *_other_splits(prepared), *finding_lines(prepared)]


def _other_splits(prepared: Prepared) -> list[str]:
    """One line for each trained source whose pattern takes in files that are named for another split."""
    lines = []
    for account, starts in zip(prepared.ledger["sources"], prepared.summary["file_starts"], strict=True):
        files = [Path(name) for _, name in starts]
        if not files:
            continue  # of the hub
        folder = Path(os.path.commonpath([file.parent for file in files]))
        others = [file.name for file in files if split_of(file, folder) not in (None, "train")]
        if others and len(others) < len(files) and not account["source"].endswith("(held out)"):
            lines.append(
                visible_line(
                    f"Note: {account['source']} also trains on files named for another split: {', '.join(others[:3])}"
                    f"{', ...' if len(others) > 3 else ''}. Leave them out of data.train, or name them as data.held_out."
                )
            )
    return lines


def finding_lines(prepared: Prepared) -> list[str]:
    """One line for each kind of finding, with its first rows."""
    lines = []
    for finding in prepared.findings:
        where = _places(finding["rows"][:3]) + (", ..." if finding["count"] > 3 else "")
        detail = f" ({finding['detail']})" if finding["detail"] else ""
        lines.append(visible_line(f"Note: {finding['count']} x {finding['meaning']}{detail}: {where}"))
    return lines


def _places(rows: Sequence[str]) -> str:
    """Rows with the name of their file once.

    >>> _places(["a.jsonl, row 3", "a.jsonl, row 5", "b.jsonl, row 1"])
    'a.jsonl, row 3, 5; b.jsonl, row 1'
    """
    numbers: dict[str, list[str]] = {}
    for row in rows:
        file, _, number = row.rpartition(", row ")
        numbers.setdefault(file, []).append(number)
    return "; ".join(f"{file}, row {', '.join(found)}" for file, found in numbers.items())


def show(prepared: Prepared, recipe: Recipe, tokenizer: Any, count: int) -> None:
    """Print rows as the model gets them, the ledger, the lengths and the findings.

    Args:
        prepared: The data.
        recipe: What it was prepared for.
        tokenizer: From load_tokenizer.
        count: Rows to show.
    """
    colours = sys.stdout.isatty()
    store, index = DocumentStore.open(prepared.folder), SequenceIndex.load(prepared.folder / "train.npz")
    sources = (*recipe.sources, *recipe.held_out_sources)
    chosen = np.unique(index.members)
    for document in chosen[np.linspace(0, len(chosen) - 1, min(count, len(chosen))).astype(int)]:
        record = store.documents[document]
        source = int(record["source"])
        starts = [(int(start), str(name)) for start, name in prepared.summary["file_starts"][source]]
        where = place(sources[source].path, starts, int(record["row"]))
        cut = f", {record['cut']} cut off" if record["cut"] else ""
        print(f"── {visible_line(where)}: {record['length']} tokens, {record['trained']} of them trained{cut}")
        print(marked_text(*store.document(int(document)), tokenizer, colours))
        print()
    legend = "green: trained, dim: not trained, reversed: special tokens" if colours else "[[...]]: trained"
    legend += "; a backslash before <...>: text that only spells a special token"
    print(f"({legend})\n")
    print_ledger(prepared.ledger)
    print(histogram(prepared.ledger))
    print()
    print("\n".join(finding_lines(prepared) or ["No findings."]))
    print(f"\nPrepared in {prepared.folder} (safe to delete: it is made again)")


def marked_text(ids: np.ndarray, trained: np.ndarray, tokenizer: Any, colours: bool) -> str:
    """A document as text in which one sees what is trained.

    Args:
        ids: Token ids, length T.
        trained: 1 where a token is trained, length T.
        tokenizer: Decodes them.
        colours: For a terminal; else trained stretches are put in double brackets.
    """
    special, control = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder), ControlTokens(tokenizer)
    pieces: list[str] = []
    for start, stop in _stretches(trained, np.isin(ids, list(special))):
        text = _decoded(ids, start, stop, tokenizer)
        if int(ids[start]) not in special:
            text = control.marked(text)
        is_trained, is_special = bool(trained[start]), int(ids[start]) in special
        text = visible(text)
        if colours:
            style = (_TRAINED if is_trained else _MASKED) + (_SPECIAL if is_special else "")
            # Each line by itself: a pager would lose the colour at the line's end.
            pieces.append("\n".join(f"{style}{line}{_PLAIN}" if line else "" for line in text.split("\n")))
        else:
            opens = is_trained and (start == 0 or not trained[start - 1])
            closes = is_trained and (stop == len(ids) or not trained[stop])
            pieces.append(("[[" if opens else "") + text + ("]]" if closes else ""))
    return "".join(pieces)


def _decoded(ids: np.ndarray, start: int, stop: int, tokenizer: Any) -> str:
    """The text of some tokens as it stands behind the one before: by themselves some tokenizers lose the space between."""
    if not start:
        return str(tokenizer.decode(ids[:stop].tolist()))
    before = tokenizer.decode(ids[start - 1 : start].tolist())
    return str(tokenizer.decode(ids[start - 1 : stop].tolist())).removeprefix(before)


def _stretches(trained: np.ndarray, special: np.ndarray) -> list[tuple[int, int]]:
    """Ranges of tokens that are alike; a special token stands alone."""
    change = np.flatnonzero((np.diff(trained) != 0) | special[1:] | special[:-1]) + 1
    edges = [0, *change.tolist(), len(trained)]
    return [(start, stop) for start, stop in pairwise(edges) if stop > start]


def print_ledger(ledger: dict[str, Any]) -> None:
    """The ledger as a table, a column for each source."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    accounts = ledger["sources"] + ([ledger["total"]] if len(ledger["sources"]) > 1 else [])
    table = Table(title="Token ledger", title_justify="left", box=SIMPLE, title_style="bold")
    table.add_column("", no_wrap=True)
    for account in accounts:
        table.add_column(escape(visible_line(account["source"])), justify="right", overflow="fold")
    for label, values in _ledger_rows(accounts):
        table.add_row(label, *values)
    console = Console() if sys.stdout.isatty() else Console(width=max(80, 50 + 24 * len(accounts)))
    console.print(table)
    if ledger["packing"]:
        packing = ledger["packing"]
        console.print(
            f"{packing['packs']:,} packs, {packing['fill']:.2%} full, {packing['padding']:,} tokens of padding",
            highlight=False,
        )


def _ledger_rows(accounts: Sequence[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    reasons = sorted({reason for account in accounts for reason in account["rows"]["dropped"]})
    rows: list[tuple[str, list[str]]] = [("format", [account["format"] or "" for account in accounts])]
    for key in ("in", "used", "repeated", "truncated", "split", "held_out"):
        values = [account["rows"][key] for account in accounts]
        if any(values) or key in ("in", "used"):
            rows.append((f"rows {key.replace('_', ' ')}", [f"{value:,}" for value in values]))
    for reason in reasons:
        rows.append(
            (
                f"rows dropped: {reason}",
                [f"{account['rows']['dropped'].get(reason, 0):,}" for account in accounts],
            )
        )
    for key in ("in", "trained", "masked", "truncated", "held_out", "dropped"):
        values = [account["tokens"][key] for account in accounts]
        if any(values) or key in ("in", "trained", "masked"):
            rows.append((f"tokens {key.replace('_', ' ')}", [f"{value:,}" for value in values]))
    rows.append(("share of the tokens", [f"{account['share']:.1%}" for account in accounts]))
    return rows
