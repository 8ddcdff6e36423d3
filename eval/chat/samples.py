"""Has base and tuned model answer the same prompts, and checks the answers: eval/chat.json.

    python -m eval.chat outputs/tiny/latest

Both use transformers, the tuned model's chat template, the generation config in final/, and one seed.
"""

from __future__ import annotations

import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

from eval.chat.checks import check, is_empty, loops, warning
from eval.chat.model import ChatFormat, Messages, load_format, load_weights
from eval.models.placement import give_memory_back
from eval.models.target import Target, base_target, check_trained
from eval.tasks.output import chatter_to
from eval.tasks.reference import Reference, load_reference
from sft.errors import EvaluationError
from sft.files import write_json
from sft.hub.demo import questions
from sft.recipe.schema import Recipe
from sft.run.directory import Run, find_run
from sft.run.trust import TRUST, check_model_code

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
"""Each has a short answer: one that does not end has another reason than its length."""

AT_ONCE = 8
"""Prompts in a batch."""

Answer = dict[str, Any]


def prompts_of(recipe: Recipe) -> list[Messages]:
    """The conversations to continue, each ending before an answer.

    A recipe's eval.system_instruction begins each that has no system turn of its own.
    """
    assert recipe.eval.chat
    given: list[str | Messages] = list(DEFAULT)
    if (own := recipe.eval.chat.prompts) is not None:
        given = [one if isinstance(one, str) else [turn.model_dump() for turn in one] for one in own]
    elif any(source.path == "builtin:demo" for source in recipe.sources):
        given = list(questions(len(DEFAULT)))  # it has learned nothing else
    system = recipe.eval.system_instruction
    conversations = []
    for prompt in given:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if system is not None and all(message["role"] != "system" for message in messages):
            messages = [{"role": "system", "content": system}, *messages]
        conversations.append(messages)
    return conversations


def answer_limit(chat_format: ChatFormat, prompts: list[list[int]], max_new_tokens: int) -> int:
    """Tokens of the longest answer: the recipe's number, where the context has room for it."""
    longest, context = max(map(len, prompts)), chat_format.context
    room = max_new_tokens if context is None else min(max_new_tokens, context - longest)
    if room < 1:
        raise EvaluationError(
            f"eval.chat.prompts: one of {longest} tokens leaves no room for an answer in a context of {context}. Shorten it."
        )
    return room


def answer_prompts(
    model: Any, chat_format: ChatFormat, prompts: list[list[int]], limit: int, seed: int
) -> list[Answer]:
    """Answer each rendered prompt in at most `limit` tokens; the same each time on the same machine."""
    import torch

    torch.manual_seed(seed)
    config = deepcopy(chat_format.generation_config)
    config.max_new_tokens = limit
    answers = []
    for start in range(0, len(prompts), AT_ONCE):
        batch = prompts[start : start + AT_ONCE]
        longest = max(map(len, batch))
        # Padded on the left: the answer follows the prompt.
        padded = [[config.pad_token_id] * (longest - len(prompt)) + prompt for prompt in batch]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in batch]
        ids, seen = (torch.tensor(one, device=model.device) for one in (padded, mask))
        generated = model.generate(ids, attention_mask=seen, generation_config=config)
        answers += [_answer(chat_format, row) for row in generated[:, longest:].tolist()]
    return answers


def _answer(chat_format: ChatFormat, ids: list[int]) -> Answer:
    """An answer up to the first token that ends it; padding follows."""
    end = next((place for place, token in enumerate(ids) if token in chat_format.stops), None)
    ids = ids if end is None else ids[: end + 1]
    text = chat_format.text(ids)
    return {"text": text, "tokens": len(ids), "ended": end is not None, "empty": is_empty(text), "loops": loops(text)}


def _answer_with_both(run: Run, reference: Reference, log: Path) -> dict[str, Any]:
    """What eval/chat.json holds."""
    recipe = run.recipe()
    evaluation, trusted = recipe.eval, recipe.model.trust_remote_code
    assert evaluation.chat
    chat_format, prompts, base = load_format(reference), prompts_of(recipe), base_target(run, reference)
    rendered = [chat_format.render(prompt) for prompt in prompts]
    limit = answer_limit(chat_format, rendered, evaluation.chat.max_new_tokens)
    answers = {}
    for target in (base, Target("tuned", str(run.final), None, trusted)):
        with chatter_to(log):
            model = load_weights(target, reference, chat_format, evaluation)
            answers[target.label] = answer_prompts(model, chat_format, rendered, limit, evaluation.seed)
        dtype = str(model.dtype).removeprefix("torch.")
        del model
        give_memory_back()  # the next model needs it
    saved = chat_format.generation_config.to_diff_dict()
    generation = {
        **{name: value for name, value in saved.items() if not name.startswith("_")},
        "max_new_tokens": limit,
        "seed": evaluation.seed,
        "dtype": dtype,
        **chat_format.thinking,
        "ends": chat_format.tokenizer.convert_ids_to_tokens(sorted(chat_format.stops)),
    }
    pairs = zip(prompts, answers["base"], answers["tuned"], strict=True)
    return {
        "generation": generation,
        "prompts": [{"messages": prompt, "base": one, "tuned": other} for prompt, one, other in pairs],
        "checks": {label: check(given) for label, given in answers.items()},
    }


def _show(run: Run, result: dict[str, Any]) -> None:
    for label, counts in result["checks"].items():
        looping = f", {counts['loops']} loop" if counts["loops"] else ""
        empty = f", {counts['empty']} are empty" if counts["empty"] else ""
        print(f"{label}: {counts['ended']} of {counts['answers']} answers end on their own{looping}{empty}")
    generation = result["generation"]
    words = warning(result["checks"]["tuned"], generation["ends"], generation["max_new_tokens"])
    if words is not None:
        print(words, file=sys.stderr, flush=True)
    print(f"Answers: {run.path / 'eval' / 'chat.json'}", flush=True)


def chat(run: Run) -> None:
    """Have base and tuned model answer, and write eval/chat.json."""
    recipe = run.recipe()
    if not recipe.eval.chat:
        raise EvaluationError("eval.chat=false: no prompts are answered.")
    check_trained(run)
    reference = load_reference(str(run.final), None, recipe.model.trust_remote_code)
    file = run.path / "eval" / "chat.json"
    file.parent.mkdir(exist_ok=True)
    if reference.tokenizer.chat_template is None and "chat" not in recipe.eval.model_fields_set:
        reason = "The tuned model has no chat template, because its data needed none."
        write_json(file, {"skipped": reason, "generation": {}, "prompts": [], "checks": {}})
        print(f"chat: no prompts are answered. {reason}")
        return
    result = _answer_with_both(run, reference, file.with_suffix(".log"))
    write_json(file, result)
    _show(run, result)


def main(arguments: list[str]) -> None:
    """Have the models of the run that the only argument names answer."""
    names = [word for word in arguments if word != TRUST]
    if len(names) != 1:
        raise EvaluationError("Name one run's folder: python -m eval.chat outputs/tiny/latest")
    run = find_run(Path(names[0]))
    check_model_code(run.path, run.recipe().model.trust_remote_code, TRUST in arguments)
    chat(run)
