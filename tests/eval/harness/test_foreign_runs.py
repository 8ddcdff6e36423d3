"""A run's folder may be somebody else's: only this command line allows it to run code, send a key or read files elsewhere."""

import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from eval.chat.samples import main as chat_main
from eval.chat.target import choose
from eval.chat.terminal import parse
from eval.run import CONSENTS, SENDS, main, parse_evaluation
from eval.sandbox.metric import score_code_within_limits
from eval.tasks.suites import check_tasks
from sft.errors import EvaluationError, RunError, UserError
from sft.export.main import main as export_main
from sft.launch.rerun import start_again
from sft.recipe.schema import REPOSITORY, Evaluation, Model
from sft.run.consent import OWN_RUN
from sft.run.directory import Run

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


TRUSTED = {
    "eval.sh": (main, ["limit=0"], "model.trust_remote_code=true"),
    "eval.chat": (chat_main, [], "model.trust_remote_code=true"),
    "chat.sh": (lambda words: choose(parse(words)), ["--checkpoint", "9"], "--trust-remote-code"),
    "export.sh": (export_main, ["--to", "merged", "--checkpoint", "9"], "--trust-remote-code"),
    "sft.sh": (lambda words: start_again(Path(words[0]), words[1:]), [], "model.trust_remote_code=true"),
}


