"""report.html and compare.html in a real browser: no error, no request, nothing wider than a phone."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from eval.report.main import compare_runs, write_report
from sft.files import write_json
from tests.eval.runs import COMPARISON, METRIC, add_answers, answer, flip, full_run, point, prompt

pytestmark = pytest.mark.slow

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# No calls home: only what the page asks for is to be seen.
QUIET = "--headless --no-sandbox --disable-gpu --disable-background-networking --disable-component-update --no-first-run".split()

BAD = """<!doctype html><title>x</title><link rel="icon" href="data:,">
<img src="http://127.0.0.1:1/x.png"><script>nothere()</script>"""

FRAME = """<!doctype html><title>x</title><link rel="icon" href="data:,">
<iframe src="{page}" style="width:{width}px;height:800px;border:0"></iframe>
<script>onload = () => {{
  const seen = document.querySelector("iframe").contentDocument;
  for (const one of seen.querySelectorAll("details")) one.open = true;
  const clipped = [...seen.querySelectorAll(".scroll")].filter((one) => one.scrollWidth > one.clientWidth + 1);
  const sizes = [seen.documentElement.scrollWidth, seen.documentElement.scrollHeight, clipped.length];
  document.title = "sizes " + sizes.join(" ");
}}</script>"""


@pytest.fixture
def browse(tmp_path: Path):  # noqa: ANN201 - a function
    """Opens a page, and gives its DOM, its errors on the console, and what it has asked for."""
    if CHROMIUM is None:
        pytest.skip("no Chromium on PATH")

    def open_page(page: Path, *options: str) -> tuple[str, list[str], list[str]]:
        log = tmp_path / "net.json"
        words = [CHROMIUM, *QUIET, f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", *options]
        words += [f"--log-net-log={log}", "--virtual-time-budget=5000", "--dump-dom", page.as_uri()]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120)
        console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
        events = [event.get("params", {}) for event in json.loads(log.read_text())["events"]]
        # What the browser itself asks for has no origin; a page from a file has the origin `null`.
        asked = [one["url"] for one in events if one.get("initiator", "not an origin") != "not an origin"]
        return done.stdout, console, [url for url in asked if not url.startswith(("file:", "data:"))]

    return open_page


@pytest.fixture
def pages(tmp_path: Path) -> list[Path]:
    """A report with everything in it, one of a run that has only begun, and a comparison of the two."""
    run = full_run(tmp_path / "runs" / "whole")
    long = "An answer with a very_long_word_" + "x" * 300 + " and more words" * 100
    attack = "<script>nothere()</script><img src='http://127.0.0.1:1/x.png'>"
    flips = [flip(number, ("lost", "gained")[number % 2], base=long, tuned=attack) for number in range(50)]
    add_answers(run, [prompt(attack, answer(long), answer("漢字 سلام 🙂\u202e\x00"))] * 5, flips)
    perplexity = {"base": 123456.789, "base_stderr": 1234.5, "tuned": 98765.4321, "difference": -24691.357}
    tested = {
        "p_value": 1.23e-17,
        "p_adjusted": 1.23e-16,
        "test": "bootstrap",
        "decides": False,
        "verdict": "NO SIGNIFICANT CHANGE",
    }
    metrics = [
        METRIC
        | {"task": f"a_task_with_a_rather_long_name_for_a_phone_{number}"}
        | tested
        | (perplexity if number % 2 else {})
        for number in range(30)
    ]
    write_json(run.comparison_file, COMPARISON | {"metrics": metrics, "note": attack})
    lines = [json.dumps(point(step, 2 / step)) for step in range(1, 3000)]
    run.metrics_file.write_text("\n".join(lines) + "\n")
    begun = full_run(tmp_path / "runs" / "begun")
    begun.metrics_file.unlink()
    begun.comparison_file.unlink()
    begun.update(status="running")
    for one in (run, begun):
        write_report(one)
    return [run.page_file, begun.page_file, compare_runs([str(run.path), str(begun.path)])]


def test_what_is_wrong_with_a_page_would_be_seen(browse, tmp_path: Path) -> None:  # noqa: ANN001
    bad = tmp_path / "bad.html"
    bad.write_text(BAD)
    _, console, asked = browse(bad)
    assert any("nothere is not defined" in line for line in console)
    assert asked == ["http://127.0.0.1:1/x.png"]


def test_pages_open_without_an_error_and_without_a_request(browse, pages: list[Path]) -> None:  # noqa: ANN001
    for page in pages:
        dom, console, asked = browse(page)
        assert "</html>" in dom
        assert (page, console, asked) == (page, [], [])


@pytest.mark.parametrize("width", [390, 1180])
def test_nothing_is_wider_than_the_window(width: int, browse, pages: list[Path], tmp_path: Path) -> None:  # noqa: ANN001
    """On a phone a table may scroll by itself; at a laptop's width none is clipped."""
    frame = tmp_path / "frame.html"
    for page in pages:
        frame.write_text(FRAME.format(page=page.as_uri(), width=width))
        dom, console, _ = browse(frame, "--allow-file-access-from-files", "--window-size=1300,900")
        assert console == []
        found = re.search(r"<title>sizes (\d+) (\d+) (\d+)</title>", dom)
        assert found is not None
        wide, high, clipped = map(int, found.groups())
        assert wide <= width, page
        assert high > 1000
        assert not clipped or width < 1000, page
