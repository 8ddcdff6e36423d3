import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sft.errors import RecipeError
from sft.recipe.load import find_file, find_recipe, load_recipe, parse_recipe
from sft.recipe.schema import REPOSITORY, SHIPPED

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


@pytest.mark.parametrize(("written", "number"), [("2e-5", 2e-5), (".5E-3", 5e-4), ("1_0e-1", 1.0)])
def test_a_number_is_a_number_however_it_is_written(written: str, number: float) -> None:
    text = PLAIN.replace("{global_batch_size: 8}", f"{{global_batch_size: 8, learning_rate: {written}}}")
    assert parse_recipe(text).train.learning_rate == number
    assert parse_recipe(PLAIN, [f"train.learning_rate={written}"]).train.learning_rate == number


@pytest.mark.parametrize("text", ["2e-5x", "use # for headings", "first line\nsecond line"])
def test_a_text_on_the_command_line_stays_a_text(text: str) -> None:
    assert parse_recipe(PLAIN, [f"tracking.project={text}"]).tracking.project == text


def test_a_finding_that_no_longer_exists_is_left_out_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = parse_recipe(PLAIN, ["data.refuse=[echo,base64]", "data.allow=[held_out_near]"])
    assert (recipe.data.refuse, recipe.data.allow) == (("echo",), ())
    said = capsys.readouterr().err
    assert "data.refuse: base64" in said and "data.allow: held_out_near" in said
    assert "data.refuse" in mistakes(PLAIN, "data.refuse=[{}]")[0]


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("train.learning_rate=.nan", "train.learning_rate: must be a finite number"),
        ("train.global_batch_size=true", "train.global_batch_size: must be a valid integer"),
        ("train.global_batch_size=-4", "train.global_batch_size: must be greater than 0, got -4"),
        ("model.quantization=nf4", "model: quantization=nf4 without lora: quantized weights cannot be trained. Set model.lora={}"),
        ("data.train={path: a}", "one source is a list, too: [{path: ...}]"),
        ("eval.tasks=gsm8k", 'eval.tasks: must be a list, got "gsm8k"'),
        ("train.precision=bf17", "train.precision: must be 'auto', 'bf16', 'fp16' or 'fp32', got \"bf17\""),
        ("model=some/model", "model: must be an object, got \"some/model\"; write {name_or_path: some/model}"),
        ("train.global_batch_size=null", "got None and None"),
        ("train.global_batch_tokens=4096", "got 8 and 4096"),
        ("train.lr_scaling=linear", "needs base_batch_size"),
        ("train.lr_scheduler_type=warmup_stable_decay", "needs one of lr_decay_steps and lr_decay_ratio, got none"),
        ("train.lr_decay_steps=5", "lr_decay_steps is for lr_scheduler_type=warmup_stable_decay, which is cosine"),
        ("train.lr_power=2", "lr_power=2 is for lr_scheduler_type=polynomial, which is cosine"),
        ("train.lr_scheduler_type=cosine_with_min_lr", "needs min_lr_ratio above 0"),
        ("train={lr_scheduler_type: polynomial, min_lr_ratio: 1, global_batch_size: 8}", "min_lr_ratio=1 never falls"),
        ("model.rope_scaling={rope_type: llama3, factor: 2.0, low_freq_factor: 1.0}", "llama3 needs low_freq_factor and high_freq_factor"),
        ("model.rope_scaling={rope_type: linear, factor: 2.0, beta_fast: 1.0}", "beta_fast is for rope_type=yarn, which is linear"),
        ("train.optimizer=adamw", "here it is `optim`"),
        ("train.optim_args={momentum: 0.9}", "optim_args.momentum: unknown to optim=adamw, which takes none"),
        ("train={optim: muon, optim_args: {nesterov: 1}, global_batch_size: 8}", "optim_args.nesterov: "),
        ("train={optim: lion, adam_beta2: 0.99, global_batch_size: 8}", "adam_beta2 has no effect with optim=lion"),
        ("tracking.run_name=../up", "tracking.run_name: "),
    ],
)  # fmt: skip
def test_a_wrong_value_is_told_with_its_key_and_itself(override: str, told: str) -> None:
    (line,) = mistakes(PLAIN, override)
    assert told in line


