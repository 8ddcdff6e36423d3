"""Exports of real runs: what others load is what was trained, on whatever engine; what is refused leaves nothing behind."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from sft.errors import UserError
from sft.export.main import main
from sft.run.directory import Run
from tests.fake_hub import TOKEN, FakeHub, fake_hub
from tests.sft.export.test_gguf import SAME, WRITES
from tests.sft.export.test_go_template import go
from tests.slow.engine_runs import SAVED, STEPS, EngineRuns

pytestmark = [
    pytest.mark.slow,
    # huggingface_hub 2.4 gives httpx2 the file in the old way.
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),
]

MODEL = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
BESIDE = {"README.md", "chat_template.jinja", "loss.png"}


@pytest.fixture
def full(runs: EngineRuns, tmp_path: Path) -> Run:
    """A copy of a run, to be spoilt."""
    shutil.copytree(runs("1").path, tmp_path / "outputs" / "mine" / "full")
    return Run(tmp_path / "outputs" / "mine" / "full")


def export(run: Run, *words: str | Path) -> None:
    main([str(run.path), *map(str, words)])


def refused(run: Run, *words: str | Path) -> str:
    with pytest.raises(UserError) as printed:
        export(run, *words)
    return str(printed.value)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


RUNS = [
    ("1", "packed"),
    ("2 ZeRO-3", "packed"),
    ("2 FSDP2", "packed"),
    ("1", "padded, adapters"),
    ("2 FSDP2", "padded, adapters"),
]


@pytest.mark.parametrize(("name", "kind"), RUNS)
def test_final_and_the_last_checkpoint_are_exported_as_one_model(
    name: str, kind: str, runs: EngineRuns, tmp_path: Path
) -> None:
    run = runs(name, kind)
    export(run, "--to", "merged", "--output", tmp_path / "final")
    export(run, "--to", "merged", "--output", tmp_path / "last", "--checkpoint", str(STEPS))
    for folder in (tmp_path / "final", tmp_path / "last"):
        assert {path.name for path in folder.iterdir()} == MODEL | BESIDE
        found, expected = weights(folder), weights(run.final)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[one], expected[one]) for one in expected)
        config = json.loads((folder / "config.json").read_text())
        assert config == json.loads((run.final / "config.json").read_text())
        assert (config["rope_theta"], config["use_cache"]) == (10000.0, True)
    assert {path.name for path in tmp_path.iterdir()} == {"final", "last"}, "something was left behind"


def test_an_earlier_checkpoint_is_another_model_and_says_so(runs: EngineRuns, tmp_path: Path) -> None:
    run = runs("1", "padded, adapters")
    export(run, "--to", "merged", "--output", tmp_path / "earlier", "--checkpoint", str(SAVED))
    assert any((weights(tmp_path / "earlier")[one] != other).any() for one, other in weights(run.final).items())
    assert f"checkpoint after {SAVED} steps" in (tmp_path / "earlier" / "README.md").read_text()


def test_a_merge_that_leaves_the_adapter_out_is_refused_and_nothing_is_left(
    runs: EngineRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peft.LoraModel.merge_and_unload", lambda model: model.unload())
    run, words = runs("1", "padded, adapters"), ["--checkpoint", str(STEPS), "--output", tmp_path / "exports" / "x"]
    assert "not the one that was trained" in refused(run, "--to", "merged", *words)
    assert list((tmp_path / "exports").iterdir()) == []


def test_weights_that_are_no_numbers_are_not_exported(full: Run, tmp_path: Path) -> None:
    tensors = weights(full.final)
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, full.final / "model.safetensors", {"format": "pt"})
    printed = refused(full, "--to", "vllm", "--accept-edits", "--output", tmp_path / "exports" / "x")
    assert "NaN or infinite values: model.norm.weight" in printed
    assert list((tmp_path / "exports").iterdir()) == []


def test_a_folder_that_lacks_a_tensor_is_not_exported(full: Run, tmp_path: Path) -> None:
    tensors = weights(full.final)
    del tensors["model.norm.weight"]
    save_file(tensors, full.final / "model.safetensors", {"format": "pt"})
    printed = refused(full, "--to", "merged", "--accept-edits", "--output", tmp_path / "x")
    assert "missing" in printed and "model.norm.weight" in printed
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("room", ["less than the model", "the model and no more"])
def test_a_disk_that_is_full_leaves_nothing(room: str, full: Run, small_disk: Callable[[int], Path]) -> None:
    size = sum(path.stat().st_size for path in full.final.iterdir() if path.is_file()) // 1024
    disk = small_disk(size // 2 if room == "less than the model" else size + 17)
    printed = refused(full, "--to", "merged", "--output", disk / "x")
    assert "Free some space" in printed
    assert list(disk.iterdir()) == []


def test_the_script_for_vllm_calls_it_with_the_folder_wherever_that_is(runs: EngineRuns, tmp_path: Path) -> None:
    export(runs("1"), "--to", "vllm", "--gpus", "2", "--output", tmp_path / "here")
    there = (tmp_path / "here").rename(tmp_path / "over there")
    (tmp_path / "vllm").write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done\n')
    (tmp_path / "vllm").chmod(0o755)
    printed = subprocess.run(
        ["bash", there / "serve.sh", "--port", "9"],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    words = printed.stdout.splitlines()
    assert words[:2] == ["serve", str(there)]
    assert words[words.index("--chat-template") + 1] == str(there / "chat_template.jinja")
    assert words[words.index("--tensor-parallel-size") + 1] == "2"
    assert json.loads(words[words.index("--override-generation-config") + 1]) == {"temperature": 0.0}
    assert words[-2:] == ["--port", "9"]


def modelfile(folder: Path) -> list[tuple[str, str]]:
    """The commands of a Modelfile, by Ollama's rules: a value in three quotes goes to the next three."""
    text, commands = (folder / "Modelfile").read_text(), []
    while text:
        line, _, rest = text.partition("\n")
        if line.startswith("#") or not line:
            text = rest
            continue
        name, _, value = text.partition(" ")
        if name == "PARAMETER":
            key, _, value = value.partition(" ")
            name = f"PARAMETER {key}"
        if value.startswith('"""'):
            value, _, text = value[3:].partition('"""')
        else:
            value, _, text = value.partition("\n")
        commands.append((name, value))
    return commands


