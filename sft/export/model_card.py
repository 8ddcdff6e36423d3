"""README.md of what is handed over: what was trained on what and how, what came of it, and how to load it. Read from the run's folder."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sft.credentials import redact
from sft.errors import ExportError
from sft.export.generation import sampling, stop_tokens, text_config
from sft.export.gguf import GGUF
from sft.export.public import is_hub_id, public_name, public_recipe
from sft.export.source import Exported
from sft.hub.names import is_on_hub
from sft.visible import visible

CARD = "README.md"
CURVE = "loss.png"


def write_card(
    source: Exported, folder: Path, tokenizer: Any, license_id: str | None, repo_id: str | None = None
) -> None:
    """Write README.md, and the loss curve beside it.

    Args:
        source: What is handed over.
        folder: That holds the model.
        tokenizer: Its own.
        license_id: Of the base, where the user has said it.
        repo_id: Where it goes on the hub.

    Raises:
        ExportError: Its head is not valid.
    """
    from huggingface_hub import ModelCard

    from eval.report.curve import draw_curve
    from eval.report.markdown import text
    from eval.report.results import read_run

    of = read_run(source.run)
    points = [one for one in of.metrics if source.step is None or one["step"] <= source.step]
    if points:
        draw_curve(points, f"{source.title}, run {source.run.path.name}", folder / CURVE)
    sections: dict[str, Callable[[], list[str]]] = {
        "Use it": lambda: _use(source, folder, tokenizer, repo_id),
        "Training": lambda: _training(source, of, points),
        "Data": lambda: _data(source, of),
        "Evaluation": lambda: _evaluation(source, of),
        "Versions": lambda: _versions(of),
    }
    lines = [f"# {text(source.title)}", "", _summary(source)]
    for name, section in sections.items():
        lines += ["", f"## {name}", "", *section()]
    head = metadata(source, license_id)
    card = redact(f"---\n{head.to_yaml()}\n---\n\n" + "\n".join(lines) + "\n")
    try:
        ModelCard(card)
    except (ValueError, TypeError) as error:
        raise ExportError(f"The card's head is not valid: {str(error).splitlines()[0]}") from None
    (folder / CARD).write_text(card, encoding="utf-8")


def metadata(source: Exported, license_id: str | None) -> Any:
    """The head of the card, in the hub's words: only what is known."""
    from huggingface_hub import ModelCardData

    base = source.base.name_or_path
    recipe = source.recipe
    datasets = [one.path for one in recipe.sources if is_on_hub(one) and is_hub_id(one.path)]
    return ModelCardData(
        base_model=base if is_hub_id(base) else None,
        datasets=list(dict.fromkeys(datasets)) or None,
        library_name="transformers",
        license=license_id or base_license(source),
        model_name=source.title,
        pipeline_tag="text-generation",
        tags=["sft", "trl", *(["lora"] if recipe.model.lora is not None else [])],
    )


def base_license(source: Exported) -> str | None:
    """What the base's own card says, where it is on this machine."""
    from huggingface_hub import ModelCard, try_to_load_from_cache

    card: Path | None = Path(source.base_path) / CARD
    if is_hub_id(source.base.name_or_path) and not Path(source.base_path).is_dir():
        cached = try_to_load_from_cache(source.base.name_or_path, CARD, revision=source.base.revision)
        card = Path(cached) if isinstance(cached, str) else None
    if card is None or not card.is_file():
        return None
    try:
        found = ModelCard.load(card).data.license
    except (ValueError, TypeError, OSError):  # a card that somebody has written by hand
        return None
    return found if isinstance(found, str) else None


def _summary(source: Exported) -> str:
    method = (
        "all weights"
        if source.recipe.model.lora is None
        else f"LoRA adapters of rank {source.recipe.model.lora.r}, merged"
    )
    from eval.report.blocks import code
    from eval.report.markdown import line_of, text

    base = public_name(source.base.name_or_path)
    named = f"[{base}](https://huggingface.co/{base})" if is_hub_id(base) else text(base)
    revision = f", revision {line_of(code(source.base.revision))}" if source.base.revision else ""
    part = f" This is its checkpoint after {source.step} steps." if source.step is not None else ""
    return f"{named}{revision}, fine-tuned ({method}) on conversations by supervised learning.{part}"


def _use(source: Exported, folder: Path, tokenizer: Any, repo_id: str | None) -> list[str]:
    from eval.report.blocks import Line, code, facts, joined
    from eval.report.markdown import lines_of

    remote = ", trust_remote_code=True" if source.base.trust_remote_code else ""
    asked = (
        'messages = [{"role": "user", "content": "Who are you?"}]\n'
        'ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)'
        if tokenizer.chat_template
        else 'ids = tokenizer("Once upon a time", return_tensors="pt")'
    )
    most = text_config(folder).get("max_position_embeddings")
    rows: dict[str, Line] = {
        "Ends an answer": joined(list(map(code, stop_tokens(folder, tokenizer)))),
        "Sampling": ", ".join(f"{name} {value:g}" for name, value in sampling(folder).items()),
        "Trained with documents of": f"up to {source.recipe.data.max_length:,} tokens",
        "Context of the model": f"{most:,} tokens" if isinstance(most, int) else "not recorded",
    }
    name = repo_id or "path/to/this/folder"
    code_block = [
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'model = AutoModelForCausalLM.from_pretrained("{name}"{remote})',
        f'tokenizer = AutoTokenizer.from_pretrained("{name}"{remote})',
        asked,
        'print(tokenizer.decode(model.generate(**ids, max_new_tokens=256)[0][ids["input_ids"].shape[1] :], skip_special_tokens=True))',
        "```",
    ]
    if (folder / GGUF).is_file():
        code_block = ["```bash", "ollama create my-model -f Modelfile && ollama run my-model", "```"]
    return [
        *code_block,
        "",
        *lines_of(facts(rows)),
    ]


