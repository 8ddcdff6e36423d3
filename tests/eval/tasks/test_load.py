from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from eval.tasks.load import LoadedTasks, load_tasks
from eval.tasks.settings import Settings
from eval.tasks.suites import check_tasks
from sft.errors import EvaluationError
from sft.recipe.schema import Evaluation

Resolve = Callable[..., Settings]
WriteTask = Callable[..., Path]


def load(settings: Settings, tmp_path: Path, *tasks: Path | str, **keys: object) -> LoadedTasks:
    evaluation = Evaluation.model_validate({"tasks": tuple(map(str, tasks)), **keys})
    selection = check_tasks(evaluation, tmp_path)
    return load_tasks(selection, settings, evaluation.confirm_run_unsafe_code, tmp_path / "log")


def answer_length(loaded: LoadedTasks, name: str) -> int:
    (task,) = loaded.by_name[name]
    return int(task.config.generation_kwargs["max_gen_toks"])


def test_a_task_keeps_its_own_answer_length(settings: Resolve, tmp_path: Path, write_task: WriteTask) -> None:
    own = write_task("own", generation_kwargs={"until": ["\n"], "max_gen_toks": 31})
    alias = write_task("alias", generation_kwargs={"until": ["\n"], "max_new_tokens": 33})
    written = write_task(
        "written", generation_kwargs={"until": ["\n\n"], "max_gen_toks": 256, "do_sample": False, "temperature": 0.0}
    )
    loaded = load(settings(), tmp_path, own, alias, written)
    assert [answer_length(loaded, name) for name in ("own", "alias", "written")] == [31, 33, 256]


def test_where_a_task_says_nothing_an_answer_is_longer_than_lm_evals(
    settings: Resolve, tmp_path: Path, write_task: WriteTask
) -> None:
    unsaid = write_task("unsaid", generation_kwargs={"until": ["\n"]})
    nothing = write_task("nothing", generation_kwargs=None)
    loaded = load(settings(), tmp_path, unsaid, nothing)
    assert [answer_length(loaded, name) for name in ("unsaid", "nothing")] == [512, 512]  # half of the demo's context
    (task,) = loaded.by_name["nothing"]
    assert task.config.generation_kwargs["until"] == ["\n\n"]


def test_the_recipe_overrules_a_task(settings: Resolve, tmp_path: Path, write_task: WriteTask) -> None:
    own = write_task("own", generation_kwargs={"until": ["\n"], "max_gen_toks": 31})
    alias = write_task("alias", generation_kwargs={"until": ["\n"], "max_tokens": 33})
    loaded = load(settings(max_gen_toks=50), tmp_path, own, alias)
    assert [answer_length(loaded, name) for name in ("own", "alias")] == [50, 50]


def test_lm_eval_reads_the_answer_length_that_is_set() -> None:
    """What `load_tasks` leans on: max_gen_toks comes first, and lm_eval fills in 256."""
    from lm_eval.defaults import default_gen_kwargs
    from lm_eval.models.utils import normalize_gen_kwargs

    assert normalize_gen_kwargs({"max_gen_toks": 9, "max_new_tokens": 5})["max_gen_toks"] == 9
    assert default_gen_kwargs("\n\n") == {
        "temperature": 0.0,
        "do_sample": False,
        "max_gen_toks": 256,
        "until": ["\n\n"],
    }


def test_an_answer_that_leaves_no_room_for_a_prompt_is_refused(
    settings: Resolve, tmp_path: Path, write_task: WriteTask
) -> None:
    with pytest.raises(EvaluationError, match="answers of 1024 tokens, and a context of 1024"):
        load(settings(max_gen_toks=1024), tmp_path, write_task("own"))


def test_examples_that_a_task_refuses_are_refused(settings: Resolve, tmp_path: Path, write_task: WriteTask) -> None:
    path = write_task("bare", num_fewshot=0)
    with pytest.raises(EvaluationError, match=r"eval\.num_fewshot=3, and bare is defined without examples"):
        load(settings(num_fewshot=3), tmp_path, path)
    assert load(settings(num_fewshot=0), tmp_path, path).by_name


