"""Checks the trackers, and has them write into the run's folder. sft/train/tracker_runs.py opens them. Imports no torch."""

from __future__ import annotations

import importlib.util
import netrc
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sft.credentials import redact
from sft.errors import RunError
from sft.recipe.schema import Tracking
from sft.run.directory import Run

_INSTALLED_BY = {
    "wandb": "pip install wandb",
    "tensorboard": "pip install tensorboard",
    "mlflow": "pip install -e '.[trackers]', or pip install mlflow-skinny",
    "trackio": "pip install -e '.[trackers]', or pip install trackio",
}


def check_trackers(tracking: Tracking) -> None:
    """Refuse trackers that are not installed, or that the environment turns off. Raises RunError, a line for each."""
    lines = []
    for name in tracking.report_to:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # a folder of that name is no package
            lines.append(f"tracking.report_to={name}: {name} is not installed. Install it: {_INSTALLED_BY[name]}.")
    if "mlflow" in tracking.report_to and os.environ.get("DISABLE_MLFLOW_INTEGRATION", "").upper() == "TRUE":
        lines.append(
            "tracking.report_to=mlflow, and DISABLE_MLFLOW_INTEGRATION=TRUE turns it off. Unset it, or remove mlflow."
        )
    if lines:
        raise RunError("\n".join(lines))


def set_up_trackers(tracking: Tracking, run: Run) -> list[str]:
    """Have the trackers write into the run's folder, and wandb offline where nobody is logged in; returns lines for the user."""
    return [note for name in tracking.report_to for note in _SET_UP[name](tracking, run)]


def _set_up_tensorboard(tracking: Tracking, run: Run) -> Iterator[str]:
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(run.path / "tensorboard")
    yield f"tensorboard: tensorboard --logdir {run.path / 'tensorboard'}"


def _set_up_wandb(tracking: Tracking, run: Run) -> Iterator[str]:
    _check_wandb(run)
    # All sessions of a run write to one run of wandb.
    name = _recorded(run, "wandb_id") or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
    run.update(wandb_id=name)
    os.environ |= {"WANDB_RUN_ID": name, "WANDB_RESUME": "allow"}
    os.environ |= {"WANDB_PROJECT": tracking.project, "WANDB_DIR": str(run.path)}
    os.environ.setdefault("WANDB_SILENT", "true")
    if "WANDB_MODE" not in os.environ and not _logged_in_to_wandb():
        os.environ["WANDB_MODE"] = "offline"
        yield f"wandb: nobody is logged in, so the run stays offline; later: wandb sync {run.path}/wandb/offline-run-*"


def _recorded(run: Run, key: str) -> Any:
    return run.record.get(key) if (run.path / "run.json").exists() else None


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


def _set_up_trackio(tracking: Tracking, run: Run) -> Iterator[str]:
    own = [name for name in ("TRACKIO_DIR", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL") if os.environ.get(name)]
    if not own:
        os.environ["TRACKIO_DIR"] = str(run.path / "trackio")
        show = f"TRACKIO_DIR={run.path / 'trackio'} trackio show --project {tracking.project}"
        yield f"trackio: {show}"
    else:
        yield f"trackio: as {' and '.join(f'{name}={redact(os.environ[name])}' for name in own)} says"


def _set_up_mlflow(tracking: Tracking, run: Run) -> Iterator[str]:
    """Make the run's run of mlflow, or find it again: transformers would start another one at each session."""
    # mlflow asks a server of its own for what to report about its use, and reports it.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    folder = run.path / "mlflow"
    if not os.environ.get("MLFLOW_TRACKING_URI"):
        # A folder needs no database; mlflow wants this said.
        os.environ |= {"MLFLOW_TRACKING_URI": folder.as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true"}
        yield f"mlflow: MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri {folder}"
    else:
        yield f"mlflow: as MLFLOW_TRACKING_URI={redact(os.environ['MLFLOW_TRACKING_URI'])} says"
    # By default it would try for minutes.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    with explained("mlflow"):
        experiment, name, begun = _run_of_mlflow(tracking, run)
    run.update(mlflow_id=name)
    os.environ |= {"MLFLOW_RUN_ID": name, "MLFLOW_EXPERIMENT_NAME": experiment}
    if begun:  # mlflow refuses another value for a parameter that it has, such as a batch per GPU on other GPUs
        os.environ["MLFLOW_MAX_LOG_PARAMS"] = "0"


def _run_of_mlflow(tracking: Tracking, run: Run) -> tuple[str, str, bool]:
    """The experiment's name, the run's id, and whether it is an earlier session's."""
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    client, name = MlflowClient(), _recorded(run, "mlflow_id") or os.environ.get("MLFLOW_RUN_ID")
    if name:
        try:
            experiment = client.get_experiment(client.get_run(name).info.experiment_id)
            return experiment.name, name, True
        except MlflowException as error:
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                raise
    found = client.get_experiment_by_name(tracking.project)
    experiment_id = found.experiment_id if found else client.create_experiment(tracking.project)
    begun = client.create_run(experiment_id, run_name=f"{run.path.parent.name}-{run.path.name}")
    return tracking.project, begun.info.run_id, False


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
