"""compare.html: several runs on one page."""

from pathlib import Path
from typing import Any

import pytest

from eval.report.blocks import Section
from eval.report.main import main, write_report
from eval.report.pages import as_html
from eval.report.run_files import read_run
from eval.report.runs import collect_runs
from sft.errors import RunError
from sft.files import write_json
from sft.run.directory import Run
from tests.eval.runs import COMPARISON, METRIC, full_run


def run_of(folder: Path, **comparison: Any) -> Run:
    run = full_run(folder)
    write_json(run.comparison_file, COMPARISON | comparison)
    return run


def page(*runs: Run) -> tuple[str, dict[str, Section]]:
    """The page, and its sections by title."""
    values = collect_runs([read_run(run) for run in runs], runs[0].path.parent)
    text = as_html(values)
    assert "its files do not hold what they should" not in text
    return text, {section.title: section for section in values["sections"]}


def test_scores_stand_side_by_side_and_other_settings_are_not_comparable(tmp_path: Path) -> None:
    worse = METRIC | {"tuned": 0.4, "difference": -0.1, "interval_95": [-0.2, -0.05], "verdict": "REGRESSED"}
    text, sections = page(run_of(tmp_path / "a"), run_of(tmp_path / "b", metrics=[worse], settings_hash="f"))
    ((_, _, first, second),) = sections["Evaluation"].blocks[0].value["rows"]
    assert "0.5000 → 0.6250" in first
    assert "-0.1000 [-0.2000, -0.0500]" in second
    assert "REGRESSED" in second
    assert "other settings than the first run, so that the scores are not comparable:</strong><ul><li>B</li>" in text


def test_runs_that_failed_or_were_not_evaluated_are_compared_as_far_as_they_go(tmp_path: Path) -> None:
    runs = run_of(tmp_path / "a"), run_of(tmp_path / "b"), Run(tmp_path / "c")
    runs[1].update(status="failed")
    runs[1].comparison_file.unlink()
    runs[2].path.mkdir()
    _, sections = page(*runs)
    rows = {row[0]: row[1:] for row in sections["Runs"].blocks[0].value["rows"]}
    assert rows["Status"] == ["finished", "failed", "not recorded"]
    assert rows["Last logged step"] == ["100", "100", "not recorded"]
    assert len(sections["Evaluation"].blocks[0].value["head"]) == 3
    assert "None of the runs has logged" in page(runs[2], runs[2])[0]


def test_the_page_is_in_the_folder_of_all_and_links_to_each_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = run_of(tmp_path / "one" / "a b"), run_of(tmp_path / "other" / "b")
    write_report(runs[0])
    main([str(run.path) for run in runs])
    assert capsys.readouterr().out.strip() == str(tmp_path / "compare.html")
    text = (tmp_path / "compare.html").read_text()
    assert '<a href="one/a%20b/report.html">' in text
    assert "other/b/report.html" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{a}", "nowhere"], "holds no run.json"),
        (["{a}"] * 11, "11 runs were given"),
    ],
)
def test_a_wrong_command_line_is_one_message(arguments: list[str], message: str, tmp_path: Path) -> None:
    folders = {name: run_of(tmp_path / name).path for name in "ab"}
    with pytest.raises(RunError, match=message):
        main([word.format(**folders) for word in arguments])