@pytest.mark.parametrize(
    ("shots", "keys", "refused"),
    [
        (2, {}, True),
        (None, {"num_fewshot": 2}, True),
        (None, {}, False),
        (2, {"fewshot_split": "test"}, False),  # named so, lm_eval leaves the document that is asked out
        (2, {"training_split": "test"}, True),
        (2, {"test_split": None, "validation_split": "test"}, True),
        (2, {"test_split": None, "validation_split": "test", "fewshot_split": "test"}, True),
        (2, {"test_split": None, "validation_split": "test", "training_split": "other"}, False),
        (2, {"fewshot_config": {"samples": [{"question": "?", "answer": "!"}] * 2}}, False),
    ],
)
def test_a_question_does_not_come_with_its_own_answer(
    shots: int | None, keys: dict[str, Any], refused: bool, settings: Resolve, tmp_path: Path, write_task: WriteTask
) -> None:
    path = write_task("mine", **keys)
    config = yaml.safe_load(path.read_text())
    data = config["dataset_kwargs"]["data_files"]
    path.write_text(yaml.safe_dump(config | {"dataset_kwargs": {"data_files": data | {"other": data["test"]}}}))
    if refused:
        with pytest.raises(EvaluationError, match="mine has no documents for examples but those it measures"):
            load(settings(num_fewshot=shots), tmp_path, path)
    else:
        assert load(settings(num_fewshot=shots), tmp_path, path).by_name


def test_a_dataset_out_of_reach_costs_only_its_task(
    settings: Resolve, tmp_path: Path, write_task: WriteTask, capsys: pytest.CaptureFixture[str]
) -> None:
    near = write_task("near")
    far = write_task("far", dataset_path="nobody/nothing", dataset_kwargs=None)
    loaded = load(settings(), tmp_path, near, far)
    assert list(loaded.by_name) == ["near"]
    assert "Couldn't reach 'nobody/nothing'" in loaded.missing["far"]
    told = capsys.readouterr().err
    assert "Out of reach, and left out: far. Load them once" in told
    assert len(told.splitlines()) == 1
    with pytest.raises(
        EvaluationError, match=r"No task can be measured:\n  far: .*\nLoad them once .*HF_DATASETS_CACHE"
    ):
        load(settings(), tmp_path, far)


def test_what_only_loading_shows_comes_in_one_message(settings: Resolve, tmp_path: Path, write_task: WriteTask) -> None:
    column = write_task("column", doc_to_text="{{no_such_column.deeper}}")
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "test.jsonl").write_text('{"question": "1?", "answer": "1"}\n')
    split = write_task("split", dataset_path=str(folder), dataset_kwargs=None, test_split="tset")
    with pytest.raises(EvaluationError) as error:
        load(settings(), tmp_path, column, split)
    told = str(error.value).splitlines()
    assert [line.split()[2] for line in told] == ["column", "split"]
    assert (
        f"The task split ({split}) cannot be loaded: `test_split: tset` is no split of its dataset, which has test;"
        in told[1]
    )


def test_a_metric_that_cannot_be_had_costs_only_its_task_and_before_anything_is_generated(
    settings: Resolve, tmp_path: Path, write_task: WriteTask
) -> None:
    near = write_task("near")
    far = write_task("far", metric_list=[{"metric": "nobody/zzz", "aggregation": "mean", "higher_is_better": True}])
    loaded = load(settings(), tmp_path, near, far, confirm_run_task_code=True)
    assert list(loaded.by_name) == ["near"]
    assert "`metric: nobody/zzz` is none of lm_eval, and `evaluate` cannot load it here" in loaded.missing["far"]


def test_documents_that_cannot_be_read_are_told_by_file_and_line(
    settings: Resolve, tmp_path: Path, write_task: WriteTask
) -> None:
    cut, blank, table = write_task("cut"), write_task("blank"), write_task("table", dataset_path="csv")
    with cut.with_suffix(".jsonl").open("a") as rows:
        rows.write('{"question": "1?", "answ')
    blank.with_suffix(".jsonl").write_text("\n\n")
    table.with_suffix(".jsonl").write_text("question,answer\n1,2\n1,2,3\n")
    with pytest.raises(EvaluationError) as error:
        load(settings(), tmp_path, cut, blank, table)
    told = str(error.value).splitlines()
    assert f"The task cut ({cut}) cannot be loaded: {cut.with_suffix('.jsonl')}, line 5: it is not JSON" in told[0]
    assert f"The task blank ({blank}) cannot be loaded: its documents" in told[1]
    assert told[1].endswith("blank.jsonl: there are none")
    assert f"cannot be read from {table.with_suffix('.jsonl')}: Error tokenizing data" in told[2]
    assert "line 3" in told[2]


@pytest.mark.slow  # lm_eval reads all its task files for a group
def test_what_is_in_a_group_is_checked_as_well(settings: Resolve, tmp_path: Path, write_task: WriteTask) -> None:
    folder = write_task("coded", unsafe_code=True).parent
    write_task("one")
    (folder / "ours.yaml").write_text("group: ours\ntask: [coded, one]\n")
    with pytest.raises(EvaluationError) as error:
        load(settings(), tmp_path, "ours", include_path=str(folder))
    assert "coded runs Python code that the model writes" in str(error.value)
    with pytest.raises(EvaluationError, match="one is part of ours and of one"):
        load(settings(), tmp_path, "ours", "one", include_path=str(folder))
