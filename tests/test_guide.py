"""docs/multi-gpu.md and the README: every command runs, is run by a slow test, or says what hardware it needs."""

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sft import cli
from sft.recipe.load import parse_recipe
from sft.recipe.schema import REPOSITORY, Recipe

GUIDES = ("README.md", "docs/multi-gpu.md", "docs/evaluation-backends.md")
NEEDS_HARDWARE = "needs hardware"

# What runs a command that trains or measures: a test file, or why there is none.
RUN_BY = {
    "bash scripts/test.sh": "it runs the tests",
    "bash scripts/sft.sh recipes/tiny.yaml": "tests/slow/test_learns_to_stop.py",
    "bash scripts/sft.sh recipes/tiny.yaml --show": "tests/sft/data/test_show.py",
    "bash scripts/sft.sh recipes/tiny.yaml --prepare": "tests/sft/data/test_show.py",
    "bash scripts/sft.sh mine.yaml": "tests/slow/test_same_result.py",
    "NPROC=2 bash scripts/sft.sh recipes/tiny.yaml": "tests/slow/test_same_result.py",
    "python -m sft.train recipes/tiny.yaml": "tests/slow/test_runs.py",
    "torchrun --nproc-per-node 2 -m sft.train recipes/tiny.yaml": "tests/slow/test_same_result.py",
    "accelerate launch --multi_gpu --num_processes 2 -m sft.train recipes/tiny.yaml": "tests/slow/test_same_result.py",
    "deepspeed --num_gpus 2 --module sft.train recipes/tiny.yaml": "tests/slow/test_same_result.py",
    "bash scripts/eval.sh": "tests/eval/test_run.py",
    "python tests/tiny_server.py": "tests/eval/models/test_server_client.py",
    "python -m eval.report": "tests/slow/test_report_in_browser.py",
    "bash scripts/chat.sh": "tests/slow/test_chat_terminal.py",
    "bash scripts/export.sh outputs/tiny/latest": "tests/slow/test_export.py",
}


def blocks(text: str) -> Iterator[str]:
    """The bash blocks of a page."""
    yield from re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(text: str) -> Iterator[str]:
    """Every command of a page that runs here, without its comment."""
    parts = [part for block in blocks(text) for part in block.split("\n\n")]
    for part in parts:
        if NEEDS_HARDWARE in part:
            continue
        for line in part.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                yield " ".join(words)


COMMANDS = sorted({command for guide in GUIDES for command in commands((REPOSITORY / guide).read_text())})


def is_plan(command: str) -> bool:
    return "scripts/sft.sh" in command and "--plan" in command


def test_a_command_is_found_with_its_block_and_without_its_comment() -> None:
    page = "```bash\na b   # why\n# all comment\nc\n\n# needs hardware: GPUs\nd\n```\n```yaml\ne: f\n```\n"
    assert list(commands(page)) == ["a b", "c"]
    assert len(COMMANDS) > 15


@pytest.mark.parametrize("command", [command for command in COMMANDS if not is_plan(command)])
def test_a_command_is_run_by_a_test(command: str) -> None:
    """A new command needs a test, or `# needs hardware` in its block."""
    by = [test for known, test in RUN_BY.items() if command == known or command.startswith(f"{known} ")]
    assert by, f"{command}: name the test that runs it in RUN_BY, or write '# {NEEDS_HARDWARE}: what' into its block"
    for test in by:
        assert (REPOSITORY / test).is_file() or " " in test, test


def test_no_test_is_named_for_a_command_that_is_gone() -> None:
    for known in RUN_BY:
        assert any(command == known or command.startswith(f"{known} ") for command in COMMANDS), known


@pytest.mark.parametrize("command", [command for command in COMMANDS if "sft.sh" in command])
def test_a_command_is_one_that_the_launcher_understands(command: str) -> None:
    words = shlex.split(command)
    cli.train.make_context("train", words[words.index("scripts/sft.sh") + 1 :])


def recipe_and_overrides(command: str) -> tuple[str, list[str]]:
    words = shlex.split(command)
    context = cli.train.make_context("train", words[words.index("scripts/sft.sh") + 1 :])
    return cli.recipe_and_overrides(context.params["words"])


