"""What is said of two real measurements by lm_eval: the embedded demo's model and the same with other weights."""

import json
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.cells import cell_len
from rich.console import Console

from eval.compare.tables import comparison_lines, comparison_table
from eval.run import main
from sft.errors import EvaluationError, GateFailed
from sft.files import read_json
from sft.hub.demo import CITIES, NAMES
from sft.run.directory import Run

WriteTask = Callable[..., Path]


@pytest.fixture
def group(write_task: WriteTask) -> Callable[[bool], list[str]]:
    """A group of two tasks with options, of 12 and of 6 documents, as the arguments of an evaluation."""

    def write(by_size: bool) -> list[str]:
        for name, count in (("first", 12), ("second", 6)):
            rows = [
                {"question": f"Is {name} {n} odd?", "options": [NAMES[n], CITIES[n]], "right": n % 3 % 2}
                for n in range(count)
            ]
            path = write_task(
                name,
                rows,
                output_type="multiple_choice",
                doc_to_choice="{{options}}",
                doc_to_target="{{right}}",
                generation_kwargs=None,
                metric_list=[
                    {"metric": metric, "aggregation": "mean", "higher_is_better": True}
                    for metric in ("acc", "acc_norm")
                ],
            )
        aggregate = [{"metric": metric, "weight_by_size": by_size} for metric in ("acc", "acc_norm")]
        group = {"group": "both", "task": ["first", "second"], "aggregate_metric_list": aggregate}
        path.with_name("both.yaml").write_text(yaml.safe_dump(group))
        return ["tasks=both", f"include_path={path.parent}", "limit=null"]

    return write


@pytest.mark.slow
@pytest.mark.parametrize("by_size", [True, False])
def test_a_group_of_lm_eval_is_paired_over_the_documents_of_its_tasks(
    by_size: bool, group: Callable[[bool], list[str]], run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(run.path), *group(by_size)])
    (path,) = (run.path / "eval").glob("*/comparison.json")
    compared = read_json(path)
    rows = {(row["task"], row["metric"]): row for row in compared["metrics"]}
    assert len(rows) == 6
    assert all(row["stderr_method"] == "paired" for row in rows.values())
    both = rows["both", "acc_norm"]
    assert [key for key, row in rows.items() if row["decides"]] == [("both", "acc_norm")]
    assert (both["documents"], both["subtasks"]) == (18, ["first", "second"])
    parts = [rows[task, "acc_norm"]["difference"] for task in ("first", "second")]
    mean = (2 * parts[0] + parts[1]) / 3 if by_size else sum(parts) / 2
    assert both["difference"] == pytest.approx(mean)
    lines = [json.loads(line) for line in (path.parent / "flips.jsonl").read_text().splitlines()]
    counts = compared["flips"].get("both", {"gained": 0, "lost": 0})
    assert len(lines) == counts["gained"] + counts["lost"]
    assert {(line["task"], line["subtask"]) for line in lines} <= {("both", "first"), ("both", "second")}
    assert lines
    for line in lines:
        assert {line["base"], line["tuned"]} == {NAMES[line["doc_id"]], CITIES[line["doc_id"]]}
        assert line["target"] == line["tuned" if line["direction"] == "gained" else "base"]
        assert line["question"].startswith("Is ")
    assert "Not searched for documents that were trained on" in capsys.readouterr().out
    assert compared["contamination"]["tasks"] == {}


