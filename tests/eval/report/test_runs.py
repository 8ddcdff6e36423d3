from pathlib import Path
from typing import Any

import pytest

from eval.report.html import as_html
from eval.report.main import main, make_page
from eval.report.markdown import as_markdown
from eval.report.results import read_run
from eval.report.runs import compare_runs, make_comparison
from eval.report.write import write_page
from sft.errors import RunError
from sft.files import write_json
from sft.run.directory import Run
from tests.eval.runs import COMPARISON, METRIC, full_run

VALUES = {"train": {"learning_rate": 1e-5, "save_steps": 10}, "data": {"max_length": 128}}


def run_of(folder: Path, learning_rate: float = 1e-5, **comparison: Any) -> Run:
    run = full_run(folder)
    values = VALUES | {"train": {"learning_rate": learning_rate, "save_steps": int(learning_rate * 1e6)}}
    run.update(recipe_values=values, data_fingerprint="c0ffee" * 4)
    write_json(run.comparison_file, COMPARISON | comparison)
    return run


def text_of(*runs: Run) -> str:
    return as_markdown(make_comparison([read_run(run) for run in runs], runs[0].path.parent))


def section(text: str, name: str) -> str:
    return text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]


def test_what_differs_is_a_row_and_what_is_the_same_is_named(tmp_path: Path) -> None:
    text = section(
        text_of(run_of(tmp_path / "a"), run_of(tmp_path / "b", 2e-5), run_of(tmp_path / "c")), "What differs"
    )
    assert "| `train.learning_rate` | 1e-05 | 2e-05 | 1e-05 |" in text
    assert "| `train.save_steps` (does not count) | 10 | 20 | 10 |" in text
    assert "“Does not count”: the training is the same with another value" in text
    assert "max_length" not in text
    assert "The same in all: plan, data, hardware, versions, program." in text


def test_a_section_that_one_run_has_not_is_told_in_words(tmp_path: Path) -> None:
    runs = run_of(tmp_path / "a"), run_of(tmp_path / "b")
    gate = {"max_regression": {"default": 0.05}, "require": {}, "judge_by": "score"}
    runs[0].update(recipe_values=VALUES | {"eval": {"gate": None, "chat": False}})
    runs[1].update(recipe_values=VALUES | {"eval": {"gate": gate, "chat": {"prompts": None, "max_new_tokens": 512}}})
    text = section(text_of(*runs), "What differs")
    assert "| none | worse by at most 0.05 on each task; judged by the scores alone |" in text
    assert "| off | max_new_tokens: 512 |" in text.replace("\\_", "_")


def test_what_one_run_has_not_recorded_is_said_of_that_run(tmp_path: Path) -> None:
    runs = run_of(tmp_path / "a"), run_of(tmp_path / "b"), run_of(tmp_path / "c")
    runs[0].plan_file.unlink()
    text = section(text_of(*runs), "What differs")
    assert "Plan: not recorded for **A**" in text
    assert "plan" not in text.partition("The same in all")[2]


def test_scores_stand_side_by_side_with_their_intervals(tmp_path: Path) -> None:
    worse = METRIC | {"tuned": 0.4, "difference": -0.1, "interval_95": [-0.2, -0.05], "verdict": "REGRESSED"}
    text = section(text_of(run_of(tmp_path / "a"), run_of(tmp_path / "b", metrics=[worse])), "Evaluation")
    assert "| Task | **A** | **B** |" in text
    first, second = "0.5000 → 0.6250 (+0.1250 [+0.0858, +0.1642])", "0.5000 → 0.4000 (-0.1000 [-0.2000, -0.0500])"
    assert (
        f"| gsm8k (exact\\_match, strict-match) | {first} (better) | {second} (REGRESSED) |".replace("\\_", "_") in text
    )
    assert "not comparable" not in text


