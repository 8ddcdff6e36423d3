"""train.callbacks: they run in the training, on each rank, also after a resume, and their errors are one line."""

from pathlib import Path

import pytest

from sft.run.directory import Run
from tests.slow.conftest import write_recipe
from tests.slow.ranks import Ranks

pytestmark = pytest.mark.slow

CODE = """
from transformers import TrainerCallback

class Note(TrainerCallback):
    def __init__(self, folder, stop=None, fail=None):
        self.folder, self.stop, self.fail = folder, stop, fail

    def on_step_end(self, args, state, control, **kwargs):
        with open(f"{self.folder}/notes-{args.process_index}", "a") as file:
            file.write(f"{state.global_step} ")
        if state.global_step == self.stop:
            control.should_training_stop = True
        if state.global_step == self.fail:
            raise KeyError("planted")
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "hooks.py").write_text(CODE)
    return write_recipe(
        tmp_path / "job.yaml",
        train={"max_steps": 6, "save_steps": 2, "global_batch_size": 4, "micro_batch_size": 2, "logging_steps": 1},
        tracking={"run_name": "one"},
    )


def note(folder: Path, **arguments: int) -> str:
    more = "".join(f", {name}: {value}" for name, value in arguments.items())
    return f"train.callbacks=[{{path: hooks.py:Note, arguments: {{folder: {folder}{more}}}}}]"


def test_a_callback_that_fails_is_one_line_and_the_run_resumes_with_it_corrected(
    recipe: Path, ranks: Ranks, tmp_path: Path
) -> None:
    printed = ranks.run(1, ["sft.train", recipe, note(tmp_path, fail=5)], expect=2)["stderr"]
    assert "hooks.py:Note fails in on_step_end: KeyError: 'planted' (hooks.py, line 14: raise KeyError" in printed
    assert "Traceback" not in printed
    allowed = "train.resume_allow_changes=[train.callbacks]"
    ranks.run(1, ["sft.train", recipe, note(tmp_path), allowed])
    assert (tmp_path / "notes-0").read_text() == "1 2 3 4 5 5 6 "
    run = Run(tmp_path / "outputs" / "job" / "one")
    assert (run.path / "code" / "hooks.py").read_text() == CODE
    assert list(run.record["code"]) == ["hooks.py"]


def test_a_callback_runs_on_each_rank_and_may_end_the_training(recipe: Path, ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, ["sft.train", recipe, note(tmp_path, stop=3)])
    assert [(tmp_path / f"notes-{rank}").read_text() for rank in (0, 1)] == ["1 2 3 ", "1 2 3 "]
    run = Run(tmp_path / "outputs" / "job" / "one")
    assert run.record["status"] == "finished" and run.final.is_dir()
    assert "ended after step 3 of 6" in run.record["warnings"]["callbacks"][0]


def test_a_stranger_s_run_folder_runs_none_of_its_code(recipe: Path, ranks: Ranks, tmp_path: Path) -> None:
    word = note(tmp_path)
    ranks.run(1, ["sft.train", recipe, word])
    run = Run(tmp_path / "outputs" / "job" / "one")
    for key in ("train.callbacks", "data.function"):
        words = [word] if key == "data.function" else []
        if words:
            (run.path / "code" / "rows.py").write_text("raise SystemExit('it has run')\n\ndef f(row): ...\n")
            run.update(overrides=[word, "data.function=rows.py:f"])
        printed = ranks.run(1, ["sft.cli", "train", run.path, *words], expect=2)["stderr"]
        assert "allows code to run" in printed and key in printed and "it has run" not in printed
    assert (tmp_path / "notes-0").read_text() == "1 2 3 4 5 6 "