def test_a_gate_that_fails_is_raised_after_all_is_written(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(GateFailed, match=r"the tuned model has 0\.0000; at least 0\.5 is required"):
        main([str(run.path), "gate={require: {demo_extraction: 0.5}}"])
    assert "Gate: failed." in capsys.readouterr().out
    assert run.record["gate"] == "failed"
    assert run.record["evaluation"] == "finished"
    assert "demo_extraction" in run.report_file.read_text()


@pytest.mark.slow
def test_what_is_incomplete_fails_the_gate_with_the_status_of_what_is_incomplete(
    run: Run, write_task: WriteTask, capsys: pytest.CaptureFixture[str]
) -> None:
    far = write_task("far", dataset_path="nobody/nothing", dataset_kwargs=None)
    with pytest.raises(SystemExit) as stop:
        main([str(run.path), f"tasks={write_task('near')},{far}", "gate={max_regression: {default: 1}}"])
    assert stop.value.code == 1
    shown = capsys.readouterr().out
    assert "Gate: failed.\n  far was not measured: " in shown


@pytest.mark.parametrize("arguments", [["gate={require: {gsm8k: 1}}"], ["tasks=builtin:demo", "gate.require.demo=1"]])
def test_a_gate_over_another_task_measures_nothing(arguments: list[str], run: Run) -> None:
    with pytest.raises(EvaluationError, match=r"is not measured.* Measured: demo_extraction"):
        main([str(run.path), *arguments])
    assert not run.tuned_evaluation.exists()


def test_one_model_alone_has_no_gate(tuned_model: Path) -> None:
    with pytest.raises(EvaluationError, match=r"eval.gate compares a tuned model with its base"):
        main([str(tuned_model), "tasks=builtin:demo", "gate.require.demo_extraction=1"])


def row(task: str, **more: object) -> dict[str, Any]:
    return {
        "task": task,
        "metric": "acc",
        "filter": "none",
        "decides": True,
        "higher_is_better": True,
        "base": 0.5,
        "tuned": 0.51234,
        "difference": 0.01234,
        "interval_95": [0.00004, 0.02464],
        "verdict": "NO EVIDENCE",
    } | more


def test_the_table_fits_80_columns_and_hides_only_what_it_counts() -> None:
    parts = [row(f"leaderboard_bbh_{n}", decides=False) for n in range(20)]
    worse = row("leaderboard_bbh_tracking_shuffled_objects_three_objects", decides=False, verdict="REGRESSED")
    comparison = {
        "complete": True,
        "metrics": [row("leaderboard_bbh", metric="acc_norm"), *parts, worse, row("x", interval_95=None)],
        "overall": row("overall", tasks=["leaderboard_bbh", "x"], verdict="TOO FEW DOCUMENTS"),
        "note": "A sentence.",
        "flips": {"x": {"metric": "acc", "gained": 3, "lost": 1}},
        "contamination": {"ngram": 13, "tasks": {"x": {"documents": 9, "found": 0, "too_short": 2}}},
        "gate": None,
    }
    console = Console(width=80, record=True, file=StringIO())
    console.print(comparison_table(comparison))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    # An end of the interval that is not 0 is not shown as 0.
    assert "[+4e-05, +0.025]" in text
    assert text.count("REGRESSED") == 1
    assert "leaderboard_bbh_7" not in text
    assert "mean of 2 tasks" in text
    assert comparison_lines(comparison) == [
        "A sentence.",
        "* decides; the others weigh little in the correction.",
        "20 more metrics are in comparison.json: parts of groups, and metrics that do not decide.",
        "x: 3 documents gained, 1 lost (acc).",
        "No document of the tasks shares 13 words in a row with the training data.",
        "2 of 9 documents are too short to be looked for there.",
    ]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_terminal_is_too_narrow_for_a_name_or_a_number(width: int) -> None:
    names = ["mmlu_high_school_european_history", "多语言任务_很长的名字", "[bold]x[/bold]"]
    large = row("wikitext", base=123456.789, tuned=98765.4, difference=-24691.4, interval_95=[-35691.3, -13691.2])
    comparison = {"complete": True, "metrics": [*map(row, names), large], "overall": None}
    console = Console(width=width, record=True, file=StringIO())
    console.print(comparison_table(comparison))
    text = console.export_text()
    assert max(map(cell_len, text.splitlines())) <= width
    for word in (*names, "123457", "98765.4", "-24691.4", "EVIDENCE"):
        assert word in text
