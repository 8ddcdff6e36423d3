from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eval.report.html import as_html
from eval.report.main import make_page, write_report
from eval.report.markdown import as_markdown
from eval.report.results import read_run
from sft.errors import RunError
from sft.files import read_json, write_json
from sft.run.directory import Run
from tests.eval.runs import COMPARISON, METRIC, add_answers, answer, flip, full_run, point, prompt


def report(run: Run) -> str:
    return as_markdown(make_page(read_run(run)))


def section(text: str, name: str) -> str:
    return text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]


def test_a_full_run_is_reported_with_nothing_missing(tmp_path: Path) -> None:
    text = report(full_run(tmp_path / "run"))
    for shown in (
        "# mine, run run",
        "`org/model`, revision `v1`",
        "LoRA adapters: rank 8, alpha 32",
        "mine, version 3",
        "| Last logged step | 100 |",
        "| Loss at the first logged step | 2.0000 |",
        "| Loss at the last logged step | 0.2000 |",
        "| Tokens per second, mean after the first logged step | 559 |",
        "| Time of a step, p50 and p90 | 1.500 s, 2.250 s |",
        "| Time to train | 1 h 2 min 5 s |",
        "1,420 tokens in; trained + masked + truncated + dropped = 1,420.",
        "12 packs, 98.5% full; 44 tokens of padding",
        "8 x NVIDIA H100 (80 GiB)",
        "`c0ffee`, with changes that no commit holds",
        "bash scripts/sft.sh recipes/mine.yaml train.seed=1 'eval.tasks=[gsm8k]'",
    ):
        assert shown in text


def test_the_evaluation_shows_both_scores_the_difference_and_its_interval(tmp_path: Path) -> None:
    scores = "1,319 | 0.5000 ± 0.0100 | 0.6250 | +0.1250 | 0.0200 | [+0.0858, +0.1642]"
    assert (
        f"| gsm8k | exact_match, strict-match | {scores} | better |"
        in section(report(full_run(tmp_path / "run")), "Evaluation").splitlines()
    )


def test_an_incomplete_evaluation_names_what_was_not_measured(tmp_path: Path) -> None:
    run = full_run(tmp_path / "run")
    write_json(run.comparison_file, COMPARISON | {"complete": False, "not_measured": {"arc_easy": "KeyError: 'x'"}})
    text = section(report(run), "Evaluation")
    assert "**The evaluation is incomplete. Not measured:**" in text
    assert "- arc_easy: KeyError: 'x'" in text
    assert "+0.1250" in text


def test_an_evaluation_that_did_not_happen_is_told_with_the_command_for_it(tmp_path: Path) -> None:
    run = full_run(tmp_path / "run")
    run.comparison_file.unlink()
    text = section(report(run), "Evaluation")
    assert "There is no comparison of base and tuned" in text
    assert f"There is no tuned model yet. To go on with the training: `bash scripts/sft.sh {run.path}`" in text
    write_json(run.final / "config.json", {})
    assert f"To measure what is missing: `bash scripts/eval.sh {run.path}`" in section(report(run), "Evaluation")


def test_a_recipe_without_evaluation_says_so(tmp_path: Path) -> None:
    run = full_run(tmp_path / "run")
    run.comparison_file.unlink()
    run.update(overrides=["eval.tasks=[]"])
    assert "The recipe asks for no evaluation" in section(report(run), "Evaluation")


def test_chat_samples_that_nobody_asked_for_are_not_missing(tmp_path: Path) -> None:
    run = full_run(tmp_path / "run")
    assert "eval/chat.json` is missing" in section(report(run), "Chat samples")
    run.update(overrides=["eval.chat=false"])
    assert "## Chat samples" not in report(run)


def test_a_bar_in_a_value_does_not_break_a_table(tmp_path: Path) -> None:
    text = report(full_run(tmp_path / "run"))
    assert r"auto: the GPU\|it has it" in text
    assert r"a\|b.jsonl" in text
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    bars = [{line.replace(r"\|", "").count("|") for line in lines} for lines in tables]
    assert len(tables) == 9
    assert all(len(different) == 1 for different in bars)


