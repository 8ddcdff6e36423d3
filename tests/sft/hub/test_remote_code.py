import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from eval.tasks.reference import load_config
from sft.errors import ModelError
from sft.hub.demo import Demo
from sft.hub.model_facts import inspect_model
from sft.hub.remote_code import check_remote_code, is_refusal
from sft.recipe.schema import Recipe

MakeRecipe = Callable[..., Recipe]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OWN = {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}


@pytest.fixture
def own(tmp_path: Path, demo: Demo) -> Path:
    """A model whose config is code of its own, which tells that it ran."""
    folder = tmp_path / "own"
    shutil.copytree(demo.model, folder)
    (folder / "configuration_own.py").write_text(
        "from pathlib import Path\n"
        "from transformers import Qwen2Config\n"
        "class OwnConfig(Qwen2Config):\n"
        "    model_type = 'own'\n"
        f"Path({str(tmp_path / 'ran')!r}).touch()\n"
    )
    change(folder / "config.json", OWN)
    return folder


def change(file: Path, values: dict[str, object]) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_a_models_own_code_is_refused_with_how_to_allow_it(own: Path, make_recipe: MakeRecipe, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        inspect_model(make_recipe(f"model.name_or_path={own}"))
    for part in (str(own), "configuration_own.OwnConfig", "own", "model.trust_remote_code=true", "full hash"):
        assert part in str(caught.value)
    assert not (tmp_path / "ran").exists()


def test_a_model_that_transformers_has_itself_runs_as_that(own: Path, make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """Many models on the hub still name the code from before they were taken in."""
    change(own / "config.json", {"model_type": "qwen2"})
    recipe = make_recipe(f"model.name_or_path={own}")
    assert inspect_model(recipe).model_type == "qwen2"
    assert type(load_config(str(own), None, recipe.model.trust_remote_code)).__module__.startswith("transformers.")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("revision", [None, "main", COMMIT[:12]])
def test_code_from_the_hub_is_pinned_to_a_commit(revision: str | None, make_recipe: MakeRecipe) -> None:
    words = ["model.trust_remote_code=true", "model.name_or_path=owner/model"]
    model = make_recipe(*words, *([f"model.revision={revision}"] if revision else [])).model
    with pytest.raises(ModelError, match=rf"full hash \(40 digits\).*today it is {COMMIT}"):
        check_remote_code(model, "owner/model", COMMIT, OWN, {})
    check_remote_code(model.model_copy(update={"revision": COMMIT}), "owner/model", COMMIT, OWN, {})


@pytest.mark.parametrize("where", ["config", "tokenizer"])
def test_code_of_another_repository_is_refused_since_nothing_pins_it(
    where: str, own: Path, make_recipe: MakeRecipe
) -> None:
    model = make_recipe("model.trust_remote_code=true", f"model.name_or_path={own}").model
    other = {"auto_map": {"AutoTokenizer": ["else/where--code.Own", None]}}
    config, tokenizer = (other, {}) if where == "config" else ({}, other)
    with pytest.raises(ModelError, match=r"names code of another repository, else/where"):
        check_remote_code(model, str(own), None, config, tokenizer)


def test_transformers_refuses_in_the_words_that_are_looked_for(own: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    for auto in (AutoConfig, AutoModelForCausalLM):
        with pytest.raises(ValueError, match=r"custom code") as caught:
            auto.from_pretrained(str(own), trust_remote_code=False)
        assert is_refusal(caught.value)


def test_nothing_is_loaded_without_saying_whether_its_code_may_run() -> None:
    """Left out, transformers asks on the terminal, and takes `y` for an answer."""
    import ast

    from sft.recipe.schema import REPOSITORY

    def loads(call: ast.Call) -> bool:
        function = ast.unparse(call.func)
        return re.fullmatch(r"Auto\w+\.from_\w+", function) is not None or function.endswith("HFLM")

    found = [
        (file.name, call)
        for folder in ("sft", "eval")
        for file in sorted((REPOSITORY / folder).rglob("*.py"))
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call) and loads(call)
    ]
    assert len(found) >= 5
    said = [(name, call.lineno, "trust_remote_code" in [word.arg for word in call.keywords]) for name, call in found]
    assert not [place for place in said if not place[2]]
