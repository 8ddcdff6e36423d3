"""A real server, as a process, gives what `hf` gives."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from eval.run import main
from sft.files import read_json
from sft.recipe.schema import REPOSITORY
from sft.run.directory import Run

pytestmark = pytest.mark.slow
WriteTask = Callable[..., Path]

CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_choice": "choices",
    "doc_to_target": "gold",
    "generation_kwargs": None,
    "metric_list": [
        {"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in ("acc", "acc_norm")
    ],
}
QUESTIONS = [
    {
        "question": f"How many {what}?",
        "choices": ["one", "two of them", "no", "seven"],
        "gold": number % 4,
        "answer": "x",
    }
    for number, what in enumerate(("trains", "cities", "Müllers", "foxes  ", "words\n", "12"))
]


@contextmanager
def serving(*arguments: str) -> Iterator[str]:
    """The address of a server that is ended afterwards."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(REPOSITORY / "tests" / "tiny_server.py"), *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.kill()


@pytest.fixture(scope="module")
def folders(demo_model: Path, tuned_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models to serve by name."""
    from tests.conftest import SHARED

    folders = {"base": demo_model, "tuned": tuned_model, "plain": tuned_model}
    own = tmp_path_factory.mktemp("own") / "model"
    shutil.copytree(demo_model, own)
    (own / "generation_config.json").write_text(
        json.dumps(
            {"eos_token_id": list(range(5, 300)), "repetition_penalty": 9.0, "do_sample": True, "temperature": 2.0}
        )
    )
    folders["own"] = own
    if SHARED.is_dir():
        stories = tmp_path_factory.mktemp("stories") / "model"
        shutil.copytree(SHARED / "models" / "stories260k_hf", stories)
        (stories / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0]['content'] }}")
        folders["stories"] = stories
    return folders


@pytest.fixture(scope="module")
def server(folders: dict[str, Path]) -> Iterator[str]:
    with serving("--openai", "plain", *(f"{name}={folder}" for name, folder in folders.items())) as address:
        yield address


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Measure one model; returns the folder of its results."""
    monkeypatch.chdir(tmp_path)
    numbers = count()

    def run(folder: Path, *arguments: str) -> Path:
        main([str(folder), *arguments])
        (results,) = (tmp_path / "outputs" / "eval").glob("*/*/results.json")
        kept = tmp_path / f"measured-{next(numbers)}"
        results.parent.rename(kept)  # two in one second have one name
        return kept

    return run


def samples(folder: Path, task: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"samples_{task}.jsonl").read_text().split("\n") if line]


def answers(folder: Path, task: str) -> list[str]:
    return [one["resps"][0][0] for one in samples(folder, task)]


def likelihoods(folder: Path, task: str) -> list[float]:
    return [float(value) for one in samples(folder, task) for (value, _) in one["filtered_resps"]]


def greedy(folder: Path, task: str) -> list[str]:
    return [str(is_greedy) for one in samples(folder, task) for (_, is_greedy) in one["filtered_resps"]]


def same_scores(one: Path, other: Path) -> None:
    """Equal but for the last digits of what is no mean over documents."""
    scores = [read_json(folder / "results.json")["results"] for folder in (one, other)]
    flat = [{(task, key): value for task, metrics in of.items() for key, value in metrics.items()} for of in scores]
    assert flat[0].keys() == flat[1].keys()
    for key, value in flat[0].items():
        assert flat[1][key] == (value if isinstance(value, str) else pytest.approx(value, rel=1e-5)), key


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("tuned", ["server.num_concurrent=4", "num_fewshot=2"]),
        ("plain", ["server.num_concurrent=4"]),
        ("stories", ["apply_chat_template=false"]),
    ],
)
def test_a_server_scores_what_hf_scores(
    name: str,
    extra: list[str],
    server: str,
    folders: dict[str, Path],
    measure: Callable[..., Path],
    write_task: WriteTask,
    request: pytest.FixtureRequest,
) -> None:
    """Generated answers, choices, and the likelihood of a text; with a chat template, with one that begins by itself, and without."""
    if name not in folders:
        request.getfixturevalue("shared")
    generate = write_task(
        "generate",
        QUESTIONS,
        generation_kwargs={"until": ["\n", "}", "a", "e", "!"], "max_gen_toks": 24},
        fewshot_split="test",
    )
    free = write_task(
        "free", QUESTIONS, generation_kwargs={"until": ["no such word"], "max_gen_toks": 12}, fewshot_split="test"
    )
    choose = write_task("choose", QUESTIONS, **CHOICE, fewshot_split="test")
    empty = write_task("empty", QUESTIONS, **CHOICE | {"doc_to_text": ""}, fewshot_split="test")
    text = {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}}",
        "generation_kwargs": None,
    }
    rolling = write_task("rolling", QUESTIONS, **text, metric_list=[{"metric": "word_perplexity"}])
    tasks = [generate, free, choose, *([] if "num_fewshot=2" in extra else [empty, rolling])]
    asked = [f"tasks={','.join(map(str, tasks))}", *(key for key in extra if not key.startswith("server."))]
    hf = measure(folders[name], *asked)
    served = measure(
        folders[name], *asked, "backend=server", f"server.base_url={server}", f"server.model={name}", *extra
    )
    same_scores(hf, served)
    for task in ("generate", "free"):
        assert answers(served, task) == answers(hf, task)
    assert any(answers(served, "free"))
    assert likelihoods(served, "choose") == pytest.approx(likelihoods(hf, "choose"), rel=1e-4)
    assert greedy(served, "choose") == greedy(hf, "choose")
    told = read_json(served / "results.json")["measured_model"]["served"]
    assert (told["name"], told["dialect"]) == (name, "openai" if "plain" in name else "vllm")


