"""The models of a run that are measured or talked to, checked as far as that goes without their weights."""

from __future__ import annotations

from eval.backends import Target
from eval.reference import Reference, check_vocabulary, load_config
from sft.errors import EvaluationError
from sft.remote_code import code_hash
from sft.run_directory import Run


def _check_same_code(run: Run, record: dict[str, str]) -> None:
    """Refuse to run code that has changed since it was trained with."""
    trained = record.get("code_sha256")
    if trained is not None and code_hash(run.recipe().model, record["path"]) != trained:
        raise EvaluationError(
            f"The Python files of {record['path']} have changed since {run.path} was trained with them. Put them back: the base model must "
            "be the one that the training started from."
        )


def base_target(run: Run, trust_remote_code: bool, reference: Reference) -> Target:
    """The model that a run started from.

    Args:
        run: The run.
        trust_remote_code: The recipe's.
        reference: The tuned model, whose tokenizer asks it.

    Raises:
        EvaluationError: It cannot be loaded, is not the one that the run was trained from, or is too small for the tokenizer.
    """
    record = run.record["base_model"]
    _check_same_code(run, record)
    path, new_tokens = str(record.get("path") or record["name_or_path"]), run.recipe().model.new_tokens
    target = Target("base", path, record["revision"], trust_remote_code, new_tokens)
    config = load_config(target.model, target.revision, trust_remote_code, called=f"The base model of {run.path},")
    check_vocabulary(reference, config, target.model, new_tokens)
    return target
