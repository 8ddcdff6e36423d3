"""Loads a model for chatting, as its users will run it: with its chat template and the generation config saved beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.models.placement import change_whole, check_placement, place_model
from eval.models.target import Target, check_folder, recorded_base
from eval.quiet import first_line
from eval.tasks.reference import Reference, context_of, load_config, load_reference
from eval.tasks.settings import LENGTH_KEYS
from sft.errors import EvaluationError
from sft.recipe.schema import Evaluation
from sft.run.directory import Run, find_run
from sft.run.trust import check_model_code

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Asker:
    """How models are prompted: tokenizer, chat template and generation config of the tuned one, for the base too."""

    path: str
    tokenizer: PreTrainedTokenizerBase
    generation_config: GenerationConfig
    context: int | None
    """Tokens of prompt and answer together."""

    @property
    def stops(self) -> frozenset[int]:
        """Ids of the tokens that end an answer."""
        ids = self.generation_config.eos_token_id
        return frozenset([ids] if isinstance(ids, int) else ids or [])

    @property
    def thinking(self) -> dict[str, bool]:
        """Turns reasoning off in templates that have a switch for it, as in training."""
        return {"enable_thinking": False} if "enable_thinking" in str(self.tokenizer.chat_template) else {}

    def upto_end(self, ids: list[int]) -> list[int]:
        """The new tokens up to and including the first that ends the answer; padding follows it."""
        end = next((place for place, token in enumerate(ids) if token in self.stops), len(ids))
        return ids[: end + 1]

    def text(self, ids: list[int]) -> str:
        """An answer without the token that ended it; other special tokens stay visible."""
        ended = bool(ids) and ids[-1] in self.stops
        return str(self.tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=False))

    def render(self, messages: Messages) -> list[int]:
        """A conversation as token ids, up to where the assistant speaks.

        Raises:
            EvaluationError: The template refuses it, or leaves its system turn out.
        """
        try:
            text = str(
                self.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True, **self.thinking
                )
            )
        except Exception as error:  # templates are programs, and raise anything
            raise EvaluationError(
                f"The chat template of {self.path} refuses this conversation ({_roles(messages)}): {first_line(error)}"
            ) from None
        for message in messages:
            if message["role"] == "system" and message["content"].strip() not in text:
                raise EvaluationError(
                    f"The chat template of {self.path} takes no system turn. Leave the system prompt out."
                )
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def _roles(messages: Messages) -> str:
    return ", ".join(message["role"] for message in messages)


def load_asker(reference: Reference) -> Asker:
    """How a model is prompted, by what is saved beside it.

    Raises:
        EvaluationError: It has no chat template.
    """
    from transformers import GenerationConfig

    if reference.tokenizer.chat_template is None:
        raise EvaluationError(
            f"{reference.path} cannot chat: its tokenizer has no chat template. Train with model.chat_template, or name another model."
        )
    saved = {
        name: value for name, value in reference.generation_config.to_diff_dict().items() if name not in LENGTH_KEYS
    }
    generation = GenerationConfig(**saved)
    if generation.pad_token_id is None:
        generation.pad_token_id = reference.tokenizer.pad_token_id
    return Asker(reference.path, reference.tokenizer, generation, context_of(reference.config))


def load_weights(target: Target, reference: Reference, asker: Asker, evaluation: Evaluation) -> Any:
    """Load a model's weights onto one GPU, all GPUs, or the CPU.

    Args:
        target: The model.
        reference: Has its config.
        asker: Has the tokenizer, for new tokens.
        evaluation: Its dtype and parallelize.

    Raises:
        EvaluationError: It cannot be loaded, or fits nowhere.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from sft.model.weight_checks import check_weights

    config = reference.config
    # None in a config is transformers' word for fp32.
    dtype = (
        str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
        if evaluation.dtype == "auto"
        else evaluation.dtype
    )
    placement = place_model(evaluation.parallelize, 1, config, dtype, target.trust_remote_code)
    check_weights(target.model, target.revision, target.trust_remote_code, f"The {target.label} model {target.model}")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            target.model,
            revision=target.revision,
            dtype=getattr(torch, dtype),
            trust_remote_code=target.trust_remote_code,
            device_map="auto" if placement.spread else None,
        )
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise EvaluationError(
            f"The {target.label} model {target.model} cannot be loaded: {first_line(error)}"
        ) from None
    check_placement(model, placement)
    if not placement.spread:
        model.to("cuda" if placement.devices else "cpu")
    if target.new_tokens:
        from sft.model.new_tokens import embed_new_tokens

        change_whole(model, lambda: embed_new_tokens(model, asker.tokenizer, target.new_tokens, target.model))
    return model.eval()


@dataclass(frozen=True)
class Chosen:
    """A model to load, and how it is prompted."""

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


def choose(model: str, base: bool = False, checkpoint: int | None = None, trust_remote_code: bool = False) -> Chosen:
    """Find the model to chat with.

    Args:
        model: A run's folder, a model's, or an id on the hub.
        base: The model that the run was trained from.
        checkpoint: The step of one of the run's checkpoints.
        trust_remote_code: Whether the user allows the Python files of the run's model.

    Raises:
        EvaluationError: There is no such model, or the run has none yet.
    """
    path = Path(model).expanduser()
    if not path.is_dir() or (path / "config.json").is_file():
        if base or checkpoint is not None:
            raise EvaluationError(f"--base and --checkpoint are for a run's folder, and {model} is a model.")
        check_folder(model)
        model = str(path) if path.is_dir() else model
        return Chosen(Target(model, model), load_reference(model, None, False), Evaluation())
    run = find_run(path)
    check_model_code(run.path, run.recipe().model.trust_remote_code, trust_remote_code, "--trust-remote-code")
    if base and checkpoint is not None:
        raise EvaluationError("--base and --checkpoint name two models. Give one of them.")
    if checkpoint is not None:
        return _checkpoint(run, checkpoint)
    recipe = run.recipe()
    if not (run.final / "config.json").is_file():
        raise EvaluationError(f"{run.path} has no final model (status: {run.record.get('status')}).{_instead(run)}")
    reference = load_reference(str(run.final), None, recipe.model.trust_remote_code)
    tuned = Target("tuned", str(run.final), None, recipe.model.trust_remote_code)
    return Chosen(recorded_base(run) if base else tuned, reference, recipe.eval)


def _steps(run: Run) -> list[int]:
    return sorted(int(folder.name.split("-")[1]) for folder in run.checkpoints.glob("checkpoint-*") if folder.is_dir())


def _instead(run: Run) -> str:
    steps = _steps(run)
    return f" Chat with a checkpoint: --checkpoint {steps[-1]}" if steps else " Finish its training first."


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
            f"{folder} holds a shard per process (train.fsdp), not a whole model. Chat with the final one, or set "
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
