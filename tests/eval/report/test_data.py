from pathlib import Path
from typing import Any

from eval.report.blocks import Page, Section
from eval.report.data import data_section
from eval.report.markdown import as_markdown
from eval.report.results import Recorded
from sft.run.directory import Run


def account(source: str, held_out: int = 0) -> dict[str, Any]:
    return {
        "source": source,
        "rows": {"in": 10, "used": 7, "held_out": held_out, "dropped": {"bad row": 3 - held_out}},
        "tokens": {
            "in": 100,
            "trained": 40,
            "masked": 50 - held_out,
            "truncated": 4,
            "held_out": held_out,
            "dropped": 6,
        },
        "share": 0.5,
    }


def section(ledger: dict[str, Any]) -> str:
    of = Recorded(Run(Path("outputs/x/1")), {}, None, [], ledger, [], {})
    return as_markdown(Page("run", [], [], [Section("Data", data_section(of))]))


def test_one_source_needs_no_sum_of_all() -> None:
    text = section({"sources": [account("a.jsonl")], "total": account("all"), "packing": None})
    assert "| `a.jsonl` | 10 | 7 | 3 (bad row) | 50.0% |" in text
    assert "all" not in text.splitlines()[3]
    assert "100 tokens in; trained + masked + truncated + dropped = 100." in text
    assert "Held out" not in text


def test_held_out_tokens_are_a_term_of_the_sum() -> None:
    sources = [account("a.jsonl", 2), account("b.jsonl")]
    text = section({"sources": sources, "total": account("all", 2), "packing": None})
    assert "| `a.jsonl` | 10 | 7 | 2 | 1 (bad row) | 50.0% |" in text
    assert "100 tokens in; trained + masked + truncated + held out + dropped = 100." in text


def test_findings_come_with_their_first_rows() -> None:
    finding = {"kind": "duplicate", "meaning": "a row that is twice there", "count": 12, "rows": ["a.jsonl, row 4"] * 5}
    text = section({"sources": [account("a.jsonl")], "total": account("all"), "packing": None, "findings": [finding]})
    row = "| 12 | a row that is twice there | `a.jsonl, row 4`, `a.jsonl, row 4`, `a.jsonl, row 4` |"
    assert text.splitlines()[-1] == row
