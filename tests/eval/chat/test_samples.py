"""Base and tuned model answer prompts: the real models of the demo."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import yaml
from transformers import GenerationConfig

from eval.chat.model import ChatFormat, load_format, load_weights
from eval.chat.samples import answer_limit, answer_prompts, chat, main, prompts_of
from eval.models.target import Target
from eval.tasks.reference import Reference, load_reference
from sft.errors import EvaluationError
from sft.files import read_json
from sft.launch.evaluation import programs
from sft.recipe.schema import Evaluation, Recipe
from sft.run.directory import Run


def change(run: Run, **evaluation: object) -> None:
    recipe = yaml.safe_load(run.recipe_file.read_text())
    run.recipe_file.write_text(yaml.safe_dump(recipe | {"eval": evaluation}))


def test_both_models_answer_and_the_same_again(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "Go"},
    ]
    change(run, chat={"prompts": ["For Nora: Oslo", turns], "max_new_tokens": 40})
    main([str(run.path)])
    first = read_json(run.path / "eval" / "chat.json")
    assert [one["messages"] for one in first["prompts"]] == [[{"role": "user", "content": "For Nora: Oslo"}], turns]
    for one in first["prompts"]:
        for label in ("base", "tuned"):
            assert one[label].keys() == {"text", "tokens", "ended", "empty", "loops"}
            assert one[label]["ended"] is (one[label]["tokens"] < 40), "one that is cut at the limit has not ended"
    assert first["prompts"][0]["base"] != first["prompts"][0]["tuned"]
    assert first["checks"]["base"]["ended"] < 2, "the untrained model does not stop"
    told = capsys.readouterr()
    assert f"tuned: {first['checks']['tuned']['ended']} of 2 answers end on their own" in told.out
    assert ("WARNING" in told.err) != first["checks"]["tuned"]["passed"]
    chat(run)
    assert read_json(run.path / "eval" / "chat.json") == first


@pytest.fixture(scope="module")
def tuned(reference: Reference) -> tuple[Any, ChatFormat]:
    chat_format = load_format(reference)
    return load_weights(Target("tuned", reference.path), reference, chat_format, Evaluation()), chat_format


def test_answers_of_a_batch_are_those_of_each_prompt_alone(tuned: tuple[Any, ChatFormat]) -> None:
    """Padding is not seen."""
    model, chat_format = tuned
    texts = ["A", "Please book 4 bus tickets to Rome for Uma, leaving Sunday"]
    prompts = [chat_format.render([{"role": "user", "content": text}]) for text in texts]
    together = answer_prompts(model, chat_format, prompts, 12, 0)
    assert together == [answer_prompts(model, chat_format, [prompt], 12, 0)[0] for prompt in prompts]
    assert together[0] != together[1]


def test_a_saved_sampling_draws_the_same_each_time(tuned: tuple[Any, ChatFormat]) -> None:
    model, chat_format = tuned
    chat_format = replace(
        chat_format, generation_config=GenerationConfig(do_sample=True, eos_token_id=[2, 0], pad_token_id=0)
    )
    prompts = [chat_format.render([{"role": "user", "content": "A"}])]
    drawn = [answer_prompts(model, chat_format, prompts, 12, seed)[0]["text"] for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_model_without_template_is_not_asked_unless_the_recipe_says_so(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.final / "chat_template.jinja").unlink()
    change(run)
    chat(run)
    assert "no chat template" in read_json(run.path / "eval" / "chat.json")["skipped"]
    assert "no prompts are answered" in capsys.readouterr().out
    change(run, chat={"max_new_tokens": 8})
    with pytest.raises(EvaluationError, match="no chat template"):
        chat(run)


def test_a_system_prompt_that_the_template_drops_is_refused(run: Run) -> None:
    (run.final / "chat_template.jinja").write_text(
        "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
    )
    change(run, system_instruction="Be brief.", chat={"prompts": ["A"]})
    with pytest.raises(EvaluationError, match="takes no system turn"):
        chat(run)


def test_answers_are_as_long_as_the_context_has_room(run: Run) -> None:
    chat_format = load_format(load_reference(str(run.final), None, False))
    assert answer_limit(chat_format, [[1] * 1000, [1]], 512) == 24
    assert answer_limit(chat_format, [[1]], 512) == 512
    with pytest.raises(EvaluationError, match="1024 tokens leaves no room"):
        answer_limit(chat_format, [[1] * 1024], 512)


def test_the_system_prompt_of_the_recipe_begins_each_conversation_without_one(
    make_recipe: Callable[..., Recipe],
) -> None:
    recipe = make_recipe(
        "eval.system_instruction=Be brief.",
        'eval.chat.prompts=["Hi", [{role: system, content: S}, {role: user, content: U}]]',
    )
    assert [one[0]["content"] for one in prompts_of(recipe)] == ["Be brief.", "S"]


def test_chat_can_be_left_out(make_recipe: Callable[..., Recipe]) -> None:
    assert programs(make_recipe().eval) == ["eval.chat"]
    assert programs(make_recipe("eval.tasks=[builtin:demo]", "eval.chat=false").eval) == ["eval.run"]
    assert programs(make_recipe("eval.tasks=[builtin:demo]").eval) == ["eval.chat", "eval.run"]
    assert programs(make_recipe("eval.chat=false").eval) == []
