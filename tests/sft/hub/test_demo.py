import hashlib
import json
import subprocess
import sys
from pathlib import Path

import yaml

from sft.hub.demo import CITIES, NAMES, TEST_ROWS, TRAIN_ROWS, VERSION, Demo, make_demo
from sft.recipe.schema import REPOSITORY

FOLDER = Path(".builtin") / f"demo-{VERSION}"


def digests(folder: Path) -> dict[str, str]:
    """Every file's bytes; the one path that the task must name is left out."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes().replace(str(folder).encode(), b"")).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_the_demo_is_the_same_bytes_wherever_and_however_often_it_is_made(tmp_path: Path) -> None:
    """In another process, which hashes words in another order."""
    make_demo(tmp_path / "one")
    program = (
        "import sys, pathlib, sft.hub.demo; sft.hub.demo.make_demo(pathlib.Path(sys.argv[1]));"
        "print(sorted({'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "two")]
    assert subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY).stdout.strip() == "[]"
    one = digests(tmp_path / "one" / FOLDER)
    assert one == digests(tmp_path / "two" / FOLDER)
    assert {"model/model.safetensors", "model/tokenizer.json", "train.jsonl", "task/test.jsonl"} <= one.keys()


def test_the_task_finds_its_rows_after_the_folder_was_moved(tmp_path: Path) -> None:
    make_demo(tmp_path / "here")
    (tmp_path / "here").rename(tmp_path / "there")
    task = yaml.safe_load(make_demo(tmp_path / "there").task.read_text())
    test = Path(task["dataset_kwargs"]["data_files"]["test"])
    assert test.is_file()
    assert tmp_path / "there" in test.parents


def test_what_is_tested_was_not_trained(demo: Demo) -> None:
    trained = [json.loads(line)["messages"] for line in demo.train.read_text().splitlines()]
    tested = [json.loads(line) for line in (demo.task.parent / "test.jsonl").read_text().splitlines()]
    assert (len(trained), len(tested)) == (TRAIN_ROWS, TEST_ROWS)

    def pairs(answers: list[str]) -> set[tuple[str, str]]:
        return {(facts["name"], facts["to"]) for facts in map(json.loads, answers)}

    seen, unseen = pairs([turns[1]["content"] for turns in trained]), pairs([row["answer"] for row in tested])
    assert not seen & unseen
    # Yet every name and every city was.
    assert {name for name, _ in seen} == set(NAMES)
    assert {city for _, city in seen} == set(CITIES)
    assert not {turns[0]["content"] for turns in trained} & {row["question"] for row in tested}


def test_the_tokenizer_gives_back_what_it_was_given(demo: Demo) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo.model)
    config = json.loads((demo.model / "config.json").read_text())
    assert len(tokenizer) <= config["vocab_size"]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (config["pad_token_id"], config["eos_token_id"])
    for text in ('{"name":"Rita","count":4}', "On Friday, ünï 数 \n\t  two  spaces"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
