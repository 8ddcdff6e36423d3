"""`sft init` on real data: the recipe trains without an edit, or one message says what is missing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sft.errors import UserError
from sft.init.main import main
from sft.launch.main import planned_job
from tests.slow.conftest import latest, rows
from tests.slow.ranks import Ranks

pytestmark = pytest.mark.slow

MISSING = {
    "dataset_info.json": "no usable columns",
    "fms_twitter_complaints_small.arrow": "U\\+FFFD.*data.allow=\\[undecodable\\]",
    "fms_twitter_complaints_small.parquet": "U\\+FFFD.*data.allow=\\[undecodable\\]",
    "identity.json": "placeholder.*data.allow=\\[placeholder\\]",
    "glaive_toolcall_en_demo.json": "it has tools, and the chat template does not show them",
    "reason_tool_use_demo_50.jsonl": "it has tools, and the chat template does not show them",
    "sgd_messages_tools_600.jsonl": "it has tools, and the chat template does not show them",
}
"""Files that `sft init` refuses, and what its message names."""

TRAINED = ("fms_multi_turn_chat.jsonl", "raschka_instruction_data.json", "axolotl_conversation.missingturns.json")
FIVE = ["train.max_steps=5", "train.save_canary=false", "eval.tasks=[]", "eval.chat=false"]


def files(shared: Path) -> list[Path]:
    """Every data file that is here."""
    return sorted(
        path for path in (shared / "sft").rglob("*") if path.suffix in (".json", ".jsonl", ".parquet", ".arrow")
    )


@pytest.fixture
def init(tmp_path: Path, shared: Path) -> Callable[[Path], Path]:
    """Write a recipe for a file."""

    def run(file: Path) -> Path:
        output = tmp_path / f"{file.stem}_{file.suffix[1:]}.yaml"
        main(
            str(file),
            str(shared / "models" / "stories260k_hf"),
            output=output,
            given=[f"output_dir={tmp_path}/outputs"],
        )
        return output

    return run


def test_every_file_becomes_a_recipe_that_plans_or_one_message(
    init: Callable[[Path], Path], shared: Path, tmp_path: Path
) -> None:
    found = files(shared)
    assert len(found) > 20
    for file in found:
        if file.name in MISSING:
            with pytest.raises(UserError, match=f"(?s){MISSING[file.name]}"):
                init(file)
            continue
        job, _ = planned_job(init(file), [])
        assert job.plan.max_steps.value
    assert len(list(tmp_path.glob("*.yaml"))) == len([file for file in found if file.name not in MISSING])


@pytest.mark.parametrize("name", rows(TRAINED, TRAINED[:1]))
def test_the_recipe_trains_five_steps_as_it_is(
    init: Callable[[Path], Path], shared: Path, ranks: Ranks, name: str
) -> None:
    recipe = init(next(file for file in files(shared) if file.name == name))
    ranks.run(1, ["sft.train", recipe, *FIVE])
    record = latest(recipe).record
    assert record["status"] == "finished"


def test_a_csv_is_trained_and_measured_with_a_task_of_its_own(
    init: Callable[[Path], Path], tmp_path: Path, ranks: Ranks
) -> None:
    rows = [f"Is {number} even?;{'yes' if number % 2 == 0 else 'no'}" for number in range(60)]
    (tmp_path / "numbers.csv").write_text("\n".join(["Question;Label", *rows]) + "\n")
    recipe = init(tmp_path / "numbers.csv")
    ranks.run(1, ["sft.train", recipe, "train.max_steps=5", "eval.chat=false"], finish=True)
    run = latest(recipe)
    comparison: dict[str, Any] = json.loads(run.comparison_file.read_text())
    assert comparison["complete"]
    assert {row["task"] for row in comparison["metrics"]} == {"numbers_csv_eval"}
    counts = json.loads(run.ledger_file.read_text())["total"]["rows"]
    assert (counts["in"], counts["used"], counts["held_out"]) == (72, 48, 12)
