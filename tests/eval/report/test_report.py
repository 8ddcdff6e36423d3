"""What report.md and report.html say of a run, and what they do with files that are missing or broken."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eval.report.collect import collect_report
from eval.report.main import write_report
from eval.report.pages import as_html, as_markdown
from eval.report.run_files import read_run
from sft.errors import RunError
from sft.files import read_json, write_json
from sft.run.directory import Run
from tests.eval.runs import COMPARISON, METRIC, RECIPE, add_answers, answer, flip, full_run, point, prompt

PROBLEM = "its files do not hold what they should"


def report(run: Run) -> str:
    return as_markdown(collect_report(read_run(run)))


def section(text: str, name: str) -> str:
    return text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]


def head(text: str) -> str:
    return text.partition("\n## ")[0]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A full run without curves, whose drawing takes most of a report's time."""
    run = full_run(tmp_path / "run")
    run.metrics_file.unlink()
    return run


def test_what_was_planned_stands_beside_what_was_measured(tmp_path: Path) -> None:
    run = full_run(tmp_path / "run")
    assert "(planned" not in report(run)
    planned = {"time": "3.1 to 5.2 h", "memory": 38.5, "max_steps": 105}
    write_json(run.plan_file, {"decisions": [{"name": one, "value": value} for one, value in planned.items()]})
    text = report(run)
    assert "| Time to train | 1 h 2 min 5 s (planned: 3.1 to 5.2 h) |" in text
    assert "GiB (planned: 38.5 GiB) |" in text


def test_a_full_run_is_reported_with_nothing_missing(tmp_path: Path) -> None:
    run = full_run(tmp_path / "run")
    add_answers(run, [prompt("Why?", answer("because"), answer("so"))], [flip(1, "lost")])
    text = report(run)
    for shown in (
        "# mine, run run",
        "`org/model`, revision v1",
        "LoRA adapters: rank 8, alpha 32",
        "mine, version 3",
        "| Last logged step | 100 |",
        "| Loss at the first logged step | 2.0000 |",
        "| Loss at the last logged step | 0.2000 |",
        "| Tokens per second | 560 |",
        "| Time to train | 1 h 2 min 5 s |",
        "1,420 tokens in; trained + masked + truncated + held out + dropped = 1,420.",
        "12 packs, 98.5% full; 44 padding tokens",
        "8 x NVIDIA H100 (80 GiB)",
        "`c0ffee`, with uncommitted changes",
        f"git checkout c0ffee\nbash scripts/sft.sh {run.path}\nbash scripts/eval.sh {run.path}",
        "Measured 2 times: eval/during.jsonl has all scores.",
        "1,319 | 0.5000 ± 0.0100 | 0.6250 | +0.1250 | [+0.0858, +0.1642]",
    ):
        assert shown in text
    page = as_html(collect_report(read_run(run)))
    assert PROBLEM not in text + page
    assert text.count("\n## ") == page.count("\n<h2>") == 10
    assert "because" in page


def test_a_run_on_a_quantized_base_says_what_was_measured(run: Run) -> None:
    assert "quantiz" not in section(report(run), "Evaluation")
    run.recipe_file.write_text(RECIPE.replace("{r: 8}}", "{r: 8}, quantization: nf4}"))
    text = report(run)
    assert "the base in nf4 (QLoRA)" in text
    measured = "merged into what nf4 was dequantized to, the base has its own weights"
    assert measured in section(text, "Evaluation")


def test_an_incomplete_evaluation_names_what_was_not_measured(run: Run) -> None:
    write_json(run.comparison_file, COMPARISON | {"complete": False, "not_measured": {"arc_easy": "KeyError: 'x'"}})
    assert "not measured: arc_easy" in head(report(run))
    assert "- arc_easy: KeyError: 'x'" in section(report(run), "Evaluation")


def test_a_run_without_a_comparison_shows_the_command_for_it(run: Run) -> None:
    run.comparison_file.unlink()
    assert f"bash scripts/sft.sh {run.path}" in head(report(run))
    write_json(run.final / "config.json", {})
    assert f"bash scripts/eval.sh {run.path}" in head(report(run))
    run.update(overrides=["eval.tasks=[]", "eval.chat=false"])
    assert "The recipe asks for no evaluation" in head(report(run))
    assert "## Chat samples" not in report(run)


