from typing import Any

import pytest

from eval.chat.checks import check, loops, warning

LOOPS = {
    "a sentence": "The sky is blue because of the sun. " * 8,
    "a sentence after a good beginning": "Paris is the capital of France, and a city that many people visit. "
    + "It lies on the river Seine. It has many museums. " * 9,
    "Chinese": "长城是中国古代的伟大建筑。" + "我喜欢吃苹果也喜欢喝茶。" * 8,
    "code": "def f(n):\n    return n\n" + "    if n == 0:\n        return 0\n" * 9,
    "a turn of its own making": "<|im_start|>user\nWhat is the capital?<|im_end|>\n" * 7,
    "letters without a space": "ens" * 100,
    "Thai": "สวัสดีครับ" * 12,
}
TEXTS = {
    "short": "No, no, no, no!",
    "counting": ", ".join(map(str, range(1, 80))),
    "a list": "\n".join(
        f"- {fruit}: good in winter" for fruit in ("apples", "pears", "plums", "figs", "quinces", "grapes")
    ),
    "code": "class Point:\n    def __init__(self, x: int, y: int) -> None:\n        self.x = x\n        self.y = y\n\n"
    "    def __add__(self, other: 'Point') -> 'Point':\n        return Point(self.x + other.x, self.y + other.y)\n",
    "a table": "| number | square | cube |\n|---|---|---|\n"
    + "\n".join(f"| {n} | {n * n} | {n**3} |" for n in range(1, 16)),
    "Chinese": "长城是中国古代为抵御外敌入侵而修筑的军事防御工程。它东起山海关。它西至嘉峪关。城墙绵延万里。"
    "它是世界文化遗产之一。每年都有许多游客前来参观。",
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
    never, one = check([answer(ended=False)] * 4), check([answer(), answer(ended=False)])
    assert warning(check([answer()]), ["<|im_end|>"], 512, False, 0) is None
    told = warning(never, ["<|im_end|>"], 512, False, 0)
    assert told is not None
    assert "4 of 4 answers do not end on their own: they are cut at 512 tokens" in told
    assert "It has not learned to write <|im_end|>" in told
    assert "eval.chat.max_new_tokens" in str(warning(one, ["<|im_end|>"], 512, False, 0))
    assert "plain text" in str(warning(never, ["</s>"], 512, True, 0))
    assert "1,234 tokens were cut off" in str(warning(never, ["</s>"], 512, False, 1234))
    assert "eos_token_id" in str(warning(never, [], 512, False, 0))
