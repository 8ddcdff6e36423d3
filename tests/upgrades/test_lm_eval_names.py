"""What eval/ relies on in lm_eval's own code: a new release that changes it fails here first."""

import ast
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any


def lm_eval_file(*parts: str) -> str:
    spec = importlib.util.find_spec("lm_eval")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent.joinpath(*parts).read_text()


def test_mbpp_instruct_loses_the_first_word_of_an_answer() -> None:
    """When this fails, mbpp_instruct may replace mbpp in the suite `code`."""
    tree = ast.parse(lm_eval_file("tasks", "mbpp", "utils.py"))
    tree.body = [node for node in tree.body if getattr(node, "name", None) == "extract_code_blocks"]
    found: dict[str, Any] = {"re": re}
    exec(compile(tree, "utils.py", "exec"), found)
    answer = "def add(a, b):\n    return a + b\n```"
    assert found["extract_code_blocks"](answer) == " add(a, b):\n    return a + b"


def test_leaderboard_math_needs_a_package_that_is_not_installed() -> None:
    """When this fails, leaderboard_math_hard may join the suite `leaderboard`."""
    assert importlib.util.find_spec("math_verify") is None
    assert "from math_verify import" in lm_eval_file("tasks", "leaderboard", "math", "utils.py")


def test_lm_eval_reads_the_answer_length_that_is_set() -> None:
    from lm_eval.defaults import default_gen_kwargs
    from lm_eval.models.utils import normalize_gen_kwargs

    assert normalize_gen_kwargs({"max_gen_toks": 9, "max_new_tokens": 5})["max_gen_toks"] == 9
    assert default_gen_kwargs("\n\n")["max_gen_toks"] == 256


def test_the_sandbox_takes_over_all_of_lm_evals_environment() -> None:
    from lm_eval import utils

    source = "".join(inspect.getsource(utils).split())
    assert "env=Environment(loader=BaseLoader,undefined=StrictUndefined,keep_trailing_newline=True)" in source
    assert source.count("env.filters[") == 1
