"""The model that answers: one that lm_eval loads."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eval.placement import Placement, change_whole
from eval.quiet import first_line
from eval.settings import Settings
from sft.errors import EvaluationError

if TYPE_CHECKING:
    from lm_eval.models.huggingface import HFLM
    from transformers import PreTrainedTokenizerBase


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
    """Tokens that the tokenizer has beside the model's own: their embeddings are what the training started from."""


def load_model(target: Target, tokenizer: PreTrainedTokenizerBase, settings: Settings, placement: Placement) -> HFLM:
    """lm_eval's model, with the generation config that both models share."""
    import torch
    from transformers import GenerationConfig

    from eval.data_parallel import DataParallelHFLM

    try:
        model = DataParallelHFLM(
            pretrained=target.model,
            revision=target.revision or "main",
            tokenizer=tokenizer,
            dtype=settings.dtype,
            max_length=settings.max_length,
            batch_size=settings.batch_size,
            add_bos_token=settings.add_bos_token,
            enable_thinking=settings.enable_thinking,
            device="cuda" if torch.cuda.is_available() else "cpu",
            parallelize=placement.spread,
            trust_remote_code=target.trust_remote_code,
        )
    except Exception as error:  # missing or broken weights come as a different error from each library
        traceback.print_exc()
        raise EvaluationError(
            f"The {target.label} model {target.model} cannot be loaded: {type(error).__name__}: {first_line(error)}"
        ) from None
    if target.new_tokens:
        from sft.embeddings import embed_new_tokens

        change_whole(model.model, lambda: embed_new_tokens(model.model, tokenizer, target.new_tokens, target.model))
    # The base model's own would stop it at another token, or repeat less. Its lengths would overrule lm_eval's.
    model.model.generation_config = GenerationConfig(
        **settings.generation, eos_token_id=list(settings.stop_token_ids), pad_token_id=model.tokenizer.pad_token_id
    )
    return model
