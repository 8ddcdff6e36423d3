"""The token ledger: where every row and token of every source went, and the limits that a recipe sets on it.

Law 5: tokens in = trained + masked + truncated + dropped, to the token; held-out tokens are a term of their own where rows are
held out, and padding is counted beside it. A row that is trained twice in a pass counts twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sft.data.documents import LENGTHS, Counts
from sft.data.mixture import Mixture, first_documents
from sft.errors import DataError
from sft.recipe.schema import Data

TOO_LONG = ("longer than max_length", "no trained token within max_length")
NOT_A_FAULT = ("duplicate", "held out too", "not drawn", "zero weight")


@dataclass
class Account:
    """One source's rows and tokens; or the sum of several."""

    source: str
    format: str | None = None
    rows_in: int = 0
    rows_used: int = 0
    rows_repeated: int = 0
    """Times that a row is seen again in one pass."""

    rows_truncated: int = 0
    rows_split: int = 0
    rows_held_out: int = 0
    rows_dropped: Counter[str] = field(default_factory=Counter)
    trained: int = 0
    masked: int = 0
    truncated: int = 0
    held_out: int = 0
    tokens_dropped: Counter[str] = field(default_factory=Counter)
    """By reason. Rows that could not be read have none."""

    @property
    def dropped(self) -> int:
        """Tokens of rows, or pieces of rows, that are not used."""
        return sum(self.tokens_dropped.values())

    @property
    def used(self) -> int:
        """Tokens that the model sees in one pass."""
        return self.trained + self.masked

    def add(self, other: Account) -> None:
        """Add another account up."""
        self.rows_dropped += other.rows_dropped
        self.tokens_dropped += other.tokens_dropped
        for name in ("rows_in", "rows_used", "rows_repeated", "rows_truncated", "rows_split", "rows_held_out"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("trained", "masked", "truncated", "held_out"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def as_json(self, all_used: int) -> dict[str, Any]:
        """The account as ledger.json has it.

        Args:
            all_used: Tokens that all sources together show the model, of which this one's share is told.
        """
        return {
            "source": self.source,
            "format": self.format,
            "rows": {
                "in": self.rows_in,
                "used": self.rows_used,
                "repeated": self.rows_repeated,
                "truncated": self.rows_truncated,
                "split": self.rows_split,
                "held_out": self.rows_held_out,
                "dropped": {reason: count for reason, count in self.rows_dropped.items() if count},
            },
            "tokens": {
                "in": self.used + self.truncated + self.held_out + self.dropped,
                "trained": self.trained,
                "masked": self.masked,
                "truncated": self.truncated,
                "held_out": self.held_out,
                "dropped": self.dropped,
            },
            "tokens_dropped": {reason: count for reason, count in self.tokens_dropped.items() if count},
            "share": self.used / all_used if all_used else 0.0,
        }


def settle(names: Sequence[str], counts: Sequence[Counts], documents: np.ndarray, mixture: Mixture) -> list[Account]:
    """The accounts of all sources, held-out ones behind.

    Args:
        names: Of the sources.
        counts: What became no document, by source.
        documents: Of sft.data.documents.DOCUMENT.
        mixture: What becomes of them.
    """
    accounts = []
    # Of the pieces of a row, the first stands for the row.
    is_first = np.zeros(len(documents), bool)
    is_first[first_documents(documents)] = True
    for number, (name, count) in enumerate(zip(names, counts, strict=True)):
        account = Account(name, rows_in=count.rows_in)
        account.rows_dropped += count.dropped_rows
        account.tokens_dropped += count.dropped_tokens
        own = documents["source"] == number
        times = mixture.times * own
        account.rows_used = int(np.count_nonzero((times > 0) & is_first))
        account.rows_repeated = int(times[is_first].sum()) - account.rows_used
        account.rows_truncated = int(np.count_nonzero((times > 0) & (documents["cut"] > 0)))
        again = np.zeros(len(documents), bool)
        again[:-1] = ~is_first[1:]
        account.rows_split = int(np.count_nonzero((times > 0) & is_first & (again | (documents["lost"] > 0))))
        account.trained = int((times * documents["trained"]).sum())
        account.masked = int((times * documents["length"]).sum()) - account.trained
        account.truncated = int((times * documents["cut"]).sum())
        account.tokens_dropped["piece without a trained token"] += int((times * documents["lost"]).sum())
        whole = documents["length"].astype(np.int64) + documents["cut"] + documents["lost"]
        # Law 5, row by row: what the tokenizer gave is in the documents, or dropped for a reason.
        assert count.tokens_in == whole[own].sum() + count.dropped_tokens.total(), name
        held_out = own & mixture.held_out
        account.rows_held_out = int(np.count_nonzero(held_out & is_first))
        account.held_out = int(whole[held_out].sum())
        for reason, which in mixture.dropped.items():
            account.rows_dropped[reason] += int(np.count_nonzero(own & which & is_first))
            account.tokens_dropped[reason] += int(whole[own & which].sum())
        accounts.append(account)
    return accounts


def total(accounts: Sequence[Account]) -> Account:
    """All accounts as one."""
    result = Account("all")
    for account in accounts:
        result.add(account)
    return result


def check_limits(ledger: dict[str, Any], data: Data) -> None:
    """Compare the ledger with the limits of the recipe.

    Raises:
        DataError: One is passed; the message has the numbers, and the lengths where those are the matter.
    """
    rows, tokens = ledger["total"]["rows"], ledger["total"]["tokens"]
    dropped, total_rows = rows["dropped"], max(rows["in"], 1)
    if not rows["used"]:
        reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
        raise DataError(
            f"Nothing is left to train on: all {rows['in']} rows were dropped or held out ({reasons or 'held out'})."
            + (f"\n{histogram(ledger)}" if any(reason in dropped for reason in TOO_LONG) else "")
        )
    too_long = sum(dropped.get(reason, 0) for reason in TOO_LONG)
    if too_long > data.max_overlong_fraction * total_rows:
        longer, other = {
            "drop": ("are longer than", "truncate or split"),
            "truncate": ("have no trained token within", "split"),
        }.get(data.overlong, ("have no trained token within", "drop"))
        raise DataError(
            f"{too_long} of {rows['in']} rows ({too_long / total_rows:.1%}) {longer} data.max_length={data.max_length}, more than "
            f"data.max_overlong_fraction={data.max_overlong_fraction:g} allows. Raise data.max_length, set data.overlong to {other}, or "
            f"raise the limit.\n{histogram(ledger)}"
        )
    faults = {reason: n for reason, n in dropped.items() if reason not in (*TOO_LONG, *NOT_A_FAULT)}
    if sum(faults.values()) > data.max_dropped_fraction * total_rows:
        reasons = ", ".join(f"{count} {reason}" for reason, count in faults.items())
        raise DataError(
            f"{sum(faults.values())} of {rows['in']} rows ({sum(faults.values()) / total_rows:.1%}) were dropped ({reasons}), more than "
            f"data.max_dropped_fraction={data.max_dropped_fraction:g} allows. Look at them with --show, correct them, or raise the limit."
        )
    used = tokens["trained"] + tokens["masked"]
    if tokens["trained"] < data.min_trained_fraction * used:
        raise DataError(
            f"{tokens['trained']} of {used} tokens are trained ({tokens['trained'] / used:.2%}), fewer than "
            f"data.min_trained_fraction={data.min_trained_fraction:g} asks for. See what is trained with --show."
        )


def histogram(ledger: dict[str, Any], width: int = 40) -> str:
    """The rows by length, as text; bins that hold rows, and those between."""
    counts = ledger["lengths"]["rows"]
    filled = [index for index, count in enumerate(counts) if count]
    if not filled:
        return "no rows"
    most, lines = max(counts), ["tokens a row       rows"]
    for index in range(filled[0], filled[-1] + 1):
        low = ledger["lengths"]["up_to"][index - 1] + 1 if index else 0
        bar = "█" * -(-counts[index] * width // most)
        lines.append(f"{low:>7} - {ledger['lengths']['up_to'][index]:<7} {counts[index]:>8} {bar}".rstrip())
    return "\n".join(lines)


def lengths_json(counts: Sequence[Counts]) -> dict[str, list[int]]:
    """The histogram of all sources, for ledger.json."""
    rows = sum((count.lengths for count in counts), np.zeros(len(LENGTHS), np.int64))
    return {"up_to": [int(edge) for edge in LENGTHS], "rows": rows.tolist()}