def test_other_settings_are_shown_and_their_column_is_marked(tmp_path: Path) -> None:
    settings = COMPARISON["settings"] | {"limit": 10}
    text = text_of(run_of(tmp_path / "a"), run_of(tmp_path / "b", settings_hash="f00", settings=settings))
    assert "| Task | **A** | **B** (not comparable) |" in section(text, "Evaluation")
    assert "| `limit` | none | 10 |" in section(text, "Evaluation")
    assert "**B**: measured under other settings" in text.partition("\n## ")[0]


def test_a_run_without_evaluation_and_one_that_failed_are_compared_as_far_as_they_go(tmp_path: Path) -> None:
    runs = run_of(tmp_path / "a"), run_of(tmp_path / "b"), Run(tmp_path / "c")
    runs[1].update(status="failed")
    runs[1].comparison_file.unlink()
    runs[2].path.mkdir()
    text = text_of(*runs)
    assert "**B**: not finished (failed)" in text
    assert "Not evaluated: **B**, **C**" in section(text, "Evaluation")
    assert "| Last logged step | 100 | 100 | not recorded |" in section(text, "Final numbers")
    assert "None of the runs has a comparison" in text_of(runs[1], runs[2])
    assert "None of the runs has logged an optimizer step." in text_of(runs[2], runs[2])


def test_ten_runs_have_ten_curves_in_a_chart_and_eleven_are_refused(tmp_path: Path) -> None:
    runs = [run_of(tmp_path / str(number)) for number in range(11)]
    text = as_html(make_comparison([read_run(run) for run in runs[:10]], tmp_path))
    loss = text.partition("Loss over optimizer steps")[2] or text.partition("by step")[2].partition("</figure>")[0]
    assert loss.count('class="curve') == 10
    with pytest.raises(RunError, match="11 runs are named"):
        compare_runs([str(run.path) for run in runs])


def test_a_curve_by_tokens_has_the_tokens_below_it(tmp_path: Path) -> None:
    page = as_html(make_comparison([read_run(run_of(tmp_path / name)) for name in "ab"], tmp_path))
    assert '<p class="x-label">tokens</p>' in page


def test_the_page_is_in_the_folder_of_all_and_links_to_each_report(tmp_path: Path) -> None:
    runs = run_of(tmp_path / "one" / "a b"), run_of(tmp_path / "other" / "b")
    write_page(runs[0].page_file, as_html(make_page(read_run(runs[0]))))
    page = compare_runs([str(run.path) for run in runs])
    assert page == tmp_path / "compare.html"
    text = page.read_text()
    assert '<a href="one/a%20b/report.html">' in text
    assert "not written yet" in text


def test_the_page_is_where_it_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(run_of(tmp_path / name).path) for name in "ab"]
    page = tmp_path / "elsewhere.html"
    main([*runs, "--output", str(page)])
    assert capsys.readouterr().out.strip() == str(page)
    assert page.is_file()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "0 runs are named"),
        (["{a}", "nowhere"], "holds no run.json"),
        (["{a}", "{b}", "--out", "x.html"], "'--out' is no option"),
        (["{a}", "{b}", "--output"], "lacks its value"),
        (["{a}", "{b}", "--output", "{b}/recipe.yaml"], "does not end in .html"),
        (["{a}", "{b}", "--output=nowhere/x.html"], "there is no folder"),
        (["--output=x.html", "{a}"], "1 runs are named"),
        (["{a}", "{b}", "{b}/../a"], "are the same run"),
    ],
)
def test_a_wrong_command_line_is_one_message(arguments: list[str], told: str, tmp_path: Path) -> None:
    folders = {name: run_of(tmp_path / name).path for name in "ab"}
    with pytest.raises(RunError, match=told):
        main([word.format(**folders) for word in arguments])


def test_a_name_of_somebody_elses_is_only_words(tmp_path: Path) -> None:
    attack = "<script>alert(1)</script>"
    run = run_of(tmp_path / "a", metrics=[METRIC | {"task": attack}], settings={attack: attack})
    run.update(recipe=attack, recipe_values={attack: attack}, versions={attack: attack})
    text = as_html(make_comparison([read_run(run), read_run(run_of(tmp_path / "b", settings_hash="x"))], tmp_path))
    assert "<script" not in text
    assert "&lt;script&gt;" in text
