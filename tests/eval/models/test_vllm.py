"""lm_eval's `vllm` model with a stand-in for vLLM, which needs a GPU: what it is given, and what becomes of its answers."""

import inspect
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eval.models.target import Target
from eval.models.vllm import vllm_arguments
from eval.run import main
from eval.tasks.settings import Settings
from sft.files import read_json
from sft.run.directory import Run

WriteTask = Callable[..., Path]
PASSED_ON = {"generation_config", "gpu_memory_utilization"}
"""What lm_eval hands to vLLM unread."""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    import importlib.util
    import sys

    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vLLM itself is installed")
    from tests import standin_vllm

    standin_vllm.install(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield standin_vllm.LLM
    standin_vllm.remove()
    assert "vllm" not in sys.modules


def answers(folder: Path, task: str) -> list[Any]:
    lines = (folder / f"samples_{task}.jsonl").read_text().split("\n")
    return [json.loads(line)["resps"] for line in lines if line]


def measure(folder: Path, *arguments: str) -> Path:
    """Where the results are, by themselves."""
    outputs = Path("outputs/eval")
    main([str(folder), *arguments])
    (results,) = outputs.glob("*/*/results.json")
    kept = Path(f"measured-{len(list(Path().glob('measured-*')))}")
    results.parent.rename(kept)
    return kept


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tuned", "stories"])
def test_the_engine_is_asked_for_what_hf_answers(
    name: str, engine: Any, tuned_model: Path, tmp_path: Path, write_task: WriteTask, request: pytest.FixtureRequest
) -> None:
    """Its own generation config would have it stop, repeat and sample otherwise, and its text begins with a space."""
    folder = tmp_path / "served"
    shutil.copytree(
        tuned_model if name == "tuned" else request.getfixturevalue("shared") / "models" / "stories260k_hf", folder
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0], "repetition_penalty": 1.3}))
    rows = [
        {"question": f"Number {n}?", "choices": ["one", "two", "seven"], "gold": n % 3, "answer": "x"} for n in range(4)
    ]
    tasks = [
        write_task(
            "free",
            rows,
            generation_kwargs={"until": ["no such word"], "max_gen_toks": 12, "do_sample": False, "temperature": 0.9},
        ),
        write_task("ends", rows, generation_kwargs={"until": ["<|im_start|>", "</s>", "e"], "max_gen_toks": 12}),
        write_task(
            "long", [{**rows[0], "question": "one two " * 400}], generation_kwargs={"until": ["\n"], "max_gen_toks": 12}
        ),
        write_task(
            "choose",
            rows,
            output_type="multiple_choice",
            doc_to_choice="choices",
            doc_to_target="gold",
            generation_kwargs=None,
            metric_list=None,
        ),
    ]
    asked = [f"tasks={','.join(map(str, tasks))}", f"apply_chat_template={str(name == 'tuned').lower()}"]
    hf, vllm = measure(folder, *asked), measure(folder, *asked, "backend=vllm", "gpu_memory_utilization=0.5")
    for task in ("free", "ends", "long"):
        assert answers(vllm, task) == answers(hf, task)
    results = [read_json(one / "results.json") for one in (hf, vllm)]
    assert results[0]["results"]["choose"] == results[1]["results"]["choose"]
    assert results[1]["prompts_cut"] == results[0]["prompts_cut"] == ["long"]
    (made,) = engine.made
    assert made.ended
    assert made.arguments["generation_config"] == "vllm"
    assert made.arguments["gpu_memory_utilization"] == 0.5
    (penalty,) = {one.repetition_penalty for one in made.asked if one.prompt_logprobs is None}
    assert penalty == 1.3
    assert results[1]["settings"]["versions"]["vllm"] == "0.30.0"


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["tensor", pytest.param("data", marks=pytest.mark.extra)])
def test_a_run_is_measured_with_one_engine_after_the_other(parallel: str, engine: Any, run: Run) -> None:
    main([str(run.path), "backend=vllm", f"{parallel}_parallel_size=2"])
    (compared,) = (run.path / "eval").glob("*/comparison.json")
    sizes = {f"{one}_parallel_size": 2 if one == parallel else 1 for one in ("tensor", "data")}
    assert read_json(compared)["settings"]["backend_settings"] == sizes
    assert {one.arguments["tensor_parallel_size"] for one in engine.made} == {sizes["tensor_parallel_size"]}
    assert {one.arguments["tokenizer"] for one in engine.made} == {str(run.final)}
    if parallel == "tensor":  # ray ends the engines that it starts
        assert [one.ended for one in engine.made] == [True, True]


def test_lm_evals_model_takes_what_it_is_given(engine: Any, settings: Callable[..., Settings]) -> None:
    from lm_eval.models.vllm_causallms import VLLM

    target = Target("tuned", "m", vllm={"gpu_memory_utilization": 0.5})
    given = vllm_arguments(target, "t", settings(backend="vllm", tensor_parallel_size=2))
    parameters = inspect.signature(VLLM.__init__).parameters
    assert given.keys() - parameters.keys() == PASSED_ON
    assert given["tensor_parallel_size"] == 2
    assert parameters["kwargs"].kind is inspect.Parameter.VAR_KEYWORD
    for name in ("tok_encode", "apply_chat_template", "modify_gen_kwargs", "_model_generate"):
        assert callable(getattr(VLLM, name)), name
