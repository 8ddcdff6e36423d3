import json
from pathlib import Path
from typing import Any

from eval.compare.comparison import compare
from eval.compare.flips import answer, find_flips, question, target, write_flips
from tests.eval.compare.lm_eval_files import Rows, results


def generated(doc_id: int, words: str, score: float, **more: object) -> dict[str, Any]:
    """A sample as lm_eval writes it to its file."""
    prompt = f"<|user|>Answer. What is {doc_id} plus 2?<|assistant|>"
    return {
        "doc_id": doc_id,
        "doc": {"question": f"What is {doc_id} plus 2?", "answer": str(doc_id + 2)},
        "target": str(doc_id + 2),
        "arguments": {"gen_args_0": {"arg_0": prompt, "arg_1": {"until": []}}},
        "resps": [[words]],
        "filtered_resps": [words],
        "filter": "none",
        "doc_hash": str(doc_id),
        "prompt_hash": str(doc_id),
        "exact_match": score,
    } | more


def flips(base: Rows, tuned: Rows) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    means = [sum(row["exact_match"] for row in side) / len(side) for side in (base, tuned)]
    sides = [results({"add": {"exact_match,none": mean}}) for mean in means]
    samples = {"add": base}, {"add": tuned}
    return find_flips(compare(*sides, *samples).metrics, samples)


def test_documents_that_flipped_are_found_both_ways_with_both_answers(tmp_path: Path) -> None:
    base = [generated(0, "2", 1), generated(1, "7", 0), generated(2, "4", 1)]
    tuned = [generated(0, "no idea", 0), generated(1, "It is 3.", 1, filtered_resps=["3"]), generated(2, "4", 1)]
    lines, counts = flips(base, tuned)
    assert counts == {"add": {"metric": "exact_match", "gained": 1, "lost": 1}}
    write_flips(lines, tmp_path / "flips.jsonl")
    lost, gained = map(json.loads, (tmp_path / "flips.jsonl").read_text().splitlines())
    assert (lost["doc_id"], lost["direction"], lost["base_score"], lost["tuned_score"]) == (0, "lost", 1, 0)
    assert (lost["question"], lost["target"], lost["base"], lost["tuned"]) == ("What is 0 plus 2?", "2", "2", "no idea")
    assert (gained["doc_id"], gained["direction"]) == (1, "gained")
    assert gained["tuned"] == "It is 3.\n[taken as the answer: 3]"


def test_what_is_not_right_or_wrong_does_not_flip() -> None:
    assert flips(*([generated(n, "", score) for n in range(2)] for score in (0.25, 0.5))) == ([], {})


def test_a_choice_is_shown_by_its_text() -> None:
    options = ["a cat", "a very long-haired dog"]
    ask = "Question: Which animal barks at night?\nAnswer:"
    sample = {
        "doc": {"query": "Which animal barks at night?", "choices": options},
        "target": "1",
        "arguments": {f"gen_args_{n}": {"arg_0": ask, "arg_1": f" {option}"} for n, option in enumerate(options)},
        "filtered_resps": [["-2.0", "False"], ["-3.0", "False"]],
    }
    assert (answer(sample, "acc"), target(sample)) == ("a cat", "a very long-haired dog")
    # By its length the longer one is likelier.
    assert answer(sample, "acc_norm") == "a very long-haired dog"
    assert question(sample) == "Which animal barks at night?"


def test_a_question_is_the_document_s_texts_that_the_prompt_has_else_the_prompt_s_end() -> None:
    doc = {
        "passage": "The sky is blue today, they say.",
        "question": "is the sky blue",
        "label": "yes",
        "note": "a b c",
    }
    prompt = {"gen_args_0": {"arg_0": "The sky is blue today, they say.\nQ: is the sky blue?", "arg_1": "{}"}}
    found = question(generated(0, "", 1, doc=doc, arguments=prompt))
    assert found == "The sky is blue today, they say.\nis the sky blue"
    assert question(generated(0, "2", 1, doc={"id": "x"})).endswith("What is 0 plus 2?<|assistant|>")
