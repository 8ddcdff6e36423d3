"""Collects what a report shows from a run directory, as sections of blocks. Imports no torch.

Files that are missing or broken never stop the reader: the section that they belong to says what is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from eval.report.blocks import Block, Section, facts, notice, table, text
from eval.report.evaluation import chat_blocks, evaluation_blocks, flips_blocks, verdict_notices
from eval.report.formats import Code, Link, code, counted, number, words
from eval.report.run_files import RunFiles, data_names, method, model_name, value_at
from eval.report.training import during_blocks, training_blocks
from sft.data.ledger import MEANT
from sft.program import shown_command

Files = TypeVar("Files")


def collect_report(files: RunFiles) -> dict[str, Any]:
    """What report.html and report.md show."""
    return {
        "title": files.name,
        "subtitle": [block.value for block in blocks_of(_subtitle, files) if block.kind == "text"],
        "notices": [block for collect in (_status, _verdict, _attention) for block in blocks_of(collect, files)],
        "sections": sections(SECTIONS, files),
    }


def sections(collectors: dict[str, Callable[[Files], list[Block]]], files: Files) -> list[Section]:
    """The sections that have something to say."""
    found = {title: blocks_of(collect, files) for title, collect in collectors.items()}
    return [Section(title, blocks) for title, blocks in found.items() if blocks]


def blocks_of(collect: Callable[[Files], list[Block]], files: Files) -> list[Block]:
    """What a collector finds; where files do not hold what they should, a sentence that says so."""
    try:
        return collect(files)
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        problem = f"Not shown, because its files do not hold what they should ({type(error).__name__}: {error})."
        return [notice("warning", problem, [])]


def _hardware(files: RunFiles) -> str:
    if not files.at("hardware"):
        return words(None)
    memory, gpus = files.at("hardware.cpu_memory_gib"), "no GPU"
    node = f"{number(files.at('hardware.cpu_cores'))} CPU cores" + (f", {number(memory, '.0f')} GiB" if memory else "")
    if files.at("hardware.gpu"):
        gib = number(files.at("hardware.gpu.memory_gib"), ".0f")
        gpus = f"{number(files.at('hardware.ranks'))} x {words(files.at('hardware.gpu.name'))} ({gib} GiB)"
    return f"{gpus}; {node} on each node"


def _subtitle(files: RunFiles) -> list[Block]:
    started = words(files.record.get("started"))[:10]
    return [text(part) for part in (model_name(files), data_names(files), _hardware(files), started)]


def _status(files: RunFiles) -> list[Block]:
    status, error = files.record.get("status"), files.record.get("error")
    if status == "finished":
        return []
    title = f"Not finished (status: {words(status)}); this is what the run has recorded so far."
    return [notice("bad", title, [words(error)] if error else [])]


def _verdict(files: RunFiles) -> list[Block]:
    if not files.comparison:
        return [notice("plain", "Not compared with the base model", [_why_not_evaluated(files)])]
    return verdict_notices(files.comparison)


def _attention(files: RunFiles) -> list[Block]:
    """What a reader easily overlooks further down."""
    comparison = files.comparison
    lines: list[Any] = [words(message) for messages in (files.at("warnings") or {}).values() for message in messages]
    if comparison and not comparison.get("complete"):
        names = ", ".join(comparison.get("not_measured") or []) or words(None)
        lines.append(f"The evaluation is incomplete; not measured: {names}.")
    if comparison.get("prompts_cut"):
        lines.append(f"Prompts longer than the context lost their beginning: {', '.join(comparison['prompts_cut'])}.")
    contamination = comparison.get("contamination") or {}
    for task, counts in contamination.get("tasks", {}).items():
        if counts["found"]:
            shared = f"share a {contamination['ngram']}-gram with the training data"
            lines.append(f"{counts['found']:,} of {counts['documents']:,} documents of {task} {shared}.")
    if value_at(files.chat, "checks.tuned.passed") is False:
        lines.append("Some answers of the tuned model to the chat prompts did not end, were empty, or looped.")
    if faults := files.at("nonfinite"):
        lines.append(f"The loss or gradient was not finite at {counted(len(faults), 'step')}.")
    tokens = files.tokens()
    dropped = value_at(files.ledger, "total.tokens_dropped") or {}
    lost = tokens.get("truncated", 0) + sum(count for reason, count in dropped.items() if reason not in MEANT)
    if lost > 0.01 * tokens.get("in", 0):
        lines.append(f"{lost:,} of {tokens['in']:,} tokens were truncated or dropped: see Data.")
    balance, balanced = _balance(files)
    if not balanced:
        lines.append(balance)
    return [notice("warning", "Worth knowing", lines)] if lines else []


def _why_not_evaluated(files: RunFiles) -> str:
    """Why there is no comparison, and the command for it."""
    if files.recipe is not None and not files.recipe.eval.tasks and files.recipe.eval.suite is None:
        return "The recipe asks for no evaluation: eval.tasks is empty."
    script = "eval" if (files.run.final / "config.json").is_file() else "sft"
    return f"There is no comparison of base and tuned. For it: {shown_command(script, str(files.run.path))}"


def _trained(files: RunFiles) -> list[Block]:
    tokens, target_tokens = files.tokens(), words(None)
    if {"trained", "masked"} <= tokens.keys():
        target_tokens = f"{tokens['trained']:,} of {tokens['trained'] + tokens['masked']:,}"
    values = {
        "Model": model_name(files),
        "Method": method(files),
        "Data": data_names(files),
        "Target tokens, in one epoch": target_tokens,
        "Recipe": f"{words(files.at('recipe'))}, version {words(files.at('recipe_version'))}",
        "Changed on the command line": [Code(one) for one in files.at("overrides") or []] or "nothing",
    }
    saved = (
        ("The tuned model is in ", Link("final"), ".")
        if files.run.final.is_dir()
        else ("The tuned model is not saved.",)
    )
    return [facts(values), text(*saved)]


FATES = {name: name.replace("_", " ") for name in ("in", "trained", "masked", "truncated", "held_out", "dropped")}
"""What became of tokens, as ledger.json counts them."""


def _balance(files: RunFiles) -> tuple[str, bool]:
    """The token ledger's sum as a sentence, and whether it accounts for every token; a missing total breaks no promise."""
    tokens = files.tokens()
    if not FATES.keys() - {"held_out"} <= tokens.keys():
        return "The ledger has no complete total.", True
    total = sum(tokens.get(fate, 0) for fate in FATES if fate != "in")
    sentence = f"{tokens['in']:,} tokens in; trained + masked + truncated + held out + dropped = {total:,}."
    balanced = bool(tokens["in"] == total)
    return sentence if balanced else f"The ledger does not add up: {sentence}", balanced