def _training(source: Exported, of: Any, points: list[dict[str, Any]]) -> list[str]:
    from eval.report.blocks import Line, facts, number
    from eval.report.markdown import lines_of
    from eval.report.results import get

    recipe = visible(public_recipe(source.recipe))
    # A text in the recipe may hold a fence, and end this one.
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", recipe)), default=0))
    record = of.record
    gpu = get(record, "hardware", "gpu", "name")
    rows: dict[str, Line] = {
        "Recipe": f"{source.title}, version {source.recipe.version}",
        "Steps": number(source.step or (points[-1]["step"] if points else None)),
        "Loss at the last logged step": number(points[-1].get("loss") if points else None, ".4f"),
        "Precision": source.precision,
        "Machine": f"{number(record.get('ranks'))} x {gpu or 'CPU'}",
    }
    return [
        *([f"![Loss and learning rate over optimizer steps]({CURVE})", ""] if points else []),
        *lines_of(facts(rows)),
        "",
        f"{fence}yaml",
        *recipe.splitlines(),
        fence,
    ]


def _data(source: Exported, of: Any) -> list[str]:
    from eval.report.blocks import Line, Table, code, joined, number
    from eval.report.markdown import line_of, lines_of
    from eval.report.results import entries, get

    accounts = entries(of.ledger, "sources")
    if not accounts:
        named = joined([code(public_name(one.path)) for one in source.recipe.sources])
        return [line_of(joined([named, "the token ledger is missing."], "; "))]
    listed: list[tuple[Line, Any]] = [(code(public_name(str(one.get("source")))), one) for one in accounts]
    listed += [("all", of.ledger.get("total") or {})] if len(accounts) > 1 else []
    rows = [
        [
            name,
            number(get(one, "rows", "in")),
            number(get(one, "rows", "used")),
            *(number(get(one, "tokens", fate)) for fate in ("in", "trained", "masked", "truncated", "dropped")),
        ]
        for name, one in listed
    ]
    head = ["Source", "Rows", "Used", "Tokens", "Trained", "Masked", "Truncated", "Dropped"]
    return [
        *lines_of(Table(head, rows, numbers=range(1, 8))),
        "",
        "Trained are the tokens that the loss was on; masked those that it was not.",
    ]


def _evaluation(source: Exported, of: Any) -> list[str]:
    from eval.report.blocks import MISSING, Table, number, words
    from eval.report.markdown import lines_of, text
    from eval.report.results import entries, get

    comparison = of.comparison
    metrics = entries(comparison, "metrics")
    if source.step is not None:
        return ["Not measured: the run's evaluation is of its end, not of this checkpoint."]
    if not metrics:
        return ["Not measured."]
    rows = [
        [
            words(one.get("task")),
            words(one.get("metric")) + (" (lower is better)" if one.get("higher_is_better") is False else ""),
            number(one.get("documents")),
            number(one.get("base"), ".4f"),
            number(one.get("tuned"), ".4f"),
            number(one.get("difference"), "+.4f"),
            "[{:+.4f}, {:+.4f}]".format(*one["interval_95"]) if one.get("interval_95") else MISSING,
            words(one.get("verdict")),
        ]
        for one in metrics
    ]
    head = ["Task", "Metric", "Documents", "Base", "This model", "Difference", "95% interval", "Verdict"]
    limit = get(comparison, "settings", "limit")
    lines = [
        *lines_of(Table(head, rows, numbers=range(2, 7))),
        "",
        f"Base and this model were measured alike by lm-evaluation-harness ({f'at most {limit}' if limit else 'all'} documents of a task; "
        f"settings `{str(comparison.get('settings_hash', ''))[:12]}`).",
    ]
    if comparison.get("note"):
        lines += ["", text(str(comparison["note"]))]
    missing = comparison.get("not_measured") or {}
    return [*lines, "", f"Not measured: {', '.join(map(text, missing))}."] if missing else lines


def _versions(of: Any) -> list[str]:
    from eval.report.blocks import Table, code, words
    from eval.report.markdown import line_of, lines_of
    from eval.report.results import get

    versions = of.record.get("versions") or {}
    commit = get(of.record, "git", "commit")
    rows = [[words(name), words(one)] for name, one in versions.items() if one != "not installed"]
    told = ["", line_of(("Commit of the program: ", code(commit), "."))] if commit else []
    return [*lines_of(Table(["Package", "Version"], rows)), *told]