def test_the_modelfile_stops_where_the_model_was_trained_to(runs: EngineRuns, tmp_path: Path) -> None:
    export(runs("1"), "--to", "ollama", "--output", tmp_path / "ollama")
    commands = modelfile(tmp_path / "ollama")
    stops = [value for name, value in commands if name == "PARAMETER stop"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "ollama")
    assert stops == [tokenizer.eos_token]
    assert ("FROM", ".") in commands
    assert ("PARAMETER temperature", "0") in commands
    assert ("PARAMETER num_ctx", "1024") in commands
    template = dict(commands)["TEMPLATE"]
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert go(template, messages) == expected


def test_gguf_holds_the_weights_once(full: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sft.export.llama_cpp.PACKAGE", "package_that_is_not_there")  # what is written here is no model
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path))
    (tmp_path / "convert_hf_to_gguf.py").write_text(WRITES.format(**SAME))
    export(full, "--to", "ollama", "--gguf", "--output", tmp_path / "ollama")
    assert ("FROM", "./model.gguf") in modelfile(tmp_path / "ollama")
    assert not list((tmp_path / "ollama").glob("*.safetensors"))
    assert "from_pretrained" not in (tmp_path / "ollama" / "README.md").read_text()


def test_a_chat_template_that_go_cannot_write_is_refused(full: Run, tmp_path: Path) -> None:
    (full.final / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ loop.index }}: {{ m.content }}\n{% endfor %}"
    )
    printed = refused(full, "--to", "ollama", "--accept-edits", "--output", tmp_path / "x")
    assert "cannot be written for Ollama: what it writes between" in printed
    assert not (tmp_path / "x").exists()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub that this process takes for the real one."""
    with fake_hub() as hub:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


TO_HUB = ["--to", "hub", "--repo-id", "me/mine"]


def test_final_and_every_checkpoint_come_to_the_hub_and_nothing_else(full: Run, hub: FakeHub) -> None:
    before = {path: path.stat().st_mode for path in full.path.parent.rglob("*")}
    export(full, *TO_HUB, "--checkpoints", "all")
    repo = hub.repos["me/mine"]
    assert repo.private
    assert set(repo.branches) == {"main", f"checkpoint-{SAVED}", f"checkpoint-{STEPS}"}
    for branch, files in repo.branches.items():
        assert set(files) == MODEL | BESIDE | {".gitattributes"}
        source = full.final if branch == "main" else full.checkpoints / branch
        assert files["model.safetensors"] == (source / "model.safetensors").read_bytes()
        assert not any(str(full.path).encode() in content or b"hf_t" in content for content in files.values())
    assert 'from_pretrained("me/mine")' in repo.branches["main"]["README.md"].decode()
    commits = len(repo.commits)
    export(full, *TO_HUB, "--checkpoints", "all")
    assert len(repo.commits) == commits, "the same was committed again"
    after = {path: path.stat().st_mode for path in full.path.parent.rglob("*")}
    assert after == before, "something was left beside the run, or changed in it"


def test_an_upload_that_was_cut_goes_on_with_the_same_command(full: Run, hub: FakeHub) -> None:
    hub.hang_up = "POST /api/models/me/mine/commit/checkpoint-8"
    printed = refused(full, *TO_HUB, "--checkpoints", "all")
    assert "hung up" in printed
    assert "1 of 3 branches are complete. The same command continues." in printed
    hub.hang_up = None
    hub.asked.clear()
    export(full, *TO_HUB, "--checkpoints", "all")
    assert not any(one.startswith("PUT /lfs") for one in hub.asked), "what had been sent was sent again"
    assert hub.repos["me/mine"].branches["checkpoint-12"]["model.safetensors"]


@pytest.mark.parametrize(
    ("status", "where", "said"),
    [
        (401, "GET /api/whoami-v2", "your token"),
        (500, "GET /api/whoami-v2", "Try again later"),
        (403, "POST /api/models/me/mine/commit", "your token"),
        (403, "PUT /lfs", "your token"),
    ],
)
def test_what_the_hub_refuses_is_one_message(status: int, where: str, said: str, full: Run, hub: FakeHub) -> None:
    hub.refuse[where] = status
    printed = refused(full, *TO_HUB)
    assert f"the hub answers {status}: " in printed
    assert said in printed
    assert TOKEN not in printed


def test_an_account_that_cannot_upload_is_refused_before_any_work(
    full: Run, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "the token belongs to me" in refused(full, "--to", "hub", "--repo-id", "nobody/mine")
    assert "OWNER/NAME" in refused(full, "--to", "hub")
    assert "is not a valid name" in refused(full, "--to", "hub", "--repo-id", "me/mine/three")
    assert "is not a valid branch" in refused(full, *TO_HUB, "--revision", "../x")
    assert "Give one of them" in refused(full, *TO_HUB, "--checkpoint", "8", "--checkpoints", "all")
    assert "does not exist" in refused(full, *TO_HUB, "--checkpoints", "8,9")
    hub.role = "read"
    assert "can only read" in refused(full, *TO_HUB)
    hub.role = "write"
    export(full, *TO_HUB, "--public")
    assert "exists and is public" in refused(full, *TO_HUB)
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere")
    assert "There is no token" in refused(full, *TO_HUB)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert "HF_HUB_OFFLINE is set" in refused(full, *TO_HUB)


def test_a_dry_run_lists_what_would_be_uploaded_and_asks_nobody(
    full: Run, hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    export(full, *TO_HUB, "--dry-run", "--checkpoints", "8")
    printed = capsys.readouterr().out
    assert hub.asked == []
    assert "branch checkpoint-8" in printed
    assert "2.3 MB  model.safetensors" in printed
    assert "optimizer" not in printed
