"""report.html: what others wrote stays text, and the page needs nothing but itself."""

import json
import random
from html.parser import HTMLParser
from pathlib import Path

import pytest

from eval.report.collect import collect_report
from eval.report.main import write_report
from eval.report.pages import MOST_OF_AN_ANSWER, as_html, html_text, said
from eval.report.run_files import read_run
from sft.files import write_json
from sft.run.directory import Run
from tests.eval.runs import COMPARISON, METRIC, add_answers, answer, flip, full_run, point, prompt

ATTACKS = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '"><svg/onload=alert(1)>',
    "' onmouseover='alert(1)",
    "{{ 7 * 7 }}{% raw %}",
    "</style></title><script src=//evil></script>",
]


class Seen(HTMLParser):
    """Every element and attribute of a page, its text, and the elements that are not closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "link", "wbr", "br"):
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
    return as_html(collect_report(read_run(run)))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A full run without curves, whose drawing takes most of a report's time."""
    run = full_run(tmp_path / "run")
    run.metrics_file.unlink()
    return run


def fill_with(run: Run, attack: str) -> None:
    """Write an attack into everything that somebody else may write."""
    add_answers(
        run, [prompt(attack, answer(attack), answer(attack * 100))], [flip(1, "lost", task=attack, question=attack)]
    )
    during = {"step": 1, "seconds": 1, "results": {attack: {attack: 0.5}}}
    (run.comparison_file.parent / "during.jsonl").write_text(json.dumps(during) + "\n")
    run.update(
        recipe=attack, error=attack, status="failed", overrides=[attack], started=attack, versions={attack: attack}
    )
    metrics = [METRIC | {"task": attack, "metric": attack, "filter": attack, "verdict": attack}]
    changed = {
        "complete": False,
        "not_measured": {attack: attack},
        "prompts_cut": [attack],
        "note": attack,
        "settings": {attack: attack, "limit": attack},
        "metrics": metrics,
        "flips": {attack: {"metric": attack, "gained": 1, "lost": 1}},
    }
    write_json(run.comparison_file, COMPARISON | changed)
    write_json(run.plan_file, {"decisions": [{"name": attack, "value": attack, "reason": attack}]})


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_others_wrote_is_text_and_nothing_else(attack: str, run: Run) -> None:
    fill_with(run, attack)
    seen = Seen(page(run))
    assert not {"script", "img"} & set(seen.elements)
    assert not [name for name, _ in seen.attributes if name.startswith("on")]
    links = {value for name, value in seen.attributes if name in ("href", "src") and not str(value).startswith("#")}
    assert links == {"data:,", "final", "recipe.yaml"}
    assert "".join(seen.words).count(attack) > 20


def test_the_page_needs_nothing_but_itself_and_every_element_is_closed(run: Run) -> None:
    add_answers(run, [prompt("?", answer(""), answer("x" * 9000))], [flip(1, "lost"), flip(2, "gained")])
    found = page(run)
    seen = Seen(found)
    assert "default-src 'none'" in found
    assert "@import" not in found
    assert not {"script", "iframe", "object", "embed", "form"} & set(seen.elements)
    assert {("lang", "en"), ("name", "viewport")} <= set(seen.attributes)
    assert seen.open == []
    assert found == page(run), "the same run gives the same bytes"


def test_hidden_characters_are_shown_and_what_scripts_need_is_kept(run: Run) -> None:
    hidden, kept = "a\x00b\x1b[31m\u202ec\u2066d\u200be\ud800", "سلام 漢字 👩\u200d👩\u200d👧 ی\u200cک\n\tx"
    add_answers(run, [prompt("?", answer(hidden), answer(kept))], [])
    found = page(run)
    for shown in ("U+0000", "U+001B", "U+202E", "U+2066", "U+200B", "U+D800"):
        assert f'<b class="u">⟨{shown}⟩</b>' in found
    assert kept in found
    found.encode("utf-8")
    assert html_text("a_long/name_with\x00hidden") == 'a_<wbr>long/<wbr>name_<wbr>with<b class="u">⟨U+0000⟩</b>hidden'


def test_what_is_long_is_cut_and_says_how_much_is_missing() -> None:
    assert said("x" * (MOST_OF_AN_ANSWER + 5)) == "x" * MOST_OF_AN_ANSWER + " … and 5 more characters"
    assert html_text("y" * 5000).endswith("and 3,000 more characters")


def test_the_report_holds_no_secret(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "0123456789secret0123456789")
    add_answers(run, [prompt("?", answer("0123456789secret0123456789"), answer("b"))], [])
    write_report(run)
    assert "secret" not in run.page_file.read_text()
    assert "[hidden]" in run.page_file.read_text()


@pytest.mark.slow
def test_a_long_run_with_thousands_of_flips_is_under_2_mb(run: Run) -> None:
    generator = random.Random(0)
    with run.metrics_file.open("w") as file:
        for step in range(1, 100_001):
            file.write(json.dumps(point(step, generator.random()) | {"grad_norm": generator.random()}) + "\n")
    words = "some words " * 360
    flips = [flip(n, "lost" if n % 2 else "gained", question=words, base=words, tuned=words) for n in range(5000)]
    add_answers(run, [prompt(words, answer(words), answer(words))] * 20, flips)
    write_report(run)
    assert run.page_file.stat().st_size < 2_000_000
