from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from eval.models.backends import find_backend
from eval.models.generation import encode_as_hf, make_request, special_tokens
from eval.models.served import Served, task_problems
from eval.models.target import Target
from eval.tasks.load import leaves, load_tasks
from eval.tasks.reference import Reference
from eval.tasks.settings import Settings
from eval.tasks.suites import check_tasks
from sft.errors import EvaluationError
from sft.recipe.schema import Evaluation
from tests.conftest import SHARED

Resolve = Callable[..., Settings]


def test_a_temperature_counts_only_where_an_answer_is_sampled(settings: Resolve) -> None:
    asked = {"until": [], "max_gen_toks": 8, "do_sample": False, "temperature": 0.7, "top_p": 0.5}
    assert make_request(asked, settings(), {}).sampling == {"temperature": 0.0}


def test_sampling_is_what_transformers_would_do(settings: Resolve) -> None:
    from transformers import GenerationConfig

    asked = {"until": [], "max_gen_toks": 8, "do_sample": True, "temperature": 0.7, "top_p": 0.5}
    generation = {"do_sample": True, "temperature": 0.1, "min_p": 0.2, "top_p": 0.9, "repetition_penalty": 1.05}
    request = make_request(asked, replace(settings(), generation=generation), {})
    defaults = GenerationConfig._get_default_generation_params()
    assert request.sampling == {"temperature": 0.7, "top_p": 0.5, "top_k": defaults["top_k"], "min_p": 0.2}
    assert request.beyond_openai == {"top_k": 50, "min_p": 0.2, "repetition_penalty": 1.05}
    assert (defaults["top_p"], defaults["repetition_penalty"]) == (1.0, 1.0)


def test_a_special_token_ends_an_answer_by_its_id(settings: Resolve, reference: Reference) -> None:
    special = special_tokens(reference.tokenizer)
    request = make_request({"until": ["\n", "<|im_start|>", ""], "max_gen_toks": 8}, settings(), special)
    assert request.until == ["\n"]
    assert request.stop_token_ids == sorted({special["<|im_start|>"], *settings().stop_token_ids})


@pytest.mark.parametrize("add_bos_token", [None, False, True])
@pytest.mark.parametrize("text", ["Once upon", "<s>Once upon"])
def test_a_prompt_is_tokens_as_lm_evals_hf_model_makes_them(
    text: str, add_bos_token: bool | None, shared: object
) -> None:
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer

    folder = str(SHARED / "models" / "stories260k_hf")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = HFLM(folder, tokenizer=tokenizer, device="cpu", add_bos_token=add_bos_token)
    bos = tokenizer.decode(model.prefix_token_id)
    assert encode_as_hf(tokenizer, text, add_bos_token, bos) == model.tok_encode(text)
    assert encode_as_hf(tokenizer, text, add_bos_token, bos) == model.tok_batch_encode([text])[0][0].tolist()
    assert encode_as_hf(tokenizer, text, False, None) == model.tok_encode(text, add_special_tokens=False)


def test_a_generation_config_that_only_transformers_follows_is_refused(settings: Resolve, reference: Reference) -> None:
    generation = {"num_beams": 4, "temperature": 0.5, "use_cache": True}
    with pytest.raises(EvaluationError, match=r"generation config has num_beams, which eval\.backend=server cannot"):
        asked = replace(settings(backend="server"), generation=generation)
        evaluation = Evaluation.model_validate({"backend": "server", "server": {"base_url": "http://127.0.0.1:1/v1"}})
        find_backend(evaluation, "tuned", (Target("tuned", "tuned"), asked, reference.tokenizer))


def test_a_task_that_only_transformers_can_do_is_refused(
    write_task: Callable[..., Path], settings: Resolve, reference: Reference, tmp_path: Path
) -> None:
    beams = write_task("beams", generation_kwargs={"until": ["\n"], "num_beams": 2})
    ends = write_task("ends", generation_kwargs={"until": ["<|im_end|>\n"]})
    fine = write_task("fine", generation_kwargs={"until": ["<|im_end|>"]})
    selection = check_tasks(Evaluation(tasks=(str(beams), str(ends), str(fine))), tmp_path)
    loaded = load_tasks(selection, settings(), False, tmp_path / "log")
    parts = [part for items in loaded.by_name.values() for part in leaves(items)]
    served = Served("http://127.0.0.1:1/v1", "tuned", "completions", 1, 5, None)
    problems = [one for part in parts for one in task_problems(part, settings(), reference.tokenizer, served)]
    assert [problem.split()[0] for problem in problems] == ["beams", "ends"]
    assert "num_beams" in problems[0]
