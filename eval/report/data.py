"""The report's section on the data: the token ledger, and what was found in the rows."""

from __future__ import annotations

from typing import Any

from eval.report.blocks import MISSING, Block, Code, Line, Paragraph, Strong, Table, code, joined, number, words
from eval.report.results import Recorded, entries, get, listed, mapping

_FATES = ("in", "trained", "masked", "truncated", "held_out", "dropped")


def data_section(of: Recorded) -> list[Block]:
    """Where every row and token went, and the findings with their first rows."""
    accounts: list[tuple[Line, Any]] = [
        (code(source.get("source")), source) for source in entries(of.ledger, "sources")
    ]
    if not accounts:
        return [Paragraph(("The token ledger, ", Code("ledger.json"), ", is missing."))]
    if len(accounts) > 1:
        accounts.append(("all", of.ledger.get("total") or {}))
    held_out = bool(get(of.ledger, "total", "rows", "held_out"))
    rows = Table(
        ["Source", "Rows", "Used", *(["Held out"] if held_out else []), "Dropped", "Share of the tokens"],
        [
            [
                name,
                *(number(get(entry, "rows", key)) for key in ("in", "used", *(["held_out"] if held_out else []))),
                _dropped(entry),
                number(get(entry, "share"), ".1%"),
            ]
            for name, entry in accounts
        ],
        numbers=(1, 2, 3, 5) if held_out else (1, 2, 4),
    )
    fates = [fate for fate in _FATES if fate != "held_out" or held_out]
    tokens = Table(
        ["Source", *(f"Tokens {fate.replace('_', ' ')}" for fate in fates)],
        [[name, *(number(get(entry, "tokens", fate)) for fate in fates)] for name, entry in accounts],
        numbers=range(1, 1 + len(fates)),
    )
    balance = Paragraph(joined([balance_line(of.ledger), _packing(of.ledger.get("packing"))], " "))
    return [rows, tokens, balance, *_findings(of.ledger)]


def _dropped(entry: object) -> str:
    reasons = get(entry, "rows", "dropped")
    if not isinstance(reasons, dict):
        return MISSING
    return ", ".join(f"{number(count)} ({words(reason)})" for reason, count in reasons.items()) or "0"


def adds_up(ledger: dict[str, Any]) -> bool | None:
    """Whether every token is accounted for; None where the ledger has no complete total."""
    tokens, known = mapping(ledger, "total", "tokens"), _counts(ledger)
    return None if len(known) < len(_used_fates(tokens)) else known[0] == sum(known[1:])


def _used_fates(tokens: dict[str, Any]) -> list[str]:
    return [fate for fate in _FATES if fate != "held_out" or tokens.get("held_out")]


def _counts(ledger: dict[str, Any]) -> list[int]:
    tokens = mapping(ledger, "total", "tokens")
    counts = (tokens.get(fate) for fate in _used_fates(tokens))
    return [count for count in counts if isinstance(count, int)]


def balance_line(ledger: dict[str, Any]) -> Line:
    """Law 5 as a sentence."""
    balanced, known = adds_up(ledger), _counts(ledger)
    if balanced is None:
        return "The ledger has no complete total."
    fates = _used_fates(mapping(ledger, "total", "tokens"))
    sides = " + ".join(fate.replace("_", " ") for fate in fates[1:])
    told = f"{known[0]:,} tokens in; {sides} = {sum(known[1:]):,}."
    return told if balanced else (Strong("The ledger does not add up:"), f" {told}")


def _packing(packing: object) -> str:
    if not isinstance(packing, dict):
        return "Not packed: one document in a sequence."
    counts = f"{number(packing.get('packs'))} packs, {number(packing.get('fill'), '.1%')} full"
    return f"Packed: {counts}; {number(packing.get('padding'))} tokens of padding beside the tokens above."


def _findings(ledger: dict[str, Any]) -> list[Block]:
    found = entries(ledger, "findings")
    if not found:
        return []
    rows = [
        [
            number(one.get("count")),
            words(one.get("meaning")),
            joined([code(row) for row in listed(one, "rows")[:3]]),
        ]
        for one in found
    ]
    return [Table(["Rows", "Found", "First"], rows, numbers=(0,))]
