from pathlib import Path
from typing import Any

import pytest

from eval.report.html import as_html
from eval.report.main import main, write_report
from eval.report.run_files import read_run
from eval.report.runs import collect_runs
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


def collected(*runs: Run) -> dict[str, Any]:
    values = collect_runs([read_run(run) for run in runs], runs[0].path.parent)
    assert "its files do not hold what they should" not in as_html("runs.html.jinja", values)
    return values


def test_what_differs_is_a_row_and_what_is_the_same_is_named(tmp_path: Path) -> None:
    runs = run_of(tmp_path / "a"), run_of(tmp_path / "b", 2e-5), run_of(tmp_path / "c")
    (recipe,) = (differences := collected(*runs)["differences"])["subjects"]
    assert [(row["key"], row["counts"], row["cells"]) for row in recipe["rows"]] == [
        ("train.learning_rate", True, ["1e-05", "2e-05", "1e-05"]),
        ("train.save_steps", False, ["10", "20", "10"]),
    ]
    assert differences["same"] == "plan, data, hardware, versions, git"


def test_a_section_that_one_run_lacks_is_shown_in_words_and_what_is_not_recorded_is_said(tmp_path: Path) -> None:
    runs = run_of(tmp_path / "a"), run_of(tmp_path / "b")
    gate = {"max_regression": {"default": 0.05}, "require": {}, "judge_by": "score"}
    runs[0].update(recipe_values=VALUES | {"eval": {"gate": None, "chat": False}})
    runs[1].update(recipe_values=VALUES | {"eval": {"gate": gate, "chat": {"prompts": None, "max_new_tokens": 512}}})
    runs[0].plan_file.unlink()
    recipe, plan = collected(*runs)["differences"]["subjects"]
    cells = {row["key"]: row["cells"] for row in recipe["rows"]}
    assert cells["eval.gate"][0] == "none"
    assert "0.05 on each task" in cells["eval.gate"][1]
    assert cells["eval.chat"] == ["off", "max_new_tokens: 512"]
    assert (plan["name"], plan["unknown"]) == ("Plan", ["A"])


def test_scores_stand_side_by_side_and_other_settings_are_not_comparable(tmp_path: Path) -> None:
    worse = METRIC | {"tuned": 0.4, "difference": -0.1, "interval_95": [-0.2, -0.05], "verdict": "REGRESSED"}
    settings = COMPARISON["settings"] | {"limit": 10}
    first, second = (
        run_of(tmp_path / "a"),
        run_of(tmp_path / "b", metrics=[worse], settings_hash="f", settings=settings),
    )
    found = collected(first, second)
    (row,) = found["evaluation"]["rows"]
    assert [(cell["scores"], cell["difference"], cell["kind"]) for cell in row["cells"]] == [
        ("0.5000 → 0.6250", "+0.1250 [+0.0858, +0.1642]", "good"),
        ("0.5000 → 0.4000", "-0.1000 [-0.2000, -0.0500]", "bad"),
    ]
    assert found["evaluation"]["columns"] == [("A", True), ("B", False)]
    assert found["evaluation"]["settings"] == [{"letter": "B", "rows": [["limit", "none", "10"]]}]
    assert "not comparable" in found["attention"][0]


def test_runs_that_failed_or_were_not_evaluated_are_compared_as_far_as_they_go(tmp_path: Path) -> None:
    runs = run_of(tmp_path / "a"), run_of(tmp_path / "b"), Run(tmp_path / "c")
    runs[1].update(status="failed")
    runs[1].comparison_file.unlink()
    runs[2].path.mkdir()
    found = collected(*runs)
    assert found["attention"][0].startswith("B: not finished (failed)")
    assert found["evaluation"]["unmeasured"] == ["B", "C"]
    assert found["final"]["rows"][0] == ["Last logged step", "100", "100", "not recorded"]
    assert "None of the runs" in collected(runs[2], runs[2])["curves"]["missing"]


def test_the_page_is_in_the_folder_of_all_and_links_to_each_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = run_of(tmp_path / "one" / "a b"), run_of(tmp_path / "other" / "b")
    write_report(runs[0])
    main([str(run.path) for run in runs])
    assert capsys.readouterr().out.strip() == str(tmp_path / "compare.html")
    text = (tmp_path / "compare.html").read_text()
    assert '<a href="one/a%20b/report.html">' in text
    assert "not written yet" in text
    main([*(str(run.path) for run in runs), "--output", str(tmp_path / "elsewhere.html")])
    assert (tmp_path / "elsewhere.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{a}", "nowhere"], "holds no run.json"),
        (["{a}", "{b}", "--output", "{b}/recipe.yaml"], "does not end in .html"),
        (["{a}", "{b}", "--output=nowhere/x.html"], "there is no folder"),
        (["--output=x.html", "{a}"], "1 runs were given"),
        (["{a}", "{b}", "{b}/../a"], "are the same run"),
        (["{a}"] * 11, "11 runs were given"),
    ],
)
def test_a_wrong_command_line_is_one_message(arguments: list[str], message: str, tmp_path: Path) -> None:
    folders = {name: run_of(tmp_path / name).path for name in "ab"}
    with pytest.raises(RunError, match=message):
        main([word.format(**folders) for word in arguments])


def test_names_that_others_chose_are_only_text(tmp_path: Path) -> None:
    attack = "<script>alert(1)</script>"
    run = run_of(tmp_path / "a", metrics=[METRIC | {"task": attack}], settings={attack: attack})
    run.update(recipe=attack, recipe_values={attack: attack}, versions={attack: attack})
    text = as_html("runs.html.jinja", collected(run, run_of(tmp_path / "b", settings_hash="x")))
    assert "<script" not in text
    assert "&lt;script&gt;" in text
