"""What a server is asked with, and how its answer is read."""

from collections.abc import Callable
from dataclasses import replace

import pytest

pytest.importorskip("tenacity", reason="lm_eval's clients of servers need it")

from eval.models.server import Served
from eval.models.server_requests import Asking
from eval.reference import Reference
from eval.tasks.settings import Settings

Resolve = Callable[..., Settings]
SERVED = Served("http://127.0.0.1:1/v1", "tuned", "chat", 1, 5, None, None)


def test_a_server_of_openais_api_is_told_no_more_texts_that_end_an_answer_than_it_takes(
    settings: Resolve, reference: Reference
) -> None:
    asking = Asking(SERVED, reference.tokenizer, settings("mine"))
    ends = [f"end {number}" for number in range(6)]
    assert asking.generation({"until": ends, "max_gen_toks": 9}, 0)["stop"] == ends[:4]
    assert asking.finish("4 end 5 more", {"until": ends, "max_gen_toks": 9}) == "4 "
    vllm = Asking(replace(SERVED, dialect="vllm"), reference.tokenizer, settings("mine"))
    assert vllm.generation({"until": ends, "max_gen_toks": 9}, 0)["stop"] == ends


def test_an_answer_with_half_a_surrogate_pair_can_be_written(settings: Resolve, reference: Reference) -> None:
    asking = Asking(SERVED, reference.tokenizer, settings("mine"))
    text = asking.text_of({"message": {"content": "half \ud83d, whole \ud83d\ude00"}})
    assert text == "half \ufffd, whole \U0001f600"
    text.encode()
