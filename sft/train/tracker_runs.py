"""Opens the trackers' runs when the training begins, takes out what a resumed run repeats, and adds the recipe."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from transformers.integrations import MLflowCallback, TensorBoardCallback, TrackioCallback, WandbCallback
from transformers.integrations.integration_utils import rewrite_logs
from transformers.trainer_callback import TrainerCallback

from sft.files import write_text
from sft.recipe.schema import Recipe, Tracking
from sft.run.directory import Run
from sft.train.tracking import explained, flush_trackers

_STEP = "train/global_step"  # trackio counts calls; transformers logs the step as a metric


def open_trackers(trainer: Any, run: Run, step: int) -> None:
    """Open the trackers on rank 0, before the first step: a login or server that does not work ends the start in one message.

    Of what they have, the lines after the step that training resumes from are removed where they are on this machine; those come again.

    Raises:
        RunError: A tracker cannot be used.
    """
    recipe = trainer.job.recipe
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, TensorBoardCallback):
            _open_tensorboard(callback, recipe, run, step)
        elif isinstance(callback, WandbCallback):
            with explained("wandb"):
                callback.setup(trainer.args, trainer.state, trainer.model)
                callback._wandb.config.update({"recipe": values(recipe)}, allow_val_change=True)
        elif isinstance(callback, TrackioCallback):
            with explained("trackio"):
                _open_trackio(callback, trainer, run, step)
        elif isinstance(callback, MLflowCallback):
            with explained("mlflow"):
                _open_mlflow(callback, trainer, step)


def values(recipe: Recipe) -> dict[str, Any]:
    """The recipe with its defaults, as plain values."""
    return recipe.model_dump(mode="json")


def _open_tensorboard(callback: Any, recipe: Recipe, run: Run, step: int) -> None:
    from torch.utils.tensorboard import SummaryWriter

    folder = run.path / "tensorboard"
    callback.tb_writer = SummaryWriter(log_dir=str(folder), **({"purge_step": step + 1} if folder.exists() else {}))
    callback.tb_writer.add_text("recipe", f"```json\n{json.dumps(values(recipe), indent=2)}\n```", step)


def _open_trackio(callback: Any, trainer: Any, run: Run, step: int) -> None:
    from trackio.context_vars import current_run
    from trackio.sqlite_storage import SQLiteStorage

    project, known = trainer.args.project, run.record.get("trackio_id")
    if (address := os.environ.get("TRACKIO_SERVER_URL")) and not os.environ.get("TRACKIO_SPACE_ID"):
        _send_once(callback, _sent_to_trackio(address, project, trainer.args.run_name, known, step))
    elif known is None and SQLiteStorage.get_latest_run_record_by_name(project, trainer.args.run_name):
        raise ValueError(
            f"{os.environ['TRACKIO_DIR']} has another run {trainer.args.run_name} in project {project}, and this one would be added to it. "
            "Choose another tracking.run_name."
        )
    file = SQLiteStorage.get_project_db_path(project)
    if known and not address and file.exists():
        with closing(sqlite3.connect(file)) as database, database:
            rows = database.execute("SELECT id, metrics FROM metrics WHERE run_id = ?", (known,)).fetchall()
            later = [(key,) for key, metrics in rows if json.loads(metrics).get(_STEP, 0) > step]
            database.executemany("DELETE FROM metrics WHERE id = ?", later)
    callback.setup(trainer.args, trainer.state, trainer.model)
    callback._trackio.config["recipe"] = values(trainer.job.recipe)
    opened = current_run.get()
    assert opened is not None
    run.update(trackio_id=opened.id)


def _sent_to_trackio(address: str, project: str, name: str, known: str | None, step: int) -> set[tuple[str, int]]:
    from trackio.remote_client import RemoteClient
    from trackio.utils import parse_trackio_server_url

    url, token = parse_trackio_server_url(address)
    client = RemoteClient(url, write_token=token or os.environ.get("TRACKIO_WRITE_TOKEN"), verbose=False)
    if known is None:
        if name in {one["name"] for one in client.predict(project=project, api_name="/get_runs_for_project")}:
            raise ValueError(
                f"{url} has another run {name} in project {project}, and this one would be added to it. Choose another tracking.run_name."
            )
        return set()
    own = known.replace("'", "")
    query = f"SELECT metrics FROM metrics WHERE run_id = '{own}' AND json_extract(metrics, '$.\"{_STEP}\"') > {step}"
    rows = client.predict(project=project, query=query, api_name="/query_project")["rows"]
    lines = [json.loads(row["metrics"]) if isinstance(row["metrics"], str) else row["metrics"] for row in rows]
    return {(key, line[_STEP]) for line in lines for key in line}


def _send_once(callback: Any, sent: set[tuple[str, int]]) -> None:
    """Send no figure again that a server has: it cannot remove it, and a resumed run logs what it logged before."""
    log = callback.on_log

    def log_new(args: Any, state: Any, control: Any, logs: Mapping[str, Any], **kwargs: Any) -> None:
        names = {key: next(iter(rewrite_logs({key: None}))) for key in logs}
        new = {
            key: value
            for key, value in logs.items()
            if not {(key, state.global_step), (names[key], state.global_step)} & sent
        }
        if new:
            log(args, state, control, logs=new, **kwargs)

    callback.on_log = log_new


def _open_mlflow(callback: Any, trainer: Any, step: int) -> None:
    from mlflow import MlflowClient

    client, name = MlflowClient(), os.environ["MLFLOW_RUN_ID"]
    callback.setup(trainer.args, trainer.state, trainer.model)
    found, address = client.get_run(name), urlparse(os.environ["MLFLOW_TRACKING_URI"])
    if address.scheme in ("", "file"):
        folder = Path(unquote(address.path)) / found.info.experiment_id / name / "metrics"
        for file in (path for path in folder.rglob("*") if path.is_file()):
            lines = file.read_text().splitlines(keepends=True)  # time, value, step
            kept = [line for line in lines if int(line.split()[2]) <= step]
            write_text(file, "".join(kept)) if kept else file.unlink()
    else:
        histories = [(key, client.get_metric_history(name, key)) for key in found.data.metrics]
        _send_once(callback, {(key, one.step) for key, history in histories for one in history if one.step > step})
    if "recipe.version" not in found.data.params:
        flat = {f"recipe.{key}": str(value)[:500] for key, value in _flat(values(trainer.job.recipe))}
        for key, value in flat.items():
            client.log_param(name, key, value, synchronous=False)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Any:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


class FlushTrackers(TrainerCallback):  # type: ignore[misc]
    """Has mlflow and trackio write what they hold at each checkpoint, so that a run that resumes from it misses no line."""

    def __init__(self, tracking: Tracking) -> None:
        self.tracking = tracking

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Flush, on rank 0."""
        if state.is_world_process_zero:
            flush_trackers(self.tracking)