def test_the_last_logged_step_stands_beside_the_planned_number(tmp_path: Path) -> None:
    run = full_run(tmp_path / "run")
    write_json(run.plan_file, {"decisions": [{"name": "max_steps", "value": 105, "reason": "the recipe"}]})
    assert "| Last logged step | 100 of 105 |" in section(report(run), "Training")


def test_the_curve_is_an_image_beside_the_report(tmp_path: Path) -> None:
    run = full_run(tmp_path / "run")
    assert "](loss.png)" in write_report(run).read_text()
    assert (run.path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "lines",
    [
        [point(1, 2.0)],
        [point(step, float("nan") if step % 7 == 0 else 2.0) for step in range(1, 300)],
        [{"step": 1}],
        [point(1, 2.0) | {"loss": None, "tokens_per_second": None}],
    ],
    ids=["one point", "many with gaps", "step alone", "nulls"],
)
def test_a_curve_is_drawn_of_whatever_was_logged(lines: list[dict[str, Any]], tmp_path: Path) -> None:
    run = full_run(tmp_path / "run")
    run.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_report(run)
    assert (run.path / "loss.png").stat().st_size > 0


def test_a_line_cut_off_by_a_kill_is_left_out_and_a_repeated_step_counts_once(tmp_path: Path) -> None:
    run = full_run(tmp_path / "run")
    lines = [json.dumps(point(step, loss)) for step, loss in ((1, 3.0), (2, 2.0), (2, 1.0))]
    run.metrics_file.write_text("\n".join([*lines, '{"step": 3, "lo']))
    text = section(report(run), "Training")
    assert "| Last logged step | 2 |" in text
    assert "| Loss at the last logged step | 1.0000 |" in text


@pytest.mark.parametrize("missing", ["recipe.yaml", "plan.json", "ledger.json", "metrics.jsonl", "run.json", "final"])
@pytest.mark.parametrize("broken", [None, "", "[]", '{"decisions": 3, "sources": [1], "git": [], "timings": 2}'])
def test_a_missing_or_broken_piece_is_no_crash(missing: str, broken: str | None, tmp_path: Path) -> None:
    run = full_run(tmp_path / "run")
    piece = run.path / missing
    if piece.is_dir():
        piece.rmdir()
    else:
        piece.unlink()
    if broken is not None:
        piece.write_text(broken)
    page = make_page(read_run(run))
    assert as_markdown(page).count("\n## ") == as_html(page).count("\n<h2>") == 10


def test_an_empty_folder_gives_a_report_of_what_is_missing(tmp_path: Path) -> None:
    text = report(Run(tmp_path))
    for told in (
        "has no status on record",
        "`plan.json`, is missing",
        "`ledger.json`, is missing",
        "There is no loss curve",
    ):
        assert told in text
    assert not (tmp_path / "loss.png").exists()


def test_a_failed_run_begins_with_its_error(tmp_path: Path) -> None:
    run = full_run(tmp_path / "run")
    run.update(status="failed", error="RuntimeError: out of <memory>")
    head = report(run).partition("\n## ")[0]
    assert "**The run failed; this is what it had recorded by then.**\n\n- RuntimeError: out of \\<memory>\n" in head


def test_a_ledger_that_does_not_add_up_is_told(tmp_path: Path) -> None:
    run = full_run(tmp_path / "run")
    ledger = json.loads(run.ledger_file.read_text())
    ledger["total"]["tokens"]["masked"] += 1
    write_json(run.ledger_file, ledger)
    assert "**The ledger does not add up:** 1,420 tokens in" in report(run)


@pytest.mark.slow
def test_the_report_is_written_again_from_the_command_line_without_torch(tmp_path: Path) -> None:
    run = full_run(tmp_path / "run")
    program = "import sys; from eval.report.main import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program, str(run.path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(run.report_file), str(run.page_file)]


