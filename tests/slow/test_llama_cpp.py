"""GGUF by the real llama.cpp: it reads, generates and scores as final/ does in transformers. Also `transformers serve`.

They need xllamacpp, sentencepiece and transformers[serving] beside the project, and LLAMA_CPP, a folder with the converter.
"""

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from eval.run import main as evaluate
from sft.errors import EvaluationError
from sft.export.main import main
from sft.files import read_json
from sft.parallel.environment import free_port
from sft.recipe.schema import REPOSITORY
from sft.run.directory import Run
from tests.conftest import SHARED
from tests.slow.conftest import until, write_recipe, write_task
from tests.slow.engine_runs import EngineRuns
from tests.slow.ranks import Ranks

pytestmark = [pytest.mark.slow, pytest.mark.extra]


def needs(*packages: str, converter: bool = False) -> pytest.MarkDecorator:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    missing += ["LLAMA_CPP, which names llama.cpp's folder"] if converter and "LLAMA_CPP" not in os.environ else []
    return pytest.mark.skipif(bool(missing), reason=f"missing: {', '.join(missing)}")


needs_llama_cpp = needs("xllamacpp", "gguf", "sentencepiece", converter=True)
PROMPTS = [
    *("Once upon a time", "The little dog", "On Friday Rita travels to Oslo", "Lily and Tom", "It was a very", "She said:"),
    *("don't, I'll, you're", "1234567 and 3.14", "née Müller «x»", "你好 🚀", "two  spaces\tand a tab", "line\n\nline\n"),
    *('{"name": "Rita"}', "<b> & </b>", "UPPER lower", "a", "Please book 3 train tickets", "..!!??", "x_y z-w", "The end."),
]  # fmt: skip
CHAT = [{"role": "user", "content": "Rewrite: it is red."}]


def trained(ranks: Ranks, folder: Path, **model: object) -> Run:
    """stories260k (Llama, SentencePiece), trained on instructions."""
    if not SHARED.is_dir():
        pytest.skip(f"real data is not at {SHARED}")
    recipe = write_recipe(
        folder / "stories.yaml",
        model={"name_or_path": str(SHARED / "models" / "stories260k_hf"), "pad_token": "<unk>", **model},
        data={"train": str(SHARED / "sft" / "raschka_instruction_data.json"), "max_length": 256},
        train={"global_batch_size": 8, "learning_rate": 2e-3, "max_steps": 40, "precision": "fp32"},
        tracking={"run_name": "one"},
    )
    ranks.run(1, ["sft.train", recipe])
    return Run(folder / "outputs" / "stories" / "one")


@pytest.fixture(scope="module")
def stories(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A template that begins with BOS."""
    return trained(ranks, tmp_path_factory.mktemp("stories"), chat_template="plain")


@pytest.fixture(scope="module")
def without_bos(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Adapters, tokens of its own, and a template without the BOS that the tokenizer puts before texts."""
    new = {"chat_template": "chatml", "new_tokens": ["<|im_start|>", "<|im_end|>"], "lora": {"r": 4}}
    return trained(ranks, tmp_path_factory.mktemp("chatml"), **new)


@contextmanager
def serving(*words: str, **environment: str) -> Iterator["subprocess.Popen[str]"]:
    """A server, which is ended afterwards."""
    settings = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY)} | environment
    with subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=settings
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def llama_server(folder: Path) -> Iterator[str]:
    """The address of a server of an export, named `tuned`."""
    program = str(REPOSITORY / "tests" / "llama_server.py")
    with serving(program, "--exact", str(folder / "model.gguf"), "tuned") as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()


def generated(model: Any, ids: list[int]) -> list[int]:
    """The greedy tokens of transformers."""
    with torch.no_grad():
        found = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=24)
    return list(found[0][len(ids) :].tolist())


def exported(run: Run, tmp_path: Path) -> Path:
    main([str(run.path), "--to", "gguf", "--name", "mine", "--output", str(tmp_path / "gguf")])
    return tmp_path / "gguf"


