"""What a server answers, read strictly: an answer that is none, or is of other tokens, is an error and no score. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sft.errors import EvaluationError


def shortened(text: str, length: int = 200) -> str:
    """The beginning of what a server said, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= length else f"{line[:length]}..."


def choices_of(answer: object, count: int, whose: str) -> list[dict[str, Any]]:
    """The choices in an answer, in the order of the prompts.

    Args:
        answer: JSON.
        count: Prompts that were sent.
        whose: The server, for the message.

    Raises:
        EvaluationError: There are not as many.
    """
    listed = answer.get("choices") if isinstance(answer, dict) else None
    choices = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    if sorted(one.get("index", -1) for one in choices) != list(range(count)):
        raise EvaluationError(
            f"{whose} was asked {count} prompts and answers {shortened(str(answer))!r}, which is not {count} choices."
        )
    return sorted(choices, key=lambda one: int(one["index"]))


def score_choice(choice: dict[str, Any], prompt: Sequence[int], scored: slice, whose: str) -> tuple[float, bool]:
    """What an echoed prompt says of its own tokens.

    Args:
        choice: With `logprobs`.
        prompt: Token ids that were sent.
        scored: The tokens of the answer, within the prompt.
        whose: The server, for the message.

    Returns:
        Sum of the log probabilities, and whether each was the likeliest token.

    Raises:
        EvaluationError: There is not one log probability for each token.
    """
    logprobs = choice.get("logprobs")
    logprobs = logprobs if isinstance(logprobs, dict) else {}
    values, tops = logprobs.get("token_logprobs"), logprobs.get("top_logprobs")
    if not isinstance(values, list) or not isinstance(tops, list):
        raise EvaluationError(f"{whose} gives no log probabilities of the prompt (`echo` with `logprobs`)")
    # With the prompt comes the one token that was generated, but where that ends the text.
    if not len(prompt) <= len(values) <= len(prompt) + 1 or len(tops) != len(values):
        raise EvaluationError(
            f"{whose} was sent {len(prompt)} tokens and one more to generate, and gives log probabilities of {len(values)}: it reads the "
            "prompt as other tokens, or does not echo it"
        )
    own, likeliest = values[scored], tops[scored]
    if not all(isinstance(value, (int, float)) for value in own) or not all(
        isinstance(top, dict) and top for top in likeliest
    ):
        raise EvaluationError(f"{whose} leaves out log probabilities of tokens in the prompt")
    greedy = all(value == max(top.values()) for value, top in zip(own, likeliest, strict=True))
    return float(sum(own)), greedy


def likelihood_request(name: str, prompts: list[list[int]], seed: int) -> dict[str, Any]:
    """A request that scores prompts."""
    return {
        "model": name,
        "prompt": prompts,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "echo": True,
        "seed": seed,
        # Two tokens that decode to the same text would be one key in what vLLM answers.
        "return_tokens_as_token_ids": True,
    }


def tokens_counted(answer: dict[str, Any]) -> int | None:
    """How many tokens the server has made of a prompt; None where it does not say."""
    usage = answer.get("usage")
    count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return count if isinstance(count, int) and count > 0 else None
