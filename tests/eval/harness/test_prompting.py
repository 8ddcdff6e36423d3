import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from eval.compare.settings_match import OF_THE_PROMPTS, check_settings_match, differing
from eval.harness.prompting import Prompting, own_template, prompt_base
from eval.models.target import Target
from eval.tasks.reference import Reference
from eval.tasks.settings import Settings
from sft.errors import EvaluationError

Resolve = Callable[..., Settings]
OTHER = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def results(settings: Settings, treatment: Prompting | None = None) -> dict[str, Any]:
    written = {
        "settings": asdict(settings),
        "settings_hash": settings.hash,
        "prompting": treatment.record if treatment else None,
    }
    read: dict[str, Any] = json.loads(json.dumps(written))
    return read


def test_a_template_is_read_from_the_model_and_is_none_where_there_is_none(
    tuned_model: Path, reference: Reference, tmp_path: Path
) -> None:
    assert own_template(Target("base", str(tuned_model))) == reference.tokenizer.chat_template
    shutil.copytree(tuned_model, tmp_path / "m")
    (tmp_path / "m" / "chat_template.jinja").unlink()
    assert own_template(Target("base", str(tmp_path / "m"))) is None
    assert own_template(Target("base", str(tmp_path / "nothing"))) is None
    with pytest.raises(EvaluationError, match=r"the tokenizer of the base model .* cannot be loaded"):
        own_template(Target("base", str(tmp_path / "nothing")), needed=True)


@pytest.mark.parametrize(("template", "has"), [(None, "has no chat template"), (OTHER, "has another chat template")])
def test_by_default_the_tuned_models_template_asks_both_and_that_is_said(
    template: str | None, has: str, settings: Resolve, reference: Reference
) -> None:
    asked = settings("arc")
    treated = prompt_base(asked, reference, template)
    assert treated.settings == asked
    assert treated.note == f"The base model {has} and was asked through the tuned model's (eval.base_template: tuned)."
    treatment = check_settings_match(results(asked, treated), results(asked), {}, {})
    assert treatment == {"base_template": "tuned", "note": treated.note}


@pytest.mark.parametrize("template", [None, OTHER])
def test_own_prompts_differ_in_the_template_alone_and_are_compared(
    template: str | None, settings: Resolve, reference: Reference
) -> None:
    asked = settings("arc", base_template="own")
    treated = prompt_base(asked, reference, template)
    base, tuned = results(treated.settings, treated), results(asked)
    names = {line.split(":")[0].strip() for line in differing(base["settings"], tuned["settings"])}
    assert names
    assert names <= OF_THE_PROMPTS
    treatment = check_settings_match(base, tuned, {}, {})
    assert treatment is not None
    assert "not of the weights alone" in treatment["note"]
    assert treated.tokenizer.chat_template == template
    expected = None if template is None else hashlib.sha256(template.encode()).hexdigest()
    assert treated.settings.chat_template_sha256 == expected


def test_own_prompts_excuse_nothing_else(settings: Resolve, reference: Reference) -> None:
    asked = settings("arc", base_template="own")
    treated = prompt_base(settings("arc", base_template="own", limit=3), reference, None)
    with pytest.raises(EvaluationError) as error:
        check_settings_match(results(treated.settings, treated), results(asked), {}, {})
    assert str(error.value).splitlines()[1:] == ["  limit: base 3, tuned None"]
    # Not asked for: the same difference is refused.
    with pytest.raises(EvaluationError, match="apply_chat_template: base False, tuned True"):
        check_settings_match(results(prompt_base(asked, reference, None).settings), results(asked), {}, {})


def test_own_prompts_where_nothing_is_asked_through_a_template_are_a_mistake(
    settings: Resolve, reference: Reference
) -> None:
    with pytest.raises(EvaluationError, match="neither model is asked through a chat template"):
        prompt_base(settings("arc", apply_chat_template=False, base_template="own"), reference, None)
    assert prompt_base(settings("arc", apply_chat_template=False), reference, None).note is None