def test_a_chat_server_answers_what_hf_answers(
    server: str, folders: dict[str, Path], measure: Callable[..., Path], write_task: WriteTask
) -> None:
    """Its own template is the tuned model's: what it makes of a message is counted before anything is measured."""
    task = write_task("mine", QUESTIONS, generation_kwargs={"until": ["a", "e", "i", "o", "u"], "max_gen_toks": 24})
    asked = [f"tasks={task}", "system_instruction=Be brief."]
    chat = ["backend=server", f"server.base_url={server}", "server.model=plain", "server.api=chat"]
    assert answers(measure(folders["plain"], *asked, *chat), "mine") == answers(
        measure(folders["plain"], *asked), "mine"
    )


def test_a_run_is_compared_by_two_served_names_as_by_hf(
    run: Run, server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(run.path)])
    by_hf = read_json(run.comparison_file)
    main([str(run.path), "backend=server", f"server.base_url={server}", "server.base=base", "server.tuned=tuned"])
    (path,) = (run.path / "eval").glob("*/comparison.json")
    by_server = read_json(path)
    assert by_server["settings_hash"] != by_hf["settings_hash"]
    assert by_server["metrics"] == by_hf["metrics"]
    for side in ("base", "tuned"):
        assert answers(path.parent / side, "demo_extraction") == answers(run.path / "eval" / side, "demo_extraction")
    assert "tuned: 4 documents of demo_extraction" in capsys.readouterr().out


def test_the_served_models_own_generation_config_decides_nothing(
    server: str, folders: dict[str, Path], measure: Callable[..., Path], write_task: WriteTask, tmp_path: Path
) -> None:
    """The base model of a run is served with its own: another end of text, a repetition penalty, sampling."""
    task = write_task("mine", QUESTIONS, generation_kwargs={"until": ["no such word"], "max_gen_toks": 12})
    bare = tmp_path / "bare"
    shutil.copytree(folders["own"], bare)
    (bare / "generation_config.json").unlink()
    hf = measure(bare, f"tasks={task}")
    served = measure(bare, f"tasks={task}", "backend=server", f"server.base_url={server}", "server.model=own")
    assert answers(served, "mine") == answers(hf, "mine")


def test_a_tuned_generation_config_is_sent_or_refused(
    server: str, folders: dict[str, Path], measure: Callable[..., Path], write_task: WriteTask, tmp_path: Path
) -> None:
    from sft.errors import EvaluationError

    task = write_task("mine", QUESTIONS, generation_kwargs={"until": ["no such word"], "max_gen_toks": 12})
    repeats = tmp_path / "repeats"
    shutil.copytree(folders["tuned"], repeats)
    (repeats / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0], "repetition_penalty": 1.7}))
    hf = measure(repeats, f"tasks={task}")
    asked = [f"tasks={task}", "backend=server", f"server.base_url={server}"]
    assert answers(measure(repeats, *asked, "server.model=tuned"), "mine") == answers(hf, "mine")
    assert answers(measure(folders["tuned"], f"tasks={task}"), "mine") != answers(hf, "mine")
    with pytest.raises(
        EvaluationError, match=r"mine is asked with repetition_penalty=1\.7, which plain at .* does not take"
    ):
        measure(repeats, *asked, "server.model=plain")


def test_a_prompt_that_is_too_long_loses_what_it_loses_with_hf_and_is_told(
    server: str,
    folders: dict[str, Path],
    measure: Callable[..., Path],
    write_task: WriteTask,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [{**QUESTIONS[0], "question": "one two three " * 400 + str(number)} for number in range(2)]
    generate = write_task("generate", rows, generation_kwargs={"until": ["no such word"], "max_gen_toks": 12})
    choose = write_task("choose", rows, **CHOICE)
    short = write_task("short", QUESTIONS)
    hf = measure(folders["tuned"], f"tasks={generate},{choose},{short}")
    served = measure(
        folders["tuned"],
        f"tasks={generate},{choose},{short}",
        "backend=server",
        f"server.base_url={server}",
        "server.model=tuned",
    )
    assert answers(served, "generate") == answers(hf, "generate")
    assert (
        read_json(served / "results.json")["prompts_cut"]
        == read_json(hf / "results.json")["prompts_cut"]
        == ["generate", "choose"]
    )
    assert capsys.readouterr().out.count("lost their beginning") == 4


def test_a_server_that_dies_midway_is_named_and_the_evaluation_incomplete(
    folders: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    write_task: WriteTask,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A server that demands a key; the key is written nowhere."""
    from sft.errors import EvaluationError

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("THE_KEY", "sesame-open-0123456789")
    first, second = (write_task(name, QUESTIONS) for name in ("first", "second"))
    monkeypatch.setattr("eval.models.server.SECONDS_BETWEEN_TRIES", 0.0)
    with serving("--key", "sesame-open-0123456789", "--die-after", "12", f"tuned={folders['tuned']}") as address:
        asked = [
            str(folders["tuned"]),
            f"tasks={first},{second}",
            "backend=server",
            f"server.base_url={address}",
            "server.model=tuned",
        ]
        with pytest.raises(EvaluationError, match=r"answers 401: .* the key that eval.server.api_key_env names"):
            main(asked)
        with pytest.raises(SystemExit) as stop:
            main([*asked, "server.api_key_env=THE_KEY", "server.num_concurrent=1"])
    assert stop.value.code == 1
    shown = capsys.readouterr()
    assert "final: 6 documents of first" in shown.out
    assert f"second: EvaluationError: No server answers at {address}" in shown.err
    written = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any("sesame" in text for text in [*written, shown.out, shown.err])