def _data(files: RunFiles) -> list[Block]:
    """What became of every row and token, and the findings in the data."""
    ledger = files.ledger
    if not ledger.get("sources"):
        return [text("The token ledger is missing: ledger.json.")]
    accounts = [(code(one["source"]), one) for one in ledger["sources"]]
    if len(accounts) > 1:
        accounts.append(("all", ledger["total"]))
    rows = []
    for name, one in accounts:
        counts = [number(one["rows"].get(key, 0)) for key in ("in", "used", "held_out")]
        dropped = ", ".join(f"{count:,} ({reason})" for reason, count in one["rows"]["dropped"].items()) or "0"
        rows.append([name, *counts, number(one.get("share"), ".1%"), dropped])
    tokens = [[name, *(number(one["tokens"].get(fate, 0)) for fate in FATES)] for name, one in accounts]
    head = ["Source", "Rows", "Used", "Held out", "Of all tokens", "Dropped"]
    packing = ledger.get("packing")
    packed = "Not packed: one document per sequence."
    if packing:
        packed = f"Packed: {packing['packs']:,} packs, {packing['fill']:.1%} full; {packing['padding']:,} padding tokens in addition."
    findings = [
        [number(one["count"]), words(one["meaning"]), [Code(row) for row in one["rows"][:3]]]
        for one in ledger.get("findings") or []
    ]
    return [
        table(head, rows, range(1, len(head) - 1)),
        table(["Source", *(f"Tokens {name}" for name in FATES.values())], tokens, range(1, 1 + len(FATES))),
        text(f"{_balance(files)[0]} {packed}"),
        *([table(["Rows", "Finding", "First"], findings, (0,))] if findings else []),
    ]


def _plan(files: RunFiles) -> list[Block]:
    if not files.decisions:
        return [text("The plan is missing: plan.json.")]
    rows = [[code(one.get("name")), words(one.get("value")), words(one.get("reason"))] for one in files.decisions]
    return [table(["Decision", "Value", "Why"], rows)]


def _environment(files: RunFiles) -> list[Block]:
    """Machine, commit and packages."""
    uncommitted = ["with uncommitted changes"] if files.at("git.dirty") else []
    values = {
        "Hardware": _hardware(files),
        "Processes": f"{number(files.at('ranks'))} ({number(files.at('hardware.ranks_per_node'))} on each node)",
        "Git commit": [code(files.at("git.commit")), *uncommitted],
        "Started": words(files.at("started")),
        "Finished": words(files.at("finished")),
    }
    if len(sessions := files.at("sessions") or []) > 1:
        values["Sessions"] = f"{len(sessions)}; run.json has each"
    versions = [[words(name), words(one)] for name, one in (files.at("versions") or {}).items()]
    return [facts(values), table(["Package", "Version"], versions)]


def _rerun(files: RunFiles) -> list[Block]:
    """The commands that repeat the run, and its evaluation."""
    commit, path = files.at("git.commit"), str(files.run.path)
    commands = [f"git checkout {commit}"] if commit else []
    commands += [shown_command(script, path) for script in ("sft", "eval")]
    dirty = "The repository had uncommitted changes, so the commit alone may not give the same result. "
    link = [" The recipe: ", Link("recipe.yaml"), "."] if files.run.recipe_file.is_file() else []
    notes = (dirty if files.at("git.dirty") else "", "A rerun reports what has changed since.", *link)
    return [Block("commands", commands), text(*notes)]


SECTIONS: dict[str, Callable[[RunFiles], list[Block]]] = {
    "Evaluation": evaluation_blocks,
    "What was trained": _trained,
    "Chat samples": chat_blocks,
    "Documents that flipped": flips_blocks,
    "Training": training_blocks,
    "Evaluation during training": during_blocks,
    "Data": _data,
    "Plan": _plan,
    "Environment": _environment,
    "Rerun": _rerun,
}