@pytest.mark.parametrize("name", TRUSTED)
def test_code_of_a_runs_model_needs_this_command_line(
    name: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command, words, consent = TRUSTED[name]
    bring(run, "model", trust_remote_code=True)
    bring(run, "eval", chat=False)
    with pytest.raises(RunError, match=f"somebody else's.* add {consent} to this command"):
        command([str(run.path), *words])
    try:
        command([str(run.path), *words, consent])
    except UserError as other:
        assert "somebody else's" not in str(other)


def test_a_run_is_not_started_again_on_the_consent_of_its_folder_alone(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    bring(run, "eval", confirm_run_unsafe_code=True, confirm_run_task_code=True)
    with pytest.raises(RunError, match=r"confirm_run_unsafe_code=true eval\.confirm_run_task_code=true"):
        start_again(run.path, [])
    words = ["eval.confirm_run_unsafe_code=true", "eval.confirm_run_task_code=false"]
    assert start_again(run.path, words)[1][-2:] == words


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """A folder of the user's, with a file in it."""
    folder = tmp_path / "private"
    folder.mkdir()
    (folder / "rows.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    (folder / "more.yaml").write_text("num_fewshot: 0\n")
    return folder


OUTSIDE = {
    "a file": {"dataset_kwargs": {"data_files": {"test": "PRIVATE/rows.jsonl"}}},
    "a list": {"dataset_kwargs": {"data_files": [{"split": "test", "path": ["PRIVATE/rows.jsonl"]}]}},
    "a pattern": {"dataset_kwargs": {"data_files": {"test": "PRIVATE/*.jsonl"}}},
    "a link": {"dataset_kwargs": {"data_files": {"test": "HERE/link.jsonl"}}},
    "a path upwards": {"dataset_kwargs": {"data_files": {"test": "HERE/../private/rows.jsonl"}}},
    "a folder": {"dataset_path": "PRIVATE", "dataset_kwargs": None},
    "a folder of the working directory": {"dataset_path": "private", "dataset_kwargs": None},
    "data_dir": {"dataset_kwargs": {"data_dir": "PRIVATE", "data_files": {"test": "rows.jsonl"}}},
    "an address": {"dataset_kwargs": {"data_files": {"test": "file://PRIVATE/rows.jsonl"}}},
    "an address in another": {"dataset_kwargs": {"data_files": {"test": "zip://rows::file://PRIVATE/rows.zip"}}},
    "a task inside a group": {
        "task": [{"task": "inner", "dataset_path": "json", "dataset_kwargs": {"data_files": "PRIVATE/rows.jsonl"}}],
        "group": "mine",
    },
    "what a group changes": {"task": [{"task": "gsm8k", "dataset_path": "PRIVATE"}], "group": "mine"},
    "an included file": {"include": "PRIVATE/more.yaml"},
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_tasks_that_came_with_a_run_read_nothing_elsewhere(
    name: str, run: Run, private: Path, write_task: WriteTask, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    text = yaml.safe_dump(OUTSIDE[name])
    path = write_task("mine")
    (path.parent / "link.jsonl").symlink_to(private / "rows.jsonl")
    replaced = text.replace("PRIVATE", str(private)).replace("HERE", str(path.parent))
    path = write_task("mine", **yaml.safe_load(replaced))
    with pytest.raises(EvaluationError, match=r"came with a run.*tasks=FILE"):
        check_tasks(Evaluation(tasks=(str(path),)), tmp_path, run.path)
    with pytest.raises(EvaluationError, match=r"came with a run"):
        check_tasks(Evaluation(tasks=("mine",), include_path=str(path.parent)), tmp_path, run.path)
    bring(run, "eval", tasks=[str(path)])
    with pytest.raises(EvaluationError, match=r"came with a run"):
        main([str(run.path), "limit=1"])


def test_what_lies_in_the_run_or_beside_the_task_is_read(run: Run, write_task: WriteTask, tmp_path: Path) -> None:
    beside = write_task("beside", include=None)
    data = run.path / "rows.jsonl"
    data.write_text((beside.parent / "beside.jsonl").read_text())
    inside = write_task("inside", dataset_kwargs={"data_files": {"test": str(data)}})
    far = write_task("far", dataset_path="owner/name", dataset_kwargs={"data_files": {"test": "data/test.jsonl"}})
    web = write_task("web", dataset_kwargs={"data_files": {"test": "https://host/rows.jsonl"}})
    tasks = (str(beside), str(inside), str(far), str(web), "builtin:demo")
    assert len(check_tasks(Evaluation(tasks=tasks), run.output_dir, run.path).tasks) == 5


CODE = {
    "a function": "doc_to_text: !function utils.text\n",
    "a function in a list": "filter_list: [{name: a, filter: [{function: custom, filter_fn: !function utils.text}]}]\n",
    "an included function": "include: functions\n",
    "a metric from the hub": "metric_list: [{metric: someone/score}]\n",
    "a metric of a task inside": "group: mine\ntask: [{task: inner, metric_list: [{metric: someone/score}]}]\n",
    "a metric of another name": "metric_list: [{metric: zzz}]\n",
}


@pytest.mark.parametrize("name", CODE)
def test_code_in_a_task_file_asks_for_consent(name: str, write_task: WriteTask, tmp_path: Path) -> None:
    path = write_task("mine", doc_to_text=None if "doc_to_text" in CODE[name] else "{{question}}", metric_list=None)
    path.write_text(path.read_text() + CODE[name])
    (path.parent / "functions").write_text("process_docs: !function utils.text\n")
    (path.parent / "utils.py").write_text("raise SystemExit('ran')\ndef text(doc): ...\n")
    (path.parent / "group.yaml").write_text("group: ours\ntask: [mine]\n")
    for tasks, folder in (((str(path),), None), (("ours",), str(path.parent))):
        evaluation = Evaluation(tasks=tasks, include_path=folder)
        with pytest.raises(EvaluationError, match=r"comes with its file.*set eval\.confirm_run_task_code=true"):
            check_tasks(evaluation, tmp_path)
        assert check_tasks(evaluation.model_copy(update={"confirm_run_task_code": True}), tmp_path).tasks


def test_a_program_of_the_working_directory_is_no_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import evaluate

    monkeypatch.chdir(tmp_path)
    (tmp_path / "rouge").mkdir()
    (tmp_path / "rouge" / "rouge.py").write_text("raise SystemExit('ran')\n")
    score_code_within_limits()
    with pytest.raises(EvaluationError, match=r"rouge, which lies in the working directory"):
        evaluate.load("rouge")


def test_the_security_page_names_keys_and_files_that_there_are() -> None:
    page = (REPOSITORY / "docs" / "security.md").read_text()
    files = re.findall(r"(?:tests|sft|eval)/[\w/]+\.py", page)
    assert [file for file in files if not (REPOSITORY / file).is_file()] == []
    known = {"eval": Evaluation.model_fields, "model": Model.model_fields}
    keys = re.findall(r"`(eval|model)\.([a-z]\w+)", page)
    assert [key for section, key in keys if key not in known[section]] == []
    assert {*CONSENTS, *SENDS} <= set(re.findall(r"\w+", page))
