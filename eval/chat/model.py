"""Loads a model for chatting, as its users will run it: with its chat template and the generation config saved beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.models.placement import change_whole, check_placement, place_model
from eval.models.target import Target, check_folder, check_trained, recorded_base
from eval.tasks.output import first_line
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
class ChatFormat:
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

    def text(self, ids: list[int]) -> str:
        """An answer without the token that ended it; other special tokens stay visible."""
        ended = bool(ids) and ids[-1] in self.stops
        return str(self.tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=False))

    def render(self, messages: Messages) -> list[int]:
        """A conversation as token ids, up to where the answer begins; refused where the template leaves its system turn out."""
        switches: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True, **self.thinking}
        try:
            text = str(self.tokenizer.apply_chat_template(messages, **switches))
        except Exception as error:  # templates are programs, and raise anything
            roles = ", ".join(message["role"] for message in messages)
            reason = f"refuses this conversation ({roles}): {first_line(error)}"
            raise EvaluationError(f"The chat template of {self.path} {reason}") from None
        if any(one["role"] == "system" and one["content"].strip() not in text for one in messages):
            raise EvaluationError(
                f"The chat template of {self.path} takes no system turn. Leave the system prompt out."
            )
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def load_format(reference: Reference) -> ChatFormat:
    """How a model is prompted, by what is saved beside it: it must have a chat template."""
    from transformers import GenerationConfig

    if reference.tokenizer.chat_template is None:
        raise EvaluationError(
            f"{reference.path} cannot chat: its tokenizer has no chat template. Train with model.chat_template, or name another model."
        )
    saved = reference.generation_config.to_diff_dict()
    generation = GenerationConfig(**{name: value for name, value in saved.items() if name not in LENGTH_KEYS})
    if generation.pad_token_id is None:
        generation.pad_token_id = reference.tokenizer.pad_token_id
    return ChatFormat(reference.path, reference.tokenizer, generation, context_of(reference.config))


def load_weights(target: Target, reference: Reference, chat_format: ChatFormat, evaluation: Evaluation) -> Any:
    """Load a model's weights onto one GPU, all GPUs, or the CPU, in the dtype of the evaluation."""
    import torch
    from transformers import AutoModelForCausalLM

    from sft.model.weight_checks import check_weights

    dtype: str = evaluation.dtype
    if dtype == "auto":  # None in a config is transformers' word for fp32
        dtype = str(getattr(reference.config, "dtype", None) or "float32").removeprefix("torch.")
    placement = place_model(evaluation.parallelize, 1, reference.config, dtype, target.trust_remote_code)
    called = f"The {target.label} model {target.model}"
    check_weights(target.model, target.revision, target.trust_remote_code, called)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            target.model,
            revision=target.revision,
            dtype=getattr(torch, dtype),
            trust_remote_code=target.trust_remote_code,
            device_map="auto" if placement.spread else None,
        )
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise EvaluationError(f"{called} cannot be loaded: {first_line(error)}") from None
    check_placement(model, placement)
    if not placement.spread:
        model.to("cuda" if placement.devices else "cpu")
    if target.new_tokens:
        from sft.model.new_tokens import embed_new_tokens

        tokenizer = chat_format.tokenizer
        change_whole(model, lambda: embed_new_tokens(model, tokenizer, target.new_tokens, target.model))
    return model.eval()


@dataclass(frozen=True)
class ChatModel:
    """A model to load, and how it is prompted."""

    target: Target
    reference: Reference
    evaluation: Evaluation
    adapter: Path | None = None
    """Adapters to put on it."""

    def load(self) -> tuple[Any, ChatFormat]:
        """The model, ready to answer."""
        chat_format = load_format(self.reference)
        model = load_weights(self.target, self.reference, chat_format, self.evaluation)
        if self.adapter is not None:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, str(self.adapter)).merge_and_unload()
        return model, chat_format


def find_model(
    model: str, base: bool = False, checkpoint: int | None = None, trust_remote_code: bool = False
) -> ChatModel:
    """Find the model to chat with: a folder, an id on the hub, or of a run its final model, its base or a checkpoint's step.

    Raises:
        EvaluationError: There is no such model, or the run has none yet.
    """
    path = Path(model).expanduser()
    if not path.is_dir() or (path / "config.json").is_file():
        if base or checkpoint is not None:
            raise EvaluationError(f"--base and --checkpoint are for a run's folder, and {model} is a model.")
        check_folder(model)
        model = str(path) if path.is_dir() else model
        return ChatModel(Target(model, model), load_reference(model, None, False), Evaluation())
    run = find_run(path)
    recipe = run.recipe()
    trusted = recipe.model.trust_remote_code
    check_model_code(run.path, trusted, trust_remote_code, "--trust-remote-code")
    if base and checkpoint is not None:
        raise EvaluationError("--base and --checkpoint name two models. Give one of them.")
    if checkpoint is not None:
        return _checkpoint(run, checkpoint)
    steps = _steps(run)
    check_trained(run, f"Chat with a checkpoint: --checkpoint {steps[-1]}" if steps else "Finish its training first.")
    reference = load_reference(str(run.final), None, trusted)
    tuned = Target("tuned", str(run.final), None, trusted)
    return ChatModel(recorded_base(run) if base else tuned, reference, recipe.eval)


def _steps(run: Run) -> list[int]:
    return sorted(int(folder.name.split("-")[1]) for folder in run.checkpoints.glob("checkpoint-*") if folder.is_dir())


def _checkpoint(run: Run, step: int) -> ChatModel:
    folder, recipe = run.checkpoints / f"checkpoint-{step}", run.recipe()
    trusted = recipe.model.trust_remote_code
    if not folder.is_dir():
        steps = ", ".join(map(str, _steps(run))) or "none"
        raise EvaluationError(f"{run.path} has no checkpoint of step {step}. There are: {steps}.")
    if (folder / "adapter_model.safetensors").is_file():
        from transformers import AutoTokenizer, GenerationConfig

        # A checkpoint of adapters has a tokenizer, and the base's config.
        base = recorded_base(run)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trusted)
        config = load_config(base.model, base.revision, trusted)
        generation = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
        return ChatModel(base, Reference(str(folder), config, generation, tokenizer), recipe.eval, folder)
    if not list(folder.glob("model*.safetensors")):
        raise EvaluationError(
            f"{folder} holds a shard per process (train.fsdp), not a full model. Chat with the final one, or set "
            "train.fsdp.state_dict_type=full."
        )
    target = Target(f"step {step}", str(folder), None, trusted)
    return ChatModel(target, load_reference(str(folder), None, trusted), recipe.eval)
