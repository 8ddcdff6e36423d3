"""Collects what a report shows from a run directory, as one dict for the templates. Imports no torch.

Files that are missing or broken never stop the reader: the part of the page that they belong to says what is missing.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from eval.report.evaluation import collect_contamination, collect_evaluation, collect_settings, collect_verdict
from eval.report.formats import Code, code, counted, duration, is_number, number, table, words
from eval.report.run_files import RunFiles, data_names, method, model_name
from eval.report.training import collect_during, collect_training
from sft.recipe.schema import REPOSITORY

Files = TypeVar("Files")
Part = dict[str, Any]
"""A part of the page: empty where there is nothing to say; only `missing` where its files are missing or broken."""

MOST_PROMPTS = 16
MOST_FLIPS = 20
"""Shown in each direction, over all tasks."""

STATUS = {
    "running": "The run has not finished; this is what it has recorded so far.",
    "failed": "The run failed; this is what it had recorded by then.",
    "interrupted": "The run was interrupted; this is what it had recorded by then.",
}


def collect_report(files: RunFiles) -> dict[str, Any]:
    """What report.html.jinja and report.md.jinja show."""
    notices = [_status, collect_verdict_notices, _attention]
    return {
        "title": files.name,
        "subtitle": guarded(_subtitle, files).get("parts", []),
        "notices": [notice for collect in notices for notice in guarded(collect, files).get("notices", [])],
        **{name: guarded(collect, files) for name, collect in PARTS.items()},
    }


def guarded(collect: Callable[[Files], Part], files: Files) -> Part:
    """A part of the page; one whose files do not hold what they should says so."""
    try:
        return collect(files)
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        problem = f"Not shown, because its files do not hold what they should ({type(error).__name__}: {error})."
        return {"missing": problem, "notices": [{"kind": "warning", "title": problem, "lines": []}]}


def hardware_name(files: RunFiles) -> str:
    """GPUs and nodes."""
    hardware = files.record.get("hardware")
    if not hardware:
        return words(None)
    gpu, memory = hardware.get("gpu"), hardware.get("cpu_memory_gib")
    node = f"{number(hardware.get('cpu_cores'))} CPU cores" + (f", {number(memory, '.0f')} GiB" if memory else "")
    if not gpu:
        return f"no GPU; {node} on each node"
    return f"{number(hardware.get('ranks'))} x {words(gpu.get('name'))} ({number(gpu.get('memory_gib'), '.0f')} GiB); {node} on each node"


def _subtitle(files: RunFiles) -> Part:
    started = words(files.record.get("started"))[:10]
    return {"parts": [model_name(files), data_names(files), hardware_name(files), started]}


def _status(files: RunFiles) -> Part:
    status = files.record.get("status")
    if status == "finished":
        return {}
    title = STATUS.get(str(status), "The run has no status on record; this is what its directory holds.")
    error = files.record.get("error")
    return {"notices": [{"kind": "bad", "title": title, "lines": [words(error)] if error else []}]}


def collect_verdict_notices(files: RunFiles) -> Part:
    """Whether the tuned model is better, and the gate."""
    if files.comparison:
        return {"notices": collect_verdict(files.comparison)}
    return {
        "notices": [{"kind": "plain", "title": "Not compared with the base model", "lines": [_not_evaluated(files)]}]
    }


def _attention(files: RunFiles) -> Part:
    """What a reader easily overlooks further down."""
    comparison, record = files.comparison, files.record
    lines: list[Any] = [words(message) for messages in (record.get("warnings") or {}).values() for message in messages]
    if comparison and not comparison.get("complete"):
        names = ", ".join(comparison.get("not_measured") or []) or words(None)
        lines.append(f"The evaluation is incomplete; not measured: {names}.")
    if comparison.get("prompts_cut"):
        lines.append(f"Prompts longer than the context lost their beginning: {', '.join(comparison['prompts_cut'])}.")
    found = comparison.get("contamination") or {}
    lines += [
        f"{counts['found']:,} of {counts['documents']:,} documents of {task} share a {found['ngram']}-gram with the training data."
        for task, counts in found.get("tasks", {}).items()
        if counts["found"]
    ]
    if (files.chat.get("checks") or {}).get("tuned", {}).get("passed") is False:
        lines.append("Some answers of the tuned model to the chat prompts did not end, were empty, or looped.")
    faults = record.get("nonfinite") or []
    if faults:
        lines.append(f"The loss or gradient was not finite at {counted(len(faults), 'step')}.")
    tokens = (files.ledger.get("total") or {}).get("tokens") or {}
    lost = tokens.get("truncated", 0) + tokens.get("dropped", 0)
    if lost > 0.01 * tokens.get("in", 0):
        lines.append(f"{lost:,} of {tokens['in']:,} tokens were truncated or dropped: see Data.")
    if adds_up(files.ledger) is False:
        lines.append(balance(files.ledger))
    damaged = [name for one in record.get("sessions") or [] for name in one.get("passed_over") or []]
    if damaged:
        lines.append(f"Damaged checkpoints that were skipped: {', '.join(damaged)}.")
    return {"notices": [{"kind": "warning", "title": "Worth knowing", "lines": lines}] if lines else []}


def _not_evaluated(files: RunFiles) -> list[str]:
    """Why there is no comparison, and the command for it."""
    if files.recipe is not None and not files.recipe.eval.tasks and files.recipe.eval.suite is None:
        return ["The recipe asks for no evaluation: eval.tasks is empty."]
    script, reason = "sft", "There is no tuned model yet. To resume the training:"
    if (files.run.final / "config.json").is_file():
        done = [name for name in ("base", "tuned") if (files.run.path / "eval" / name / "results.json").is_file()]
        measured = f"Measured so far: {' and '.join(done)}." if done else "Nothing has been measured."
        script, reason = "eval", f"{measured} To measure what is missing:"
    return [
        f"There is no comparison of base and tuned. {reason} {shlex.join(['bash', f'scripts/{script}.sh', str(files.run.path)])}"
    ]


def _evaluation(files: RunFiles) -> Part:
    if not files.comparison:
        return {"missing": _not_evaluated(files)}
    return collect_evaluation(files.comparison) | {"contamination": collect_contamination(files.comparison)}


def _trained(files: RunFiles) -> Part:
    record = files.record
    tokens = (files.ledger.get("total") or {}).get("tokens") or {}
    known = "trained" in tokens and "masked" in tokens
    facts = {
        "Model": model_name(files),
        "Method": method(files),
        "Data": data_names(files),
        "Target tokens, in one epoch": f"{tokens['trained']:,} of {tokens['trained'] + tokens['masked']:,}"
        if known
        else words(None),
        "Recipe": f"{words(record.get('recipe'))}, version {words(record.get('recipe_version'))}",
        "Changed on the command line": [Code(one) for one in record.get("overrides") or []] or "nothing",
    }
    return {"facts": facts, "final": files.run.final.is_dir()}


def _chat(files: RunFiles) -> Part:
    """Base and tuned side by side on the chat prompts."""
    if not files.chat:
        wanted = files.recipe is None or files.recipe.eval.chat
        return {"missing": "No chat samples: eval/chat.json is missing."} if wanted else {}
    if files.chat.get("skipped"):
        return {"missing": f"No prompts were answered. {files.chat['skipped']}"}
    rows = []
    for side, check in files.chat["checks"].items():
        counts = [number(check[key]) for key in ("answers", "ended", "empty", "loops")]
        rows.append([side, *counts, "yes" if check["passed"] else "no"])
    head = ["Model", "Answers", "Ended on their own", "Empty", "Looping", "Passed"]
    prompts = files.chat["prompts"]
    samples = [
        {
            "turns": [(words(turn["role"]), words(turn["content"])) for turn in one["messages"]],
            "answers": [_answer(side, one[side]) for side in ("base", "tuned")],
        }
        for one in prompts[:MOST_PROMPTS]
    ]
    return {
        "checks": table(head, rows, range(1, 5)),
        "generation": _generation(files.chat.get("generation") or {}),
        "samples": samples,
        "more": len(prompts) - len(samples),
    }


def _answer(side: str, answer: Part) -> Part:
    marks = [
        mark
        for key, bad, mark in (("ended", False, "did not end"), ("empty", True, "empty"), ("loops", True, "loops"))
        if answer[key] is bad
    ]
    return {"name": side, "text": words(answer["text"]), "marks": marks, "note": counted(answer["tokens"], "token")}


def _generation(generation: Part) -> str:
    sampling = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    given = ", ".join(f"{key} {number(generation[key])}" for key in sampling if is_number(generation.get(key)))
    decoding = f"sampling ({given})" if given else "sampling"
    shown = [decoding if generation.get("do_sample") else "greedy decoding"]
    if generation.get("max_new_tokens"):
        shown.append(f"at most {number(generation['max_new_tokens'])} tokens")
    if generation.get("chat_template"):
        shown.append(f"{generation['chat_template']} chat template")
    return ", ".join(shown)


def _flips(files: RunFiles) -> Part:
    """The documents that only one of the two models answered right, with both answers."""
    counts = files.comparison.get("flips") or {}
    if files.flips is None:
        return {"missing": "Not recorded: eval/flips.jsonl is missing."} if files.comparison else {}
    if not files.flips:
        return {"missing": "None: both models have the same documents right."}
    rows = [[task, one["metric"], number(one["gained"]), number(one["lost"])] for task, one in counts.items()]
    groups = []
    for direction in ("lost", "gained"):
        flips = [one for one in files.flips if one["direction"] == direction]
        if flips:
            shown = [_flip(one) for one in _shared_out(flips)]
            groups.append(
                {
                    "title": f"{direction.capitalize()}: {len(shown)} of {counted(len(flips), 'document')}",
                    "flips": shown,
                }
            )
    head = ["Task", "Metric", "Gained: tuned right, base wrong", "Lost: base right, tuned wrong"]
    return {"counts": table(head, rows, (2, 3)), "groups": groups}


def _shared_out(flips: list[Part]) -> list[Part]:
    """The first flips of each task, as many of each as there is room for."""
    tasks: dict[str, list[Part]] = {}
    for flip in flips:
        tasks.setdefault(flip["task"], []).append(flip)
    ranked = sorted((place, task) for task, of_task in tasks.items() for place in range(len(of_task)))[:MOST_FLIPS]
    return [tasks[task][place] for task in tasks for place, of in ranked if of == task]


def _flip(flip: Part) -> Part:
    scores = f"{number(flip['base_score'], '.4g')} → {number(flip['tuned_score'], '.4g')}"
    answers: list[Part] = [
        {"name": side, "text": words(flip[side]), "marks": [], "note": ""} for side in ("base", "tuned")
    ]
    return {
        "title": f"{flip.get('subtask') or flip['task']}, document {flip['doc_id']}: {scores}",
        "beginning": " ".join(words(flip["question"])[:80].split()),
        "turns": [("question", words(flip["question"])), ("expected", words(flip["target"]))],
        "answers": answers,
    }


FATES = {
    "in": "in",
    "trained": "trained",
    "masked": "masked",
    "truncated": "truncated",
    "held_out": "held out",
    "dropped": "dropped",
}
"""What became of tokens, as ledger.json counts them."""


def _fates(ledger: Part) -> list[str]:
    return [fate for fate in FATES if fate != "held_out" or ledger["total"]["tokens"].get("held_out")]


def adds_up(ledger: Part) -> bool | None:
    """Whether the ledger accounts for every token; None where it has no complete total."""
    tokens = (ledger.get("total") or {}).get("tokens") or {}
    if not {"in", "trained", "masked", "truncated", "dropped"} <= tokens.keys():
        return None
    whole, *parts = (tokens[fate] for fate in _fates(ledger))
    return bool(whole == sum(parts))


def balance(ledger: Part) -> str:
    """The token ledger's sum as a sentence."""
    balanced = adds_up(ledger)
    if balanced is None:
        return "The ledger has no complete total."
    tokens, (_, *fates) = ledger["total"]["tokens"], _fates(ledger)
    total = sum(tokens[fate] for fate in fates)
    sentence = f"{tokens['in']:,} tokens in; {' + '.join(FATES[fate] for fate in fates)} = {total:,}."
    return sentence if balanced else f"The ledger does not add up: {sentence}"


