"""Uploads to the Hugging Face hub: private by default, a branch for each checkpoint, and only what makes up a model.

Account, name and network are checked before any weight is read. An interrupted upload continues with the same command.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
)
from huggingface_hub.utils._validators import validate_repo_id

from sft.credentials import redact
from sft.errors import ExportError
from sft.export.model import make_folder
from sft.export.model_card import write_card
from sft.export.source import Exported, check_unchanged, find_exported, steps_of
from sft.files import in_words
from sft.run.directory import Run

MAIN = "main"
_BRANCH = re.compile(r"[A-Za-z0-9](?:[\w./-]*\w)?")
_REPLACED = ["model*.safetensors", "model.safetensors.index.json"]
"""Weights of an earlier upload go in the commit that brings new ones: shards of two models would be one folder."""


def upload(run: Run, arguments: argparse.Namespace) -> None:
    """Check, list and upload, as the command line says. Raises UserError where something is wrong, or the hub does not take it."""
    repo_id = _checked_repo_id(arguments.repo_id)
    branches = _branches(run, arguments.checkpoint, arguments.checkpoints, arguments.revision)
    for source in branches.values():
        check_unchanged(source, arguments.accept_edits)
    if not os.access(run.path.parent, os.W_OK):
        raise ExportError(
            f"{run.path.parent} cannot be written, and the upload is made there. Make it writable, or copy the run to another folder."
        )
    api: Any = None
    if not arguments.dry_run:
        from huggingface_hub import HfApi

        api = HfApi()
        _check_account(api, repo_id, arguments.public)
    for done, (branch, source) in enumerate(branches.items()):
        # Beside the run, where the weights can be links and take no room.
        with tempfile.TemporaryDirectory(prefix=".export-", dir=run.path.parent, ignore_cleanup_errors=True) as place:
            folder = _made(source, Path(place), arguments.license, repo_id)
            print(f"{repo_id}, branch {branch}:\n{_listing(folder)}", flush=True)
            if api is not None:
                so_far = f"{done} of {len(branches)} branches are complete. The same command continues."
                with _errors(api, repo_id, so_far):
                    address = _push(api, folder, repo_id, branch, source, private=not arguments.public)
                print(f"Uploaded: {address}", flush=True)
    if api is None:
        visibility = "public" if arguments.public else "private"
        print(f"Nothing was uploaded (--dry-run). Without it the repository would be {visibility}.")


def _checked_repo_id(repo_id: str | None) -> str:
    if repo_id is None:
        raise ExportError(
            "--to hub needs --repo-id OWNER/NAME: your name on the hub or an organization's, and a name for the model."
        )
    try:
        validate_repo_id(repo_id)
        if "/" not in repo_id:
            raise HFValidationError
    except HFValidationError:
        raise ExportError(
            f"--repo-id {repo_id} is not a valid name: OWNER/NAME, of letters, digits, `-`, `_` and `.`, at most 96 of them."
        ) from None
    return repo_id


def _branches(run: Run, step: int | None, steps: str | None, revision: str | None) -> dict[str, Exported]:
    """The model of each branch to upload, of --checkpoint, --checkpoints and --revision."""
    if step is not None and steps is not None:
        raise ExportError(
            "--checkpoint N uploads a checkpoint in place of final/, --checkpoints also uploads final/. Give one of them."
        )
    if revision is not None and (not _BRANCH.fullmatch(revision) or ".." in revision):
        raise ExportError(f"--revision {revision} is not a valid branch: letters, digits, `-`, `_`, `.` and `/`.")
    there = steps_of(run)
    if steps is not None and steps != "all" and not re.fullmatch(r"\d+(,\d+)*", steps):
        raise ExportError(
            f"--checkpoints {steps}: give `all`, or steps with commas: {','.join(map(str, there)) or 'there is none'}."
        )
    chosen = there if steps == "all" else sorted({int(word) for word in (steps or "").split(",") if word})
    branches = {f"checkpoint-{one}": find_exported(run, one) for one in chosen}
    if revision in branches:
        raise ExportError(f"--revision {revision} is also the branch of a checkpoint. Choose another name.")
    return {revision or MAIN: find_exported(run, step), **branches}


def _made(source: Exported, place: Path, license_id: str | None, repo_id: str) -> Path:
    """The folder of a branch, with its card."""

    def finish(folder: Path, tokenizer: Any) -> None:
        write_card(source, folder, tokenizer, license_id, repo_id)

    make_folder(source, place / source.name, finish, link=True)
    return place / source.name


def _listing(folder: Path) -> str:
    """The files with their sizes."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    lines = [f"  {in_words(size):>10}  {name}" for name, size in sizes.items()]
    return "\n".join([*lines, f"  {in_words(sum(sizes.values())):>10}  in {len(sizes)} files"])


