"""Uploading to the Hugging Face hub: private unless asked otherwise, a branch for each checkpoint, and only what makes up a model.

Everything that can be wrong with the account, the name or the network is asked before any weight is read. What an interrupted upload has
sent is not sent again by the next.
"""

from __future__ import annotations

import argparse
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft.credentials import redact
from sft.errors import ExportError
from sft.export.folder import Made, make_folder
from sft.export.source import Exported, check_unchanged, find_exported, steps_of
from sft.files import in_words
from sft.run.directory import Run

MAIN = "main"
_REPO_ID = re.compile(r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?/[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?")
_BRANCH = re.compile(r"[A-Za-z0-9](?:[\w./-]*[\w])?")
_REPLACED = ("model*.safetensors", "model.safetensors.index.json")
"""Weights of an earlier upload are removed in the commit that brings others: shards of two models would be one folder."""


@dataclass(frozen=True)
class Upload:
    """One branch."""

    source: Exported
    revision: str


def upload(run: Run, arguments: argparse.Namespace) -> None:
    """Check, list, upload, tell.

    Args:
        run: What is uploaded of.
        arguments: From sft/export/main.py.

    Raises:
        UserError: Anything is wrong, or the hub does not take it.
    """
    repo_id = _repo_id(arguments.repo_id)
    uploads = planned(run, arguments.checkpoint, arguments.checkpoints, arguments.revision)
    for one in uploads:
        check_unchanged(one.source, arguments.accept_edits)
    api: Any = None
    if not arguments.dry_run:
        from huggingface_hub import HfApi

        api = HfApi()
        check_account(api, repo_id, arguments.public)
    for number, one in enumerate(uploads):
        with _made(one, arguments.license, repo_id) as made:
            print(f"{repo_id}, branch {one.revision}: {made.checked}.")
            print(listing(made.folder), flush=True)
            if api is not None:
                url = push(api, made.folder, repo_id, one, private=not arguments.public, done=number, of=len(uploads))
                print(f"Uploaded: {url}", flush=True)
    if api is None:
        print(
            f"Nothing was uploaded, and nobody was asked (--dry-run). Without it the repository is {_seen(arguments.public)}."
        )


def _seen(public: bool) -> str:
    return "public" if public else "private"


def _repo_id(given: str | None) -> str:
    if given is None:
        raise ExportError(
            "--to hub needs --repo-id OWNER/NAME: your name on the hub or an organization's, and a name for the model."
        )
    if not _REPO_ID.fullmatch(given) or len(given) > 96 or "--" in given or ".." in given:
        raise ExportError(
            f"--repo-id {given} is no name of a repository: OWNER/NAME, of letters, digits, `-`, `_` and `.`, at most 96 of them."
        )
    return given


def planned(run: Run, step: int | None, steps: str | None, revision: str | None) -> list[Upload]:
    """The branches to upload, each checked to be there.

    Args:
        run: Of the models.
        step: --checkpoint.
        steps: --checkpoints.
        revision: --revision.

    Raises:
        ExportError: The options contradict each other, or a checkpoint is not there.
    """
    if step is not None and steps is not None:
        raise ExportError(
            "--checkpoint N uploads that checkpoint instead of final/, --checkpoints final/ and checkpoints beside it: give one of them."
        )
    if revision is not None and (not _BRANCH.fullmatch(revision) or ".." in revision):
        raise ExportError(f"--revision {revision} is no name of a branch: letters, digits, `-`, `_`, `.` and `/`.")
    uploads = [Upload(find_exported(run, step), revision or MAIN)]
    for one in _steps(run, steps):
        uploads.append(Upload(find_exported(run, one), f"checkpoint-{one}"))
    names = [one.revision for one in uploads]
    if len(set(names)) < len(names):
        raise ExportError(f"--revision {revision} is also the branch of a checkpoint. Choose another name.")
    return uploads


def _steps(run: Run, given: str | None) -> list[int]:
    if given is None:
        return []
    there = steps_of(run)
    if given == "all":
        if not there:
            raise ExportError(f"--checkpoints all: {run.checkpoints} holds none.")
        return there
    if not re.fullmatch(r"\d+(,\d+)*", given):
        raise ExportError(
            f"--checkpoints {given}: give `all`, or their steps with commas between: {','.join(map(str, there)) or 'there is none'}."
        )
    return sorted({int(word) for word in given.split(",")})


@contextmanager
def _made(one: Upload, license_id: str | None, repo_id: str) -> Iterator[Made]:
    """The folder of a branch, beside the run for as long as it is uploaded: there its weights are links, and take no room."""
    from sft.export.model_card import write_card

    def finish(folder: Path, tokenizer: Any) -> None:
        write_card(one.source, folder, tokenizer, license_id, repo_id)

    try:
        place = Path(tempfile.mkdtemp(prefix=".export-", dir=one.source.run.path.parent))
    except OSError:  # a run that may only be read
        place = Path(tempfile.mkdtemp(prefix="sft-export-"))
    try:
        yield make_folder(one.source, place / one.source.name, finish, link=True)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def listing(folder: Path) -> str:
    """What is uploaded, with sizes."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sizes = [path.stat().st_size for path in files]
    lines = [f"  {_size(size):>10}  {path.relative_to(folder)}" for path, size in zip(files, sizes, strict=True)]
    return "\n".join([*lines, f"  {_size(sum(sizes)):>10}  in {len(files)} files"])


def _size(count: int) -> str:
    return f"{count / 1e3:.1f} kB" if count < 1e6 else in_words(count)


def check_account(api: Any, repo_id: str, public: bool) -> None:
    """Ask the hub who this is, whether the name may be used, and whether the repository is as visible as was asked for.

    Args:
        api: huggingface_hub's HfApi.
        repo_id: owner/name.
        public: --public.

    Raises:
        ExportError: Anything is wrong.
    """
    from huggingface_hub.errors import RepositoryNotFoundError

    with _told(api, repo_id, "Nothing was uploaded."):
        account = api.whoami()
    role = ((account.get("auth") or {}).get("accessToken") or {}).get("role")
    if role == "read":
        raise ExportError(
            "The token can only read. Make one that can write (https://huggingface.co/settings/tokens), and log in: hf auth login."
        )
    owners = [account["name"], *(one.get("name") for one in account.get("orgs") or [])]
    owner = repo_id.partition("/")[0]
    if owner.lower() not in [str(one).lower() for one in owners]:
        raise ExportError(
            f"--repo-id {repo_id}: the token is of {owners[0]}, who is not {owner} and in no organization of that "
            f"name. Yours: {', '.join(map(str, owners))}."
        )
    try:
        with _told(api, repo_id, "Nothing was uploaded.", passing=RepositoryNotFoundError):
            there = api.repo_info(repo_id)
    except RepositoryNotFoundError:
        return
    if not there.private and not public:
        raise ExportError(
            f"{repo_id} is there already, and public: anybody would see what is uploaded. Add --public if that is "
            f"meant, make it private in its "
            "settings, or choose another --repo-id."
        )
    if there.private and public:
        raise ExportError(
            f"{repo_id} is there already, and private: --public would not change that. Change it in its settings, or leave --public out."
        )


def push(api: Any, folder: Path, repo_id: str, one: Upload, *, private: bool, done: int = 0, of: int = 1) -> str:
    """Upload a folder to its branch; the repository and the branch are made where they are not there.

    Args:
        api: huggingface_hub's HfApi.
        folder: Complete.
        repo_id: owner/name.
        one: Its branch.
        private: Of a repository that is made.
        done: Branches uploaded before.
        of: Branches in all.

    Returns:
        Where it can be looked at.

    Raises:
        ExportError: The hub did not take it.
    """
    so_far = (
        f"{done} of {of} branches are complete; the same command goes on, and what has been sent is not sent again."
    )
    what = "final/" if one.source.step is None else f"checkpoint after {one.source.step} steps"
    with _told(api, repo_id, so_far):
        api.create_repo(repo_id, private=private, exist_ok=True)
        if one.revision != MAIN:
            api.create_branch(repo_id, branch=one.revision, exist_ok=True)
        info = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            revision=one.revision,
            commit_message=f"{one.source.title}: {what}",
            delete_patterns=list(_REPLACED),
        )
    return f"{api.endpoint}/{repo_id}/tree/{one.revision} (commit {str(info.oid)[:12]})"


_MEANING = {
    401: "the token is not valid. Log in again: hf auth login, or set HF_TOKEN",
    403: "the token may not write there. Use one with the right to write to this repository (https://huggingface.co/settings/tokens)",
    404: "it is not there, or the token does not see it",
    413: "a file is too large",
    429: "too many requests. Wait some minutes",
}


@contextmanager
def _told(api: Any, repo_id: str, so_far: str, passing: type[BaseException] | tuple[()] = ()) -> Iterator[None]:
    """Turn what goes wrong with the hub into one message.

    Raises:
        ExportError: Something went wrong.
    """
    try:
        yield
    except passing:
        raise
    except Exception as error:
        told = _meant(_innermost(error), api, repo_id)
        if told is None:
            raise
        raise ExportError(redact(f"{told} {so_far}")) from None


def _innermost(error: BaseException) -> BaseException:
    """What went wrong with a file's upload, which huggingface_hub tells as the cause of a RuntimeError."""
    while isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _meant(error: BaseException, api: Any, repo_id: str) -> str | None:
    """What an error of the hub or the network means; None for any other."""
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, and an upload needs the hub. Unset it, or see what would be uploaded: --dry-run."
    if isinstance(error, LocalTokenNotFoundError):
        return "There is no token for the hub. Log in (hf auth login), or set HF_TOKEN."
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code if error.response is not None else 0
        said = (error.server_message or str(error)).strip().splitlines()
        otherwise = "the hub is not well. Try again later" if status >= 500 else said[0] if said else "no reason given"
        return f"{repo_id}: the hub answers {status}: {_MEANING.get(status, otherwise)}."
    if _is_network(error):
        return f"The hub, {api.endpoint}, was lost or cannot be reached: {_first(error)}."
    return None


def _is_network(error: BaseException) -> bool:
    return isinstance(error, ConnectionError | TimeoutError) or type(error).__module__.partition(".")[0].startswith(
        ("httpx", "httpcore")
    )


def _first(error: BaseException) -> str:
    lines: Sequence[str] = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
