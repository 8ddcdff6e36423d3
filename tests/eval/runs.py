"""Folders of runs, written by hand: what a training, an evaluation and the chat leave, as their docs say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sft.files import write_json
from sft.run.directory import Run

RECIPE = """
schema_version: 1
version: 3
model: {name_or_path: org/model, lora: {r: 8}}
data: {train: [{path: a|b.jsonl}, {path: c.jsonl}]}
train: {global_batch_size: 8}
eval: {tasks: [gsm8k]}
"""
METRIC: dict[str, Any] = {
    "task": "gsm8k",
    "metric": "exact_match",
    "filter": "strict-match",
    "higher_is_better": True,
    "documents": 1319,
    "base": 0.5,
    "base_stderr": 0.01,
    "tuned": 0.625,
    "tuned_stderr": None,
    "difference": 0.125,
    "difference_stderr": 0.02,
    "interval_95": [0.0858, 0.1642],
    "verdict": "IMPROVED",
}
COMPARISON: dict[str, Any] = {
    "complete": True,
    "not_measured": {},
    "settings_hash": "0123456789abcdef",
    "settings": {"limit": None, "apply_chat_template": True, "dtype": "bfloat16"},
    "prompts_cut": [],
    "metrics": [METRIC],
}


def point(step: int, loss: float) -> dict[str, Any]:
    return {
        "step": step,
        "epoch": step / 100,
        "loss": loss,
        "learning_rate": 1e-5,
        "tokens_seen": 1000 * step,
        "tokens_per_second": 500.0 + step,
        "labelled_tokens_per_second": 100.0,
        "mfu": 0.4,
        "step_seconds_p50": 1.5,
        "step_seconds_p90": 2.25,
        "data_seconds": 0.5,
        "peak_memory_gib": 1.5,
    }


def account(rows: int, trained: int, masked: int) -> dict[str, Any]:
    tokens = {"in": trained + masked + 20, "trained": trained, "masked": masked, "truncated": 0, "dropped": 20}
    return {"rows": {"in": rows + 1, "used": rows, "dropped": {"longer than 128 tokens": 1}}, "tokens": tokens}


def full_run(folder: Path) -> Run:
    run = Run(folder)
    (folder / "eval").mkdir(parents=True)
    run.final.mkdir()
    run.recipe_file.write_text(RECIPE)
    run.update(
        status="finished",
        recipe="mine",
        recipe_path="recipes/mine.yaml",
        recipe_version=3,
        overrides=["train.seed=1", "eval.tasks=[gsm8k]"],
        ranks=8,
        base_model={"name_or_path": "org/model", "revision": "v1"},
        git={"commit": "c0ffee", "dirty": True},
        versions={"torch": "2.13.0"},
        hardware={"gpu": {"name": "NVIDIA H100", "memory_gib": 80.0}, "ranks": 8, "ranks_per_node": 8, "cpu_cores": 64},
        timings={"prepare_seconds": 2.34, "train_seconds": 3725.0, "evaluate_seconds": 61.4},
        train_loss=1.75,
        started="2026-11-20T10:00:00+0000",
    )
    write_json(
        run.plan_file, {"decisions": [{"name": "precision", "value": "bf16", "reason": "auto: the GPU|it has it"}]}
    )
    sources = [{"source": "a|b.jsonl", **account(10, 700, 280)}, {"source": "c.jsonl", **account(5, 300, 100)}]
    total = account(15, 1000, 380)
    total["tokens"] |= {"in": 1420, "dropped": 40}
    total["tokens_dropped"] = {"too_long": 40}
    packing = {"packs": 12, "fill": 0.985, "padding": 44}
    write_json(run.ledger_file, {"sources": sources, "total": total, "packing": packing})
    run.metrics_file.write_text("".join(json.dumps(point(10 * step, 2 / step)) + "\n" for step in range(1, 11)))
    write_json(run.comparison_file, COMPARISON)
    return run


def answer(text: str, ended: bool = True, loops: bool = False) -> dict[str, Any]:
    return {"text": text, "tokens": len(text), "ended": ended, "empty": not text, "loops": loops}


def flip(number: int, direction: str, **values: Any) -> dict[str, Any]:
    gained = direction == "gained"
    scores = {"base_score": float(not gained), "tuned_score": float(gained)}
    words = {"question": f"Question {number}?", "target": "42", "base": "41", "tuned": "42"}
    return {"task": "gsm8k", "doc_id": number, "direction": direction} | words | scores | values


def add_answers(run: Run, prompts: list[dict[str, Any]], flips: list[dict[str, Any]]) -> None:
    """chat.json, flips.jsonl and during.jsonl."""
    checks = {"answers": len(prompts), "ended": 1, "empty": 0, "loops": 1, "passed": False}
    chat = {"generation": {"do_sample": False}, "prompts": prompts, "checks": {"base": checks, "tuned": checks}}
    folder = run.comparison_file.parent
    (folder / "chat.json").write_text(json.dumps(chat))
    (folder / "flips.jsonl").write_text("".join(json.dumps(one) + "\n" for one in flips))
    lines = [{"step": step, "seconds": 2.0, "results": {"gsm8k": {"acc,none": step / 100}}} for step in (10, 20)]
    (folder / "during.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def prompt(question: str, base: dict[str, Any], tuned: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}], "base": base, "tuned": tuned}
