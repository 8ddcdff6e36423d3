import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from sft.checkpoint.write import CheckpointWriter
from sft.errors import Interrupted, RunError
from sft.files import write_json
from sft.parallel.progress import CHECKPOINT, Progress
from sft.recipe.schema import Recipe
from sft.run.directory import Run
from sft.train.max_time import TimeLimit
from sft.train.request_files import forget_stale
from sft.train.stopping import Stopping, Wish


class Training:
    """The steps of a process by itself; its checkpoints have room, or none."""

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
        self.writer.save(number, write, goes_on=not self.stopping.wish)
        self.stopping.shortage = self.writer.shortage
        self.stopping.on_save(None, None, self.control)

    def end(self, step: int) -> None:
        with self.stopping.losses_told(step):
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


def test_a_stop_that_finds_no_room_is_one_message_that_tells_what_is_lost_and_what_to_do(
    training: Training, capsys: pytest.CaptureFixture[str]
) -> None:
    training.step(1)
    (training.run.path / "stop").touch()
    training.step(3, room=False)
    assert training.control.should_training_stop
    with pytest.raises(RunError) as ended:
        training.end(3)
    assert capsys.readouterr().err == ""  # not that the run goes on
    told = str(ended.value)
    assert told.startswith(
        "Interrupted by the file `stop` after step 3. The checkpoint of step 3 was not written: the disk is full; "
    )
    assert "are free now, in " in told
    assert told.endswith(
        ". checkpoint-1 stays: 2 steps are lost. Free some space. The same command resumes from checkpoint-1."
    )
    assert not (training.run.path / "stop").exists()


def test_an_interruption_after_the_last_step_says_that_the_step_was_not_saved(training: Training) -> None:
    training.step(1, room=False)
    with (
        pytest.raises(
            RunError, match=r"by SIGTERM\. The checkpoint of step 1 .* There is no checkpoint: 1 step is lost\."
        ),
        training.stopping.losses_told(1),
    ):
        raise Interrupted("SIGTERM", 143)


def test_who_asks_while_a_save_fails_is_heard_after_a_step_that_can_be_saved(training: Training) -> None:
    training.stopping.begin(1)
    (training.run.path / "stop").touch()
    training.stopping.shortage = training.writer._found_short(1, ValueError("full"))  # type: ignore[arg-type]
    training.stopping.on_save(None, None, training.control)
    assert not training.control.should_training_stop
    training.step(2)
    assert training.control.should_training_stop
    with pytest.raises(Interrupted):
        training.end(2)


def test_a_save_that_was_asked_for_is_timed_where_it_is_written_and_given_up_where_it_is_not(
    training: Training, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, limit = training.run.path / "save", training.stopping.limit
    assert limit is not None
    asked.touch()
    training.step(1, room=False)
    assert not asked.exists() and limit.save_seconds == 7.0
    said = capsys.readouterr().err
    assert "The run goes on, there is none yet" in said
    assert said.endswith("The file `save` is removed: make it again once there is room.\n")
    asked.touch()
    training.step(2)
    assert not asked.exists() and limit.save_seconds < 7.0
    assert training.stopping.wish == Wish.NOTHING and not training.control.should_training_stop
    assert capsys.readouterr().err == ""


def test_a_file_that_asked_an_earlier_start_is_removed_and_one_that_asks_this_one_stays(tmp_path: Path) -> None:
    for name, made in {"stop": 99.0, "save": 101.0}.items():
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (made, made))
    assert forget_stale(tmp_path, 100.0) == ["stop"]
    assert [path.name for path in tmp_path.iterdir()] == ["save"]


def test_a_training_begins_without_what_earlier_ones_were_asked(
    training: Training, capsys: pytest.CaptureFixture[str]
) -> None:
    (training.run.path / "stop").touch()
    os.utime(training.run.path / "stop", (1.0, 1.0))
    training.stopping.on_train_begin(None, None, training.control)
    assert capsys.readouterr().out == "The file `stop` is older than this start, and asks nothing of it: removed.\n"
    training.step(1)
    assert not training.control.should_training_stop
