"""Which model a person wants to talk to, and how it is asked."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.chat.model import Asker, load_asker, load_weights
from eval.models.target import Target, check_folder, recorded_base
from eval.reference import Reference, load_config, load_reference
from sft.errors import EvaluationError
from sft.recipe.schema import Evaluation
from sft.run.directory import Run, find_run
from sft.run.trust import check_model_code


@dataclass(frozen=True)
class Chosen:
    """A model to load, and how it is asked."""

    target: Target
    reference: Reference
    evaluation: Evaluation
    adapter: Path | None = None
    """Adapters to put on it."""

    def load(self) -> tuple[Any, Asker]:
        """The model, ready to answer.

        Raises:
            EvaluationError: It has no chat template, or cannot be loaded.
        """
        asker = load_asker(self.reference)
        model = load_weights(self.target, self.reference, asker, self.evaluation)
        if self.adapter is not None:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, str(self.adapter)).merge_and_unload()
        return model, asker


def choose(arguments: argparse.Namespace) -> Chosen:
    """What the command line names.

    Args:
        arguments: `model`, `base` and `checkpoint`.

    Raises:
        EvaluationError: There is no such model, or the run has none yet.
    """
    path = Path(arguments.model).expanduser()
    if not path.is_dir() or (path / "config.json").is_file():
        if arguments.base or arguments.checkpoint is not None:
            raise EvaluationError(f"--base and --checkpoint are for a run's folder, and {arguments.model} is a model.")
        check_folder(arguments.model)
        model = str(path) if path.is_dir() else arguments.model
        return Chosen(Target(model, model), load_reference(model, None, False), Evaluation())
    run = find_run(path)
    allowed: bool = arguments.trust_remote_code
    check_model_code(run.path, run.recipe().model.trust_remote_code, allowed, "--trust-remote-code")
    if arguments.base and arguments.checkpoint is not None:
        raise EvaluationError("--base and --checkpoint name two models. Give one of them.")
    if arguments.checkpoint is not None:
        return _checkpoint(run, arguments.checkpoint)
    recipe = run.recipe()
    if not (run.final / "config.json").is_file():
        raise EvaluationError(f"{run.path} has no final model (status: {run.record.get('status')}).{_instead(run)}")
    reference = load_reference(str(run.final), None, recipe.model.trust_remote_code)
    tuned = Target("tuned", str(run.final), None, recipe.model.trust_remote_code)
    return Chosen(recorded_base(run) if arguments.base else tuned, reference, recipe.eval)


def _steps(run: Run) -> list[int]:
    return sorted(int(folder.name.split("-")[1]) for folder in run.checkpoints.glob("checkpoint-*") if folder.is_dir())


def _instead(run: Run) -> str:
    steps = _steps(run)
    return f" Talk to a checkpoint: --checkpoint {steps[-1]}" if steps else " Finish its training first."


def _checkpoint(run: Run, step: int) -> Chosen:
    folder, recipe = run.checkpoints / f"checkpoint-{step}", run.recipe()
    if not folder.is_dir():
        steps = ", ".join(map(str, _steps(run))) or "none"
        raise EvaluationError(f"{run.path} has no checkpoint of step {step}. There are: {steps}.")
    trusted = recipe.model.trust_remote_code
    if (folder / "adapter_model.safetensors").is_file():
        return Chosen(recorded_base(run), _with_adapters(run, folder), recipe.eval, folder)
    if not list(folder.glob("model*.safetensors")):
        raise EvaluationError(
            f"{folder} holds no whole model, but each process its share (train.fsdp). Talk to the final one, or set "
            "train.fsdp.state_dict_type=full."
        )
    target = Target(f"step {step}", str(folder), None, trusted)
    return Chosen(target, load_reference(str(folder), None, trusted), recipe.eval)


def _with_adapters(run: Run, folder: Path) -> Reference:
    """A checkpoint of adapters has a tokenizer, and the base's config."""
    from transformers import AutoTokenizer, GenerationConfig

    base = recorded_base(run)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=base.trust_remote_code)
    config = load_config(base.model, base.revision, base.trust_remote_code)
    generation = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return Reference(str(folder), config, generation, tokenizer)
