"""What is handed over: final/ of a run, or one of its checkpoints. Whether it is there and whole is asked before anything loads.

Imports no torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft.checkpoint.manifest import fault
from sft.checkpoint.resume import Writer, checkpoints_of, step_of, writer_of
from sft.errors import ExportError
from sft.files import read_json
from sft.recipe.schema import Model, Recipe
from sft.run.directory import Run, find_run
from sft.run.trust import base_changes, check_final

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""One of them is in every folder that holds a tokenizer."""


@dataclass(frozen=True)
class Exported:
    """A model of a run, as it lies on the disk."""

    run: Run
    recipe: Recipe
    folder: Path
    """final/, or the checkpoint."""

    step: int | None
    """Of the checkpoint; None for final/."""

    writer: Writer | None
    """What wrote the checkpoint; None for final/."""

    base: Model
    """The recipe's section, with the commit that was trained."""

    base_path: str
    """Folder or id on the hub of the model that training started from."""

    precision: str
    """The plan's: bf16, fp16, fp32."""

    @property
    def name(self) -> str:
        """recipe-run, with the checkpoint's step: safe in a path and for a server."""
        step = f"-checkpoint-{self.step}" if self.step is not None else ""
        return f"{self.title}-{self.run.path.name}{step}"

    @property
    def title(self) -> str:
        """The recipe's name."""
        return self.run.recipe_name

    @property
    def adapter(self) -> Path | None:
        """The folder of the adapters; None where all weights were trained."""
        if self.recipe.model.lora is None:
            return None
        return self.folder / "adapter" if self.step is None else self.folder

    @property
    def holds_model(self) -> bool:
        """Whether the folder loads by from_pretrained alone."""
        return (self.folder / "config.json").is_file() and any(self.folder.glob("model*.safetensors"))


def find_exported(run: Run, step: int | None) -> Exported:
    """What is handed over of a run.

    Args:
        run: From find_run.
        step: Of a checkpoint; None for final/.

    Raises:
        ExportError: It is not there, not finished, or damaged.
    """
    recipe, record = run.recipe(), run.record
    folder = _final(run, record) if step is None else _checkpoint(run, step)
    in_shares = step is not None and not any(folder.glob("*.safetensors"))
    if not in_shares and not has_tokenizer(folder):
        raise ExportError(
            f"{folder} holds no tokenizer ({', '.join(TOKENIZER_FILES)}): it was saved with one, so a file was removed. Put it back, or "
            "export a checkpoint: --checkpoint N."
        )
    decided = {row["name"]: row["value"] for row in read_json(run.plan_file).get("decisions", [])}
    base = record.get("base_model") or {}
    model = recipe.model
    if model.revision != base.get("revision"):
        model = model.model_copy(update={"revision": base.get("revision")})
    found = Exported(
        run=run,
        recipe=recipe,
        folder=folder,
        step=step,
        writer=None if step is None else writer_of(folder),
        base=model,
        base_path=str(base.get("path") or model.name_or_path),
        precision=str(decided.get("precision", "fp32")),
    )
    if step is None and (found.adapter is not None and not (found.adapter / "adapter_config.json").is_file()):
        raise ExportError(
            f"{found.adapter} is missing: final/ cannot be compared with the base and its adapter without it. Export a checkpoint: "
            "--checkpoint N."
        )
    return found


def check_unchanged(source: Exported, accept: bool) -> None:
    """Refuse a model that is no longer what the training wrote. Reads every byte of it.

    Args:
        source: A checkpoint among them has been compared with its manifest already.
        accept: Whether edits of final/ are meant.

    Raises:
        RunError: final/ has changed.
        ExportError: Adapters would be merged into a base that has changed, or is gone.
    """
    if source.step is None:
        check_final(source.run, accept)
    if source.adapter is None:
        return
    if source.base_path.startswith("/") and not Path(source.base_path, "config.json").is_file():
        raise ExportError(
            f"The base model {source.base_path}, which {source.run.path} has trained adapters for, is gone. Put it back: the export is "
            "compared with the base and its adapters."
        )
    changes = base_changes(source.run)
    if changes:
        raise ExportError(f"The base model {changes}. The adapters fit the old weights. Put the base back.")


def has_tokenizer(folder: Path) -> bool:
    """Whether a tokenizer loads from a folder; transformers would make one up where none is."""
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def steps_of(run: Run) -> list[int]:
    """Of the checkpoints that are there, rising."""
    return sorted(step_of(path) for path in checkpoints_of(run))


def _final(run: Run, record: dict[str, Any]) -> Path:
    if (run.final / "config.json").is_file() and any(run.final.glob("*.safetensors")):
        return run.final
    steps = steps_of(run)
    status = record.get("status", "unknown")
    if status == "finished":
        raise ExportError(
            f"{run.final} holds no model, and the run is finished: it was removed. {_or_checkpoint(steps)}"
        )
    raise ExportError(
        f"{run.path} has no final/ yet (status: {status}). Go on with it: bash scripts/sft.sh {run.path}. {_or_checkpoint(steps)}"
    )


def _or_checkpoint(steps: list[int]) -> str:
    if not steps:
        return "It has no checkpoint either."
    return f"Or export a checkpoint: --checkpoint {steps[-1]} (there {'are' if len(steps) > 1 else 'is'}: {_listed(steps)})."


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps))


def _checkpoint(run: Run, step: int) -> Path:
    folder = run.checkpoints / f"checkpoint-{step}"
    if not folder.is_dir():
        steps = steps_of(run)
        there = f"There are: {_listed(steps)}." if steps else "The run has none."
        raise ExportError(f"--checkpoint {step}: {folder} does not exist. {there}")
    why = fault(folder)
    if why is not None:
        raise ExportError(f"{folder} is not what was written: {why}. Export another checkpoint, or final/.")
    return folder


def find_run_to_export(word: str) -> Run:
    """The run that the user named.

    Raises:
        ExportError: There is no such folder, or it is the export of a run.
        RunError: It is not a run's folder.
    """
    path = Path(word).expanduser()
    if not path.exists():
        raise ExportError(f"{word} does not exist. Name a run's folder, such as outputs/tiny/latest.")
    if path.is_dir() and not (path / "run.json").is_file() and (path.parent / "run.json").is_file():
        raise ExportError(
            f"{word} is a part of a run. Name the run: {path.parent}; a checkpoint of it by --checkpoint N."
        )
    return find_run(path)


def read_config(folder: Path, name: str) -> dict[str, Any]:
    """A JSON file of a model's folder; empty where it is not there.

    Raises:
        ExportError: It is no JSON object.
    """
    path = folder / name
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ExportError(f"{path} cannot be read: {error}.") from None
    if not isinstance(values, dict):
        raise ExportError(f"{path} cannot be read: it holds no JSON object.")
    return values