def _check_account(api: Any, repo_id: str, public: bool) -> None:
    """Check that the token may write, that the owner fits, and that an existing repository is as visible as requested."""
    with _errors(api, repo_id, "Nothing was uploaded."):
        account = api.whoami()
        private = api.repo_info(repo_id).private if api.repo_exists(repo_id) else not public
    if ((account.get("auth") or {}).get("accessToken") or {}).get("role") == "read":
        raise ExportError(
            "The token can only read. Make one that can write (https://huggingface.co/settings/tokens): hf auth login."
        )
    owners = [account["name"], *(one.get("name") for one in account.get("orgs") or [])]
    if repo_id.partition("/")[0].lower() not in [str(one).lower() for one in owners]:
        raise ExportError(
            f"--repo-id {repo_id}: the token belongs to {owners[0]}, who can write to {', '.join(map(str, owners))}."
        )
    if private == public:
        state, remedy = ("private", "leave --public out") if private else ("public", "add --public")
        raise ExportError(
            f"{repo_id} exists and is {state}. To upload to it as it is, {remedy}; or change it in its settings."
        )


def _push(api: Any, folder: Path, repo_id: str, branch: str, source: Exported, *, private: bool) -> str:
    """Upload a folder to its branch, and create repository and branch if they are missing; returns the commit's address."""
    what = "final/" if source.step is None else f"checkpoint after {source.step} steps"
    api.create_repo(repo_id, private=private, exist_ok=True)
    if branch != MAIN:
        api.create_branch(repo_id, branch=branch, exist_ok=True)
    info = api.upload_folder(
        repo_id=repo_id,
        folder_path=folder,
        revision=branch,
        commit_message=f"{source.title}: {what}",
        delete_patterns=_REPLACED,
    )
    return f"{api.endpoint}/{repo_id}/tree/{branch} (commit {str(info.oid)[:12]})"


@contextmanager
def _errors(api: Any, repo_id: str, so_far: str) -> Iterator[None]:
    """Turn an error of the hub or the network into one message."""
    try:
        yield
    except Exception as error:
        cause: BaseException = error
        # How huggingface_hub reports a file's upload.
        while isinstance(cause, RuntimeError) and cause.__cause__ is not None:
            cause = cause.__cause__
        message = _explain(cause, api, repo_id)
        if message is None:
            raise
        raise ExportError(redact(f"{message} {so_far}")) from None


def _explain(error: BaseException, api: Any, repo_id: str) -> str | None:
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, and an upload needs the hub. Unset it, or see what would be uploaded: --dry-run."
    if isinstance(error, LocalTokenNotFoundError):
        return "There is no token for the hub. Log in (hf auth login) or set HF_TOKEN."
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code if error.response is not None else 0
        remedy = (
            "Try again later."
            if status == 429 or status >= 500
            else "Check what your token may do: https://huggingface.co/settings/tokens."
        )
        return f"{repo_id}: the hub answers {status}: {error.server_message or line}. {remedy}"
    if isinstance(error, ConnectionError | TimeoutError) or type(error).__module__.startswith(("httpx", "httpcore")):
        return f"The hub, {api.endpoint}, cannot be reached or hung up: {line}."
    return None