@needs_llama_cpp
@pytest.mark.parametrize("name", ["stories", "demo", "adapters, new tokens"])
def test_llama_cpp_reads_and_generates_what_final_does(
    name: str, stories: Run, without_bos: Run, runs: EngineRuns, tmp_path: Path
) -> None:
    from gguf import GGUFReader

    run = {"stories": lambda: stories, "demo": lambda: runs("1")}.get(name, lambda: without_bos)()
    folder = exported(run, tmp_path)
    assert not list(folder.glob("*.safetensors")), "the weights lie there twice"
    assert "llama-server -m model.gguf" in (folder / "README.md").read_text()
    fields = GGUFReader(folder / "model.gguf").fields
    assert fields["general.name"].contents() == "mine"
    assert not [name for name in fields if name in ("general.finetune", "general.basename", "general.version")]
    tokenizer = AutoTokenizer.from_pretrained(run.final)
    model = AutoModelForCausalLM.from_pretrained(run.final, dtype=torch.float32).eval()
    with llama_server(folder) as address:
        place = address.removesuffix("/v1")

        def ask(where: str, **payload: Any) -> Any:
            return requests.post(place + where, json=payload, timeout=60).json()

        for prompt in PROMPTS:
            ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
            assert ask("/tokenize", content=prompt)["tokens"] == ids, prompt
            answer = ask("/completion", prompt=ids, n_predict=24, temperature=0, return_tokens=True)
            assert answer["tokens"] == generated(model, ids), prompt
        for chat in (CHAT, [*CHAT, {"role": "assistant", "content": "Red it is."}, *CHAT]):
            ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
            answer = ask("/v1/chat/completions", messages=chat, max_tokens=24, temperature=0)
            assert answer["usage"]["prompt_tokens"] == len(ids)
            text = tokenizer.decode(generated(model, ids), skip_special_tokens=True)
            assert answer["choices"][0]["message"]["content"].strip() == text.strip()


@pytest.fixture
def tasks(tmp_path: Path) -> tuple[Path, Path]:
    """One that generates, and one that scores given answers."""
    rows = json.loads((SHARED / "sft" / "raschka_instruction_data.json").read_text())[:12]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chrf = [{"metric": "chrf", "aggregation": "chrf", "higher_is_better": True}]
    question = {"doc_to_text": "{{instruction}}", "doc_to_target": "{{output}}"}
    greedy = {"until": ["\n\n"], "do_sample": False, "max_gen_toks": 32}
    generates = write_task(
        tmp_path / "generates.yaml",
        tmp_path / "rows.jsonl",
        **question,
        output_type="generate_until",
        generation_kwargs=greedy,
        metric_list=chrf,
    )
    choice = {"output_type": "multiple_choice", "doc_to_choice": ["yes", "no"], "doc_to_target": 0}
    scores = write_task(tmp_path / "scores.yaml", tmp_path / "rows.jsonl", **question | choice)
    return generates, scores


def measured(folder: Path, *words: str) -> tuple[list[str], float]:
    """Answers and the score of the task that generates."""
    evaluate([str(folder), *words])
    (results,) = (Path.cwd() / "outputs" / "eval").glob("*/*/results.json")
    results = results.parent.rename(Path.cwd() / f"measured-{time.time_ns()}") / "results.json"
    samples = (results.parent / "samples_generates.jsonl").read_text().splitlines()
    score = read_json(results)["results"]["generates"]["chrf,none"]
    return [json.loads(line)["resps"][0][0] for line in samples], score


@needs_llama_cpp
def test_llama_cpps_server_is_scored_as_hf_and_cannot_be_asked_for_likelihoods(
    stories: Run, tasks: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    generates, scores = tasks
    hf = measured(stories.final, f"tasks={generates}")
    assert any(hf[0])
    with llama_server(exported(stories, tmp_path)) as address:
        served = ["backend=server", f"server.base_url={address}", "server.model=tuned"]
        for api in ("completions", "chat"):
            words = [*served, f"server.api={api}"]
            assert measured(stories.final, f"tasks={generates}", *words) == hf
            with pytest.raises(EvaluationError, match=r"scores scores given answers.*log probabilities.*backend=hf"):
                evaluate([str(stories.final), f"tasks={scores}", *words])
        with pytest.raises(EvaluationError, match=r"serves no model `other`.*server\.model"):
            evaluate([str(stories.final), f"tasks={generates}", *served[:2], "server.model=other"])


@needs("fastapi", "uvicorn", "openai")
def test_transformers_serve_is_scored_as_hf_and_answers_to_its_folder_alone(
    stories: Run, tasks: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lists the models of the hub's cache, never the folder that it serves."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hub").mkdir()
    port, final = free_port(), str(stories.final)
    command = ["-m", "transformers.cli.transformers", "serve", final, "--port", str(port), "--device", "cpu"]
    words = ["backend=server", f"server.base_url=http://127.0.0.1:{port}/v1", "server.api=chat"]
    with serving(*command, HF_HUB_CACHE=str(tmp_path / "hub")) as process:
        until(lambda: answers(port), process)
        served = measured(stories.final, f"tasks={tasks[0]}", *words, f"server.model={final}")
        with pytest.raises(EvaluationError, match=r"serves no model `other`"):
            evaluate([final, f"tasks={tasks[0]}", *words, "server.model=other"])
    assert served == measured(stories.final, f"tasks={tasks[0]}")


def answers(port: int) -> bool:
    try:
        return requests.get(f"http://127.0.0.1:{port}/health", timeout=5).ok
    except requests.ConnectionError:
        return False