def test_all_mistakes_come_in_one_message() -> None:
    text = (
        PLAIN.replace("name_or_path", "name_or_pathh")
        .replace("train: rows.jsonl", "train: 5, max_len: 100")
        .replace("{global_batch_size: 8}", "{global_batch_size: -4, weight_decay: much}")
        .replace("schema_version: 1\nversion: 1\n", "")
    )
    lines = mistakes(text)
    for expected in (
        "schema_version: missing; write `schema_version: 1` (format of the file)",
        "version: missing; write `version: 1` (of this recipe)",
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
        ("trian", "; did you mean `train`?"),
        ("model.lora.lora_alhpa", "; did you mean `lora_alpha`?"),
        ("train.max_length", "; it belongs to `data`"),
        ("train.lr", "; here it is `learning_rate`"),
        ("train.learning_r\u0430te", "; did you mean `learning_rate`? (as written it is 'learning_r\\u0430te', which only looks alike)"),
        ("data.columns", "; it belongs to a source: `train: [{path: ..., columns: ...}]`"),
    ],
)  # fmt: skip
def test_an_unknown_key_comes_with_the_nearest_known_one(key: str, hint: str) -> None:
    assert mistakes(PLAIN, f"{key}=1") == [f"{key}: unknown key{hint}"]


def test_mistakes_in_a_list_of_sources_are_told_by_position() -> None:
    assert mistakes(PLAIN, "data.train=[{path: a.jsonl, splitt: x}, {nam: y}]") == [
        "data.train.0.splitt: unknown key; did you mean `split`?",
        "data.train.1.path: missing; this key has no default",
        "data.train.1.nam: unknown key; did you mean `name`?",
    ]


def test_a_path_in_a_list_is_a_source() -> None:
    train = parse_recipe(PLAIN, ["data.train=[a.jsonl, {path: b.jsonl, epochs: 2}]", "data.held_out=[c.jsonl]"]).data
    assert [(one.path, one.epochs) for one in train.train] == [("a.jsonl", 1), ("b.jsonl", 2)]  # type: ignore[union-attr]
    assert [one.path for one in train.held_out] == ["c.jsonl"]  # type: ignore[union-attr]
    assert mistakes(PLAIN, "data.train=[a.jsonl, 3]") == ["data.train.1: must be an object, got 3"]


@pytest.mark.parametrize(("version", "remedy"), [(2, "Update the program"), (0, "There is no version 0")])
def test_a_file_of_another_format_is_refused_before_its_keys_are_judged(version: int, remedy: str) -> None:
    text = PLAIN.replace("schema_version: 1", f"schema_version: {version}\nkey_of_the_future: 1")
    with pytest.raises(RecipeError, match=f"schema_version {version}, and this program reads 1. {remedy}"):
        parse_recipe(text)


def test_a_section_whose_lines_are_all_commented_out_means_its_defaults() -> None:
    assert parse_recipe(PLAIN + "eval:\n  # tasks: [gsm8k]\ntracking:\n") == parse_recipe(PLAIN)
    # But of these two null means something else.
    (line,) = mistakes(PLAIN.replace("{global", "\n  fsdp:\n  # offload_params: true\n  #{global"))
    assert line == "line 6: `fsdp` is empty: write `fsdp: {}` for its defaults, or `fsdp: null`"


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
        ("a: 010\n", "line 1: YAML reads 010 as a number in base 8"),
        ("a: 1:30:00\n", "line 1: YAML reads 1:30:00 as a number in base 60"),
        ("a: " + "[" * 3000, ""),
    ],
)
def test_what_is_no_recipe_or_would_be_misread_is_one_message_with_the_place(text: str, told: str) -> None:
    assert any(told in line for line in mistakes(text)), told


def test_an_override_is_judged_as_the_file_is() -> None:
    in_file = PLAIN.replace("{global_batch_size: 8}", "{global_batch_size: -4, seeed: 1}")
    assert mistakes(in_file) == mistakes(PLAIN, "train.global_batch_size=-4", "train.seeed=1")


