"""What base and tuned model are asked to see whether they chat."""

from __future__ import annotations

from sft.hub.demo import questions
from sft.recipe.schema import Recipe

Messages = list[dict[str, str]]

DEFAULT: tuple[str | Messages, ...] = (
    "Hello! How are you?",
    "What is the capital of France? Answer in one word.",
    "Explain in two sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "请用一句话介绍长城。",
    "Name three uses of a paper clip, as a list.",
    "Rewrite this sentence politely: Send me the report now.",
    [
        {"role": "user", "content": "I have three apples and buy two more. How many do I have?"},
        {"role": "assistant", "content": "You have five apples."},
        {"role": "user", "content": "I eat one of them. How many are left?"},
    ],
)
"""Short answers suffice for each: one that does not end has another reason than its length."""


def prompts_of(recipe: Recipe) -> list[Messages]:
    """The conversations to go on with, each ending before an answer.

    A recipe's eval.system_instruction begins each that has no system turn of its own.
    """
    assert recipe.eval.chat
    given: list[str | Messages] = list(DEFAULT)
    if recipe.eval.chat.prompts is not None:
        given = [
            one if isinstance(one, str) else [turn.model_dump() for turn in one] for one in recipe.eval.chat.prompts
        ]
    elif any(source.path == "builtin:demo" for source in recipe.sources):
        given = list(questions(len(DEFAULT)))  # it has learnt nothing else
    return [_conversation(one, recipe.eval.system_instruction) for one in given]


def _conversation(prompt: str | Messages, system: str | None) -> Messages:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system is None or any(message["role"] == "system" for message in messages):
        return messages
    return [{"role": "system", "content": system}, *messages]
