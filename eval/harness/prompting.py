"""How a base model is asked that has no chat template, or another one than the tuned model."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from eval.models.target import Target
from eval.quiet import first_line
from eval.reference import Reference
from eval.tasks.settings import Settings, template_sha256
from sft.errors import EvaluationError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Treatment:
    """How the base model is asked."""

    settings: Settings
    tokenizer: PreTrainedTokenizerBase
    told: str | None
    """A sentence for the terminal and the comparison; None where base and tuned have the same template, or none is applied."""

    def with_facts(self, loaded: dict[str, dict[str, Any]]) -> Treatment:
        """The same, with what the loaded tasks tell of themselves.

        Args:
            loaded: From `task_facts`.
        """
        return replace(self, settings=replace(self.settings, loaded=loaded))

    @property
    def own_prompts(self) -> bool:
        """Whether it is asked with other prompts than the tuned model."""
        return self.told is not None and self.settings.base_template == "own"

    @property
    def record(self) -> dict[str, Any] | None:
        """What results.json and comparison.json say of it."""
        return None if self.told is None else {"base_template": self.settings.base_template, "told": self.told}


def own_template(base: Target, needed: bool = False) -> str | dict[str, str] | None:
    """The base model's own chat template; None where it has none, or no tokenizer that can be read.

    Args:
        base: The base model.
        needed: Whether it is to be asked through it: eval.base_template=own.

    Raises:
        EvaluationError: It is, and whether there is one cannot be told.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            base.model, revision=base.revision, trust_remote_code=base.trust_remote_code
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        if needed:
            raise EvaluationError(
                f"eval.base_template=own, and the tokenizer of the base model {base.model} cannot be loaded, so that its chat template is "
                f"not known: {first_line(error)} Put it beside the model, or leave eval.base_template out."
            ) from None
        return None  # it is asked through the tuned model's tokenizer in any case
    template: str | dict[str, str] | None = tokenizer.chat_template
    return template


def treat_base(settings: Settings, reference: Reference, template: str | dict[str, str] | None) -> Treatment:
    """Decide how the base model is asked.

    Args:
        settings: How the tuned model is asked.
        reference: The tuned model.
        template: The base model's own chat template.

    Raises:
        EvaluationError: It is to be asked with its own prompts, and so is the tuned model.
    """
    if not settings.apply_chat_template:
        if settings.base_template == "own":
            raise EvaluationError(
                "eval.base_template=own, and eval.apply_chat_template=false: neither model is asked through a chat template. Leave "
                "eval.base_template out."
            )
        return Treatment(settings, reference.tokenizer, None)
    sha256 = None if template is None else template_sha256(template)
    if sha256 == settings.chat_template_sha256:
        return Treatment(settings, reference.tokenizer, None)
    has = "has no chat template" if template is None else "has another chat template"
    if settings.base_template == "tuned":
        told = f"The base model {has} and was asked through the tuned model's (eval.base_template: tuned)."
        return Treatment(settings, reference.tokenizer, told)
    if template is None:
        told = (
            "The base model has no chat template and was asked with the tasks' plain prompts, the tuned model through its chat template "
            "(eval.base_template: own). The comparison is of the two with these prompts, not of the weights alone."
        )
        return Treatment(_without_template(settings), reference.tokenizer, told)
    told = (
        "The base model was asked through its own chat template, the tuned model through another (eval.base_template: own). The "
        "comparison is of the two with these prompts, not of the weights alone."
    )
    tokenizer = copy.deepcopy(reference.tokenizer)
    tokenizer.chat_template = template
    thinks = False if "enable_thinking" in str(template) else None
    return Treatment(replace(settings, chat_template_sha256=sha256, enable_thinking=thinks), tokenizer, told)


def _without_template(settings: Settings) -> Settings:
    return replace(
        settings,
        apply_chat_template=False,
        chat_template_sha256=None,
        fewshot_as_multiturn=False,
        enable_thinking=None,
        add_bos_token=None,
    )