def _data(files: RunFiles) -> Part:
    """What became of every row and token, and the findings in the data."""
    ledger = files.ledger
    if not ledger.get("sources"):
        return {"missing": "The token ledger is missing: ledger.json."}
    accounts = [(code(one["source"]), one) for one in ledger["sources"]]
    if len(accounts) > 1:
        accounts.append(("all", ledger["total"]))
    fates = _fates(ledger)
    held_out = ["held_out"] if ledger["total"]["rows"].get("held_out") else []
    rows = []
    for name, one in accounts:
        counts = [number(one["rows"].get(key)) for key in ("in", "used", *held_out)]
        dropped = ", ".join(f"{count:,} ({reason})" for reason, count in one["rows"]["dropped"].items()) or "0"
        rows.append([name, *counts, dropped, number(one.get("share"), ".1%")])
    tokens = [[name, *(number(one["tokens"].get(fate)) for fate in fates)] for name, one in accounts]
    head = ["Source", "Rows", "Used", *["Held out" for _ in held_out], "Dropped", "Share of the tokens"]
    packing = ledger.get("packing")
    packed = "Not packed: one document per sequence."
    if packing:
        packed = f"Packed: {packing['packs']:,} packs, {packing['fill']:.1%} full; {packing['padding']:,} tokens of padding besides."
    findings = [
        [number(one["count"]), words(one["meaning"]), [Code(row) for row in one["rows"][:3]]]
        for one in ledger.get("findings") or []
    ]
    return {
        "rows": table(head, rows, [column for column in range(1, len(head)) if head[column] != "Dropped"]),
        "tokens": table(["Source", *(f"Tokens {FATES[fate]}" for fate in fates)], tokens, range(1, 1 + len(fates))),
        "balance": f"{balance(ledger)} {packed}",
        "findings": table(["Rows", "Finding", "First"], findings, (0,)) if findings else None,
    }


