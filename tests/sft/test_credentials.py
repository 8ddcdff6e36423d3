from pathlib import Path

import pytest

from sft.credentials import HIDDEN, redact, secrets_in
from sft.errors import RecipeError
from sft.files import write_json
from sft.program import exit_on_error
from sft.recipe.load import parse_recipe
from tests.conftest import DEMO_RECIPE

# Made of words, in the shapes that real ones have.
PLANTED = {
    "Hugging Face": "hf_" + "PlantedPlantedPlantedPlantedPlante",
    "OpenAI": "sk-proj-" + "Planted0planted1planted2planted3",
    "AWS": "AKIA" + "PLANTED0PLANTED1",
    "GitHub": "ghp_" + "Planted0Planted1Planted2Planted3Plan",
    "wandb": "wandb_v1_" + "Planted0Planted1Planted2",
    "Google": "AIza" + "Planted0Planted1Planted2Planted3Pla",
    "URL": "https://me:planted-password@host.example/rows.jsonl",
    "token in an URL": "https://planted0planted1planted@host.example/rows.jsonl",
}
SECRET = {name: value for name, value in PLANTED.items() if "URL" not in name} | {
    "URL": "planted-password",
    "token in an URL": "planted0planted1planted",
}


@pytest.mark.parametrize("kind", PLANTED)
def test_a_secret_in_a_recipe_or_an_override_is_refused_and_not_shown(kind: str) -> None:
    comment, override = f"# {PLANTED[kind]}\n", f"train.trainer_args.hub_token={PLANTED[kind]}"
    with pytest.raises(RecipeError) as caught:
        parse_recipe(DEMO_RECIPE + comment, [override], "mine.yaml")
    message = str(caught.value)
    assert message.startswith("mine.yaml holds what looks like a token or a key:\n  ")
    assert SECRET[kind] not in message
    assert f"line {DEMO_RECIPE.count(chr(10)) + 1}" in message
    assert "override train.trainer_args.hub_token" in message
    assert "hf auth login" in message


def test_what_the_environment_keeps_secret_is_no_value_of_a_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    key = "0123456789abcdef" * 2 + "planted0"  # 40 digits, as wandb's older keys: the shape of a commit
    parse_recipe(DEMO_RECIPE, [f"model.revision={key}"])
    monkeypatch.setenv("WANDB_API_KEY", key)
    with pytest.raises(
        RecipeError, match=r"override model.revision: the value of the environment variable WANDB_API_KEY"
    ):
        parse_recipe(DEMO_RECIPE, [f"model.revision={key}"])


@pytest.mark.parametrize(
    "harmless",
    [
        "Qwen/Qwen2.5-3B",
        "https://host.example:8080/rows.jsonl",
        "ssh://git@host.example/repository",
        "task-specific-instructions-for-models",
        "risk-0123456789012345678901234567890",
        "user@host.example:/data",
    ],
)
def test_names_and_addresses_are_no_secrets(harmless: str) -> None:
    assert secrets_in(f"name: {harmless}\n", [f"data.train={harmless}"]) == []
    assert redact(harmless) == harmless


def test_names_of_files_and_short_words_in_the_environment_are_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN_PATH", "/home/me/.cache/token")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "a value that is long enough")
    monkeypatch.setenv("SOME_KEY", "finished")
    text = "/home/me/.cache/token, a value that is long enough, finished"
    assert redact(text) == text


def test_a_record_is_written_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVICE_PASSWORD", "planted by hand, with spaces")
    values = {**PLANTED, "variable": "it is planted by hand, with spaces."}
    write_json(tmp_path / "run.json", {"error": values})
    written = (tmp_path / "run.json").read_text()
    assert not [value for value in [*SECRET.values(), "planted by hand"] if value in written]
    assert written.count(HIDDEN) == len(values)


@pytest.mark.parametrize("kind", [ValueError, RecipeError])
def test_an_error_is_shown_without_secrets(kind: type[Exception], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, exit_on_error():
        raise kind(f"401 for {PLANTED['URL']} with {PLANTED['Hugging Face']}")
    shown = capsys.readouterr().err
    assert f"401 for https://{HIDDEN}@host.example/rows.jsonl with {HIDDEN}" in shown
    assert ended.value.code == (2 if kind is RecipeError else 1)
    assert ("Traceback" in shown) == (kind is ValueError)
