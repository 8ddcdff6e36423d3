import json
import random
from html.parser import HTMLParser
from pathlib import Path

import pytest

from eval.report.blocks import Code, Page, Paragraph, Section, Table
from eval.report.html import FOLDED_FROM, MOST_OF_AN_ANSWER, Budget, as_html
from eval.report.main import make_page, write_report
from eval.report.results import read_run
from sft.files import write_json
from sft.run.directory import Run
from sft.visible import visible
from tests.eval.runs import COMPARISON, METRIC, add_answers, answer, flip, full_run, point, prompt

ATTACKS = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '"><svg/onload=alert(1)>',
    "' onmouseover='alert(1)",
    "{{ 7 * 7 }}{% raw %}",
    "</style></title><script src=//evil></script>",
    "javascript:alert(1)",
]


class Seen(HTMLParser):
    """Every element and attribute of a page, and its words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "link", "wbr", "path", "rect", "circle", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def page(run: Run) -> str:
    return as_html(make_page(read_run(run)))


def attacked_run(folder: Path, attack: str) -> Run:
    """A run in which whatever somebody else writes is an attack."""
    run = full_run(folder)
    add_answers(
        run, [prompt(attack, answer(attack), answer(attack * 100))], [flip(1, "lost", task=attack, question=attack)]
    )
    (run.comparison_file.parent / "during.jsonl").write_text(
        json.dumps({"step": 1, "seconds": 1, "results": {attack: {attack: 0.5}}}) + "\n"
    )
    run.update(
        recipe=attack, error=attack, status="failed", overrides=[attack], started=attack, versions={attack: attack}
    )
    settings = {attack: attack, "limit": attack}
    metrics = [METRIC | {"task": attack, "metric": attack, "filter": attack, "verdict": attack}]
    counts = {attack: {"metric": attack, "gained": 1, "lost": 1}}
    reasons = {"complete": False, "not_measured": {attack: attack}, "prompts_cut": [attack], "note": attack}
    write_json(run.comparison_file, COMPARISON | reasons | {"settings": settings, "metrics": metrics, "flips": counts})
    decisions = [{"name": attack, "value": attack, "reason": attack}]
    write_json(run.plan_file, {"decisions": decisions})
    write_json(run.ledger_file, {"sources": [{"source": attack, "rows": {"dropped": {attack: 1}}}]})
    return run


@pytest.mark.parametrize("attack", ATTACKS)
def test_whatever_others_wrote_is_words_and_nothing_else(attack: str, tmp_path: Path) -> None:
    seen = Seen(page(attacked_run(tmp_path / "run", attack)))
    assert "script" not in seen.elements
    assert "img" not in seen.elements
    assert not [name for name, _ in seen.attributes if name.startswith("on")]
    links = [value for name, value in seen.attributes if name in ("href", "src")]
    assert {link for link in links if link and not link.startswith("#")} == {"data:,", "final", "recipe.yaml"}
    assert "".join(seen.words).count(attack) > 20


def test_the_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    text = page(full_run(tmp_path / "run"))
    seen = Seen(text)
    assert "Content-Security-Policy" in text
    assert "default-src 'none'" in text
    assert "url(" not in text
    assert "@import" not in text
    assert not {"script", "iframe", "object", "embed", "form"} & set(seen.elements)
    assert ("lang", "en") in seen.attributes
    assert ("name", "viewport") in seen.attributes


def test_every_element_is_closed(tmp_path: Path) -> None:
    run = full_run(tmp_path / "run")
    add_answers(run, [prompt("?", answer(""), answer("x" * 9000))], [flip(1, "lost"), flip(2, "gained")])
    assert Seen(page(run)).open == []


def test_what_cannot_be_seen_is_shown_and_what_scripts_need_is_kept(tmp_path: Path) -> None:
    run = full_run(tmp_path / "run")
    hidden, kept = "a\x00b\x1b[31m\u202ec\u2066d\u200be\ud800", "سلام 漢字 👩\u200d👩\u200d👧 ی\u200cک\n\tx"
    add_answers(run, [prompt("?", answer(hidden), answer(kept))], [])
    text = page(run)
    for shown in ("U+0000", "U+001B", "U+202E", "U+2066", "U+200B", "U+D800"):
        assert f'<b class="u">⟨{shown}⟩</b>' in text
    assert kept in text
    text.encode("utf-8")


@pytest.mark.parametrize("place", ["a\u202eb", "\x7f", "\u2028", "\U000e0041"])
def test_no_hidden_character_is_left(place: str) -> None:
    assert visible(visible(place)) == visible(place) != place


def test_a_long_answer_is_folded_and_says_how_long_it_is_and_what_is_left_out() -> None:
    short = Budget().clip("x" * FOLDED_FROM)
    assert short.whole is None
    long = Budget().clip("x" * (MOST_OF_AN_ANSWER + 5))
    assert long.whole == "x" * MOST_OF_AN_ANSWER
    assert long.told == "8,005 characters, the last 5 are not shown"


def test_nothing_is_shown_beyond_the_budget_and_that_is_said() -> None:
    budget = Budget(answers=1000)
    texts = [budget.clip("&" * 500) for _ in range(40)]
    assert sum(len(one.whole or one.beginning) for one in texts) <= 1100
    assert texts[-1].told == "500 characters, the last 500 are not shown"


def test_marks_say_which_answers_did_not_end_were_empty_or_looped(tmp_path: Path) -> None:
    run = full_run(tmp_path / "run")
    add_answers(run, [prompt("?", answer("a a a", ended=False, loops=True), answer(""))], [])
    text = page(run)
    for mark in ("did not end", "loops", "empty"):
        assert f'<span class="badge bad">{mark}</span>' in text


def test_flips_are_shared_by_the_tasks_and_the_rest_is_counted(tmp_path: Path) -> None:
    run = full_run(tmp_path / "run")
    flips = [flip(number, "gained", task=f"task{number % 2}") for number in range(101)]
    add_answers(run, [], flips)
    text = page(run)
    assert "Gained: 20 of 101 documents. 81 more are in eval/flips.jsonl." in text
    assert (text.count("<summary>task0, document"), text.count("<summary>task1, document")) == (10, 10)


def test_the_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    run = full_run(tmp_path / "run")
    add_answers(run, [prompt("?", answer("a"), answer("b"))], [flip(1, "lost")])
    assert page(run) == page(run)


def test_the_report_holds_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "0123456789secret0123456789")
    run = full_run(tmp_path / "run")
    run.metrics_file.unlink()
    add_answers(run, [prompt("?", answer("0123456789secret0123456789"), answer("b"))], [])
    write_report(run)
    assert "secret" not in run.page_file.read_text()
    assert "[hidden]" in run.page_file.read_text()


def test_a_table_has_a_limit_and_says_what_is_left_out() -> None:
    rows = [(Code(str(number)), "x") for number in range(1000)]
    text = as_html(Page("t", [], [], [Section("Data", [Table(("a", "b"), rows), Paragraph("y" * 5000)])]))
    assert text.count("<tr>") == 301
    assert "700 more rows are not shown." in text
    assert "and 3,000 more characters" in text


def test_two_sections_of_one_name_have_anchors_of_their_own() -> None:
    text = as_html(Page("t", [], [], [Section("Data", []), Section("Data", [])]))
    assert 'id="data"' in text
    assert 'id="data-2"' in text


@pytest.mark.parametrize("words", ["&<>\"'", "漢字🙂", "\x00"])
def test_no_words_make_the_page_larger_than_2_mb(words: str, tmp_path: Path) -> None:
    run = full_run(tmp_path / "run")
    text = words * 3000
    flips = [
        flip(n, "lost" if n % 2 else "gained", question=text, target=text, base=text, tuned=text) for n in range(60)
    ]
    add_answers(run, [prompt(text, answer(text), answer(text))] * 30, flips)
    metrics = [METRIC | {"task": f"{words}{number}"} for number in range(400)]
    write_json(run.comparison_file, COMPARISON | {"metrics": metrics, "note": text})
    assert len(page(run).encode()) < 2_000_000


@pytest.mark.slow
def test_a_long_run_with_thousands_of_flips_is_under_2_mb(tmp_path: Path) -> None:
    run = full_run(tmp_path / "run")
    generator = random.Random(0)
    with run.metrics_file.open("w") as file:
        for step in range(1, 100_001):
            file.write(json.dumps(point(step, generator.random()) | {"grad_norm": generator.random()}) + "\n")
    text = "some words " * 360
    flips = [flip(n, "lost" if n % 2 else "gained", question=text, base=text, tuned=text) for n in range(5000)]
    add_answers(run, [prompt(text, answer(text), answer(text))] * 20, flips)
    write_report(run)
    assert run.page_file.stat().st_size < 2_000_000
