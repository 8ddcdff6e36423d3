"""Trackers: where wandb and tensorboard write, and wandb offline where nobody is logged in."""

from __future__ import annotations

import netrc
import os
from pathlib import Path

from sft.recipe import Tracking
from sft.run_directory import Run


def _logged_in_to_wandb() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    file = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    try:
        hosts = netrc.netrc(str(file)).hosts
    except (OSError, netrc.NetrcParseError):
        return False
    return any("wandb" in host for host in hosts)


def finish_trackers(tracking: Tracking) -> None:
    """Let wandb write what it still holds: what follows replaces the process, and nothing runs at its exit."""
    if "wandb" in tracking.report_to:
        import wandb

        wandb.finish()


def set_up_trackers(tracking: Tracking, run: Run) -> list[str]:
    """Point the trackers at the run's folder.

    Returns:
        Lines to tell the user.
    """
    notes = []
    if "tensorboard" in tracking.report_to:
        os.environ["TENSORBOARD_LOGGING_DIR"] = str(run.path / "tensorboard")
        notes.append(f"tensorboard: tensorboard --logdir {run.path / 'tensorboard'}")
    if "wandb" in tracking.report_to:
        os.environ["WANDB_PROJECT"] = tracking.project
        os.environ["WANDB_DIR"] = str(run.path)
        os.environ.setdefault("WANDB_SILENT", "true")
        if "WANDB_MODE" not in os.environ and not _logged_in_to_wandb():
            os.environ["WANDB_MODE"] = "offline"
            notes.append(
                f"wandb: nobody is logged in, so the run stays offline; later: wandb sync {run.path}/wandb/offline-run-*"
            )
    return notes