@pytest.mark.slow
def test_a_wrong_command_line_is_one_message_and_status_2() -> None:
    words = [sys.executable, "-m", "eval.report", "nowhere"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "holds no run.json" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_of_several_sessions_lists_them(tmp_path: Path) -> None:
    run = full_run(tmp_path / "run")
    assert "sessions" not in section(report(run), "Environment")
    killed = {"started": "10:00", "checkpoint": None, "status": "killed", "last_step": 23, "ranks": 2, "seconds": 61.0}
    last = {"started": "11:00", "checkpoint": "checkpoint-20", "status": "finished", "ranks": 4, "seconds": None}
    run.update(sessions=[killed, last | {"last_step": 100, "changes": {"train.max_steps": [50, 100]}}])
    shown = section(report(run), "Environment")
    assert "It was trained in 2 sessions:" in shown
    assert "| 10:00 | the first step | killed | 23 | 2 | 1 min 1 s | nothing |" in shown
    assert "| 11:00 | checkpoint-20 | finished | 100 | 4 | not recorded | `train.max_steps` |" in shown


def head(text: str) -> str:
    return text.partition("\n## ")[0]


DECIDED = METRIC | {"test": "mcnemar", "p_value": 0.0004, "p_adjusted": 0.002, "verdict": "IMPROVED"}


def test_the_verdict_comes_first_and_names_what_got_worse(tmp_path: Path) -> None:
    run = full_run(tmp_path / "run")
    worse = DECIDED | {"task": "ifeval", "verdict": "REGRESSED", "difference": -0.2, "interval_95": [-0.3, -0.1]}
    overall = {
        "difference": 0.02,
        "interval_95": [0.01, 0.03],
        "p_value": 0.01,
        "verdict": "IMPROVED",
        "tasks": ["a", "b"],
    }
    metrics = [DECIDED, worse, DECIDED | {"task": "b"}, DECIDED | {"task": "c", "verdict": "NO EVIDENCE"}]
    write_json(run.comparison_file, COMPARISON | {"metrics": metrics, "overall": overall, "note": "Holm."})
    text = report(run)
    assert "**IMPROVED: +0.0200 over 2 tasks, 95% interval [+0.0100, +0.0300]**" in head(text)
    assert "- Of 4 metrics: 1 REGRESSED, 2 IMPROVED, 1 NO EVIDENCE." in head(text)
    assert "- REGRESSED: ifeval, exact_match, strict-match: 0.5000 → 0.6250 (-0.2000" in head(text)
    assert "Holm." in section(text, "Evaluation")
    assert "| 0.0004 | 0.002 | mcnemar | REGRESSED |" in section(text, "Evaluation")


def test_a_gate_that_failed_says_why_at_the_top(tmp_path: Path) -> None:
    run = full_run(tmp_path / "run")
    gate = {"asked": {"max_regression": {"ifeval": 0.02}}, "passed": False, "failures": ["ifeval fell by 0.1."]}
    write_json(run.comparison_file, COMPARISON | {"gate": gate})
    assert "**The gate failed**\n\n- ifeval fell by 0.1.\n" in head(report(run))
    write_json(run.comparison_file, COMPARISON | {"gate": gate | {"passed": True, "failures": []}})
    assert "**The gate passed**" in head(report(run))
    assert "- Asked: worse by at most 0.02 on ifeval; judged by the scores alone.\n" in head(report(run))


def test_what_the_answers_were_generated_with_is_what_a_reader_wants(tmp_path: Path) -> None:
    run = full_run(tmp_path / "run")
    add_answers(run, [prompt("Why?", answer("because"), answer("so"))], [])
    assert "Both answered with greedy decoding." in section(report(run), "Chat samples")
    chat = read_json(run.comparison_file.parent / "chat.json")
    chat["generation"] = {
        "pad_token_id": 0,
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.8,
        "max_new_tokens": 512,
        "chat_template": "the tuned model's",
    }
    write_json(run.comparison_file.parent / "chat.json", chat)
    told = (
        "Both answered with sampling (temperature 0.7, top_p 0.8), at most 512 tokens, the tuned model's chat template."
    )
    assert told in section(report(run), "Chat samples")


def test_documents_that_were_trained_on_are_counted(tmp_path: Path) -> None:
    run = full_run(tmp_path / "run")
    assert "was not looked for" in section(report(run), "Evaluation")
    found = {"ngram": 13, "tasks": {"gsm8k": {"documents": 200, "found": 3}}}
    write_json(run.comparison_file, COMPARISON | {"contamination": found})
    text = report(run)
    assert "- 3 of 200 documents of gsm8k share 13 words in a row with the training data." in head(text)
    assert "| gsm8k | 200 | 3 | 1.5% | not recorded | not recorded |" in section(text, "Evaluation")
    clean = {f"mmlu_{number}": {"documents": 200, "found": 0, "too_short": 0} for number in range(10)}
    write_json(run.comparison_file, COMPARISON | {"contamination": found | {"tasks": found["tasks"] | clean}})
    text = section(report(run), "Evaluation")
    assert ("10 more tasks" in text, "mmlu_" in text) == (True, False)
    write_json(run.comparison_file, COMPARISON | {"contamination": found | {"tasks": clean}})
    assert "No document of the tasks shares 13 words" in section(report(run), "Evaluation")


def test_what_is_easily_overlooked_stands_at_the_top(tmp_path: Path) -> None:
    run = full_run(tmp_path / "run")
    add_answers(run, [prompt("?", answer("a"), answer("b b b", False, True))], [])
    write_json(run.comparison_file, COMPARISON | {"prompts_cut": ["longbench"]})
    run.update(nonfinite=[{"step": 7, "answer": "skip"}], sessions=[{"passed_over": {"checkpoint-9": "damaged"}}])
    run.warn("plan", "few steps", "a|b")
    told = head(report(run))
    for words in (
        "- few steps",
        "- a\\|b",
        "context: longbench",
        "did not all end",
        "not finite at 1 step",
        "40 of 1,420 tokens",
        "checkpoint-9",
    ):
        assert words in told


def test_markdown_has_the_counts_of_answers_and_flips_and_says_where_the_words_are(tmp_path: Path) -> None:
    run = full_run(tmp_path / "run")
    flips = [flip(number, "gained") for number in range(3)] + [flip(9, "lost")]
    add_answers(run, [prompt("Why?", answer("because"), answer("so"))], flips)
    write_json(run.comparison_file, COMPARISON | {"flips": {"gsm8k": {"metric": "acc", "gained": 3, "lost": 1}}})
    text = report(run)
    assert "| tuned | 1 | 1 | 0 | 1 | no |" in section(text, "Chat samples")
    assert "| gsm8k | acc | 3 | 1 |" in section(text, "Documents that flipped")
    assert "`eval/flips.jsonl`" in section(text, "Documents that flipped")
    assert "because" not in text
    assert "Measured 2 times, in 4.0 s together." in section(text, "Evaluation during training")


@pytest.mark.parametrize("name", ["chat.json", "flips.jsonl", "during.jsonl", "comparison.json"])
@pytest.mark.parametrize(
    "broken", ["", "[]", '{"a', '{"checks": 1, "prompts": [{"messages": 3, "base": []}], "flips": 4}\n']
)
def test_a_broken_evaluation_file_is_no_crash(name: str, broken: str, tmp_path: Path) -> None:
    run = full_run(tmp_path / "run")
    add_answers(run, [prompt("?", answer("a"), answer("b"))], [flip(1, "lost")])
    (run.comparison_file.parent / name).write_text(broken)
    assert as_html(make_page(read_run(run))).startswith("<!doctype html>")


def test_any_value_may_be_of_another_kind(tmp_path: Path) -> None:
    run = full_run(tmp_path / "run")
    for value in (None, 3, "x", [], {}, [3], {"a": 1}, True):
        run.update(
            warnings=value,
            sessions=value,
            nonfinite=value,
            overrides=value,
            git=value,
            hardware=value,
            recipe=value,
            started=value,
        )
        keys = (
            "metrics",
            "gate",
            "overall",
            "contamination",
            "flips",
            "not_measured",
            "prompts_cut",
            "settings",
            "versions",
        )
        write_json(run.comparison_file, COMPARISON | dict.fromkeys(keys, value))
        metric = dict.fromkeys(METRIC, value)
        assert as_html(make_page(read_run(run)))
        write_json(run.comparison_file, COMPARISON | {"metrics": [metric], "gate": {"failures": value, "asked": value}})
        assert as_html(make_page(read_run(run)))


def test_a_folder_that_takes_no_file_is_one_message(tmp_path: Path) -> None:
    run = full_run(tmp_path / "run")
    run.page_file.mkdir()
    with pytest.raises(RunError, match="cannot be written"):
        write_report(run)
    assert not list(run.path.glob(".report*"))
