"""From rows to documents: rendered, tokenized, masked, and every token accounted for.

Law 5: tokens in = trained + masked + truncated + dropped, for every source; padding is counted beside it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from sft.chat import ChatRenderer, assistant_mask
from sft.errors import DataError
from sft.facts import hub_answers, local_slice, source_files
from sft.recipe import Data, Recipe, Source
from sft.rows import Row, read_rows, row_format, to_messages, without_nulls

IGNORED = -100
"""The label of a token that is not trained."""

_BATCH = 1000
"""Rows that go through the tokenizer at a time; it spreads them over the cores."""

# 64-bit offsets: a pack of all documents may hold more than 2**31 tokens.
SCHEMA = pa.schema([("input_ids", pa.large_list(pa.int32())), ("labels", pa.large_list(pa.int32()))])


@dataclass
class Account:
    """Where one source's rows and tokens went."""

    source: str
    rows_in: int = 0
    rows_used: int = 0
    rows_dropped: Counter[str] = field(default_factory=Counter)
    trained: int = 0
    masked: int = 0
    truncated: int = 0
    dropped: int = 0

    def as_json(self) -> dict[str, Any]:
        """The account as ledger.json has it; `in` is the sum of the four."""
        total = self.trained + self.masked + self.truncated + self.dropped
        return {
            "source": self.source,
            "rows": {"in": self.rows_in, "used": self.rows_used, "dropped": dict(self.rows_dropped)},
            "tokens": {
                "in": total,
                "trained": self.trained,
                "masked": self.masked,
                "truncated": self.truncated,
                "dropped": self.dropped,
            },
        }


@dataclass(frozen=True)
class Documents:
    """All documents in one file, and their accounts."""

    file: Path
    """Arrow stream of SCHEMA: a row is a document."""

    accounts: list[Account]
    fingerprint: str
    """sha256 over the token ids and labels of all documents, in order."""

    def total(self) -> Account:
        """The accounts of all sources added up."""
        total = Account("all")
        for account in self.accounts:
            total.rows_dropped += account.rows_dropped
            for name in ("rows_in", "rows_used", "trained", "masked", "truncated", "dropped"):
                setattr(total, name, getattr(total, name) + getattr(account, name))
        return total


def labels_from_mask(input_ids: list[int], trained: list[bool]) -> list[int]:
    """Keep the trained tokens as labels and hide the rest from the loss.

    Args:
        input_ids: One document's token ids, length T.
        trained: Whether each token is trained, length T.

    Returns:
        Labels of length T, not shifted: the model shifts them. The first is always hidden, since nothing predicts it.

    >>> labels_from_mask([5, 6, 7], [True, False, True])
    [-100, -100, 7]
    """
    labels = [token if keep else IGNORED for token, keep in zip(input_ids, trained, strict=True)]
    return [IGNORED, *labels[1:]]


def _source_rows(source: Source, output_dir: str) -> Iterator[tuple[str, Row]]:
    """The rows of a source, each with where it came from."""
    files = source_files(source, output_dir)
    if files is not None:
        wanted = local_slice(source)
        rows = ((f"{file}, row {number}", row) for file in files for number, row in enumerate(read_rows(file), start=1))
        yield from islice(rows, wanted.start, wanted.stop)
        return
    import datasets

    if (
        not hub_answers()
    ):  # so that what is cached is found at once, and what is not is told without a minute of retries
        import huggingface_hub

        huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        dataset = datasets.load_dataset(source.path, source.name, split=source.split, revision=source.revision)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        first = str(error).splitlines()[0]
        raise DataError(
            f"data.train: {source.path} is no local path, and the hub's dataset cannot be loaded: {first.rstrip('.')}. "
            "Download it where there is a network (hf download --repo-type dataset), or give a local file."
        ) from None
    # Columnar: a key that one row has is null in all others.
    yield from ((f"{source.path}, row {number}", without_nulls(row)) for number, row in enumerate(dataset, start=1))


