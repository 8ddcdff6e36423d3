import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sft.errors import RecipeError
from sft.recipe.load import find_file, load_recipe, parse_recipe
from sft.recipe.schema import REPOSITORY, Recipe

MakeRecipe = Callable[..., Recipe]

PLAIN = """\
schema_version: 1
version: 1
model: {name_or_path: some/model}
data: {train: rows.jsonl}
train: {global_batch_size: 8}
"""


def mistakes(text: str, *overrides: str) -> list[str]:
    """The lines of the message, its heading left out."""
    with pytest.raises(RecipeError) as error:
        parse_recipe(text, overrides, origin="mine.yaml")
    heading, *lines = str(error.value).splitlines()
    assert "mine.yaml" in heading or "override" in heading
    return [line.strip() for line in lines]


@pytest.mark.parametrize(
    ("written", "number"),
    [
        ("2e-5", 2e-5),
        (".5E-3", 5e-4),
        ("+3e-4", 3e-4),
        ("1e+0", 1.0),
        ("1", 1.0),
        ("1_0e-1", 1.0),
    ],
)
def test_a_number_is_a_number_however_it_is_written(written: str, number: float) -> None:
    text = PLAIN.replace("{global_batch_size: 8}", f"{{global_batch_size: 8, learning_rate: {written}}}")
    assert parse_recipe(text).train.learning_rate == number
    assert parse_recipe(PLAIN, [f"train.learning_rate={written}"]).train.learning_rate == number


def test_a_finding_that_no_longer_exists_is_left_out_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = parse_recipe(PLAIN, ["data.refuse=[echo,base64]", "data.allow=[held_out_near]"])
    assert (recipe.data.refuse, recipe.data.allow) == (("echo",), ())
    said = capsys.readouterr().err
    assert "data.refuse: base64" in said and "data.allow: held_out_near" in said
    assert "data.refuse" in mistakes(PLAIN, "data.refuse=[{}]")[0]


def test_a_word_that_only_begins_like_a_number_stays_a_word() -> None:
    for word in ("1e", "e5", "2e-5x", "0625-v2"):
        assert parse_recipe(PLAIN, [f"tracking.project={word}"]).tracking.project == word


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ('train.learning_rate="2e-5"', "train.learning_rate: must be a valid number"),
        ("train.learning_rate=.nan", "train.learning_rate: must be a finite number"),
        ("train.global_batch_size=true", "train.global_batch_size: must be a valid integer"),
        ("train.global_batch_size=8.5", "train.global_batch_size: must be a valid integer"),
        ("train.global_batch_size=-4", "train.global_batch_size: must be greater than 0, got -4"),
        ("data.packing=1", "data.packing: must be a valid boolean, got 1"),
        ("tracking.project=5", "tracking.project: must be a valid string, got 5"),
        ("eval.tasks=gsm8k", 'eval.tasks: must be a list, got "gsm8k"'),
        ("train.adam_beta2=1.5", "train.adam_beta2: must be less than 1, got 1.5"),
        ("train.learning_rate=2e5", "train.learning_rate: must be less than or equal to 1, got 200000.0"),
        ("train.precision=bf17", "train.precision: must be 'auto', 'bf16', 'fp16' or 'fp32', got \"bf17\""),
        ("model.lora=5", "model.lora: "),
        ("train=5", "train: "),
    ],
)
def test_a_value_of_the_wrong_kind_is_told_with_its_key_and_itself(override: str, told: str) -> None:
    (line,) = mistakes(PLAIN, override)
    assert told in line


def test_all_mistakes_come_in_one_message() -> None:
    text = (
        PLAIN.replace("name_or_path", "name_or_pathh")
        .replace("train: rows.jsonl", "train: 5, max_len: 100")
        .replace("{global_batch_size: 8}", "{global_batch_size: -4, weight_decay: much}")
    )
    lines = mistakes(text)
    for expected in (
        "model.name_or_path: missing",
        "model.name_or_pathh: unknown key; did you mean `name_or_path`?",
        "data.max_len: unknown key; did you mean `max_length`?",
        "data.train: ",
        "train.global_batch_size: must be greater than 0, got -4",
        'train.weight_decay: must be a valid number, got "much"',
    ):
        assert any(expected in line for line in lines), expected


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("trian.seed", "; did you mean `train`?"),
        ("train.learning_rat", "; did you mean `learning_rate`?"),
        ("model.lora.lora_alhpa", "; did you mean `lora_alpha`?"),
        ("eval.task", "; did you mean `tasks`?"),
        ("learning_rate", "; it belongs to `train`"),
        ("train.max_length", "; it belongs to `data`"),
        ("train.lr", "; here it is `learning_rate`"),
        ("data.max_seq_length", "; here it is `max_length`"),
        ("train.learning-rate", "; did you mean `learning_rate`?"),
        ("model.zzz", ""),
    ],
)
def test_an_unknown_key_comes_with_the_nearest_known_one(key: str, hint: str) -> None:
    (line,) = mistakes(PLAIN, f"{key}=1")
    assert line == f"{key if key != 'trian.seed' else 'trian'}: unknown key{hint}"


