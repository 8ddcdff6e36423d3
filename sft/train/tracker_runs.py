"""Opens the trackers' runs when the training begins, sends nothing twice after a resume, and adds the recipe."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from transformers.integrations import MLflowCallback, TensorBoardCallback, TrackioCallback, WandbCallback
from transformers.integrations.integration_utils import rewrite_logs
from transformers.trainer_callback import TrainerCallback
from transformers.utils import flatten_dict

from sft.recipe.schema import Tracking
from sft.run.directory import Run
from sft.train.tracking import explained, flush_trackers

_STEP = "train/global_step"  # trackio counts calls; transformers logs the step as a metric


def open_trackers(trainer: Any, run: Run, step: int) -> None:
    """Open the trackers on rank 0, before the first step: a login or server that does not work ends the start in one message.

    What they have of the steps after the one that training resumes from is not sent again; of tensorboard's it is removed.

    Raises:
        RunError: A tracker cannot be used.
    """
    recipe = trainer.job.recipe.model_dump(mode="json")
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, TensorBoardCallback):
            _open_tensorboard(callback, recipe, run, step)
        elif isinstance(callback, WandbCallback):
            with explained("wandb"):
                callback.setup(trainer.args, trainer.state, trainer.model)
                callback._wandb.config.update({"recipe": recipe}, allow_val_change=True)
        elif isinstance(callback, TrackioCallback):
            with explained("trackio"):
                _open_trackio(callback, trainer, recipe, run, step)
        elif isinstance(callback, MLflowCallback):
            with explained("mlflow"):
                _open_mlflow(callback, trainer, recipe, run, step)


def _open_tensorboard(callback: Any, recipe: dict[str, Any], run: Run, step: int) -> None:
    from torch.utils.tensorboard import SummaryWriter

    folder = run.path / "tensorboard"
    callback.tb_writer = SummaryWriter(log_dir=str(folder), **({"purge_step": step + 1} if folder.exists() else {}))
    callback.tb_writer.add_text("recipe", f"```json\n{json.dumps(recipe, indent=2)}\n```", step)


def _open_trackio(callback: Any, trainer: Any, recipe: dict[str, Any], run: Run, step: int) -> None:
    from trackio.context_vars import current_run

    if known := run.record.get("trackio_id"):
        _send_once(callback, _sent_to_trackio(trainer.args.project, known, step))
    callback.setup(trainer.args, trainer.state, trainer.model)
    callback._trackio.config["recipe"] = recipe
    opened = current_run.get()
    assert opened is not None
    run.update(trackio_id=opened.id)


def _sent_to_trackio(project: str, known: str, step: int) -> set[tuple[str, int]]:
    from trackio.sqlite_storage import SQLiteStorage

    own = known.replace("'", "")
    query = f"SELECT metrics FROM metrics WHERE run_id = '{own}' AND json_extract(metrics, '$.\"{_STEP}\"') > {step}"
    if address := os.environ.get("TRACKIO_SERVER_URL"):
        from trackio.remote_client import RemoteClient
        from trackio.utils import parse_trackio_server_url

        url, token = parse_trackio_server_url(address)
        client = RemoteClient(url, write_token=token or os.environ.get("TRACKIO_WRITE_TOKEN"), verbose=False)
        rows = client.predict(project=project, query=query, api_name="/query_project")["rows"]
    elif SQLiteStorage.get_project_db_path(project).exists():
        try:
            rows = SQLiteStorage.query_project(project, query)["rows"]
        except ValueError:  # more rows than trackio returns at once: they are sent again
            return set()
    else:  # a Space of the Hub: what is repeated is sent again
        return set()
    lines = [json.loads(row["metrics"]) if isinstance(row["metrics"], str) else row["metrics"] for row in rows]
    return {(key, line[_STEP]) for line in lines for key in line}


def _send_once(callback: Any, sent: set[tuple[str, int]]) -> None:
    """Send no figure again that the tracker has: a resumed run logs what it logged before."""
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


def _open_mlflow(callback: Any, trainer: Any, recipe: dict[str, Any], run: Run, step: int) -> None:
    from mlflow import MlflowClient

    client, is_new = MlflowClient(), "MLFLOW_RUN_ID" not in os.environ
    callback.setup(trainer.args, trainer.state, trainer.model)
    found = callback._ml_flow.active_run()
    name = found.info.run_id
    run.update(mlflow_id=name)
    histories = [(key, client.get_metric_history(name, key)) for key in found.data.metrics]
    _send_once(callback, {(key, one.step) for key, history in histories for one in history if one.step > step})
    if is_new:
        for key, value in flatten_dict(recipe, "recipe").items():
            client.log_param(name, key, str(value)[:500], synchronous=False)


class FlushTrackers(TrainerCallback):  # type: ignore[misc]
    """Has mlflow and trackio write what they hold at each checkpoint, so that a run that resumes from it misses no line."""

    def __init__(self, tracking: Tracking) -> None:
        self.tracking = tracking

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Flush, on rank 0."""
        if state.is_world_process_zero:
            flush_trackers(self.tracking)