def _render(renderer: ChatRenderer, rows: list[tuple[str, Row]], format: str, account: Account) -> list[Any]:
    """The conversations of a batch as text; rows without an answer are dropped and counted."""
    rendered = []
    for where, row in rows:
        account.rows_in += 1
        try:
            messages, tools = to_messages(row, format)
            if not any(
                turn["role"] == "assistant" and (turn["content"] or turn.get("tool_calls")) for turn in messages
            ):
                account.rows_dropped["no answer to train on"] += 1
                continue
            rendered.append(renderer.render(messages, tools))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"the column {error} is missing" if isinstance(error, KeyError) else error
            raise DataError(f"{where}: {reason}. Correct or remove the row.") from None
    return rendered


def _tokenize(
    tokenizer: Any, rendered: list[Any], data: Data, account: Account
) -> Iterator[tuple[list[int], list[int]]]:
    """Documents of a batch as (input_ids, labels), none longer than max_length."""
    if not rendered:  # the tokenizer takes no empty batch
        return
    # The template has written the special tokens, BOS included: the tokenizer must not add another.
    encoded = tokenizer([item.text for item in rendered], add_special_tokens=False, return_offsets_mapping=True)
    for item, ids, offsets in zip(rendered, encoded["input_ids"], encoded["offset_mapping"], strict=True):
        keep = assistant_mask(offsets, item.spans) if data.loss_on == "assistant" else [True] * len(ids)
        labels = labels_from_mask(ids, keep)
        if len(ids) > data.max_length and data.overlong == "error":
            raise DataError(
                f"{account.source}: a row has {len(ids)} tokens, more than data.max_length={data.max_length}. Raise it, or set "
                "data.overlong to drop or truncate."
            )
        drop = "longer than max_length" if len(ids) > data.max_length and data.overlong == "drop" else None
        kept, kept_labels = ids[: data.max_length], labels[: data.max_length]
        trained = sum(label != IGNORED for label in kept_labels)
        if drop is None and not trained:
            drop = "no trained token within max_length" if len(ids) > data.max_length else "no trained token"
        if drop is not None:
            account.rows_dropped[drop] += 1
            account.dropped += len(ids)
            continue
        account.rows_used += 1
        account.trained += trained
        account.masked += len(kept) - trained
        account.truncated += len(ids) - len(kept)
        yield kept, kept_labels


def prepare_documents(
    recipe: Recipe, tokenizer: Any, file: Path, progress: Callable[[str], None] | None = None
) -> Documents:
    """Tokenize every source into one file.

    Args:
        recipe: Names the sources, max_length, loss_on and overlong.
        tokenizer: From load_tokenizer.
        file: Where the documents go.
        progress: Called with a line of text after each batch.

    Raises:
        DataError: A source is missing, has no usable columns, holds a row that cannot be read, or nothing is left.
    """
    renderer, digest = ChatRenderer(tokenizer), hashlib.sha256()
    accounts = []
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, SCHEMA) as writer:
        for source in recipe.sources:
            account = Account(source.path)
            accounts.append(account)
            rows = _source_rows(source, recipe.output_dir)
            head = list(islice(rows, _BATCH))
            if not head:
                raise DataError(f"{source.path} holds no rows.")
            format = row_format({key for _, row in head for key in row}, source.path)
            batches = chain([head], iter(lambda rows=rows: list(islice(rows, _BATCH)), []))  # type: ignore[misc]
            for batch in batches:
                documents = list(_tokenize(tokenizer, _render(renderer, batch, format, account), recipe.data, account))
                _write(writer, digest, documents)
                if progress is not None:
                    progress(f"{source.path}: {account.rows_in} rows")
    documents_file = Documents(file, accounts, digest.hexdigest())
    total = documents_file.total()
    if total.rows_used == 0:
        reasons = ", ".join(f"{count} {reason}" for reason, count in total.rows_dropped.items())
        raise DataError(f"Nothing is left to train on: all {total.rows_in} rows were dropped ({reasons}).")
    return documents_file


def _write(writer: Any, digest: Any, documents: list[tuple[list[int], list[int]]]) -> None:
    if not documents:
        return
    columns = [pa.array([document[index] for document in documents], SCHEMA.field(index).type) for index in (0, 1)]
    writer.write_batch(pa.record_batch(columns, schema=SCHEMA))
    for document in documents:
        for numbers in document:
            # With the length, so that a token may not move from one document to the next unseen.
            digest.update(np.array([len(numbers), *numbers], "<i4").tobytes())
