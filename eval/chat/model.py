"""A model that answers through a chat template, as its users will have it: with the generation config that is saved beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eval.models.placement import change_whole, check_placement, place_model
from eval.models.target import Target
from eval.quiet import first_line
from eval.reference import Reference
from eval.tasks.settings import LENGTH_KEYS
from sft.errors import EvaluationError
from sft.recipe.schema import Evaluation

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

    from eval.chat.prompts import Messages


@dataclass(frozen=True)
class Asker:
    """How models are asked: the tuned one's tokenizer, template and generation config, for the base as well."""

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
        """What the template is told of thoughts: none, where it asks, as in training."""
        return {"enable_thinking": False} if "enable_thinking" in str(self.tokenizer.chat_template) else {}

    def upto_end(self, ids: list[int]) -> list[int]:
        """The new tokens up to and including the first that ends the answer: behind it is padding."""
        end = next((place for place, token in enumerate(ids) if token in self.stops), len(ids))
        return ids[: end + 1]

    def text(self, ids: list[int]) -> str:
        """What was said, without the token that ended it. Other special tokens stay: that they were said is something to see."""
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
        except Exception as error:  # a template is a program of somebody else's
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
    """How a model is asked, by what is saved beside it.

    Raises:
        EvaluationError: It has no chat template.
    """
    from transformers import GenerationConfig

    from eval.reference import context_of

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
    """A model's weights, on one GPU, spread over all, or on the CPU.

    Args:
        target: The model.
        reference: Says how large it is, and its number format.
        asker: Has the tokenizer, for new tokens.
        evaluation: Its dtype and parallelize.

    Raises:
        EvaluationError: It cannot be loaded, or fits nowhere.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from sft.model.load import check_weights

    config = reference.config
    # None in a config is transformers' word for fp32.
    dtype = (
        str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
        if evaluation.dtype == "auto"
        else evaluation.dtype
    )
    placement = place_model(evaluation.parallelize, 1, 1, config, dtype, target.trust_remote_code)
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
