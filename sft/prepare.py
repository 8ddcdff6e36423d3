"""The data made ready by the first rank, and the run's folder opened around it; the other ranks wait for both."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft import distributed
from sft.data import Documents, prepare_documents
from sft.errors import RunError
from sft.facts import DataFacts
from sft.job import Job
from sft.run_directory import Run, check_start, open_run, record_start, write_json


@dataclass(frozen=True)
class Prepared:
    """What training starts from."""

    run: Run
    documents: Documents
    sequences_file: Path
    """Arrow file of packs, or of documents without packing."""

    sequences: int

    def facts(self) -> DataFacts:
        """The data as the plan counts it."""
        total = self.documents.total()
        return DataFacts(total.rows_used, total.trained + total.masked, total.trained, self.sequences, exact=True)

    def ledger(self, max_length: int, packing: bool) -> dict[str, Any]:
        """ledger.json: where every token went, and the padding beside it."""
        total = self.documents.total()
        used = total.trained + total.masked
        space = self.sequences * max_length
        packed = {"packs": self.sequences, "fill": used / space, "padding": space - used} if packing else None
        accounts = [account.as_json() for account in self.documents.accounts]
        return {"sources": accounts, "total": total.as_json(), "packing": packed}


def prepare(job: Job, tokenizer: Any) -> Prepared:
    """Prepare the data, then make the run's folder: a mistake in the data leaves none behind.

    Raises:
        UserError: The data or the run's folder cannot be used.
    """
    prepared: Prepared | None = None
    if distributed.is_first_rank():
        prepared = _prepare(job, tokenizer)
    shared: Prepared | None = distributed.from_first_rank(prepared)
    assert shared is not None
    return shared


def _prepare(job: Job, tokenizer: Any) -> Prepared:
    check_start(job)
    output = Path(job.recipe.output_dir).expanduser()
    try:
        output.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".preparing-", dir=output))
    except OSError as error:
        raise RunError(f"output_dir={job.recipe.output_dir} cannot be written: {error}.") from None
    try:
        started = time.monotonic()
        documents = prepare_documents(job.recipe, tokenizer, work / "documents.arrow", _progress)
        run = open_run(job)
        documents = _keep(run, documents)
        file, sequences = _sequences(job, documents)
        prepared = Prepared(run, documents, file, sequences)
        record_start(run, job, {"prepare_seconds": time.monotonic() - started}, documents.fingerprint)
        write_json(run.ledger_file, prepared.ledger(job.recipe.data.max_length, job.recipe.data.packing))
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return prepared


def _keep(run: Run, documents: Documents) -> Documents:
    """Move the documents into the run's folder.

    Raises:
        RunError: The run goes on after an interruption, and the data has changed since.
    """
    earlier = run.record.get("data_fingerprint") if (run.path / "run.json").exists() else None
    if earlier not in (None, documents.fingerprint) and run.last_checkpoint():
        raise RunError(
            f"The data, tokenizer or chat template has changed since {run.path} was started, so it cannot go on. Start anew with "
            "train.resume=never."
        )
    shutil.rmtree(run.data, ignore_errors=True)
    run.data.mkdir()
    return Documents(documents.file.rename(run.data / documents.file.name), documents.accounts, documents.fingerprint)


def _sequences(job: Job, documents: Documents) -> tuple[Path, int]:
    from sft.batches import documents_dataset, pack_documents

    if not job.recipe.data.packing:
        return documents.file, len(documents_dataset(documents.file))
    packs = documents.file.with_name("packs.arrow")
    return packs, len(pack_documents(documents_dataset(documents.file), job.recipe.data.max_length, packs))


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text}", end="\r", file=sys.stderr, flush=True)
