from typing import Any

import pytest

from eval.chat.checks import check, loops, warning

LOOPS = {
    "a sentence": "The sky is blue because of the sun. " * 8,
    "Chinese": "长城是中国古代的伟大建筑。" + "我喜欢吃苹果也喜欢喝茶。" * 8,
}
TEXTS = {
    "short": "No, no, no, no!",
    "code": "class Point:\n    def __init__(self, x: int, y: int) -> None:\n        self.x = x\n        self.y = y\n\n"
    "    def __add__(self, other: 'Point') -> 'Point':\n        return Point(self.x + other.x, self.y + other.y)\n",
    "a table": "| number | square | cube |\n|---|---|---|\n"
    + "\n".join(f"| {n} | {n * n} | {n**3} |" for n in range(1, 16)),
}


@pytest.mark.parametrize("name", LOOPS)
def test_an_answer_that_loops_is_found(name: str) -> None:
    assert loops(LOOPS[name])


@pytest.mark.parametrize("name", TEXTS)
def test_lists_tables_and_code_do_not_loop(name: str) -> None:
    assert not loops(TEXTS[name])


def test_a_loop_that_was_left_again_is_none() -> None:
    assert not loops(LOOPS["a sentence"] + " ".join(f"word{n}" for n in range(128)))


def answer(**seen: bool) -> dict[str, Any]:
    return {"text": "x", "tokens": 1, "ended": True, "empty": False, "loops": False} | seen


@pytest.mark.parametrize("wrong", [{"ended": False}, {"empty": True}, {"loops": True}])
def test_one_bad_answer_is_enough_not_to_pass(wrong: dict[str, bool]) -> None:
    assert check([answer(), answer()])["passed"]
    assert not check([answer(), answer(**wrong)])["passed"]


def test_a_model_that_does_not_end_is_told_with_the_reason_and_the_remedy() -> None:
    never = check([answer(ended=False)] * 4)
    assert warning(check([answer()]), ["<|im_end|>"], 512) is None
    told = warning(never, ["<|im_end|>"], 512)
    assert told is not None
    assert "4 of 4 answers do not end on their own: they are cut at 512 tokens" in told
    assert "Generation ends at <|im_end|>" in told
    assert "eos_token_id" in str(warning(never, [], 512))
