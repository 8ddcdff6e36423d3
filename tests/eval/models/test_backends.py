from importlib.util import find_spec

import pytest

from eval.models.backends import CLIENT_PACKAGES, check_backend, contradictions
from eval.run import parse_evaluation
from sft.errors import EvaluationError
from sft.recipe.schema import Evaluation

SERVER = {"backend": "server", "server": {"base_url": "http://127.0.0.1:1/v1"}}


def evaluation(**keys: object) -> Evaluation:
    return Evaluation.model_validate(keys)


def test_the_defaults_contradict_nothing() -> None:
    assert contradictions(evaluation()) == []


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"tensor_parallel_size": 2}, "eval.tensor_parallel_size=2 is of eval.backend=vllm, and eval.backend=hf"),
        ({"gpu_memory_utilization": 0.5}, "eval.gpu_memory_utilization=0.5 is of eval.backend=vllm"),
        (
            {"server": {"base_url": "http://x/v1"}},
            "eval.server.base_url=http://x/v1 is of eval.backend=server, and eval.backend=hf",
        ),
        (
            {"backend": "vllm", "parallelize": True},
            "eval.parallelize=True is of eval.backend=hf, and eval.backend=vllm",
        ),
        ({"backend": "vllm", "server": {"api": "chat"}}, "eval.server.api=chat is of eval.backend=server"),
        ({"backend": "server"}, "eval.server.base_url is not given"),
        ({**SERVER, "processes": 2}, "eval.processes=2 is of eval.backend=hf"),
        (
            {**SERVER, "data_parallel_size": 2},
            "eval.data_parallel_size=2 is of eval.backend=vllm, and eval.backend=server",
        ),
        ({**SERVER, "dtype": "bfloat16"}, "eval.dtype=bfloat16, and a server has its weights loaded"),
        (
            {"backend": "server", "apply_chat_template": False, "server": {"base_url": "http://x/v1", "api": "chat"}},
            "eval.server.api=chat sends messages",
        ),
        (
            {"backend": "server", "batch_size": 4, "server": {"base_url": "http://x/v1", "api": "chat"}},
            "eval.batch_size=4, and a chat request holds one conversation",
        ),
        (
            {"backend": "server", "server": {"base_url": "http://x/v1", "api_key_env": "NOT_THERE"}},
            "eval.server.api_key_env=NOT_THERE, and there is no such environment variable",
        ),
    ],
)
def test_what_contradicts_is_told_before_anything_loads(keys: dict[str, object], told: str) -> None:
    assert any(told in problem for problem in contradictions(evaluation(**keys)))
    with pytest.raises(EvaluationError, match=r"^eval\."):
        check_backend(evaluation(**keys))


def test_all_contradictions_are_one_message() -> None:
    with pytest.raises(EvaluationError) as told:
        parse_evaluation(["backend=server", "tensor_parallel_size=2", "dtype=float16"])
    assert len(str(told.value).splitlines()) >= 3


def test_a_missing_package_is_told_with_the_command_that_installs_it() -> None:
    problems = contradictions(evaluation(backend="vllm"))
    assert any("-m pip install -e '.[vllm]'" in problem for problem in problems) == (find_spec("vllm") is None)
    problems = contradictions(evaluation(**SERVER))
    missing = [name for name in CLIENT_PACKAGES if find_spec(name) is None]
    assert bool(problems) == bool(missing)
    assert all(name in problems[0] for name in missing)


def test_a_training_does_not_end_in_an_evaluation_by_a_server_that_has_no_tuned_model() -> None:
    asked = evaluation(**SERVER, tasks=("gsm8k",))
    with pytest.raises(EvaluationError, match="no server has the tuned model when its training ends"):
        check_backend(asked, after_training=True)


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("backend=vlm", "backend"),
        ("server.base_urll=http://x", "did you mean `base_url`"),
        ("server.base_url=127.0.0.1:8000", "base_url"),
        ("server.num_concurrent=0", "num_concurrent"),
        ("server.api_key_env=sk-123", "api_key_env"),
        ("gpu_memory_utilization=1.5", "gpu_memory_utilization"),
    ],
)
def test_a_wrong_value_is_told(argument: str, told: str) -> None:
    with pytest.raises(EvaluationError, match=told):
        parse_evaluation([argument])