def test_a_bar_in_a_value_does_not_break_a_table(run: Run) -> None:
    text = report(run)
    assert r"auto: the GPU\|it has it" in text
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    bars = [{line.replace(r"\|", "").count("|") for line in lines} for lines in tables]
    assert len(tables) == 7
    assert all(len(different) == 1 for different in bars)


@pytest.mark.parametrize(
    "lines",
    [
        [point(step, float("nan") if step % 7 == 0 else 2.0) for step in range(1, 300)],
        [point(1, 2.0) | {"loss": None, "tokens_per_second": None}],
    ],
    ids=["many with gaps", "nulls"],
)
def test_a_curve_is_drawn_of_whatever_was_logged(lines: list[dict[str, Any]], run: Run) -> None:
    run.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "](loss.png)" in write_report(run).read_text()
    assert (run.path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert PROBLEM not in run.page_file.read_text()


def test_a_line_cut_off_by_a_kill_is_left_out_and_a_repeated_step_counts_once(run: Run) -> None:
    lines = [json.dumps(point(step, loss)) for step, loss in ((1, 3.0), (2, 2.0), (2, 1.0))]
    run.metrics_file.write_text("\n".join([*lines, '{"step": 3, "lo']))
    write_json(run.plan_file, {"decisions": [{"name": "max_steps", "value": 105, "reason": "the recipe"}]})
    text = section(report(run), "Training")
    assert "| Last logged step | 2 of 105 |" in text
    assert "| Loss at the last logged step | 1.0000 |" in text


FILES = "recipe.yaml plan.json ledger.json metrics.jsonl run.json eval/chat.json eval/flips.jsonl eval/during.jsonl eval/comparison.json"


WRONG_KINDS = {
    "decisions": 3,
    "sources": [1],
    "git": [],
    "timings": 2,
    "checks": 1,
    "prompts": [3],
    "metrics": [3],
    "results": 3,
}


@pytest.mark.parametrize("name", FILES.split())
@pytest.mark.parametrize("broken", [None, '{"a', json.dumps(WRONG_KINDS)])
def test_a_missing_or_broken_file_costs_only_its_own_parts(name: str, broken: str | None, run: Run) -> None:
    add_answers(run, [prompt("?", answer("a"), answer("b"))], [flip(1, "lost")])
    (run.path / name).unlink(missing_ok=True)
    if broken is not None:
        (run.path / name).write_text(broken)
    values = collect_report(read_run(run))
    assert as_markdown(values).count("\n## ") == as_html(values).count("\n<h2>") >= 8


def test_an_empty_folder_gives_a_report_of_what_is_missing(tmp_path: Path) -> None:
    text = report(Run(tmp_path))
    for shown in ("status: not recorded", "plan.json", "ledger.json", "There is no loss curve"):
        assert shown in text
    assert not (tmp_path / "loss.png").exists()


def test_the_ledger_s_sum_has_each_term_and_a_wrong_one_stands_at_the_top(run: Run) -> None:
    ledger = read_json(run.ledger_file)
    for one in (*ledger["sources"], ledger["total"]):
        one["rows"]["held_out"] = one["tokens"]["held_out"] = 2
    ledger["total"]["tokens"]["masked"] -= 2
    ledger["findings"] = [{"kind": "duplicate", "meaning": "a duplicate", "count": 12, "rows": ["a.jsonl, row 4"] * 5}]
    write_json(run.ledger_file, ledger)
    text = section(report(run), "Data")
    assert "trained + masked + truncated + held out + dropped = 1,420." in text
    assert r"| `a\|b.jsonl` | 11 | 10 | 2 | not recorded | 1 (longer than 128 tokens) |" in text
    assert "| 12 | a duplicate | `a.jsonl, row 4`, `a.jsonl, row 4`, `a.jsonl, row 4` |" in text
    ledger["total"]["tokens"]["masked"] += 1
    write_json(run.ledger_file, ledger)
    assert "The ledger does not add up: 1,420 tokens in" in head(report(run))


@pytest.mark.parametrize(("reason", "is_fault"), [("held_out", False), ("bad_row", True)])
def test_tokens_that_were_meant_to_be_dropped_are_not_worth_knowing(reason: str, is_fault: bool, run: Run) -> None:
    ledger = read_json(run.ledger_file)
    ledger["total"]["tokens_dropped"] = {reason: 100}
    write_json(run.ledger_file, ledger)
    assert ("of 1,420 tokens were truncated or dropped: see Data." in head(report(run))) == is_fault


DECIDED = METRIC | {"test": "paired t", "p_value": 0.0004, "p_adjusted": 0.002, "verdict": "IMPROVED"}


def test_the_verdict_comes_first_and_names_what_regressed(run: Run) -> None:
    worse = DECIDED | {"task": "ifeval", "verdict": "REGRESSED", "difference": -0.2, "interval_95": [-0.3, -0.1]}
    overall = {"difference": 0.02, "interval_95": [0.01, 0.03], "verdict": "IMPROVED", "tasks": ["a", "b"]}
    metrics = [DECIDED, worse, DECIDED | {"task": "b"}, DECIDED | {"task": "c", "verdict": "NO SIGNIFICANT CHANGE"}]
    write_json(run.comparison_file, COMPARISON | {"metrics": metrics, "overall": overall, "note": "Holm."})
    text = report(run)
    assert "**IMPROVED: +0.0200 over 2 tasks, 95% interval [+0.0100, +0.0300]**" in head(text)
    assert "- Of 4 metrics: 2 IMPROVED, 1 REGRESSED, 1 NO SIGNIFICANT CHANGE" in head(text)
    assert "- REGRESSED: ifeval, exact_match, strict-match: 0.5000 → 0.6250 (-0.2000" in head(text)
    assert "Holm." in section(text, "Evaluation")
    assert "| 0.0004 | 0.002 | paired t | REGRESSED |" in section(text, "Evaluation")


def test_a_gate_that_failed_says_why_at_the_top(run: Run) -> None:
    gate = {"asked": {"max_regression": {"ifeval": 0.02}}, "passed": False, "failures": ["ifeval fell by 0.1."]}
    write_json(run.comparison_file, COMPARISON | {"gate": gate})
    assert "**The gate failed**\n\n- ifeval fell by 0.1.\n" in head(report(run))
    write_json(run.comparison_file, COMPARISON | {"gate": gate | {"passed": True, "failures": []}})
    assert "**The gate passed**" in head(report(run))


def test_what_is_easily_overlooked_stands_at_the_top(run: Run) -> None:
    add_answers(run, [prompt("?", answer("a"), answer("b b b", False, True))], [])
    found = {"ngram": 13, "tasks": {"gsm8k": {"documents": 200, "found": 3}, "mmlu": {"documents": 9, "found": 0}}}
    write_json(run.comparison_file, COMPARISON | {"prompts_cut": ["longbench"], "contamination": found})
    run.update(nonfinite=[{"step": 7, "answer": "skip"}])
    run.warn("plan", "few steps", "a|b")
    for shown in (
        "- few steps",
        "- a\\|b",
        "beginning: longbench",
        "did not end",
        "not finite at 1 step",
        "40 of 1,420 tokens",
        "- 3 of 200 documents of gsm8k share a 13-gram with the training data.",
    ):
        assert shown in head(report(run))
    assert "| gsm8k | 200 | 3 | not recorded |" in section(report(run), "Evaluation")


def test_a_folder_that_takes_no_file_is_one_message(run: Run) -> None:
    run.page_file.mkdir()
    with pytest.raises(RunError, match="cannot be written"):
        write_report(run)
    assert not list(run.path.glob(".report*"))


@pytest.mark.slow
def test_the_command_line_writes_the_report_without_torch_and_refuses_what_is_no_run(run: Run) -> None:
    program = "import sys; from eval.report.main import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program, str(run.path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(run.report_file), str(run.page_file)]
    wrong = [sys.executable, "-m", "eval.report", "nowhere"]
    done = subprocess.run(wrong, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "holds no run.json" in done.stderr
    assert "Traceback" not in done.stderr
