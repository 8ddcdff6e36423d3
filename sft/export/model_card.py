"""Writes README.md of an exported model: how to use it, how it was trained, on what, and its scores. Read from the run's folder."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.report.charts import draw_curve
from eval.report.run_files import read_run
from sft.credentials import redact
from sft.errors import ExportError
from sft.export.gguf import GGUF
from sft.export.public import is_hub_id, public_name, public_recipe
from sft.export.serving import sampling, stop_tokens
from sft.export.source import Exported, text_config
from sft.hub.names import is_on_hub
from sft.visible import visible, visible_line

CARD, CURVE = "README.md", "loss.png"
_USE = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}"{remote})
tokenizer = AutoTokenizer.from_pretrained("{name}"{remote})
{prompt}
print(tokenizer.decode(model.generate(**ids, max_new_tokens=256)[0][ids["input_ids"].shape[1] :], skip_special_tokens=True))
```"""
_CHAT = """\
messages = [{"role": "user", "content": "Who are you?"}]
ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)"""
_TEXT = 'ids = tokenizer("Once upon a time", return_tensors="pt")'
_TOKENS = ("in", "trained", "masked", "truncated", "dropped")


def write_card(
    source: Exported, folder: Path, tokenizer: Any, license_id: str | None, repo_id: str | None = None
) -> None:
    """Write README.md, and the loss curve beside it.

    Args:
        source: The exported model.
        folder: The folder that holds it.
        tokenizer: Its tokenizer.
        license_id: Of the base, as the user gave it.
        repo_id: Its name on the hub.

    Raises:
        ExportError: The metadata is not valid.
    """
    from huggingface_hub import ModelCard

    of = read_run(source.run)
    points = [one for one in of.metrics if source.step is None or one["step"] <= source.step]
    if points:
        draw_curve(points, f"{source.title}, run {source.run.path.name}", folder / CURVE)
    lines = [
        f"# {_cell(source.title)}",
        "",
        _summary(source),
        "",
        "## Use",
        "",
        *_use(source, folder, tokenizer, repo_id),
    ]
    lines += [
        "",
        "## Training",
        "",
        *_training(source, of.record, points),
        "",
        "## Data",
        "",
        *_data(source, of.ledger),
    ]
    lines += ["", "## Evaluation", "", *_evaluation(source, of.comparison), "", "## Versions", ""]
    versions = of.record.get("versions") or {}
    lines += _table(["Package", "Version"], [[name, one] for name, one in versions.items() if one != "not installed"])
    card = redact(f"---\n{metadata(source, license_id).to_yaml()}\n---\n\n" + "\n".join(lines) + "\n")
    try:
        ModelCard(card)
    except (ValueError, TypeError) as error:
        raise ExportError(f"The card's metadata is not valid: {str(error).splitlines()[0]}") from None
    (folder / CARD).write_text(card, encoding="utf-8")


def metadata(source: Exported, license_id: str | None) -> Any:
    """The card's metadata, as far as it is known."""
    from huggingface_hub import ModelCardData

    base, recipe = source.base.name_or_path, source.recipe
    datasets = dict.fromkeys(one.path for one in recipe.sources if is_on_hub(one) and is_hub_id(one.path))
    return ModelCardData(
        base_model=base if is_hub_id(base) else None,
        datasets=list(datasets) or None,
        library_name="transformers",
        license=license_id or base_license(source),
        model_name=source.title,
        pipeline_tag="text-generation",
        tags=["sft", "trl", *(["lora"] if recipe.model.lora is not None else [])],
    )


def base_license(source: Exported) -> str | None:
    """The license in the base's own card, where that is on this machine."""
    from huggingface_hub import ModelCard, try_to_load_from_cache

    card = Path(source.base_path) / CARD
    if is_hub_id(source.base.name_or_path) and not Path(source.base_path).is_dir():
        cached = try_to_load_from_cache(source.base.name_or_path, CARD, revision=source.base.revision)
        card = Path(str(cached))
    if not card.is_file():
        return None
    try:
        found = ModelCard.load(card).data.license
    except (ValueError, TypeError, OSError):  # somebody else's card
        return None
    return found if isinstance(found, str) else None


def _cell(value: object) -> str:
    """A value as text in Markdown: neither markup nor a table's end."""
    text = html.escape(visible_line(str(value)), quote=False)
    return re.sub(r"([\\`*_{}\[\]#|])", r"\\\1", text)


