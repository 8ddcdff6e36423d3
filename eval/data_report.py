"""The report's section on the data: the token ledger, and what was found in the rows."""

from __future__ import annotations

from typing import Any

from eval.markdown import MISSING, code, number, table, text
from eval.recorded import Recorded, entries, get

_FATES = ("in", "trained", "masked", "truncated", "held_out", "dropped")


def data_section(of: Recorded) -> list[str]:
    """Where every row and token went, and the findings with their first rows."""
    accounts = [(code(source.get("source")), source) for source in entries(of.ledger, "sources")]
    if not accounts:
        return ["The token ledger, `ledger.json`, is missing."]
    if len(accounts) > 1:
        accounts.append(("all", of.ledger.get("total") or {}))
    held_out = bool(get(of.ledger, "total", "rows", "held_out"))
    rows = table(
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
    tokens = table(
        ["Source", *(f"Tokens {fate.replace('_', ' ')}" for fate in fates)],
        [[name, *(number(get(entry, "tokens", fate)) for fate in fates)] for name, entry in accounts],
        numbers=range(1, 1 + len(fates)),
    )
    balance = [_balance(of.ledger, fates), _packing(of.ledger.get("packing"))]
    return [*rows, "", *tokens, "", *balance, *_findings(of.ledger)]


def _dropped(entry: object) -> str:
    reasons = get(entry, "rows", "dropped")
    if not isinstance(reasons, dict):
        return MISSING
    return ", ".join(f"{number(count)} ({text(reason)})" for reason, count in reasons.items()) or "0"


def _balance(ledger: dict[str, Any], fates: list[str]) -> str:
    tokens = get(ledger, "total", "tokens") or {}
    counts = [tokens.get(fate) for fate in fates]
    known = [count for count in counts if isinstance(count, int)]
    if len(known) < len(counts):
        return "The ledger has no complete total."
    sides = " + ".join(fate.replace("_", " ") for fate in fates[1:])
    words = f"{known[0]:,} tokens in; {sides} = {sum(known[1:]):,}"
    return f"{words}." if known[0] == sum(known[1:]) else f"**The ledger does not add up:** {words}."


def _packing(packing: object) -> str:
    if not isinstance(packing, dict):
        return "Not packed: one document in a sequence."
    counts = f"{number(packing.get('packs'))} packs, {number(packing.get('fill'), '.1%')} full"
    return f"Packed: {counts}; {number(packing.get('padding'))} tokens of padding beside the tokens above."


def _findings(ledger: dict[str, Any]) -> list[str]:
    found = entries(ledger, "findings")
    if not found:
        return []
    rows = [
        [number(one.get("count")), text(one.get("meaning")), ", ".join(map(code, (one.get("rows") or [])[:3]))]
        for one in found
    ]
    return ["", *table(["Rows", "Found", "First"], rows, numbers=(0,))]
