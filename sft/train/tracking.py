"""Checks the trackers, and has them write into the run's folder. sft/train/tracker_runs.py opens them. Imports no torch."""

from __future__ import annotations

import importlib.util
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sft.credentials import redact
from sft.errors import RunError
from sft.recipe.schema import Tracking
from sft.run.directory import Run


def check_trackers(tracking: Tracking) -> None:
    """Refuse trackers that are not installed. Raises RunError, a line for each."""
    lines = []
    for name in tracking.report_to:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # a folder of that name is no package
            lines.append(f"tracking.report_to={name}: {name} is not installed. Install it: pip install {name}.")
    if lines:
        raise RunError("\n".join(lines))


def set_up_trackers(tracking: Tracking, run: Run) -> list[str]:
    """Have the trackers write into the run's folder, and wandb offline where nobody is logged in; returns lines for the user."""
    return [note for name in tracking.report_to for note in _SET_UP[name](tracking, run)]


def _set_up_tensorboard(tracking: Tracking, run: Run) -> Iterator[str]:
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(run.path / "tensorboard")
    yield f"tensorboard: tensorboard --logdir {run.path / 'tensorboard'}"


def _set_up_wandb(tracking: Tracking, run: Run) -> Iterator[str]:
    settings = run.path / "wandb" / "settings"
    if settings.exists():
        raise RunError(
            f"{settings} would decide where wandb sends this run and its key. Neither this program nor wandb wrote it, and a run's folder "
            "may come from somebody else. Remove it; your own settings are in ~/.config/wandb."
        )
    # All sessions of a run write to one run of wandb.
    name = run.record.get("wandb_id") or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
    run.update(wandb_id=name)
    os.environ |= {"WANDB_RUN_ID": name, "WANDB_RESUME": "allow"}
    os.environ |= {"WANDB_PROJECT": tracking.project, "WANDB_DIR": str(run.path)}
    os.environ.setdefault("WANDB_SILENT", "true")
    if "WANDB_MODE" not in os.environ and not _logged_in_to_wandb():
        os.environ["WANDB_MODE"] = "offline"
        yield f"wandb: nobody is logged in, so the run stays offline; later: wandb sync {run.path}/wandb/offline-run-*"


def _logged_in_to_wandb() -> bool:
    from requests.utils import get_netrc_auth

    address = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    return bool(os.environ.get("WANDB_API_KEY") or get_netrc_auth(address))


def _set_up_trackio(tracking: Tracking, run: Run) -> Iterator[str]:
    if not any(os.environ.get(name) for name in ("TRACKIO_DIR", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")):
        os.environ["TRACKIO_DIR"] = str(run.path / "trackio")
        yield f"trackio: TRACKIO_DIR={run.path / 'trackio'} trackio show --project {tracking.project}"


def _set_up_mlflow(tracking: Tracking, run: Run) -> Iterator[str]:
    # mlflow asks a server of its own for what to report about its use, and reports it.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    if not os.environ.get("MLFLOW_TRACKING_URI"):
        folder = run.path / "mlflow"
        # A folder needs no database; mlflow wants this said.
        os.environ |= {"MLFLOW_TRACKING_URI": folder.as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true"}
        yield f"mlflow: MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri {folder}"
    # By default it would try for minutes.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    if name := run.record.get("mlflow_id"):
        # It refuses another value for a parameter that it has, such as a batch per GPU on other GPUs.
        os.environ |= {"MLFLOW_RUN_ID": name, "MLFLOW_MAX_LOG_PARAMS": "0"}
        os.environ.pop("MLFLOW_EXPERIMENT_NAME", None)
    else:
        os.environ["MLFLOW_EXPERIMENT_NAME"] = tracking.project
    with explained("mlflow"):
        from mlflow import MlflowClient

        MlflowClient().search_experiments(max_results=1)


_SET_UP: dict[str, Callable[[Tracking, Run], Iterator[str]]] = {
    "wandb": _set_up_wandb,
    "tensorboard": _set_up_tensorboard,
    "mlflow": _set_up_mlflow,
    "trackio": _set_up_trackio,
}


@contextmanager
def explained(name: str) -> Iterator[None]:
    """Raise what a tracker raises as a RunError in one line, without a secret."""
    try:
        yield
    except Exception as error:
        first = redact(str(error).strip().partition("\n")[0][:300])
        raise RunError(
            f"tracking.report_to={name}: {name} cannot be used: {type(error).__name__}: {first}. Check its address and login in the "
            f"environment, or leave it out: tracking.report_to. The figures are in metrics.jsonl in any case."
        ) from None


def finish_trackers(tracking: Tracking) -> None:
    """Let the trackers write what they still hold: this process is about to be replaced, and nothing runs at its exit."""
    if "wandb" in tracking.report_to:
        import wandb

        wandb.finish()
    flush_trackers(tracking)


def flush_trackers(tracking: Tracking) -> None:
    """Wait until mlflow and trackio have written what they were given; a server that does not answer is given up on."""
    if "mlflow" in tracking.report_to:
        import mlflow

        mlflow.flush_async_logging()
    if "trackio" in tracking.report_to:
        import trackio

        run = trackio.context_vars.current_run.get()
        if run is not None and run._is_local:
            with run._client_lock:
                run._flush_queues_inline()
