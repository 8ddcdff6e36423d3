import pytest

from eval.models.backends import check_backend
from eval.run import parse_evaluation
from sft.errors import EvaluationError
from sft.recipe.schema import Evaluation

ADDRESS = {"base_url": "http://127.0.0.1:1/v1"}
SERVER = {"backend": "server", "server": ADDRESS}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tensor_parallel_size": 2}, "eval.tensor_parallel_size=2 has no effect: give it to `vllm serve`"),
        ({"backend": "vllm"}, r"eval.backend=vllm: .*vllm serve MODEL.* backend=server server.base_url="),
        ({"server": ADDRESS}, "eval.server.base_url=.* is of eval.backend=server, and eval.backend=hf"),
        ({"backend": "server"}, "eval.server.base_url is not given"),
        ({**SERVER, "processes": 2}, "eval.processes=2, and the server decides it"),
        (
            {"backend": "server", "apply_chat_template": False, "server": {**ADDRESS, "api": "chat"}},
            "eval.server.api=chat sends messages",
        ),
        (
            {"backend": "server", "server": {**ADDRESS, "api_key_env": "NOT_THERE"}},
            "eval.server.api_key_env=NOT_THERE, and there is no such environment variable",
        ),
    ],
)
def test_what_contradicts_is_refused_before_anything_loads(keys: dict[str, object], message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        check_backend(Evaluation.model_validate(keys))


def test_all_contradictions_are_one_message() -> None:
    with pytest.raises(EvaluationError) as refused:
        parse_evaluation(["backend=server", "tensor_parallel_size=2", "dtype=float16"])
    assert len(str(refused.value).splitlines()) == 3


def test_a_training_does_not_end_in_an_evaluation_by_a_server_that_has_no_tuned_model() -> None:
    with pytest.raises(EvaluationError, match="no server has the tuned model when its training ends"):
        check_backend(Evaluation.model_validate({**SERVER, "tasks": ("gsm8k",)}), after_training=True)
