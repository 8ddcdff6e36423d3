"""Keeps the token ledger: where every row and token of every source went, and the limits that a recipe sets on it.

Tokens in = trained + masked + truncated + held out + dropped, to the token. Padding is counted beside it. A row that is trained twice
in an epoch counts twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from sft.data.documents import LENGTHS, Counts
from sft.data.mixture import Mixture, first_documents
from sft.errors import DataError
from sft.recipe.schema import Data

_TOO_LONG = ("too_long", "targets_past_max_length")
MEANT = ("duplicate", "held_out", "not_drawn", "zero_weight", "function")
"""Reasons for dropping a row that are not faults."""


def make_ledger(
    names: Sequence[str],
    formats: Sequence[str],
    counts: Sequence[Counts],
    documents: np.ndarray,
    mixture: Mixture,
    packs: int | None,
    pack_length: int,
) -> dict[str, Any]:
    """The ledger as ledger.json has it: held-out sources last, `packs` None without packing."""
    accounts = [
        {"source": name, "format": format} | _account(number, count, documents, mixture)
        for number, (name, format, count) in enumerate(zip(names, formats, counts, strict=True))
    ]
    total = {"source": "all", "format": None} | _total(accounts)
    used = _used(total)
    for account in [*accounts, total]:
        account["share"] = _used(account) / used if used else 0.0
    lengths = sum((count.lengths for count in counts), np.zeros(len(LENGTHS), np.int64))
    space = (packs or 0) * pack_length
    packing = {"packs": packs, "fill": used / space if space else 0, "padding": space - used}
    return {
        "sources": accounts,
        "total": total,
        "packing": None if packs is None else packing,
        "lengths": {"up_to": [int(edge) for edge in LENGTHS], "rows": lengths.tolist()},
    }


def _account(number: int, count: Counts, documents: np.ndarray, mixture: Mixture) -> dict[str, Any]:
    """The rows and tokens of one source."""
    own = documents["source"] == number
    documents = documents[own]
    times, held_out = mixture.times[own], mixture.held_out[own]
    # Of the pieces of a row, the first stands for the row.
    is_first = np.zeros(len(documents), bool)
    is_first[first_documents(documents)] = True
    has_more = np.append(~is_first[1:], False) if len(documents) else is_first
    whole = documents["length"].astype(np.int64) + documents["cut"] + documents["lost"]
    # What the tokenizer gave is in the documents, or dropped for a reason.
    assert count.tokens_in == whole.sum() + count.dropped_tokens.total(), number
    rows_dropped, tokens_dropped = Counter(count.dropped_rows), Counter(count.dropped_tokens)
    tokens_dropped["piece_without_targets"] += int((times * documents["lost"]).sum())
    for reason, dropped in mixture.dropped.items():
        rows_dropped[reason] += int(np.count_nonzero(dropped[own] & is_first))
        tokens_dropped[reason] += int(whole[dropped[own]].sum())
    used = int(np.count_nonzero((times > 0) & is_first))
    trained = int((times * documents["trained"]).sum())
    tokens = {
        "trained": trained,
        "masked": int((times * documents["length"]).sum()) - trained,
        "truncated": int((times * documents["cut"]).sum()),
        "held_out": int(whole[held_out].sum()),
        "dropped": tokens_dropped.total(),
    }
    return {
        "rows": {
            "in": count.rows_in,
            "used": used,
            "repeated": int(times[is_first].sum()) - used,
            "truncated": int(np.count_nonzero((times > 0) & (documents["cut"] > 0))),
            "split": int(np.count_nonzero((times > 0) & is_first & (has_more | (documents["lost"] > 0)))),
            "held_out": int(np.count_nonzero(held_out & is_first)),
            "dropped": {reason: rows for reason, rows in rows_dropped.items() if rows},
        },
        "tokens": {"in": sum(tokens.values())} | tokens,
        "tokens_dropped": {reason: dropped for reason, dropped in tokens_dropped.items() if dropped},
    }


def _used(account: dict[str, Any]) -> int:
    return int(account["tokens"]["trained"] + account["tokens"]["masked"])


def _total(values: Sequence[Any]) -> Any:
    """The sum of dictionaries of numbers, key by key; other values are left out."""
    if not isinstance(values[0], dict):
        return sum(values)
    keys = {key: None for value in values for key in value if not isinstance(value[key], str)}
    return {key: _total([value[key] for value in values if key in value]) for key in keys}


def check_limits(ledger: dict[str, Any], data: Data) -> None:
    """Compare the ledger with the limits of the recipe.

    Raises DataError where one is exceeded; the message has the numbers, and the histogram of lengths if it is about
    lengths.
    """
    rows, tokens = ledger["total"]["rows"], ledger["total"]["tokens"]
    dropped = rows["dropped"]
    if not rows["used"]:
        lengths = f"\n{histogram(ledger)}" if any(reason in dropped for reason in _TOO_LONG) else ""
        reasons = reasons_text(dropped) or "held out"
        raise DataError(
            f"Nothing is left to train on: all {rows['in']} rows were dropped or held out ({reasons}).{lengths}"
        )
    too_long = sum(dropped.get(reason, 0) for reason in _TOO_LONG)
    if too_long > data.max_overlong_fraction * rows["in"]:
        raise DataError(
            f"{too_long} of {rows['in']} rows ({too_long / rows['in']:.1%}) are too long for data.max_length={data.max_length}, more than "
            f"data.max_overlong_fraction={data.max_overlong_fraction:g} allows. Raise data.max_length, set data.overlong=split, or "
            f"raise the limit.\n{histogram(ledger)}"
        )
    faults = {reason: count for reason, count in dropped.items() if reason not in (*_TOO_LONG, *MEANT)}
    faulty = sum(faults.values())
    if faulty > data.max_dropped_fraction * rows["in"]:
        raise DataError(
            f"{faulty} of {rows['in']} rows ({faulty / rows['in']:.1%}) were dropped ({reasons_text(faults)}), more than "
            f"data.max_dropped_fraction={data.max_dropped_fraction:g} allows. Look at them with --show, correct them, or raise the limit."
        )
    used = _used(ledger["total"])
    if tokens["trained"] < data.min_trained_fraction * used:
        raise DataError(
            f"{tokens['trained']} of {used} tokens are trained ({tokens['trained'] / used:.2%}), fewer than "
            f"data.min_trained_fraction={data.min_trained_fraction:g} requires. See what is trained with --show."
        )


def reasons_text(dropped: dict[str, int]) -> str:
    """Reasons and counts in words.

    >>> reasons_text({"bad_row": 3, "too_long": 1})
    '3 bad row, 1 too long'
    """
    return ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in dropped.items())


def histogram(ledger: dict[str, Any], width: int = 40) -> str:
    """The rows by length, as text: the bins that hold rows, and those between."""
    counts, edges = ledger["lengths"]["rows"], ledger["lengths"]["up_to"]
    filled = [index for index, count in enumerate(counts) if count]
    if not filled:
        return "no rows"
    lines = ["tokens a row       rows"]
    for index in range(filled[0], filled[-1] + 1):
        low = edges[index - 1] + 1 if index else 0
        bar = "█" * -(-counts[index] * width // max(counts))
        lines.append(f"{low:>7} - {edges[index]:<7} {counts[index]:>8} {bar}".rstrip())
    return "\n".join(lines)
