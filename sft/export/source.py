"""Finds what a run exports: final/ or one of its checkpoints, checked before anything loads. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft.checkpoint.manifest import fault
from sft.checkpoint.resume import step_of
from sft.errors import ExportError
from sft.files import read_json
from sft.hub.names import has_tokenizer
from sft.program import shown_command
from sft.recipe.schema import Model, Recipe
from sft.run.directory import Run, find_run
from sft.run.trust import base_changes, check_final


@dataclass(frozen=True)
class Exported:
    """A model of a run, as it is on the disk."""

    run: Run
    recipe: Recipe
    folder: Path
    """final/, or the checkpoint."""

    step: int | None
    """The checkpoint's; None for final/."""

    base: Model
    """The recipe's section `model`, with the commit that was trained."""

    base_path: str
    """Folder, or id on the hub, of the model that training started from."""

    precision: str
    """The plan's: bf16, fp16, fp32."""

    @property
    def title(self) -> str:
        """The recipe's name."""
        return self.run.recipe_name

    @property
    def name(self) -> str:
        """recipe-run, with the checkpoint's step: safe in a path and for a server."""
        step = f"-checkpoint-{self.step}" if self.step is not None else ""
        return f"{self.title}-{self.run.path.name}{step}"

    @property
    def holds_model(self) -> bool:
        """Whether the folder loads by from_pretrained alone."""
        return (self.folder / "config.json").is_file() and any(self.folder.glob("model*.safetensors"))


def find_run_to_export(name: str) -> Run:
    """The run that the user named. Raises RunError, or ExportError where the folder is missing or a part of a run."""
    path = Path(name).expanduser()
    if not path.exists():
        raise ExportError(f"{name} does not exist. Name a run's folder, such as outputs/tiny/latest.")
    if not (path / "run.json").is_file() and (path.parent / "run.json").is_file():
        raise ExportError(
            f"{name} is part of a run. Name the run, {path.parent}, and a checkpoint with --checkpoint N."
        )
    return find_run(path)


def find_exported(run: Run, step: int | None) -> Exported:
    """The model of a checkpoint's step, or final/. Raises ExportError where it is missing, unfinished or damaged."""
    recipe, base = run.recipe(), run.record.get("base_model") or {}
    folder = _final(run) if step is None else _checkpoint(run, step)
    sharded = step is not None and not any(folder.glob("*.safetensors"))
    if not sharded and not has_tokenizer(folder):
        raise ExportError(
            f"{folder} holds no tokenizer, and it was saved with one. Put its files back, or export a checkpoint: --checkpoint N."
        )
    decided = {row["name"]: row["value"] for row in read_json(run.plan_file).get("decisions", [])}
    return Exported(
        run=run,
        recipe=recipe,
        folder=folder,
        step=step,
        base=recipe.model.model_copy(update={"revision": base.get("revision")}),
        base_path=str(base.get("path") or recipe.model.name_or_path),
        precision=str(decided.get("precision", "fp32")),
    )


def check_unchanged(source: Exported, accept: bool) -> None:
    """Refuse a model that is no longer what the training wrote; `accept` takes the user's edits of final/. Reads every byte of it.

    Raises RunError where final/ has changed, ExportError where adapters would be merged into a base that has changed.
    """
    if source.step is None:
        check_final(source.run, accept)
    elif not source.holds_model and (changes := base_changes(source.run)):
        raise ExportError(f"The base model {changes}. The adapters fit the old weights: put the base back.")


def steps_of(run: Run) -> list[int]:
    """Steps of the run's checkpoints, rising."""
    return sorted(step_of(path) for path in run.all_checkpoints())


def _final(run: Run) -> Path:
    if (run.final / "config.json").is_file() and any(run.final.glob("*.safetensors")):
        return run.final
    steps = steps_of(run)
    other = f", or export a checkpoint: --checkpoint {steps[-1]}" if steps else ""
    raise ExportError(
        f"{run.path} has no final/ (status: {run.record.get('status', 'unknown')}). Resume it with "
        f"{shown_command('sft', str(run.path))}{other}."
    )


def _checkpoint(run: Run, step: int) -> Path:
    folder = run.checkpoints / f"checkpoint-{step}"
    if not folder.is_dir():
        raise ExportError(
            f"--checkpoint {step}: {folder} does not exist. There are: {', '.join(map(str, steps_of(run))) or 'none'}."
        )
    if why := fault(folder):
        raise ExportError(f"{folder} is damaged: {why}. Export another checkpoint, or final/.")
    return folder


def read_config(folder: Path, name: str) -> dict[str, Any]:
    """A JSON file of a model's folder; empty if there is none. Raises ExportError where it holds no JSON object."""
    path = folder / name
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("it holds no JSON object")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ExportError(f"{path} cannot be read: {error}.") from None
    return values


def text_config(source: Exported) -> dict[str, Any]:
    """config.json of the model, or of its text part; a checkpoint of adapters or shards has that of final/ or of the base.

    Raises ExportError where it is nowhere on this machine.
    """
    folders = [source.folder, source.run.final, Path(source.base_path)]
    config = next((config for folder in folders if (config := read_config(folder, "config.json"))), None)
    if config is None:
        from transformers import PretrainedConfig

        try:
            config = PretrainedConfig.get_config_dict(source.base_path, revision=source.base.revision)[0]
        except OSError:
            raise ExportError(
                f"The config.json of {source.base_path} is not on this machine. Download the model (hf download) and export again."
            ) from None
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, dict) else config
