"""The account of a file's keys, and the tables."""

from typing import Any

import pytest

from sft.convert.conversion import Conversion, fitted, flatten, refusal, table
from sft.convert.main import TOOLS


def conversion(keys: dict[str, Any]) -> Conversion:
    return Conversion("axolotl", "theirs.yml", flatten(keys), 8)


@pytest.mark.parametrize("tool", TOOLS)
def test_every_key_that_a_table_names_is_a_key_of_recipes(tool: str) -> None:
    for key, row in TOOLS[tool][1].items():
        # Sources are lists, and refusal() looks at single keys.
        in_a_list = row.to.startswith(("data.train.", "data.held_out."))
        assert in_a_list or not row.to or "no key" not in refusal(row.to, "x"), f"{tool}: {key} -> {row.to}"
        assert row.to or row.note, f"{tool}: {key} is dropped without a reason"


def test_every_key_is_in_one_list_and_an_unknown_one_is_dropped_with_a_reason() -> None:
    c = conversion({"a": 1, "b": {"c": None}, "d": [{"e": 2}], "f": "x", "g": [], "h": "no such", "i": 5, "typo": 1})
    rows = table(
        "a -> train.seed\nf -- no reason\nd.*.e -> train.max_steps -- steps\nh -> model.kernels\ni -> train.learning_rate",
        {"model.kernels": {"on": "liger"}},
    )
    c.apply(rows)
    assert c.carried == {"a": "train.seed: 1"}
    assert c.changed == {"d.0.e": "train.max_steps: 2 (steps)"}
    assert c.dropped["f"] == "no reason"
    assert "nothing like no such" in c.dropped["h"]
    assert "train.learning_rate does not take 5" in c.dropped["i"]
    assert set(c.dropped) == {"b.c", "f", "g", "h", "i", "typo"}


def test_a_default_that_is_not_ours_is_written_where_the_file_says_nothing() -> None:
    rows = table("beta -> train.adam_beta2 (0.999)\nr -> model.lora.r (8)")
    c = conversion({"beta": None})
    c.apply(rows)
    assert c.settings == {"train.adam_beta2": 0.999}
    assert "default" in c.changed["beta"]
    assert "beta" not in c.dropped
    c = conversion({"beta": 0.9})
    c.settings["model.lora"] = {}
    c.apply(rows)
    assert (c.settings["train.adam_beta2"], c.settings["model.lora.r"]) == (0.9, 8)


@pytest.mark.parametrize(
    ("key", "given", "ours"),
    [
        ("train.learning_rate", "2e-5", 2e-5),
        ("train.max_steps", 10.0, 10),
        ("train.max_steps", "10", 10),
        ("data.packing", "True", True),
        ("tracking.report_to", "wandb", ["wandb"]),
        ("train.max_steps", 0.5, 0.5),
    ],
)
def test_a_value_is_written_in_the_type_that_recipes_take(key: str, given: object, ours: object) -> None:
    assert fitted(key, given) == ours
    assert type(fitted(key, given)) is type(ours)
