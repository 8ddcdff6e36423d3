"""Decide how a base model is prompted that has no chat template, or another one than the tuned model."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from eval.models.target import Target
from eval.tasks.output import first_line
from eval.tasks.reference import Reference
from eval.tasks.settings import Settings, template_sha256
from sft.errors import EvaluationError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Prompting:
    """How the base model is prompted."""

    settings: Settings
    tokenizer: PreTrainedTokenizerBase
    note: str | None = None
    """A sentence for the terminal and the comparison; None where base and tuned have the same template, or none is applied."""

    @property
    def record(self) -> dict[str, Any] | None:
        """For results.json and comparison.json."""
        return None if self.note is None else {"base_template": self.settings.base_template, "note": self.note}


def own_template(base: Target, needed: bool = False) -> str | dict[str, str] | None:
    """The base model's own chat template; None where it has none, or no tokenizer that can be read, unless that is needed."""
    from transformers import AutoTokenizer

    try:
        trusted = base.trust_remote_code
        tokenizer = AutoTokenizer.from_pretrained(base.model, revision=base.revision, trust_remote_code=trusted)
    except (OSError, ValueError, KeyError, ImportError) as error:
        if needed:
            raise EvaluationError(
                f"eval.base_template=own, and the tokenizer of the base model {base.model} cannot be loaded, so that its chat template is "
                f"not known: {first_line(error)} Put it beside the model, or leave eval.base_template out."
            ) from None
        return None  # the tuned model's tokenizer makes the prompts in any case
    template: str | dict[str, str] | None = tokenizer.chat_template
    return template


def prompt_base(settings: Settings, reference: Reference, template: str | dict[str, str] | None) -> Prompting:
    """Decide how the base model is prompted, given the tuned model's settings and the base model's own chat template."""
    own = settings.base_template == "own"
    if not settings.apply_chat_template:
        if own:
            raise EvaluationError(
                "eval.base_template=own, and eval.apply_chat_template=false: neither model is asked through a chat template. Leave "
                "eval.base_template out."
            )
        return Prompting(settings, reference.tokenizer)
    sha256 = None if template is None else template_sha256(template)
    if sha256 == settings.chat_template_sha256:
        return Prompting(settings, reference.tokenizer)
    if not own:
        has = "has no chat template" if template is None else "has another chat template"
        note = f"The base model {has} and was asked through the tuned model's (eval.base_template: tuned)."
        return Prompting(settings, reference.tokenizer, note)
    chat, how = (
        template is not None,
        "through its own chat template" if template is not None else "with the tasks' plain prompts",
    )
    note = (
        f"The base model was asked {how}, the tuned model through its chat template (eval.base_template: own). The comparison is of the "
        "two with these prompts, not of the weights alone."
    )
    tokenizer = copy.deepcopy(reference.tokenizer)
    tokenizer.chat_template = template
    own_settings = replace(
        settings,
        apply_chat_template=chat,
        chat_template_sha256=sha256,
        fewshot_as_multiturn=chat,
        enable_thinking=False if "enable_thinking" in str(template) else None,
        add_bos_token=False if chat else None,
    )
    return Prompting(own_settings, tokenizer, note)
