"""A run's folder may be somebody else's: only this command line allows it to run code, send a key or read files elsewhere."""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from eval.chat.model import find_model
from eval.chat.samples import main as chat_main
from eval.run import main, parse_evaluation
from eval.sandbox.metric import score_code_within_limits
from sft.errors import EvaluationError, RunError, UserError
from sft.export.main import main as export_main
from sft.launch.rerun import rerun_arguments
from sft.run.directory import Run
from sft.run.trust import OWN_RUN

WriteTask = Callable[..., Path]
KEY = "AWS_SECRET_ACCESS_KEY"


def bring(run: Run, section: str, **values: object) -> None:
    """Have the run's recipe say more."""
    recipe = yaml.safe_load(run.recipe_file.read_text())
    recipe[section] |= values
    run.recipe_file.write_text(yaml.safe_dump(recipe))


def test_nothing_is_sent_to_an_address_that_only_the_run_names(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "words-that-are-secret")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.1)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        bring(run, "eval", backend="server", server={"base_url": url, "api_key_env": KEY, "tuned": "a", "base": "b"})
        for given, told in (([], url), ([f"server.base_url={url}"], KEY), ([f"server.api_key_env={KEY}"], url)):
            with pytest.raises(EvaluationError, match="Nothing was sent") as refused:
                main([str(run.path), *given])
            assert told in str(refused.value)
        with pytest.raises(TimeoutError):
            listener.accept()
    words = [f"server.base_url={url}", f"eval.server.api_key_env={KEY}"]
    assert parse_evaluation(words, run).server.api_key_env == KEY
    assert parse_evaluation([words[0], "server.api_key_env=null"], run).server.api_key_env is None
    assert parse_evaluation(["backend=hf", "server={}"], run).backend == "hf"
    bring(run, "eval", server={"base_url": url, "base_url_of_base": "http://other/v1"})
    with pytest.raises(EvaluationError, match="base_url_of_base=http://other"):
        parse_evaluation([words[0]], run)


def test_a_runs_own_consents_count_only_in_the_evaluation_of_its_training(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    bring(run, "eval", confirm_run_unsafe_code=True, confirm_run_task_code=True)
    consents = {"confirm_run_unsafe_code", "confirm_run_task_code"}
    for given in ({}, {"confirm_run_task_code"}, consents):
        evaluation = parse_evaluation([f"{key}=true" for key in given], run)
        assert {key for key in consents if getattr(evaluation, key)} == set(given)
    monkeypatch.setenv(OWN_RUN, str(run.path))
    assert parse_evaluation([], run).confirm_run_task_code
    monkeypatch.setenv(OWN_RUN, str(run.path.with_name("other")))
    assert not parse_evaluation([], run).confirm_run_task_code


def choose_checkpoint(words: list[str]) -> object:
    """As scripts/chat.sh does."""
    return find_model(words[0], checkpoint=9, trust_remote_code="--trust-remote-code" in words)


TRUSTED = {
    "eval.sh": (main, ["limit=0"], "model.trust_remote_code=true"),
    "eval.chat": (chat_main, [], "model.trust_remote_code=true"),
    "chat.sh": (choose_checkpoint, [], "--trust-remote-code"),
    "export.sh": (export_main, ["--to", "merged", "--checkpoint", "9"], "--trust-remote-code"),
    "sft.sh": (lambda words: rerun_arguments(Path(words[0]), words[1:]), [], "model.trust_remote_code=true"),
}


@pytest.mark.parametrize("name", TRUSTED)
def test_code_of_a_runs_model_needs_this_command_line(
    name: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command, words, consent = TRUSTED[name]
    bring(run, "model", trust_remote_code=True)
    bring(run, "eval", chat=False)
    with pytest.raises(RunError, match=f"somebody else.* add {consent} to this command"):
        command([str(run.path), *words])
    try:
        command([str(run.path), *words, consent])
    except UserError as other:
        assert "somebody else" not in str(other)


def test_a_run_is_not_started_again_on_the_consent_of_its_folder_alone(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    bring(run, "eval", confirm_run_unsafe_code=True, confirm_run_task_code=True)
    with pytest.raises(RunError, match=r"confirm_run_unsafe_code=true eval\.confirm_run_task_code=true"):
        rerun_arguments(run.path, [])
    words = ["eval.confirm_run_unsafe_code=true", "eval.confirm_run_task_code=false"]
    assert rerun_arguments(run.path, words)[1][-2:] == words


def test_a_program_of_the_working_directory_is_no_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import evaluate

    monkeypatch.chdir(tmp_path)
    (tmp_path / "rouge").mkdir()
    (tmp_path / "rouge" / "rouge.py").write_text("raise SystemExit('ran')\n")
    score_code_within_limits()
    with pytest.raises(EvaluationError, match=r"rouge, which lies in the working directory"):
        evaluate.load("rouge")