def _code(value: object) -> str:
    return "`" + visible_line(str(value)).replace("`", "'").replace("|", "\\|") + "`"


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    cells = [[one if isinstance(one, _Markdown) else _cell(one) for one in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in ([*head], ["---"] * len(head), *cells)]


def _number(value: object, spec: str) -> str:
    return format(value, spec) if isinstance(value, int | float) else "not recorded"


class _Markdown(str):
    """Text that is Markdown already."""


def _summary(source: Exported) -> str:
    lora = source.recipe.model.lora
    method = "all weights" if lora is None else f"LoRA adapters of rank {lora.r}, merged"
    base = public_name(source.base.name_or_path)
    name = f"[{base}](https://huggingface.co/{base})" if is_hub_id(base) else _cell(base)
    revision = f", revision {_code(source.base.revision)}" if source.base.revision else ""
    checkpoint = f" This is its checkpoint after {source.step} steps." if source.step is not None else ""
    return f"{name}{revision}, supervised fine-tuning ({method}).{checkpoint}"


def _use(source: Exported, folder: Path, tokenizer: Any, repo_id: str | None) -> list[str]:
    use = _USE.format(
        name=repo_id or "path/to/this/folder",
        remote=", trust_remote_code=True" if source.base.trust_remote_code else "",
        prompt=_CHAT if tokenizer.chat_template else _TEXT,
    )
    if (folder / GGUF).is_file():
        use = "```bash\nollama create my-model -f Modelfile && ollama run my-model\n```"
    rows: list[list[object]] = [
        ["Stop tokens", _Markdown(", ".join(map(_code, stop_tokens(folder, tokenizer))))],
        ["Sampling", ", ".join(f"{name} {value:g}" for name, value in sampling(folder).items())],
        ["Trained on documents of up to", f"{source.recipe.data.max_length:,} tokens"],
        ["Context length", text_config(source).get("max_position_embeddings", "not recorded")],
    ]
    return [*use.splitlines(), "", *_table(["", ""], rows)]


def _training(source: Exported, record: dict[str, Any], points: list[dict[str, Any]]) -> list[str]:
    recipe = visible(public_recipe(source.recipe))
    # Longer than any fence in the recipe, which would end this one.
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", recipe)), default=0))
    last = points[-1] if points else {}
    gpu = ((record.get("hardware") or {}).get("gpu") or {}).get("name")
    rows: list[list[object]] = [
        ["Recipe", f"{source.title}, version {source.recipe.version}"],
        ["Steps", source.step or last.get("step", "not recorded")],
        ["Last logged loss", last.get("loss", "not recorded")],
        ["Precision", source.precision],
        ["Machine", f"{record.get('ranks')} x {gpu or 'CPU'}"],
    ]
    curve = [f"![Loss and learning rate over optimizer steps]({CURVE})", ""] if points else []
    return [*curve, *_table(["", ""], rows), "", f"{fence}yaml", *recipe.splitlines(), fence]


def _data(source: Exported, ledger: dict[str, Any]) -> list[str]:
    accounts = ledger.get("sources") or []
    if not accounts:
        return [", ".join(_code(public_name(one.path)) for one in source.recipe.sources) + "; no token ledger."]
    rows = []
    for name, one in [
        *((_code(public_name(str(one.get("source")))), one) for one in accounts),
        ("all", ledger.get("total")),
    ]:
        if one and (name != "all" or len(accounts) > 1):
            tokens = one.get("tokens") or {}
            counts = [(one.get("rows") or {}).get("in", 0), *(tokens.get(fate, 0) for fate in _TOKENS)]
            rows.append([_Markdown(name), *(f"{count:,}" for count in counts)])
    head = ["Source", "Rows", "Tokens", "Trained", "Masked", "Truncated", "Dropped"]
    return [*_table(head, rows), "", "The loss is on the trained tokens."]


def _evaluation(source: Exported, comparison: dict[str, Any]) -> list[str]:
    metrics = comparison.get("metrics") or []
    if source.step is not None or not metrics:
        return [
            "Not measured." if source.step is None else "The run's evaluation is of final/, not of this checkpoint."
        ]
    rows = []
    for one in metrics:
        lower = " (lower is better)" if one.get("higher_is_better") is False else ""
        interval = "[{:+.4f}, {:+.4f}]".format(*one["interval_95"]) if one.get("interval_95") else ""
        numbers = [
            _number(one.get("base"), ".4f"),
            _number(one.get("tuned"), ".4f"),
            _number(one.get("difference"), "+.4f"),
        ]
        cells = map(_Markdown, [*numbers, interval, _cell(one.get("verdict") or "does not decide")])
        rows.append([one.get("task"), f"{one.get('metric')}{lower}", one.get("documents"), *cells])
    head = ["Task", "Metric", "Documents", "Base", "This model", "Difference", "95% interval", "Verdict"]
    limit = (comparison.get("settings") or {}).get("limit")
    lines = [
        *_table(head, rows),
        "",
        f"Base and this model were evaluated with the same settings of lm-evaluation-harness, on {limit or 'all'} documents of each task "
        f"(settings hash {_code(str(comparison.get('settings_hash', ''))[:12])}).",
    ]
    if comparison.get("note"):
        lines += ["", _cell(comparison["note"])]
    if missing := comparison.get("not_measured"):
        lines += ["", f"Not measured: {', '.join(map(_cell, missing))}."]
    return lines
