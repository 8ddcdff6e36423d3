"""Writes README.md of an exported model: how to use it, how it was trained, on what, and its scores. Read from the run's folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader

from eval.report.charts import draw_curve
from eval.report.formats import Code, interval, number
from eval.report.pages import markdown_text
from eval.report.run_files import read_run
from sft.credentials import redact
from sft.errors import ExportError
from sft.export.gguf import GGUF
from sft.export.public import is_hub_id, public_name, public_recipe
from sft.export.serving import sampling, stop_tokens
from sft.export.source import Exported, text_config
from sft.hub.names import is_on_hub
from sft.terminal import visible

CARD, CURVE = "README.md", "loss.png"
_FATES = ("in", "trained", "masked", "truncated", "dropped")


def write_card(
    source: Exported, folder: Path, tokenizer: Any, license_id: str | None, repo_id: str | None = None
) -> None:
    """Write README.md, and the loss curve beside it. Raises ExportError where the metadata is not valid."""
    from huggingface_hub import ModelCard

    run, recipe = read_run(source.run), visible(public_recipe(source.recipe)).rstrip()
    points = [one for one in run.metrics if source.step is None or one["step"] <= source.step]
    if points:
        draw_curve(points, f"{source.title}, run {source.run.path.name}", folder / CURVE)
    lora = source.recipe.model.lora
    values = {
        "source": source,
        "base": _base_link(public_name(source.base.name_or_path)),
        "method": "all weights" if lora is None else f"LoRA adapters of rank {lora.r}, merged",
        "gguf": (folder / GGUF).is_file(),
        "ollama": (folder / "Modelfile").is_file(),
        "place": _Markdown(repo_id or "path/to/this/folder"),
        "remote": _Markdown(", trust_remote_code=True" if source.base.trust_remote_code else ""),
        "chat": bool(tokenizer.chat_template),
        "stop_tokens": stop_tokens(folder, tokenizer),
        "sampling": sampling(folder),
        "context_length": text_config(source).get("max_position_embeddings"),
        "points": points,
        "last": points[-1] if points else {},
        "curve": _Markdown(CURVE),
        "recipe": _Markdown(recipe),
        # Longer than any fence in the recipe, which would end this one.
        "fence": _Markdown("`" * max(3, 1 + max(map(len, re.findall("`+", recipe)), default=0))),
        "accounts": _accounts(run.ledger),
        "fates": _FATES,
        "record": run.record,
        "comparison": run.comparison,
    }
    body = _environment().get_template("model_card.md.jinja").render(values)
    card = redact(f"---\n{metadata(source, license_id).to_yaml()}\n---\n\n{body}\n")
    try:
        ModelCard(card)
    except (ValueError, TypeError) as error:
        raise ExportError(f"The card's metadata is not valid: {str(error).splitlines()[0]}") from None
    (folder / CARD).write_text(card, encoding="utf-8")


def _as_markdown(value: object) -> str:
    return value if isinstance(value, _Markdown) else markdown_text(value)


def _environment() -> Environment:
    # The card is Markdown, which `finalize` escapes; escaping for HTML would spoil it.
    environment = Environment(  # noqa: S701
        loader=PackageLoader("sft.export", ""), finalize=_as_markdown, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"code": Code, "public": public_name, "number": number, "interval": interval}
    return environment


class _Markdown(str):
    """Text that is Markdown already."""


def _base_link(base: str) -> str:
    return _Markdown(f"[{base}](https://huggingface.co/{base})") if is_hub_id(base) else base


def _accounts(ledger: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of the table: a source each, and their sum."""
    sources = [(Code(public_name(str(one.get("source")))), one) for one in ledger.get("sources") or []]
    total = [("all", ledger["total"])] if len(sources) > 1 and ledger.get("total") else []
    return [
        {"name": name, "rows": (one.get("rows") or {}).get("in"), "tokens": one.get("tokens") or {}}
        for name, one in [*sources, *total]
    ]


def metadata(source: Exported, license_id: str | None) -> Any:
    """The card's metadata, as far as it is known."""
    from huggingface_hub import ModelCardData

    base, recipe = source.base.name_or_path, source.recipe
    datasets = dict.fromkeys(one.path for one in recipe.sources if is_on_hub(one) and is_hub_id(one.path))
    return ModelCardData(
        base_model=base if is_hub_id(base) else None,
        datasets=list(datasets) or None,
        library_name="transformers",
        license=license_id,
        model_name=source.title,
        pipeline_tag="text-generation",
        tags=["sft", "trl", *(["lora"] if recipe.model.lora is not None else [])],
    )
