"""Name the models to measure, and check them as far as that goes without their weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eval.models.served import Served
from eval.tasks.reference import Reference, check_vocabulary, load_config
from sft.errors import EvaluationError
from sft.hub.remote_code import code_hash
from sft.program import shown_command
from sft.run.directory import Run


@dataclass(frozen=True)
class Target:
    """A model to measure."""

    label: str
    """How lines on the terminal begin: base, tuned."""

    model: str
    """A folder or an id on the hub."""

    revision: str | None = None
    trust_remote_code: bool = False

    new_tokens: tuple[str, ...] = ()
    """Tokens that the tokenizer has beside the model's own: they get the embeddings that training started from."""

    served: Served | None = None
    """Where a server has it."""


def check_folder(named: str) -> None:
    """Refuse a path that is no folder: taken for a name on the hub, it would get a misleading answer."""
    path = Path(named).expanduser()
    if path.is_dir():
        return
    if path.suffix in (".yaml", ".yml"):
        raise EvaluationError(
            f"{named} is a recipe, and a recipe is trained by `{shown_command('sft', named)}`. Name its run: outputs/<run>/latest."
        )
    if named.startswith((".", "~", "outputs/")) or path.is_absolute() or len(path.parts) > 2:
        raise EvaluationError(f"There is no folder {path}. Name a run's folder, a model's, or an id on the hub.")


def check_trained(run: Run, instead: str = "Finish its training first.") -> None:
    """Refuse a run without its final model."""
    if not (run.final / "config.json").is_file():
        raise EvaluationError(f"{run.path} has no final model (status: {run.record.get('status')}). {instead}")


def recorded_base(run: Run) -> Target:
    """The model that a run started from, as run.json records it; its code must be what training ran."""
    model, record = run.recipe().model, run.record["base_model"]
    trained = record.get("code_sha256")
    if trained is not None and code_hash(model, record["path"]) != trained:
        raise EvaluationError(
            f"The Python files of {record['path']} have changed since {run.path} was trained with them. Put them back: the base model must "
            "be the one that the training started from."
        )
    path = str(record.get("path") or record["name_or_path"])
    return Target("base", path, record["revision"], model.trust_remote_code, model.new_tokens)


def base_target(run: Run, reference: Reference) -> Target:
    """The model that a run started from; it must load, and be large enough for the tuned model's tokenizer."""
    target = recorded_base(run)
    named = f"The base model of {run.path},"
    config = load_config(target.model, target.revision, target.trust_remote_code, named)
    check_vocabulary(reference, config, target.model, target.new_tokens)
    return target