@pytest.mark.parametrize(
    "command", [command for command in COMMANDS if "sft.sh" in command and "mine.yaml" not in command]
)
def test_every_override_is_a_key_of_the_recipe(command: str) -> None:
    recipe, overrides = recipe_and_overrides(command)
    parse_recipe((REPOSITORY / recipe).read_text(), overrides)


@pytest.mark.parametrize("command", [command for command in COMMANDS if is_plan(command)])
def test_a_plan_is_printed_as_the_page_says(
    command: str,
    recipe_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The launcher's own main; scripts/sft.sh only finds the environment for it."""
    words = [str(recipe_file) if word == "mine.yaml" else word for word in shlex.split(command)]
    for word in words[: words.index("bash")]:
        name, _, value = word.partition("=")
        monkeypatch.setenv(name, value)
    cli.run(["train", *words[words.index("scripts/sft.sh") + 1 :], f"output_dir={tmp_path}"])
    assert "global_batch_size" in capsys.readouterr().out


def engine_rows(page: str) -> dict[str, dict[str, str]]:
    """The table of engines: cells by the names of the columns, by engine."""
    table = page.split("### Engines")[1].split("\n\n| engine |")[1].split("\n\n")[0]
    names = ["engine", *(cell.strip() for cell in table.splitlines()[0].strip("| ").split("|"))]
    cells = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in table.splitlines()[2:]]
    return {row[0]: dict(zip(names, row, strict=True)) for row in cells}


ENGINES = engine_rows((REPOSITORY / "docs" / "multi-gpu.md").read_text())
WHAT_TRAINS_IT = {
    "one process": ("test_same_result.py", "1 process, other micro-batch"),
    "DDP": ("test_same_result.py", "2 ranks, DDP"),
    "ZeRO-1": ("test_same_result.py", "2 ranks, ZeRO-1"),
    "ZeRO-2": ("test_same_result.py", "2 ranks, ZeRO-2"),
    "ZeRO-3": ("test_same_result.py", "2 ranks, ZeRO-3"),
    "ZeRO-2, offload": ("test_same_result.py", "2 ranks, ZeRO-2, offload"),
    "ZeRO-3, offload": ("test_same_result.py", "2 ranks, ZeRO-3, offload"),
    "ZeRO-3, NVMe": ("test_nvme.py", "train.deepspeed="),
    "FSDP2": ("test_same_result.py", "2 ranks, FSDP2"),
    "tensor parallel": ("test_parallel.py", "train.tensor_parallel_size="),
    "sequence parallel": ("test_parallel.py", "train.sequence_parallel_size="),
}


def test_every_engine_of_the_table_is_trained_by_a_slow_test() -> None:
    assert list(ENGINES) == list(WHAT_TRAINS_IT)
    for file, row in WHAT_TRAINS_IT.values():
        assert f'"{row}' in (REPOSITORY / "tests" / "slow" / file).read_text(), row


@pytest.mark.parametrize("engine", ENGINES)
def test_what_the_table_says_to_write_is_what_the_recipe_accepts(
    engine: str, make_recipe: Callable[..., Recipe]
) -> None:
    written = ENGINES[engine]["in the recipe"]
    override = written.strip("`").replace(": ", "=")
    beside = ["train.deepspeed=zero2"] if engine == "sequence parallel" else []
    recipe = make_recipe(*beside, *([] if written == "nothing" else [override]))
    if "deepspeed" in written:
        name = recipe.train.deepspeed
        assert (REPOSITORY / "ds_configs" / f"{name}.json").is_file()
        assert engine.startswith(f"ZeRO-{str(name)[4]}")


def test_every_shipped_file_is_a_row_of_the_table() -> None:
    files = {path.stem for path in (REPOSITORY / "ds_configs").glob("*.json")}
    assert {row["in the recipe"].removeprefix("`train.deepspeed: ").strip("`") for row in ENGINES.values()} - {
        "nothing"
    } >= files


def test_the_bytes_of_the_guide_are_those_of_the_ds_configs() -> None:
    sums = (REPOSITORY / "ds_configs" / "README.md").read_text()
    for name, engine in {"zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}.items():
        row = next(line for line in sums.splitlines() if line.startswith(f"| `{name}` | 2"))
        assert row.split("|")[6].strip() == ENGINES[engine]["bytes a parameter"]
