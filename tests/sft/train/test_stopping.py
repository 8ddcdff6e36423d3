import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from sft.checkpoint.write import CheckpointWriter
from sft.errors import Interrupted, RecipeError, RunError
from sft.files import write_json
from sft.parallel.progress import CHECKPOINT, Progress
from sft.recipe.schema import Recipe
from sft.recipe.train import parse_duration
from sft.run.directory import Run
from sft.train.stopping import Stopping, StopRequest, TimeLimit


class Training:
    """The steps of a single process; its checkpoints have room, or none."""

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        (folder / "checkpoints").mkdir()
        write_json(folder / "run.json", {})
        self.run, self.progress, self.control = Run(folder), Progress(), SimpleNamespace(should_training_stop=False)
        self.stopping = Stopping(folder, recipe, self.progress, 0, 1)
        self.stopping.limit = TimeLimit(time.time() + 1e6, 7.0)
        self.writer = CheckpointWriter(folder / "checkpoints", 3, {"ranks": 1, "engine": "DDP", "recipe": "job"}, 0)

    def step(self, number: int, room: bool = True) -> None:
        """Train it, and save."""
        self.stopping.begin(number)
        self.stopping.on_step_end(None, None, self.control)
        self.progress.at(CHECKPOINT)

        def write() -> None:
            made = self.run.checkpoints / ".incomplete" / f"checkpoint-{number}"
            made.mkdir(parents=True)
            if not room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            (made / "weights").write_text("1")

        # As RecipeTrainer does.
        self.writer.save(number, write, goes_on=not self.stopping.agreed)
        self.stopping.shortage = self.writer.shortage
        self.stopping.on_save(None, None, self.control)

    def end(self, step: int) -> None:
        with self.stopping.reporting_lost_steps(step):
            interrupted = self.stopping.end(step)
            if interrupted is not None:
                raise interrupted


@pytest.fixture
def training(tmp_path: Path, make_recipe: Callable[..., Recipe]) -> Training:
    return Training(tmp_path, make_recipe())


def test_a_stop_with_its_checkpoint_is_an_interruption(training: Training) -> None:
    (training.run.path / "stop").touch()
    training.step(3)
    assert training.control.should_training_stop
    with pytest.raises(Interrupted, match="the file `stop` after step 3"):
        training.end(3)
    assert not (training.run.path / "stop").exists()


def test_a_stop_that_finds_no_room_says_what_is_lost_and_what_to_do(
    training: Training, capsys: pytest.CaptureFixture[str]
) -> None:
    training.step(1)
    (training.run.path / "stop").touch()
    training.step(3, room=False)
    assert training.control.should_training_stop
    with pytest.raises(RunError, match=r"step 3 was not written.* checkpoint-1 stays: 2 steps are lost\. Free some"):
        training.end(3)
    assert capsys.readouterr().err == ""  # not that the run goes on


def test_an_interruption_after_the_last_step_says_that_the_step_was_not_saved(training: Training) -> None:
    training.step(1, room=False)
    with (
        pytest.raises(RunError, match=r"by SIGTERM\..* There is no checkpoint: 1 step is lost\."),
        training.stopping.reporting_lost_steps(1),
    ):
        raise Interrupted("SIGTERM", 143)


def test_a_request_during_a_failed_save_takes_effect_after_the_next_step(training: Training) -> None:
    training.stopping.begin(1)
    (training.run.path / "stop").touch()
    training.stopping.shortage = training.writer._found_short(1, ValueError("full"))  # type: ignore[arg-type]
    training.stopping.on_save(None, None, training.control)
    assert not training.control.should_training_stop
    training.step(2)
    assert training.control.should_training_stop
    with pytest.raises(Interrupted):
        training.end(2)


def test_a_requested_save_is_timed_and_removed_also_where_there_is_no_room(
    training: Training, capsys: pytest.CaptureFixture[str]
) -> None:
    file, limit = training.run.path / "save", training.stopping.limit
    assert limit is not None
    file.touch()
    training.step(1, room=False)
    assert not file.exists() and limit.save_seconds == 7.0
    assert "Removed the file `save`" in capsys.readouterr().err
    file.touch()
    training.step(2)
    assert not file.exists() and limit.save_seconds < 7.0
    assert training.stopping.agreed == StopRequest.NOTHING and not training.control.should_training_stop


def test_a_file_meant_for_an_earlier_start_is_removed(training: Training) -> None:
    for name, made in {"stop": 1.0, "save": time.time() + 60}.items():
        (training.run.path / name).touch()
        os.utime(training.run.path / name, (made, made))
    training.stopping.on_train_begin(None, None, training.control)
    assert [name for name in ("stop", "save") if (training.run.path / name).exists()] == ["save"]


def test_a_duration_is_the_sum_of_its_parts() -> None:
    assert [parse_duration(text) for text in ("1d", "23h30m", "90m", "1d2h3m4s")] == [86400, 84600, 5400, 93784]


@pytest.mark.parametrize("text", ["", "5", "h", "30m1h", "1.5h", "-1h", "0m", "00h0s"])
def test_what_is_no_duration_is_refused(text: str, make_recipe: Callable[..., Recipe]) -> None:
    with pytest.raises(RecipeError, match=r"train.max_time: .*such as 23h30m"):
        make_recipe(f'train.max_time="{text}"')


def run_until_due(deadline: float, step: float, save: float) -> tuple[int, float]:
    """Train steps that take as long as each other: how many are done, and when the save is."""
    limit, now, done = TimeLimit(deadline, save), 0.0, 0
    while True:
        limit.begin(now)
        due = limit.is_due(now)
        now += step
        done += 1
        if due:
            return done, now + save


@pytest.mark.parametrize("step", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("save", [0.5, 30.0])
def test_the_save_is_done_in_time_and_little_time_is_lost(step: float, save: float) -> None:
    done, end = run_until_due(1000, step, save)
    assert 1000 - 2 * step - save / 2 - 6 <= end <= 1000
    assert done > 90
    assert run_until_due(1, 10, 1)[0] == 1  # too short a limit still trains a step


def test_the_limit_allows_for_a_slow_step_now_and_then() -> None:
    limit = TimeLimit(100, 0)
    for began in (0.0, 1.0, 2.0, 22.0, 23.0):
        limit.begin(began)
    assert limit.needed(23.0) == 1 + 20 + 5