def _plan(files: RunFiles) -> Part:
    if not files.decisions:
        return {"missing": "The plan is missing: plan.json."}
    rows = [[code(one.get("name")), words(one.get("value")), words(one.get("reason"))] for one in files.decisions]
    return {"decisions": table(["Decision", "Value", "Why"], rows)}


def _environment(files: RunFiles) -> Part:
    """Machine, commit, packages, and the sessions of a run that was resumed."""
    record = files.record
    git = record.get("git") or {}
    on_each = number((record.get("hardware") or {}).get("ranks_per_node"))
    facts = {
        "Hardware": hardware_name(files),
        "Processes": f"{number(record.get('ranks'))} ({on_each} on each node)",
        "Git commit": [code(git.get("commit")), *(["with uncommitted changes"] if git.get("dirty") else [])],
        "Started": words(record.get("started")),
        "Finished": words(record.get("finished")),
    }
    sessions = [
        [
            words(one.get("started")),
            words(one.get("checkpoint") or "the first step"),
            words(one.get("status")),
            number(one.get("last_step")),
            number(one.get("ranks")),
            duration(one.get("seconds")),
            [Code(key) for key in one.get("changes") or []] or "nothing",
        ]
        for one in record.get("sessions") or []
    ]
    head = ["Started", "From", "Ended", "At step", "Processes", "Trained for", "Changed in the recipe"]
    versions = [[words(name), words(one)] for name, one in (record.get("versions") or {}).items()]
    return {
        "facts": facts,
        "sessions": table(head, sessions, (3, 4)) if len(sessions) > 1 else None,
        "versions": table(["Package", "Version"], versions),
    }


