"""What an evaluation during training measures and keeps; tests/slow/test_evaluation_during_training.py trains."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from eval.harness.during_training import During
from eval.models.live_model import undisturbed
from sft.errors import EvaluationError, RecipeError
from sft.launch.job import check_tasks_during
from sft.recipe.schema import Recipe


def test_what_is_measured_during_training_is_a_section_of_its_own(make_recipe: Callable[..., Recipe]) -> None:
    assert make_recipe().eval.during is None
    recipe = make_recipe("eval.tasks=[gsm8k]", "eval.suite=leaderboard", "eval.limit=500", "eval.every_steps=5")
    assert recipe.eval.during is not None
    assert (recipe.eval.during.tasks, recipe.eval.during.suite, recipe.eval.during.limit) == (
        ("gsm8k",),
        "leaderboard",
        50,
    )
    own = make_recipe(
        "eval.suite=leaderboard", "eval.every_steps=5", "eval.every_tasks=[arc_easy]", "eval.every_limit=7"
    ).eval.during
    assert own is not None
    assert (own.tasks, own.suite, own.limit) == (("arc_easy",), None, 7)


def test_what_is_measured_after_the_training_alone_is_no_part_of_it(make_recipe: Callable[..., Recipe]) -> None:
    gate = "eval.gate={max_regression: {gsm8k: 0.1}}"
    own = make_recipe("eval.tasks=[gsm8k]", gate, "eval.backend=vllm", "eval.seed=3", "eval.every_steps=5").eval.during
    assert own is not None
    assert (own.backend, own.gate, own.seed) == ("hf", None, 3)


def test_generated_code_is_not_run_beside_a_training(make_recipe: Callable[..., Recipe]) -> None:
    recipe = make_recipe("eval.every_tasks=[humaneval]", "eval.every_steps=5", "eval.confirm_run_unsafe_code=true")
    with pytest.raises(EvaluationError, match=r"eval\.every_steps .*none of which may run generated code"):
        check_tasks_during(recipe)
    with pytest.raises(EvaluationError, match=r"eval.every_steps .*did you mean"):
        check_tasks_during(make_recipe("eval.every_tasks=[humanevil]", "eval.every_steps=5"))


@pytest.mark.parametrize(
    ("override", "told"), [("every_steps=5", "nothing to measure"), ("every_tasks=[gsm8k]", "every_tasks")]
)
def test_what_measures_nothing_is_refused(override: str, told: str, make_recipe: Callable[..., Recipe]) -> None:
    with pytest.raises(RecipeError, match=told):
        make_recipe(f"eval.{override}")


def test_lines_of_steps_that_come_again_are_removed(tmp_path: Path) -> None:
    file = tmp_path / "eval" / "during.jsonl"
    during = During(None, None, None, None, 2, file, tmp_path / "log")  # type: ignore[arg-type]
    assert during._keep(0) == []
    lines = [json.dumps({"step": step}) for step in (0, 2, 4, 6)]
    file.write_text("\n".join(lines) + '\n{"step": 8, "sec')  # a kill cut the last one off
    assert during._keep(4) == [0, 2, 4]
    assert file.read_text().splitlines() == lines[:3]


def test_a_measurement_leaves_random_numbers_and_modes_as_they_were() -> None:
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(2, 2))
    model.train()
    model[0].eval()  # as a library may have put it
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    with undisturbed(model):
        assert not any(module.training for module in model.modules())
        assert not model(torch.ones(1, 2)).requires_grad
        after = random.random(), np.random.rand(), float(torch.rand(()))
    assert [module.training for module in model.modules()] == [True, False, True]
    assert (random.random(), np.random.rand(), float(torch.rand(()))) == after
    assert model(torch.ones(1, 2)).requires_grad


def test_a_step_that_is_to_be_the_last_one_is_not_measured() -> None:
    trainer = SimpleNamespace(stopping=SimpleNamespace(agreed=1))
    during = During(trainer, None, None, None, 2, Path("none"), Path("none"))  # type: ignore[arg-type]
    state, control = SimpleNamespace(global_step=4), SimpleNamespace(should_training_stop=True)
    during.on_step_end(None, state, control)  # it would fail without a model
    assert during.figure is None
