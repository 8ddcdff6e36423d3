"""report.md: what a person reads of a run. Everything in it is read from the run's folder.

    python -m eval.report outputs/qwen3b/latest    # write it again

What the folder does not hold is said to be missing. Imports no torch.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eval.curve import draw_curve
from eval.data_report import data_section
from eval.markdown import MISSING, code, duration, facts, number, table, text
from eval.recorded import Recorded, entries, get, read_run
from eval.speed_report import speed_facts
from sft.errors import RunError, run_main
from sft.recipe import REPOSITORY, Recipe
from sft.run_directory import Run, find_run

ENDINGS = {
    "running": "has not finished; this is what it has recorded so far",
    "failed": "failed; this is what it had recorded by then",
    "interrupted": "was interrupted; this is what it had recorded by then",
}


def _title(of: Recorded) -> list[str]:
    record = of.record
    lines = [f"# {text(record.get('recipe') or of.run.path.parent.name)}, run {text(of.run.path.name)}"]
    if record.get("status") != "finished":
        ending = ENDINGS.get(str(record.get("status")), "has no status on record; this is what its folder holds")
        lines += ["", f"**The run {ending}.**" + (f" {text(record['error'])}" if record.get("error") else "")]
    return lines


def _method(recipe: Recipe | None) -> str:
    if recipe is None:
        return MISSING
    lora = recipe.model.lora
    if lora is None:
        return "all weights (full fine-tuning)"
    modules = lora.target_modules if isinstance(lora.target_modules, str) else ", ".join(lora.target_modules)
    return f"LoRA adapters: rank {lora.r}, alpha {lora.lora_alpha}, dropout {lora.lora_dropout}, on {text(modules)}"


def _what(of: Recorded) -> list[str]:
    record, base = of.record, get(of.record, "base_model")
    revision = get(base, "revision")
    sources = ", ".join(code(source.path) for source in of.recipe.sources) if of.recipe else MISSING
    return facts(
        {
            "Model": code(get(base, "name_or_path")) + (f", revision {code(revision)}" if revision else ""),
            "Trained": _method(of.recipe),
            "Data": sources,
            "Recipe": f"{text(record.get('recipe'))}, version {text(record.get('recipe_version'))}",
            "Changed on the command line": ", ".join(map(code, record.get("overrides") or [])) or "nothing",
            "Tuned model": "[final](final)" if of.run.final.is_dir() else "not saved",
        }
    )


def _scores(metrics: list[dict[str, Any]]) -> list[str]:
    rows = []
    for entry in metrics:
        name = text(entry.get("metric")) + (
            f", {text(entry['filter'])}" if entry.get("filter") not in (None, "none") else ""
        )
        scores = [
            number(entry.get(side), ".4f")
            + (f" ± {entry[f'{side}_stderr']:.4f}" if entry.get(f"{side}_stderr") is not None else "")
            for side in ("base", "tuned")
        ]
        interval = entry.get("interval_95")
        rows.append(
            [
                text(entry.get("task")),
                name + (" (lower is better)" if entry.get("higher_is_better") is False else ""),
                number(entry.get("documents")),
                *scores,
                number(entry.get("difference"), "+.4f"),
                number(entry.get("difference_stderr"), ".4f"),
                "[{:+.4f}, {:+.4f}]".format(*interval) if interval else MISSING,
                text(entry.get("verdict")),
            ]
        )
    head = ["Task", "Metric", "Documents", "Base", "Tuned", "Difference", "Standard error", "95% interval", "Verdict"]
    return table(head, rows, numbers=range(2, 8))


def _no_evaluation(of: Recorded) -> list[str]:
    if of.recipe is not None and not of.recipe.eval.tasks and of.recipe.eval.suite is None:
        return ["The recipe asks for no evaluation: `eval.tasks` is empty."]
    done = [name for name in ("base", "tuned") if (of.run.path / "eval" / name / "results.json").is_file()]
    measured = f"Measured so far: {' and '.join(done)}." if done else "Nothing has been measured."
    command = shlex.join(["python", "-m", "eval.run", str(of.run.path)])
    return [f"**There is no comparison of base and tuned.** {measured} To measure what is missing: {code(command)}."]


def _evaluation(of: Recorded) -> list[str]:
    comparison = of.comparison
    metrics = entries(comparison, "metrics")
    if not comparison:
        return _no_evaluation(of)
    lines = _scores(metrics) if metrics else ["No task was measured on both models."]
    lines += ["", "Difference is tuned - base; ± and standard errors are of the documents that were asked."]
    not_measured = comparison.get("not_measured") or {}
    if not_measured or not comparison.get("complete"):
        lines += ["", "**The evaluation is incomplete.** Not measured:", ""]
        lines += [f"- {text(task)}: {text(reason)}" for task, reason in not_measured.items()] or ["- not recorded"]
    if comparison.get("prompts_cut"):
        lines += [
            "",
            f"Prompts longer than the context lost their beginning: {', '.join(map(text, comparison['prompts_cut']))}.",
        ]
    limit = get(comparison, "settings", "limit")
    asked = f"at most {limit} documents a task" if limit else "all documents of each task"
    template = (
        "through the chat template" if get(comparison, "settings", "apply_chat_template") else "without a chat template"
    )
    settings = code(str(comparison.get("settings_hash", ""))[:12] or None)
    return [
        *lines,
        "",
        f"Both models: {asked}, {template}, in {text(get(comparison, 'settings', 'dtype'))}; settings {settings}.",
    ]


def _column(of: Recorded, key: str) -> list[float]:
    return [point[key] for point in of.metrics if isinstance(point.get(key), int | float)]


def _training(of: Recorded) -> list[str]:
    if not of.metrics:
        return ["There is no loss curve: `metrics.jsonl` holds no optimizer step."]
    loss, memory = _column(of, "loss"), _column(of, "peak_memory_gib")
    last, timings = of.metrics[-1], of.record.get("timings")
    planned = next((one.get("value") for one in of.decisions if one.get("name") == "max_steps"), None)
    rows = {
        "Last logged step": number(last["step"]) + (f" of {number(planned)}" if planned else ""),
        "Epochs": number(last.get("epoch"), ".2f"),
        "Tokens seen": number(last.get("tokens_seen"), ",.0f"),
        "Loss at the first logged step": number(loss[0] if loss else None, ".4f"),
        "Loss at the last logged step": number(loss[-1] if loss else None, ".4f"),
        "Mean loss of the training": number(of.record.get("train_loss"), ".4f"),
        **_held_out(of),
        **_faults(of),
        **speed_facts(of.metrics),
        "Peak memory of the first rank": f"{max(memory):.2f} GiB" if memory else MISSING,
        "Time to prepare the data": duration(get(timings, "prepare_seconds")),
        "Time to train": duration(get(timings, "train_seconds")),
    }
    if of.comparison:
        rows["Time to evaluate"] = duration(get(timings, "evaluate_seconds"))
    return ["![Training loss and learning rate over optimizer steps](loss.png)", "", *facts(rows)]


def _faults(of: Recorded) -> dict[str, str]:
    """What was not as it should be in the numbers, where something was."""
    rows = {}
    faults = [
        f"step {number(fault.get('step'))} ({text(fault.get('answer'))})" for fault in entries(of.record, "nonfinite")
    ]
    if faults:
        rows["Losses or gradients that were not finite"] = ", ".join(faults)
    spikes = [
        f"step {number(point['step'])} ({number(point.get('loss'), '.4f')})"
        for point in of.metrics
        if point.get("spike") is True
    ]
    if spikes:
        rows["Spikes of the loss"] = ", ".join(spikes[:10]) + (
            f" and {len(spikes) - 10} more" if len(spikes) > 10 else ""
        )
    return rows


def _held_out(of: Recorded) -> dict[str, str]:
    """The loss on rows that were not trained, where some were held out."""
    losses, before = _column(of, "held_out_loss"), of.record.get("held_out_loss_before")
    if not losses:
        return {}
    least = min(losses)
    return {
        "Loss on held-out rows, before the first step": number(before, ".4f"),
        "Loss on held-out rows, after the last": number(losses[-1], ".4f")
        + (f" (least on the way: {least:.4f})" if least < losses[-1] else ""),
    }


def _plan(of: Recorded) -> list[str]:
    if not of.decisions:
        return ["The plan, `plan.json`, is missing."]
    rows = [[code(one.get("name")), text(one.get("value")), text(one.get("reason"))] for one in of.decisions]
    return table(["Decision", "Value", "Why"], rows)


def _hardware(hardware: object) -> str:
    if not isinstance(hardware, dict):
        return MISSING
    gpu = hardware.get("gpu")
    gpus = f"{number(hardware.get('ranks'))} x {text(get(gpu, 'name'))} ({number(get(gpu, 'memory_gib'), '.0f')} GiB)"
    memory = hardware.get("cpu_memory_gib")
    machine = f"{number(hardware.get('cpu_cores'))} CPU cores" + (f", {number(memory, '.0f')} GiB" if memory else "")
    return f"{gpus if gpu else 'no GPU'}; {machine} on each machine"


def _sessions(of: Recorded) -> list[str]:
    """Where a run went on, and how each start of it ended; nothing for a run in one piece."""
    sessions = entries(of.record, "sessions")
    if len(sessions) < 2:
        return []
    rows = [
        [
            text(one.get("started")),
            text(one.get("checkpoint") or "the first step"),
            text(one.get("status")),
            number(one.get("last_step")),
            number(one.get("ranks")),
            duration(one.get("seconds")),
            ", ".join(map(code, one.get("changes") or {})) or "nothing",
        ]
        for one in sessions
    ]
    head = ["Started", "From", "Ended", "At step", "Processes", "Trained for", "Changed in the recipe"]
    return ["", f"It was trained in {len(sessions)} sessions:", "", *table(head, rows)]


def _environment(of: Recorded) -> list[str]:
    record, commit = of.record, get(of.record, "git", "commit")
    on_each = number(get(record, "hardware", "ranks_per_node"))
    rows = {
        "Hardware": _hardware(record.get("hardware")),
        "Processes": f"{number(record.get('ranks'))} ({on_each} on each machine)",
        "Git commit": code(commit) + (", with changes that no commit holds" if get(record, "git", "dirty") else ""),
        "Started": text(record.get("started")),
        "Finished": text(record.get("finished")),
    }
    versions = record.get("versions")
    if isinstance(versions, dict):
        return [
            *facts(rows),
            *_sessions(of),
            "",
            *table(["Package", "Version"], [[text(name), text(one)] for name, one in versions.items()]),
        ]
    return [*facts(rows), *_sessions(of), "", "The versions of the packages are missing."]


def _again(of: Recorded) -> list[str]:
    record = of.record
    if not record.get("recipe_path"):
        return ["The command is missing."]
    path = Path(record["recipe_path"])
    shown = path.relative_to(REPOSITORY) if path.is_relative_to(REPOSITORY) else path
    commit = get(record, "git", "commit")
    folder, script = record.get("working_directory"), "scripts/sft.sh"
    lines = [f"git checkout {commit}"] if commit else []
    if folder and shown == path:  # a recipe of the user's, whose paths start where it was called
        lines, script = [f"cd {shlex.quote(folder)}"], str(REPOSITORY / script)
        lines += [f"git -C {shlex.quote(str(REPOSITORY))} checkout {commit}"] if commit else []
    lines.append(shlex.join(["bash", script, str(shown), *map(str, record.get("overrides") or [])]))
    notes = ["The recipe as it was read: [recipe.yaml](recipe.yaml)."] if of.run.recipe_file.is_file() else []
    if get(record, "git", "dirty"):
        notes.append(
            "The working tree had changes that no commit holds, so the commit alone may not give the same result."
        )
    notes.append(
        f"Or from this folder, which tells what is no longer as it was: {code(f'bash scripts/sft.sh {of.run.path}')}."
    )
    return ["```bash", *lines, "```", "", *notes]


SECTIONS: dict[str, Callable[[Recorded], list[str]]] = {
    "Evaluation": _evaluation,
    "Training": _training,
    "Data": data_section,
    "Plan": _plan,
    "Environment": _environment,
    "To run it again": _again,
}


def write_report(run: Run) -> Path:
    """Write report.md, and loss.png beside it where there are logged steps.

    Args:
        run: Any run, finished or not.

    Returns:
        The path of report.md.

    Raises:
        RunError: The folder cannot be written.
    """
    of = read_run(run)
    lines = [*_title(of), "", *_what(of)]
    for name, section in SECTIONS.items():
        lines += ["", f"## {name}", "", *section(of)]
    try:
        if of.metrics:
            draw_curve(
                of.metrics,
                f"{of.record.get('recipe') or run.path.parent.name}, run {run.path.name}",
                run.path / "loss.png",
            )
        run.report_file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise RunError(f"The report cannot be written: {error}.") from None
    return run.report_file


def main(arguments: list[str]) -> None:
    """Write the report of the run that the only argument names."""
    if len(arguments) != 1:
        raise RunError("Name one run's folder: python -m eval.report outputs/tiny/latest")
    print(write_report(find_run(Path(arguments[0]))))


if __name__ == "__main__":
    run_main(main)
