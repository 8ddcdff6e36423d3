from collections.abc import Iterator
from itertools import combinations

import pytest

from eval.sandbox.metric import CodeEval, pass_at_k, score_code_within_limits
from eval.tasks.index import known_tasks


@pytest.mark.parametrize(
    ("samples", "correct", "k"), [(5, 2, 1), (6, 3, 2), (7, 1, 4), (4, 4, 2), (4, 0, 3), (5, 3, 5)]
)
def test_pass_at_k_is_the_share_of_draws_with_a_correct_one(samples: int, correct: int, k: int) -> None:
    draws = list(combinations([True] * correct + [False] * (samples - correct), k))
    assert pass_at_k(samples, correct, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_nothing_is_run_that_nobody_has_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ALLOW_CODE_EVAL", "0")
    with pytest.raises(ValueError, match=r"eval\.confirm_run_unsafe_code=true"):
        CodeEval().compute(predictions=[["x = 1"]], references=["assert x == 1"], k=[1])


@pytest.fixture
def evaluate_as_it_was() -> Iterator[None]:
    import evaluate

    load = evaluate.load
    yield
    evaluate.load = load


def test_lm_eval_is_given_this_metric_wherever_it_asks_for_code_eval(evaluate_as_it_was: None) -> None:
    import evaluate
    from lm_eval.api.registry import get_metric

    score_code_within_limits()
    score_code_within_limits()
    assert isinstance(evaluate.load("code_eval"), CodeEval)
    assert isinstance(get_metric("code_eval").__self__, CodeEval)


@pytest.mark.parametrize("name", ["humaneval", "humaneval_infilling", "mbpp"])
def test_lm_evals_code_tasks_ask_as_the_metric_expects(name: str) -> None:
    """Their modules, read: what they call it by, and with what. Another way in an upgrade would go around the limits."""
    from importlib.util import find_spec
    from pathlib import Path

    spec = find_spec("lm_eval")
    assert spec is not None
    assert spec.origin is not None
    source = "".join((Path(spec.origin).parent / "tasks" / name / "utils.py").read_text().split())
    assert "importevaluateashf_evaluate" in source
    assert source.count('hf_evaluate.load("code_eval")') == 1
    assert source.count(".compute(references=") == source.count(".compute(") == 2
    for forbidden in ("exec(", "subprocess", "multiprocessing", "os.system"):
        assert forbidden not in source


def test_every_task_that_runs_code_is_one_that_was_looked_at() -> None:
    """The last two run it by means of their own, which is said before they are measured."""
    families = ("humaneval", "mbpp", "cruxeval", "longproc")
    assert [name for name in known_tasks().unsafe if not name.startswith(families)] == []
