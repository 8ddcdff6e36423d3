"""What is said of two real measurements by lm_eval: the embedded demo's model and the same with other weights."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

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
    assert all(row["test"] == "paired t" for row in rows.values())
    both = rows["both", "acc_norm"]
    assert [key for key, row in rows.items() if row["decides"]] == [("both", "acc_norm")]
    assert both["documents"] == 18
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
    assert "Not searched for contamination" in capsys.readouterr().out
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
