"""The same rows, tokenizer and template give the token ids and labels that TRL's own preparation gives, row by row.

What differs, and why:
- TRL's training template of Qwen3, and its completion mask, train the line break that the template writes behind the end-of-turn
  token. A model that has stopped never writes it; it is not trained here.
- TRL lets a special token's string in a row become that token. Here it stays text unless data.special_tokens is `keep`, which
  these comparisons set where the rows have such strings (t0's answers end with one).
- A row whose answer is empty is dropped here (t0 has 1,400 under the default); under `keep` its end token makes it none.

Of large files it is every sixth row.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from sft.data.documents import DocumentMaker
from sft.data.formats import IGNORED
from sft.data.readers import read_rows
from sft.recipe.schema import Data, Source
from tests.slow.conftest import rows

Rows = list[dict[str, Any]]
Labelled = list[tuple[list[int], list[int]]]

LARGE, EVERY = 600, 6

pytestmark = [
    pytest.mark.slow,
    # TRL and datasets warn of their own doings.
    pytest.mark.filterwarnings("ignore"),
]


def by_trl(tokenizer: Any, rows: Rows, folder: Path, **options: Any) -> Labelled:
    from datasets import Dataset
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from trl import SFTConfig, SFTTrainer

    config = Qwen3Config(vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1)
    config.num_attention_heads = config.num_key_value_heads = 1
    config.head_dim = 8
    arguments = SFTConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        max_length=None,
        shuffle_dataset=False,
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    trainer = SFTTrainer(
        Qwen3ForCausalLM(config), arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )
    return [(row["input_ids"], row["labels"]) for row in trainer.train_dataset]


def by_us(tokenizer: Any, rows: Rows, format: str, chat: bool = True, **data: Any) -> Labelled:
    maker = DocumentMaker(Data(train="rows", max_length=1_000_000, **data), tokenizer)
    chunk = maker.make(Source(path="rows", chat=chat), 0, format, list(enumerate(rows, start=1)))
    assert [int(number) for number in chunk.documents["row"]] == list(range(1, len(rows) + 1))
    result, start = list[tuple[list[int], list[int]]](), 0
    for length in chunk.documents["length"].tolist():
        ids, trained = chunk.tokens[start : start + length].tolist(), chunk.trained[start : start + length]
        result.append((ids, [token if keep else IGNORED for token, keep in zip(ids, trained, strict=True)]))
        start += length
    return result


def without_line_breaks(labelled: Labelled, tokenizer: Any) -> tuple[Labelled, int]:
    """TRL's labels without the line breaks behind the end-of-turn token and without the first token, which nothing predicts."""
    line_break = tokenizer("\n", add_special_tokens=False)["input_ids"]
    assert len(line_break) == 1
    taken, result = 0, []
    for ids, labels in labelled:
        kept = [IGNORED, *labels[1:]]
        for index in range(1, len(ids)):
            if kept[index] == line_break[0] and ids[index - 1] == tokenizer.eos_token_id:
                kept[index] = IGNORED
                taken += 1
        result.append((ids, kept))
    return result, taken


def load(shared: Path, name: str) -> Rows:
    rows = [row for row in read_rows(shared / "sft" / name) if isinstance(row, dict)]
    return rows[::EVERY] if len(rows) >= LARGE else rows


def tokenizer_of(shared: Path, name: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(shared / "tokenizers" / name)


@pytest.mark.parametrize("name", ["qwen3", "minimind"])
def test_prompts_and_completions_as_they_stand(name: str, shared: Path, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(shared, name)
    rows = [{key: row[key] for key in ("prompt", "completion")} for row in load(shared, "t0_short.jsonl")]
    ours = by_us(tokenizer, rows, "prompt_completion", chat=False, special_tokens="keep")
    assert ours == by_trl(tokenizer, rows, tmp_path)


@pytest.mark.parametrize("name", ["qwen3", "minimind"])
def test_prompts_and_completions_as_a_conversation(name: str, shared: Path, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(shared, name)
    rows = load(shared, "t0_short.jsonl")
    turns = [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "completion": [{"role": "assistant", "content": row["completion"]}],
        }
        for row in rows
    ]
    theirs, line_breaks = without_line_breaks(by_trl(tokenizer, turns, tmp_path), tokenizer)
    ours = by_us(tokenizer, rows, "prompt_completion", special_tokens="keep")
    assert line_breaks == len(rows)
    assert ours == theirs


CONVERSATIONS = {
    "alpaca": ("llamafactory/alpaca_en_demo.json", "alpaca"),
    "oasst": ("oasst_en_best_path.jsonl", "messages"),
    "sgd with tools": ("sgd_messages_tools_600.jsonl", "messages"),
}


@pytest.mark.parametrize("kind", CONVERSATIONS)
@pytest.mark.parametrize("name", rows(["qwen3", "minimind"], ["qwen3"]))
def test_conversations(name: str, kind: str, shared: Path, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(shared, name)
    file, format = CONVERSATIONS[kind]
    rows = load(shared, file)
    turns = (
        [{"messages": row["messages"]} for row in rows] if format == "messages" else [as_messages(row) for row in rows]
    )
    for turn, row in zip(turns, rows, strict=True):
        if "tools" in row:
            # As text: columns would give each tool the parameters of all others, null where it has none.
            turn["tools"] = json.dumps(row["tools"])
    # TRL knows the family of Qwen3 and not that of minimind, of which it cannot train the answers alone.
    answers_only = name == "qwen3"
    theirs = by_trl(tokenizer, turns, tmp_path, assistant_only_loss=answers_only)
    theirs, line_breaks = without_line_breaks(theirs, tokenizer) if answers_only else (first_hidden(theirs), 0)
    ours = by_us(tokenizer, rows, format, loss_on="assistant" if answers_only else "all")
    assert ours == theirs
    if answers_only:
        assert line_breaks == sum(turn["role"] == "assistant" for row in turns for turn in row["messages"])


def first_hidden(labelled: Labelled) -> Labelled:
    return [(ids, [IGNORED, *labels[1:]]) for ids, labels in labelled]


def as_messages(row: dict[str, Any]) -> dict[str, Any]:
    question = "\n".join(part for part in (row["instruction"], row["input"]) if part)
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": row["output"]}]}
