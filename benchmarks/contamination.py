"""How long does it take, and how much memory, to look for the documents of an evaluation in a training set?

    python benchmarks/contamination.py --rows 1000000

Prepared data as a training leaves it: the rows of a JSON Lines file in Qwen3's tokens, the same rows again until there are enough. The
documents: 12,000 of 170 words, as many as MMLU-Pro has, a tenth of them out of the rows. First it checks that these are found and no other.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from machine import described
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval.compare.contamination import NGRAM, Search, training_texts, words
from sft.data.store import DOCUMENT, DocumentWriter, SequenceIndex

SHARED = Path(__file__).resolve().parents[1].parent / "shared" / "data"
DOCUMENTS, WORDS = 12_000, 170


def memory_mib() -> float:
    """Most memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def prepare(folder: Path, ids: list[list[int]], rows: int) -> None:
    """Write the rows over and over."""
    lengths = np.array([len(one) for one in ids], np.int32)
    tokens = np.concatenate([np.array(one, np.int32) for one in ids])
    written = 0
    with DocumentWriter(folder) as writer:
        while written < rows:
            count = min(len(ids), rows - written)
            documents = np.zeros(count, DOCUMENT)
            documents["length"] = lengths[:count]
            part = tokens[: lengths[:count].sum()]
            writer.write(part, np.ones(len(part), np.uint8), documents)
            written += count
    SequenceIndex(np.arange(rows), np.arange(1, rows + 1)).save(folder / "train.npz")


def main() -> None:
    """Measure once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--data", type=Path, default=SHARED / "sft" / "t0_short.jsonl")
    parser.add_argument("--tokenizer", type=Path, default=SHARED / "tokenizers" / "qwen3")
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in arguments.data.read_text(encoding="utf-8").splitlines()]
    # Each completion ends in a control token, written out: in tokens it is no word.
    texts = [f"{row['prompt']} {row['completion']}".replace("<|endoftext|>", "") for row in rows]
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    draw = random.Random(0)
    vocabulary = sorted({word for text in texts[:5000] for word in words(text)})
    long = [text for text in texts if NGRAM <= len(words(text)) < WORDS]
    taken = draw.sample(long, DOCUMENTS // 10)
    documents = [[text] for text in taken]
    documents += [[" ".join(draw.choices(vocabulary, k=WORDS))] for _ in range(DOCUMENTS - len(documents))]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, tokenizer(texts).input_ids, arguments.rows)
        before, started = memory_mib(), time.process_time()
        search = Search(documents, NGRAM, most_shared=DOCUMENTS)
        for some in training_texts(folder, tokenizer):
            search.scan(some)
        found, seconds = search.found(), time.process_time() - started
        tokens = (folder / "tokens.bin").stat().st_size // 4
    if not (found[: len(taken)].all() and not found[len(taken) :].any()):
        raise SystemExit(f"Found {found[: len(taken)].sum()} of {len(taken)}, and {found[len(taken) :].sum()} others.")
    print(described(["numpy", "tokenizers", "transformers", "xxhash"]))
    print(
        f"{arguments.rows:,} rows, {tokens:,} tokens: {seconds:.1f} s of processor time; {memory_mib() - before:.0f} MiB more than before"
    )


if __name__ == "__main__":
    main()
