"""Reads the tuned model's config, tokenizer and generation config, which decide how base and tuned are prompted; no weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from eval.tasks.output import first_line
from sft.errors import EvaluationError
from sft.hub.remote_code import is_refusal

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Reference:
    """The model that decides how both are prompted: the tuned one."""

    path: str
    config: PreTrainedConfig
    generation_config: GenerationConfig
    tokenizer: PreTrainedTokenizerBase


def _not_loaded(what: str, model: str, error: Exception, remedy: str = "") -> EvaluationError:
    if is_refusal(error):
        return EvaluationError(
            f"{model} has code of its own, which is not run here. A run's models are measured with the run's model.trust_remote_code; "
            "another model with such code is not measured."
        )
    return EvaluationError(f"{what} {model} cannot be loaded: {first_line(error)}{remedy}")


def load_config(
    model: str, revision: str | None, trust_remote_code: bool, called: str = "The model"
) -> PreTrainedConfig:
    """Read a model's config: what is wrong with the model shows before its weights load.

    Raises:
        EvaluationError: There is no such model.
    """
    from transformers import AutoConfig

    if model.startswith(("/", "./", "../", "~")) and not Path(model).expanduser().is_dir():
        raise EvaluationError(f"{called} {model} cannot be loaded: there is no such folder.")
    try:
        return AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        remedy = " Name a folder that `from_pretrained` can load, or an id on the hub that this machine can reach."
        raise _not_loaded(called, model, error, remedy) from None


def load_reference(model: str, revision: str | None, trust_remote_code: bool) -> Reference:
    """Read a model's config, generation config and tokenizer; no weights.

    Raises:
        EvaluationError: One of them is missing.
    """
    from transformers import AutoTokenizer, GenerationConfig

    config = load_config(model, revision, trust_remote_code)
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise _not_loaded("The tokenizer of", model, error) from None
    # Without its files transformers makes an empty tokenizer of the model's kind and says nothing.
    if len(tokenizer.get_vocab()) <= len(tokenizer.get_added_vocab()):
        raise EvaluationError(f"The tokenizer of {model} cannot be loaded: its vocabulary is empty or missing.")
    try:
        generation_config = GenerationConfig.from_pretrained(model, revision=revision)
    except OSError:  # what transformers itself does for a model without one
        generation_config = GenerationConfig.from_model_config(config)
    return Reference(model, config, generation_config, tokenizer)


def check_vocabulary(
    reference: Reference, config: PreTrainedConfig, model: str, new_tokens: tuple[str, ...] = ()
) -> None:
    """Refuse a tokenizer that a model has too few embeddings for; `new_tokens` get theirs before the model is measured."""
    ids = reference.tokenizer.get_vocab()
    largest, rows = max(ids[token] for token in ids if token not in new_tokens), config.get_text_config().vocab_size
    if largest >= rows:
        raise EvaluationError(
            f"{model} cannot be measured with the tokenizer of {reference.path}: its largest token id is {largest}, and "
            f"the model embeds {rows} tokens. The two do not belong together."
        )


def context_of(config: PreTrainedConfig) -> int | None:
    """The model's context: tokens of prompt and answer together; None where its config does not say."""
    text = config.get_text_config()
    # The names and their order are lm_eval's: resolve_max_length.
    found = (getattr(text, name, None) for name in ("n_positions", "max_position_embeddings", "n_ctx"))
    return next((int(length) for length in found if length is not None), None)
