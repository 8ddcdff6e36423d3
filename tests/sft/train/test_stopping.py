import os
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from sft.checkpoint.write import CheckpointWriter
from sft.errors import Interrupted, RecipeError, RunError
from sft.files import write_json
from sft.recipe.schema import Recipe
from sft.recipe.train import parse_duration
from sft.run.directory import Run
from sft.train.stopping import Stopping, StopRequest, TimeLimit


class Training:
    """The steps of a single process; its checkpoints have room, or none."""

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        (folder / "checkpoints").mkdir()
        write_json(folder / "run.json", {})
        self.run, self.control = Run(folder), SimpleNamespace(should_training_stop=False)
        self.stopping = Stopping(self.run, recipe)
        self.stopping.limit = TimeLimit(time.time() + 1e6, 7.0)
        self.writer = CheckpointWriter(folder / "checkpoints", 3, {"ranks": 1, "engine": "DDP", "recipe": "job"}, 0)

    def step(self, number: int, room: bool = True, during_the_save: Callable[[], None] = lambda: None) -> None:
        """Train it, and save."""
        self.stopping.begin()
        self.stopping.on_step_end(None, None, self.control)

        def write() -> None:
            during_the_save()
            made = self.run.checkpoints / ".incomplete" / f"checkpoint-{number}"
            made.mkdir(parents=True)
            (made / "weights").write_text("1")

        # As RecipeTrainer does.
        with nullcontext() if room else mock.patch.object(shutil, "disk_usage", lambda _: SimpleNamespace(free=-1)):
            self.writer.save(number, write, goes_on=not self.stopping.agreed)
        self.stopping.saved(self.writer.shortage, 0.5, self.control)


@pytest.fixture
def training(tmp_path: Path, make_recipe: Callable[..., Recipe]) -> Training:
    return Training(tmp_path, make_recipe())


@pytest.mark.parametrize("during_the_save", [True, False])
def test_a_stop_with_its_checkpoint_is_an_interruption(during_the_save: bool, training: Training) -> None:
    stop = training.run.path / "stop"
    if during_the_save:
        training.step(3, during_the_save=stop.touch)
    else:
        stop.touch()
        training.step(3)
    assert training.control.should_training_stop
    end = training.stopping.end(3)
    assert isinstance(end, Interrupted) and str(end) == "Interrupted by the file `stop` after step 3"
    assert not stop.exists()


def test_a_stop_that_finds_no_room_is_an_error(training: Training, capsys: pytest.CaptureFixture[str]) -> None:
    training.step(1)
    (training.run.path / "stop").touch()
    training.step(3, room=False)
    assert training.control.should_training_stop
    with pytest.raises(RunError, match=r"step 3 was not written.* Free some space\. .*checkpoint-1"):
        raise training.stopping.end(3) or ValueError
    assert capsys.readouterr().err == ""  # not that the run goes on


def test_a_requested_save_is_timed_and_removed_also_where_there_is_no_room(training: Training) -> None:
    file, limit = training.run.path / "save", training.stopping.limit
    assert limit is not None
    file.touch()
    training.step(1, room=False)
    assert not file.exists() and limit.save_seconds == 7.0
    file.touch()
    training.step(2)
    assert not file.exists() and limit.save_seconds == 0.5
    assert training.stopping.agreed == StopRequest.NOTHING and not training.control.should_training_stop


def test_a_file_meant_for_an_earlier_start_is_removed(training: Training) -> None:
    for name, made in {"stop": 1.0, "save": time.time() + 60}.items():
        (training.run.path / name).touch()
        os.utime(training.run.path / name, (made, made))
    training.stopping.on_train_begin(None, None, training.control)
    assert [name for name in ("stop", "save") if (training.run.path / name).exists()] == ["save"]


def test_a_duration_is_the_sum_of_its_parts() -> None:
    assert [parse_duration(text) for text in ("1d", "23h30m", "90m", "1d2h3m4s")] == [86400, 84600, 5400, 93784]


@pytest.mark.parametrize("text", ["5", "30m1h", "0m"])
def test_what_is_no_duration_is_refused(text: str, make_recipe: Callable[..., Recipe]) -> None:
    with pytest.raises(RecipeError, match=r"train.max_time: .*such as 23h30m"):
        make_recipe(f'train.max_time="{text}"')


def run_until_due(deadline: float, step: float, save: float) -> tuple[int, float]:
    """Train steps that take as long as each other: how many are done, and when the save is."""
    limit, now, done = TimeLimit(deadline, save), 0.0, 0
    while True:
        limit.begin(now)
        now += step
        done += 1
        if limit.is_due(now):
            return done, now + save


@pytest.mark.parametrize(("step", "save"), [(0.1, 30.0), (10.0, 0.5)])
def test_the_save_is_done_in_time_and_little_time_is_lost(step: float, save: float) -> None:
    done, end = run_until_due(1000, step, save)
    assert 1000 - 2 * step - save / 2 - 6 <= end <= 1000
    assert done > 90
    assert run_until_due(1, 10, 1)[0] == 1  # too short a limit still trains a step