def test_mistakes_in_a_list_of_sources_are_told_by_position() -> None:
    lines = mistakes(PLAIN, "data.train=[{path: a.jsonl, splitt: x}, {nam: y}]")
    assert lines == [
        "data.train.0.splitt: unknown key; did you mean `split`?",
        "data.train.1.path: missing; this key has no default",
        "data.train.1.nam: unknown key; did you mean `name`?",
    ]


def test_exactly_one_way_to_say_the_batch() -> None:
    assert "got None and None" in mistakes(PLAIN, "train.global_batch_size=null")[0]
    assert "got 8 and 4096" in mistakes(PLAIN, "train.global_batch_tokens=4096")[0]
    tokens = parse_recipe(PLAIN, ["train.global_batch_size=null", "train.global_batch_tokens=4096"])
    assert tokens.sequences_per_step == 2
    assert parse_recipe(PLAIN).sequences_per_step == 8


def test_the_versions_of_the_file_and_of_the_recipe_are_asked_for() -> None:
    lines = mistakes(PLAIN.replace("schema_version: 1\n", "").replace("version: 1\n", ""))
    assert lines == [
        "schema_version: missing; write `schema_version: 1` (format of the file)",
        "version: missing; write `version: 1` (of this recipe)",
    ]


@pytest.mark.parametrize(("version", "remedy"), [(2, "Update the program"), (0, "There is no version 0")])
def test_a_file_of_another_format_is_refused_before_its_keys_are_judged(version: int, remedy: str) -> None:
    text = PLAIN.replace("schema_version: 1", f"schema_version: {version}\nkey_of_the_future: 1")
    with pytest.raises(RecipeError, match=f"schema_version {version}, and this program reads 1. {remedy}"):
        parse_recipe(text)


def test_a_section_whose_lines_are_all_commented_out_means_its_defaults() -> None:
    assert parse_recipe(PLAIN + "eval:\n  # tasks: [gsm8k]\ntracking:\n") == parse_recipe(PLAIN)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "it holds nothing"),
        ("just words\n", "it holds no keys"),
        ("a: [1, 2\n", "line 2, column 1"),
        ("a: 1\nb: 2\na: 3\n", "line 3: `a` was already given on line 1"),
        (PLAIN + "eval: {limit: 1, limit: 2}\n", "line 6: `limit` was already given on line 6"),
        ("a: 1\n5: 2\n", "line 2: the key 5 is not a name"),
        ("a: !!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
        ("a: 2026-13-45\n", "month must be in 1..12"),
        ("a: " + "[" * 3000, ""),
    ],
)
def test_a_file_that_is_no_recipe_is_one_message_with_the_place(text: str, told: str) -> None:
    assert any(told in line for line in mistakes(text)), told


def test_an_override_is_judged_as_the_file_is() -> None:
    in_file = PLAIN.replace("{global_batch_size: 8}", "{global_batch_size: -4, seeed: 1}")
    assert mistakes(in_file) == mistakes(PLAIN, "train.global_batch_size=-4", "train.seeed=1")
    right = PLAIN.replace("{global_batch_size: 8}", "{global_batch_size: 16, seed: 3}")
    assert parse_recipe(right) == parse_recipe(PLAIN, ["train.global_batch_size=16", "train.seed=3"])


def test_an_override_can_be_any_yaml_and_the_last_one_counts() -> None:
    recipe = parse_recipe(
        PLAIN,
        [
            "eval.tasks=[gsm8k, arc_easy]",
            "model.lora={}",
            "model.lora.r=4",
            "train.seed=1",
            "train.seed=2",
            "data.train=[{path: a.jsonl}, {path: b.jsonl, split: test}]",
            "tracking.run_name=",
            "eval.limit=null",
        ],
    )
    assert recipe.eval.tasks == ("gsm8k", "arc_easy")
    assert recipe.model.lora is not None
    assert (recipe.model.lora.r, recipe.model.lora.lora_alpha) == (4, 32)
    assert recipe.train.seed == 2
    assert [(source.path, source.split) for source in recipe.sources] == [("a.jsonl", "train"), ("b.jsonl", "test")]
    assert (recipe.tracking.run_name, recipe.eval.limit) == (None, None)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("train.seed", "Write key=value"),
        ("=5", "Write key=value"),
        ("data.train.path=x", "`train` holds 'rows.jsonl', which has no keys of its own"),
        ("train.seed={1", "not valid YAML"),
        ("train.=1", "unknown key"),
    ],
)
def test_an_override_that_is_none_is_quoted_back(override: str, told: str) -> None:
    with pytest.raises(RecipeError) as error:
        parse_recipe(PLAIN, [override])
    assert told in str(error.value)
    assert override.partition("=")[0] in str(error.value)


