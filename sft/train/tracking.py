"""Points wandb and tensorboard at the run's folder. Imports no torch."""

from __future__ import annotations

import netrc
import os
import secrets
from pathlib import Path
from typing import Any

from sft.errors import RunError
from sft.recipe.schema import Tracking
from sft.run.directory import Run


def set_up_trackers(tracking: Tracking, run: Run) -> list[str]:
    """Have the trackers write into the run's folder, and wandb offline where nobody is logged in; returns lines for the user."""
    notes = []
    if "tensorboard" in tracking.report_to:
        os.environ["TENSORBOARD_LOGGING_DIR"] = str(run.path / "tensorboard")
        notes.append(f"tensorboard: tensorboard --logdir {run.path / 'tensorboard'}")
    if "wandb" in tracking.report_to:
        _check_wandb(run)
        # All sessions of a run write to one run of wandb.
        record = run.record if (run.path / "run.json").exists() else {}
        name = record.get("wandb_id") or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
        run.update(wandb_id=name)
        os.environ |= {"WANDB_RUN_ID": name, "WANDB_RESUME": "allow"}
        os.environ |= {"WANDB_PROJECT": tracking.project, "WANDB_DIR": str(run.path)}
        os.environ.setdefault("WANDB_SILENT", "true")
        if "WANDB_MODE" not in os.environ and not _logged_in_to_wandb():
            os.environ["WANDB_MODE"] = "offline"
            notes.append(
                f"wandb: nobody is logged in, so the run stays offline; later: wandb sync {run.path}/wandb/offline-run-*"
            )
    return notes


def _check_wandb(run: Run) -> None:
    """Refuse what wandb would refuse after the model is loaded, or obey without a word."""
    key = os.environ.get("WANDB_API_KEY", "")
    if key and len(key) < 40 and os.environ.get("WANDB_MODE") not in ("offline", "disabled"):
        raise RunError(
            f"WANDB_API_KEY has {len(key)} characters, and wandb's keys have at least 40. Copy all of it, unset it to use that of `wandb "
            "login`, or keep the run here: WANDB_MODE=offline."
        )
    settings = run.path / "wandb" / "settings"
    if settings.exists():
        raise RunError(
            f"{settings} would decide where wandb sends this run and its key. Neither this program nor wandb wrote it, and a run's folder "
            "may come from somebody else. Remove it; your own settings are in ~/.config/wandb."
        )


def _logged_in_to_wandb() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    file = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    try:
        hosts = netrc.netrc(str(file)).hosts
    except (OSError, netrc.NetrcParseError):
        return False
    return any("wandb" in host for host in hosts)


def resume_trackers(trainer: Any, run: Run, step: int) -> None:
    """Remove from tensorboard what was logged after the step that training resumes from; it comes a second time."""
    from transformers.integrations import TensorBoardCallback

    folder = run.path / "tensorboard"
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, TensorBoardCallback) and folder.exists():
            from torch.utils.tensorboard import SummaryWriter

            callback.tb_writer = SummaryWriter(log_dir=str(folder), purge_step=step + 1)


def finish_trackers(tracking: Tracking) -> None:
    """Let wandb write what it still holds: this process is about to be replaced, and nothing runs at its exit."""
    if "wandb" in tracking.report_to:
        import wandb

        wandb.finish()