def _settings(files: RunFiles) -> Part:
    return collect_settings(files.comparison) if files.comparison else {}


def _rerun(files: RunFiles) -> Part:
    """The commands that repeat the run."""
    record = files.record
    if not record.get("recipe_path"):
        return {"missing": "The command is missing."}
    path, folder = Path(record["recipe_path"]), record.get("working_directory")
    git = record.get("git") or {}
    shown = path.relative_to(REPOSITORY) if path.is_relative_to(REPOSITORY) else path
    checkout = [f"checkout {git['commit']}"] if git.get("commit") else []
    script, commands = "scripts/sft.sh", [f"git {one}" for one in checkout]
    if folder and shown == path:  # a recipe outside the repository: its paths are relative to where it was started
        script = str(REPOSITORY / script)
        commands = [
            f"cd {shlex.quote(str(folder))}",
            *(f"git -C {shlex.quote(str(REPOSITORY))} {one}" for one in checkout),
        ]
    commands.append(shlex.join(["bash", script, str(shown), *map(str, record.get("overrides") or [])]))
    return {
        "commands": commands,
        "recipe": files.run.recipe_file.is_file(),
        "dirty": bool(git.get("dirty")),
        "again": Code(f"bash scripts/sft.sh {files.run.path}"),
        "measure": Code(f"bash scripts/eval.sh {files.run.path}") if files.comparison else None,
    }


PARTS: dict[str, Callable[[RunFiles], Part]] = {
    "evaluation": _evaluation,
    "trained": _trained,
    "chat": _chat,
    "flips": _flips,
    "training": collect_training,
    "during": collect_during,
    "data": _data,
    "plan": _plan,
    "environment": _environment,
    "settings": _settings,
    "rerun": _rerun,
}
