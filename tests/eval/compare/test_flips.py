import json
from pathlib import Path
from typing import Any

from eval.compare.comparison import compare
from eval.compare.flips import answer, find_flips, question, target, write_flips


def generated(doc_id: int, said: str, score: int, taken: str | None = None, **more: object) -> dict[str, Any]:
    """A sample as lm_eval writes it to its file."""
    return {
        "doc_id": doc_id,
        "doc": {"question": f"What is {doc_id} plus 2?", "answer": str(doc_id + 2)},
        "target": str(doc_id + 2),
        "arguments": {
            "gen_args_0": {"arg_0": f"<|user|>Answer. What is {doc_id} plus 2?<|assistant|>", "arg_1": {"until": []}}
        },
        "resps": [[said]],
        "filtered_resps": [said if taken is None else taken],
        "filter": "none",
        "metrics": ["exact_match"],
        "doc_hash": str(doc_id),
        "prompt_hash": str(doc_id),
        "exact_match": score,
    } | more


def chosen(*logprobs: float) -> dict[str, Any]:
    options = ["a cat", "a very long-haired dog"]
    return {
        "doc_id": 0,
        "doc": {"query": "Which animal barks at night?", "choices": options},
        "target": "1",
        "arguments": {
            f"gen_args_{n}": {"arg_0": "Question: Which animal barks at night?\nAnswer:", "arg_1": f" {option}"}
            for n, option in enumerate(options)
        },
        "resps": [[[str(logprob), "False"]] for logprob in logprobs],
        "filtered_resps": [[str(logprob), "False"] for logprob in logprobs],
        "filter": "none",
    }


def results(score: float, n: int) -> dict[str, Any]:
    return {
        "settings_hash": "a",
        "settings": {},
        "results": {"add": {"exact_match,none": score, "sample_len": n}},
        "higher_is_better": {"add": {"exact_match": True}},
        "n-samples": {},
        "n-shot": {},
        "versions": {},
        "failed": {},
        "prompts_cut": [],
        "measured_model": {"model": "m", "revision": None},
        "config": {},
    }


def test_documents_that_flipped_are_found_both_ways_with_both_answers(tmp_path: Path) -> None:
    base = {"add": [generated(0, "2", 1), generated(1, "7", 0), generated(2, "4", 1)]}
    tuned = {"add": [generated(0, "no idea", 0), generated(1, "3", 1), generated(2, "4", 1)]}
    sides = results(2 / 3, 3), results(2 / 3, 3)
    rows = compare(*sides, base, tuned)["metrics"]
    lines, counts = find_flips(rows, *sides, base, tuned)
    assert counts == {"add": {"metric": "exact_match", "gained": 1, "lost": 1}}
    write_flips(lines, tmp_path / "flips.jsonl")
    lost, gained = map(json.loads, (tmp_path / "flips.jsonl").read_text().splitlines())
    assert (lost["doc_id"], lost["direction"], lost["base_score"], lost["tuned_score"]) == (0, "lost", 1, 0)
    assert (lost["question"], lost["target"], lost["base"], lost["tuned"]) == ("What is 0 plus 2?", "2", "2", "no idea")
    assert (gained["doc_id"], gained["direction"], gained["tuned"]) == (1, "gained", "3")


def test_what_is_no_right_or_wrong_does_not_flip() -> None:
    base, tuned = ({"add": [generated(n, "", score) for n in range(2)]} for score in (0.25, 0.5))  # type: ignore[arg-type]
    sides = results(0.25, 2), results(0.5, 2)
    assert find_flips(compare(*sides, base, tuned)["metrics"], *sides, base, tuned) == ([], {})


def test_a_choice_is_shown_by_its_text() -> None:
    sample = chosen(-2.0, -3.0)
    assert (answer(sample, "acc"), target(sample)) == ("a cat", "a very long-haired dog")
    # By its length the longer one is likelier.
    assert answer(sample, "acc_norm") == "a very long-haired dog"
    assert question(sample) == "Which animal barks at night?"


def test_a_question_that_is_not_in_the_document_is_the_end_of_the_prompt() -> None:
    sample = generated(0, "2", 1, doc={"id": "x"})
    assert question(sample).endswith("What is 0 plus 2?<|assistant|>")


def test_passage_and_question_stay_in_the_order_of_the_prompt() -> None:
    doc = {"question": "is the sky blue", "passage": "The sky is blue today, they say.", "label": "yes"}
    prompt = {"gen_args_0": {"arg_0": "The sky is blue today, they say.\nQ: is the sky blue?", "arg_1": "{}"}}
    assert question(generated(0, "", 1, doc=doc, arguments=prompt)) == (
        "The sky is blue today, they say.\nis the sky blue"
    )
