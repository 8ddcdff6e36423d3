"""Shows the prepared data to a person: a few lines before every training, all of it with --show."""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Any

import numpy as np

from sft.data.ledger import histogram, reasons_text
from sft.data.prepared import Prepared
from sft.data.sources import all_sources, place
from sft.data.special_tokens import SpecialTokens
from sft.data.store import DocumentStore, SequenceIndex
from sft.recipe.schema import Recipe
from sft.terminal import visible, visible_line

_TRAINED, _MASKED, _SPECIAL, _PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[7m", "\x1b[0m"


def summary_lines(prepared: Prepared) -> list[str]:
    """The ledger in one line, then a line for each finding."""
    rows, tokens = prepared.ledger["total"]["rows"], prepared.ledger["total"]["tokens"]
    packing = prepared.ledger["packing"]
    used = tokens["trained"] + tokens["masked"]
    dropped = f", dropped: {reasons_text(rows['dropped'])}" if rows["dropped"] else ""
    held_out = f", {rows['held_out']} held out" if rows["held_out"] else ""
    packs = f"; {packing['packs']} packs, {packing['fill']:.1%} full" if packing else ""
    line = (
        f"Data: {rows['used']} of {rows['in']} rows used{held_out}{dropped}; {used} tokens, {tokens['trained']} of them trained, "
        f"{tokens['truncated']} truncated, {tokens['dropped']} dropped{packs}."
    )
    not_read = [
        f"Not read: {visible_line(f'{columns} of {path}')}" for path, columns in prepared.summary["not_read"].items()
    ]
    return [line, *not_read, *finding_lines(prepared)]


def finding_lines(prepared: Prepared) -> list[str]:
    """A line for each kind of finding, with its first rows."""
    lines = []
    for finding in prepared.findings:
        places = "; ".join(finding["rows"][:3]) + ("; ..." if finding["count"] > 3 else "")
        lines.append(visible_line(f"Note: {finding['count']} x {finding['meaning']}: {places}"))
    return lines


def show(prepared: Prepared, recipe: Recipe, tokenizer: Any, count: int) -> None:
    """Print `count` rows as the model sees them, the ledger, the lengths and the findings."""
    colours = sys.stdout.isatty()
    store, index = DocumentStore.open(prepared.folder), SequenceIndex.load(prepared.folder / "train.npz")
    sources = all_sources(recipe)
    chosen = np.unique(index.members)
    for document in chosen[np.linspace(0, len(chosen) - 1, min(count, len(chosen))).astype(int)]:
        record = store.documents[document]
        source = int(record["source"])
        starts = [(int(start), str(name)) for start, name in prepared.summary["file_starts"][source]]
        where = place(sources[source][1].path, starts, int(record["row"]))
        cut = f", {record['cut']} cut off" if record["cut"] else ""
        print(f"── {visible_line(where)}: {record['length']} tokens, {record['trained']} of them trained{cut}")
        print(marked_text(*store.document(int(document)), tokenizer, colours))
        print()
    legend = "green: trained, dim: not trained, reversed: special tokens" if colours else "[[...]]: trained"
    print(f"({legend}; a backslash before <...>: text that only spells a special token)\n")
    print_ledger(prepared.ledger)
    print(histogram(prepared.ledger))
    print()
    print("\n".join(finding_lines(prepared) or ["No findings."]))
    print(f"\nPrepared in {prepared.folder} (safe to delete: it is made again)")


def marked_text(ids: np.ndarray, trained: np.ndarray, tokenizer: Any, colours: bool) -> str:
    """A document as text that shows the loss mask: with a terminal's colours, otherwise trained stretches in double brackets."""
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    spelled = SpecialTokens(tokenizer)
    is_special = np.isin(ids, list(special))
    # Stretches of equal tokens; a special token stands alone.
    change = np.flatnonzero((np.diff(trained) != 0) | is_special[1:] | is_special[:-1]) + 1
    pieces: list[str] = []
    for start, stop in pairwise([0, *change.tolist(), len(ids)]):
        text = _decoded(ids, start, stop, tokenizer)
        text = visible(text if is_special[start] else spelled.shown(text))
        if colours:
            style = (_TRAINED if trained[start] else _MASKED) + (_SPECIAL if is_special[start] else "")
            # Each line by itself: a pager would lose the colour at the line's end.
            pieces.append("\n".join(f"{style}{line}{_PLAIN}" if line else "" for line in text.split("\n")))
        elif trained[start]:
            opens = start == 0 or not trained[start - 1]
            closes = stop == len(ids) or not trained[stop]
            pieces.append(("[[" if opens else "") + text + ("]]" if closes else ""))
        else:
            pieces.append(text)
    return "".join(pieces)


def _decoded(ids: np.ndarray, start: int, stop: int, tokenizer: Any) -> str:
    """The text of some tokens as it stands after the one before: alone, some tokenizers lose the space between."""
    if not start:
        return str(tokenizer.decode(ids[:stop].tolist()))
    before = tokenizer.decode(ids[start - 1 : start].tolist())
    return str(tokenizer.decode(ids[start - 1 : stop].tolist())).removeprefix(before)


def print_ledger(ledger: dict[str, Any]) -> None:
    """Print the ledger: a line for each count, a column for each source."""
    accounts = ledger["sources"] + ([ledger["total"]] if len(ledger["sources"]) > 1 else [])
    print("Token ledger")
    for number, account in enumerate(accounts, start=1):
        format = f" ({account['format']})" if account["format"] else ""
        print(visible_line(f"  column {number}: {account['source']}{format}"))
    columns = [_ledger_column(account) for account in accounts]
    for label in dict.fromkeys(label for column in columns for label in column):
        values = [column.get(label, 0) for column in columns]
        if any(values):
            print(f"  {label:<36}" + "".join(f"{value:>16,}" for value in values))
    print(f"  {'share of the tokens':<36}" + "".join(f"{account['share']:>16.1%}" for account in accounts))
    if packing := ledger["packing"]:
        print(f"{packing['packs']:,} packs, {packing['fill']:.2%} full, {packing['padding']:,} tokens of padding")


def _ledger_column(account: dict[str, Any]) -> dict[str, int]:
    """The numbers of one source by label."""
    numbers = {f"rows {key}": value for key, value in account["rows"].items() if key != "dropped"}
    numbers |= {f"rows dropped: {reason}": count for reason, count in account["rows"]["dropped"].items()}
    numbers |= {f"tokens {key}": value for key, value in account["tokens"].items()}
    return {label.replace("_", " "): value for label, value in numbers.items()}