def test_an_override_can_be_any_yaml_and_the_last_one_counts() -> None:
    lora, seeds = ["model.lora={}", "model.lora.r=4"], ["train.seed=1", "train.seed=2"]
    sources = "data.train=[{path: a.jsonl}, {path: b.jsonl, split: test}]"
    recipe = parse_recipe(PLAIN, ["eval.tasks=[gsm8k, arc_easy]", *lora, *seeds, sources, "tracking.run_name="])
    assert recipe.eval.tasks == ("gsm8k", "arc_easy")
    assert recipe.model.lora is not None
    assert (recipe.model.lora.r, recipe.model.lora.lora_alpha) == (4, 32)
    assert (recipe.train.seed, recipe.tracking.run_name) == (2, None)
    assert [(source.path, source.split) for source in recipe.sources] == [("a.jsonl", "train"), ("b.jsonl", "test")]


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("train.seed", "Write key=value"),
        ("data.train.path=x", "`train` holds 'rows.jsonl', which has no keys of its own"),
        ("train.seed={1", "not valid YAML"),
    ],
)
def test_an_override_that_is_none_is_quoted_back(override: str, told: str) -> None:
    with pytest.raises(RecipeError) as error:
        parse_recipe(PLAIN, [override])
    assert told in str(error.value)
    assert override.partition("=")[0] in str(error.value)


def test_a_merge_key_takes_over_what_is_not_written_here() -> None:
    text = PLAIN.replace("rows.jsonl", "[&first {path: a.jsonl, epochs: 2.0}, {<<: *first, path: b.jsonl}]")
    assert [(one.path, one.epochs) for one in parse_recipe(text).sources] == [("a.jsonl", 2.0), ("b.jsonl", 2.0)]
    assert "line 4" in mistakes(text.replace("{<<: *first,", "{<<: *first, <<: *first,"))[0]


def test_a_file_that_cannot_be_read_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"There is no recipe .*typo\.yaml\. Shipped: .*recipes/tiny\.yaml"):
        load_recipe(tmp_path / "typo.yaml")
    with pytest.raises(RecipeError, match="is a folder"):
        load_recipe(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match=r"binary\.yaml cannot be read"):
        load_recipe(tmp_path / "binary.yaml")
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(RecipeError, match=r"pipe.yaml is a pipe.*write it to a file"):
        load_recipe(tmp_path / "pipe.yaml")


def test_a_path_is_looked_for_where_the_user_is_and_then_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_file("recipes/tiny.yaml") == REPOSITORY / "recipes" / "tiny.yaml"
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "tiny.yaml").touch()
    assert find_file("recipes/tiny.yaml").resolve() == tmp_path / "recipes" / "tiny.yaml"
    assert find_file("no/such") == Path("no/such")
    assert find_recipe("qwen3b") == find_recipe("qwen3b.yaml") == SHIPPED / "recipes" / "qwen3b.yaml"
    (tmp_path / "qwen3b.yaml").touch()
    assert find_recipe("qwen3b.yaml").resolve() == tmp_path / "qwen3b.yaml"
    assert find_recipe("../qwen3b.yaml") == Path("../qwen3b.yaml")
    for impossible in ("~nobody_of_this_name/x", "a" * 300, "a\0b"):
        assert not find_file(impossible).is_file()


def test_reading_a_recipe_imports_no_torch() -> None:
    heavy = ["torch", "transformers", "datasets", "trl", "deepspeed", "accelerate", "lm_eval", "peft"]
    program = (
        "import sys, pathlib, sft.recipe.load; sft.recipe.load.load_recipe(pathlib.Path('recipes/tiny.yaml'));"
        f"print(sorted(set({json.dumps(heavy)}) & set(sys.modules)))"
    )
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY).stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("text", "tool"),
    [
        ("base_model: m\ndatasets: [{path: d}]\nmicro_batch_size: 1", "axolotl"),
        ("model_name_or_path: m\nstage: sft\nfinetuning_type: lora", "LLaMA-Factory"),
        ("model_name_or_path: m\ndataset_name: d", "trl"),
        ("model: {_component_: a}\ndataset: {}\noptimizer: {}", "torchtune"),
    ],
)
def test_another_tools_config_gets_the_command_that_converts_it(text: str, tool: str) -> None:
    with pytest.raises(RecipeError) as refused:
        parse_recipe(text, origin="my file.yml")
    assert f"config of {tool}" in str(refused.value)
    assert "sft convert 'my file.yml' --gpus N" in str(refused.value)


def test_a_recipe_with_a_wrong_key_is_no_other_tools_config() -> None:
    with pytest.raises(RecipeError) as refused:
        parse_recipe("schema_version: 1\nversion: 1\nmodel: {name_or_path: m}\ngradient_accumulation_steps: 2")
    assert "sft convert" not in str(refused.value)
