"""The models of a run that are measured or talked to, checked as far as that goes without their weights."""

from __future__ import annotations

from pathlib import Path

from eval.models.backends import Target
from eval.reference import Reference, check_vocabulary, load_config
from sft.errors import EvaluationError, did_you_mean
from sft.hub.remote_code import code_hash
from sft.run.directory import Run


def check_folder(named: str) -> None:
    """Refuse what can only have been meant as a folder, and is none: asking the hub for it would tell of something else.

    Args:
        named: A folder, or an id on the hub such as Qwen/Qwen2.5-0.5B.

    Raises:
        EvaluationError: There is no such folder, or it is a recipe.
    """
    path = Path(named).expanduser()
    if path.is_dir():
        return
    if path.suffix in (".yaml", ".yml"):
        raise EvaluationError(
            f"{named} is a recipe, and a recipe is trained by scripts/sft.sh. Name its run: outputs/<run>/latest."
        )
    local = named.startswith((".", "~", "outputs/")) or path.is_absolute() or len(path.parts) > 2
    # A folder named as a hub's organisation may well be here; one with runs in it is none.
    if local or path.is_file() or (len(path.parts) == 2 and (path.parent / "latest").is_symlink()):
        beside = [folder.name for folder in sorted(path.parent.glob("*/"))] if path.parent.is_dir() else []
        hint = did_you_mean(path.name, beside, ".")
        raise EvaluationError(f"There is no folder {path}{hint} Name a run's folder, a model's, or an id on the hub.")


def _check_same_code(run: Run, record: dict[str, str]) -> None:
    """Refuse to run code that has changed since it was trained with."""
    trained = record.get("code_sha256")
    if trained is not None and code_hash(run.recipe().model, record["path"]) != trained:
        raise EvaluationError(
            f"The Python files of {record['path']} have changed since {run.path} was trained with them. Put them back: the base model must "
            "be the one that the training started from."
        )


def recorded_base(run: Run) -> Target:
    """The model that a run started from, as it is on record; nothing of it is read but its code.

    Raises:
        EvaluationError: Its code is not what the run was trained with.
    """
    model, record = run.recipe().model, run.record["base_model"]
    _check_same_code(run, record)
    path = str(record.get("path") or record["name_or_path"])
    return Target("base", path, record["revision"], model.trust_remote_code, model.new_tokens)


def base_target(run: Run, reference: Reference) -> Target:
    """The model that a run started from.

    Args:
        run: The run.
        reference: The tuned model, whose tokenizer asks it.

    Raises:
        EvaluationError: It cannot be loaded, is not the one that the run was trained from, or is too small for the tokenizer.
    """
    target = recorded_base(run)
    config = load_config(
        target.model, target.revision, target.trust_remote_code, called=f"The base model of {run.path},"
    )
    check_vocabulary(reference, config, target.model, target.new_tokens)
    return target
