import json
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest

from eval.tasks.reference import Reference, check_vocabulary, load_config, load_reference
from eval.tasks.settings import Settings, resolve_settings
from eval.tasks.suites import TaskSelection
from sft.errors import EvaluationError
from sft.recipe.schema import Evaluation

Resolve = Callable[..., Settings]
NOTHING = TaskSelection((), ())


def changed(folder: Path, copy: Path, file: str, **values: object) -> Path:
    """A copy of a model's folder with other values in one of its files."""
    shutil.copytree(folder, copy)
    path = copy / file
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | values))
    return copy


def resolved(folder: Path, **keys: object) -> Settings:
    reference = load_reference(str(folder), None, False)
    return resolve_settings(Evaluation.model_validate(keys), NOTHING, reference, on_gpu=False)


def test_every_setting_is_part_of_the_hash(settings: Resolve) -> None:
    plain = settings("arc")
    other = {field.name: "other" for field in fields(Settings)}
    differ = {name for name, value in other.items() if replace(plain, **{name: value}).hash != plain.hash}  # type: ignore[arg-type]
    assert differ == set(other)
    assert settings("arc").hash == plain.hash


def test_the_context_is_the_one_that_lm_eval_would_take(reference: Reference) -> None:
    from lm_eval.models.utils import resolve_max_length

    settings = resolve_settings(Evaluation(), NOTHING, reference, on_gpu=False)
    assert settings.max_length == resolve_max_length(reference.config, reference.tokenizer)


def test_auto_is_the_number_format_that_the_tuned_model_was_saved_in(tuned_model: Path, tmp_path: Path) -> None:
    half = changed(tuned_model, tmp_path / "m", "config.json", dtype="bfloat16")
    assert resolved(tuned_model).dtype == "float32"
    assert resolved(half).dtype == "bfloat16"
    assert resolved(half, dtype="float32").dtype == "float32"


def test_both_stop_where_the_tuned_model_or_its_tokenizer_ends_a_turn(tuned_model: Path, tmp_path: Path) -> None:
    assert resolved(tuned_model).stop_token_ids == (0, 2)
    other = changed(tuned_model, tmp_path / "m", "generation_config.json", eos_token_id=5)
    assert resolved(other).stop_token_ids == (2, 5)
    (other / "generation_config.json").unlink()
    assert resolved(other).stop_token_ids == (2,)


def test_lengths_of_a_generation_config_do_not_overrule_lm_eval(tuned_model: Path, tmp_path: Path) -> None:
    lengths = {"max_new_tokens": 2048, "max_length": 4096, "min_new_tokens": 3}
    other = changed(tuned_model, tmp_path / "m", "generation_config.json", repetition_penalty=1.05, **lengths)
    generation = resolved(other).generation
    assert generation["repetition_penalty"] == 1.05
    assert not lengths.keys() & generation.keys()


def test_a_batch_size_is_only_searched_for_on_a_gpu(reference: Reference) -> None:
    def batch_size(asked: object, on_gpu: bool) -> int | str:
        evaluation = Evaluation.model_validate({"batch_size": asked})
        return resolve_settings(evaluation, NOTHING, reference, on_gpu).batch_size

    assert [batch_size("auto", True), batch_size("auto", False), batch_size(3, False)] == ["auto", 32, 3]


def test_a_tokenizer_without_chat_template_is_told_how_to_go_on(tuned_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tuned_model, tmp_path / "m")
    (tmp_path / "m" / "chat_template.jinja").unlink()
    with pytest.raises(EvaluationError, match=r"has no chat template\. Set eval\.apply_chat_template=false"):
        resolved(tmp_path / "m")
    plain = resolved(tmp_path / "m", apply_chat_template=False)
    # Without a template lm_eval lets the tokenizer add its own beginning.
    assert (plain.chat_template_sha256, plain.add_bos_token) == (None, None)


@pytest.mark.parametrize(
    "template",
    ["{{ messages[-1]['content'] }}", "{{ raise_exception('no system turn') if messages[0]['role'] == 'system' }}"],
)
def test_a_system_instruction_that_the_template_drops_is_refused(
    template: str, tuned_model: Path, tmp_path: Path
) -> None:
    shutil.copytree(tuned_model, tmp_path / "m")
    (tmp_path / "m" / "chat_template.jinja").write_text(template)
    with pytest.raises(EvaluationError, match="takes no system turn"):
        resolved(tmp_path / "m", system_instruction="Be brief.")
    assert resolved(tuned_model, system_instruction="Be brief.").system_instruction == "Be brief."


def test_a_tokenizer_that_outgrew_a_model_is_refused(reference: Reference, tuned_model: Path, tmp_path: Path) -> None:
    check_vocabulary(reference, reference.config, "base")
    small = changed(tuned_model, tmp_path / "m", "config.json", vocab_size=100)
    with pytest.raises(EvaluationError, match=r"largest token id is \d+, and the model embeds 100 tokens"):
        check_vocabulary(reference, load_config(str(small), None, False), "base")


def test_new_tokens_do_not_count_as_outgrown(reference: Reference, tuned_model: Path, tmp_path: Path) -> None:
    ids = reference.tokenizer.get_vocab()
    last = max(ids, key=lambda token: ids[token])
    base = load_config(str(changed(tuned_model, tmp_path / "m", "config.json", vocab_size=ids[last])), None, False)
    with pytest.raises(EvaluationError, match="do not belong together"):
        check_vocabulary(reference, base, "base")
    check_vocabulary(reference, base, "base", (last,))


def test_a_model_without_tokenizer_is_one_message(tuned_model: Path, tmp_path: Path) -> None:
    tmp_path.joinpath("config.json").write_bytes((tuned_model / "config.json").read_bytes())
    with pytest.raises(EvaluationError, match=r"The tokenizer of .* its vocabulary is empty or missing"):
        load_reference(str(tmp_path), None, False)


@pytest.mark.parametrize("name", ["/no/such/folder", "nobody/nothing", "not a name at all"])
def test_a_model_that_is_missing_is_one_message(name: str) -> None:
    with pytest.raises(EvaluationError, match="cannot be loaded") as error:
        load_config(name, None, False)
    assert name in str(error.value)
    assert "\n" not in str(error.value)