@pytest.mark.parametrize("name", ["a/b", "../up", "..", ".hidden", "", "two words", "name\n", "ä"])
def test_a_run_name_is_the_name_of_one_folder(name: str) -> None:
    (line,) = mistakes(PLAIN, f"tracking.run_name={json.dumps(name)}")
    assert line.startswith("tracking.run_name: ")
    assert parse_recipe(PLAIN, ["tracking.run_name=lr-2.5e-4_v2"]).tracking.run_name == "lr-2.5e-4_v2"


def test_a_missing_recipe_comes_with_those_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"There is no recipe .*typo\.yaml\. Recipes here: .*recipes/tiny\.yaml"):
        load_recipe(tmp_path / "typo.yaml")
    with pytest.raises(RecipeError, match="is a folder"):
        load_recipe(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match=r"binary\.yaml cannot be read"):
        load_recipe(tmp_path / "binary.yaml")


def test_a_path_is_looked_for_where_the_user_is_and_then_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_file("recipes/tiny.yaml") == REPOSITORY / "recipes" / "tiny.yaml"
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "tiny.yaml").touch()
    assert find_file("recipes/tiny.yaml").resolve() == tmp_path / "recipes" / "tiny.yaml"
    assert find_file("no/such") == Path("no/such")


@pytest.mark.parametrize("path", ["~nobody_of_this_name/x", "a" * 300, "a\0b"])
def test_a_path_that_no_file_can_have_is_only_not_there(path: str) -> None:
    assert not find_file(path).is_file()


def test_reading_a_recipe_imports_no_torch() -> None:
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from sft.recipe.load import load_recipe\n"
        "load_recipe(Path('recipes/tiny.yaml'))\n"
        "heavy = {'torch', 'transformers', 'datasets', 'trl', 'deepspeed', 'accelerate', 'lm_eval', 'peft'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=REPOSITORY
    )
    assert printed.stdout.strip() == "[]"


def test_a_merge_key_takes_over_what_is_not_written_here() -> None:
    text = PLAIN.replace(
        "rows.jsonl", "[&first {path: a.jsonl, split: train, epochs: 2.0}, {<<: *first, path: b.jsonl, epochs: 1.0}]"
    )
    sources = parse_recipe(text).sources
    assert [(one.path, one.split, one.epochs) for one in sources] == [
        ("a.jsonl", "train", 2.0),
        ("b.jsonl", "train", 1.0),
    ]
    assert "line 4" in mistakes(text.replace("{<<: *first,", "{<<: *first, <<: *first,"))[0]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("train: {global_batch_size: 8, max_steps: 010}", ("line 5", "010", "base 8")),
        ("train: {global_batch_size: 8, max_time: 1:30:00}", ("line 5", "1:30:00", "base 60")),
        ("train: {global_batch_size: 8, seed: 4294967296}", ("train.seed", "less than 4294967296")),
        (f"a: &a [{'1,' * 99}]\nb: &b [{'*a,' * 99}]\nc: [{'*b,' * 99}]", ("100000 values",)),
        ("train: {global_batch_size: 8, max_time: 30}", ("train.max_time", "30m")),
        ("train:\n  global_batch_size: 8\n  fsdp:\n  # offload_params: true", ("line 7", "fsdp: {}")),
        ("train: {global_batch_size: 8, learning_r\u0430te: 1e-5}", ("\\u0430",)),
    ],
)
def test_what_yaml_would_misread_is_refused(line: str, told: tuple[str, ...]) -> None:
    said = " ".join(mistakes(PLAIN.replace("train: {global_batch_size: 8}", line)))
    assert all(word in said for word in told), said


@pytest.mark.parametrize("text", ["use # for headings", "first line\nsecond line"])
def test_a_text_on_the_command_line_is_taken_whole(text: str) -> None:
    assert parse_recipe(PLAIN, [f"tracking.project={text}"]).tracking.project == text


def test_a_recipe_from_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(RecipeError, match=r"pipe.yaml is a pipe.*write it to a file"):
        load_recipe(tmp_path / "pipe.yaml")
