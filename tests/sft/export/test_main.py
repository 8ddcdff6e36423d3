"""Exports, as far as they are decided without loading a model: refusals, the command for vLLM, the Modelfile, the card."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from sft.checkpoint.final import complete_config
from sft.checkpoint.manifest import write_manifest
from sft.errors import ExportError, UserError
from sft.export.main import main
from sft.export.model import check_logits, check_output, check_private, model_files
from sft.export.model_card import metadata, write_card
from sft.export.ollama import check_architecture, check_vocabulary
from sft.export.public import public_recipe
from sft.export.serving import (
    VllmServer,
    context_length,
    missing_sampling,
    sampling,
    tensor_parallel_size,
)
from sft.export.source import find_exported
from sft.files import write_json
from sft.hub.demo import Demo
from sft.run.directory import Run

RECIPE = """\
schema_version: 1
version: 3
output_dir: /data/secret/outputs
model: {name_or_path: "builtin:demo"}
data: {train: [{path: /data/secret/chats.jsonl}, {path: owner/dataset}], max_length: 128}
eval: {system_instruction: "/no_think Say yes/no/maybe.", server: {base_url: "http://secret:8000/v1"}}
train:
  global_batch_size: 8
  deepspeed: zero2
  callbacks: [{path: ../secret/hooks.py:Mine, arguments: {file: ../secret/a.json, more: {out: "/home/secret doe/b.json"}}}]
  trainer_args: {logging_dir: ../secret/logs}
tracking: {report_to: [wandb], project: my-company}
"""


@pytest.fixture
def run(tmp_path: Path, demo: Demo) -> Run:
    """A run as it would lie there: the demo's base as final/ and as a checkpoint."""
    run = Run(tmp_path / "outputs" / "mine" / "first")
    shutil.copytree(demo.model, run.final)
    checkpoint = run.checkpoints / "checkpoint-5"
    shutil.copytree(demo.model, checkpoint)
    (checkpoint / "optimizer.pt").write_bytes(b"moments")
    (checkpoint / "training_args.bin").write_bytes(b"arguments")
    writer = {"engine": "one process", "ranks": 1, "weights": "fp32", "precision": "fp32"}
    write_manifest(checkpoint, {"writer": writer | {"parameters": []}})
    run.recipe_file.write_text(RECIPE)
    write_json(run.plan_file, {"decisions": [{"name": "precision", "value": "fp32", "reason": ""}]})
    base = {"name_or_path": "builtin:demo", "revision": None, "path": str(demo.model)}
    record = {"status": "finished", "recipe": "mine", "overrides": [], "base_model": base, "ranks": 1}
    write_json(run.path / "run.json", record | {"working_directory": "/data/secret", "versions": {"torch": "2.13.0"}})
    return run


def refused(*words: str | Path) -> str:
    with pytest.raises(UserError) as told:
        main([str(word) for word in words])
    return str(told.value)


def test_mistakes_on_the_command_line_are_told_before_anything_is_read(run: Run, tmp_path: Path) -> None:
    assert "did you mean `vllm`?" in refused(run.path, "--to", "vlm")
    assert "--gpus belongs to --to vllm" in refused(run.path, "--to", "merged", "--gpus", "2")
    assert "--dry-run belongs to --to hub" in refused(run.path, "--to", "vllm", "--dry-run")
    assert "does not exist" in refused(tmp_path / "nothing", "--to", "merged")
    assert "no run.json" in refused(tmp_path, "--to", "merged")
    assert f"Name the run, {run.path}" in refused(run.final, "--to", "merged")


def test_a_run_that_is_not_finished_names_its_checkpoints(run: Run) -> None:
    shutil.rmtree(run.final)
    run.update(status="running")
    told = refused(run.path, "--to", "merged")
    assert "has no final/ (status: running)" in told
    assert "--checkpoint 5" in told
    assert find_exported(run, 5).folder.name == "checkpoint-5"
    assert "There are: 5." in refused(run.path, "--to", "merged", "--checkpoint", "6")


def test_a_damaged_checkpoint_and_a_missing_tokenizer_are_refused(run: Run) -> None:
    (run.checkpoints / "checkpoint-5" / "config.json").write_text("{}")
    assert "config.json has 2 bytes" in refused(run.path, "--to", "merged", "--checkpoint", "5")
    (run.final / "tokenizer.json").unlink()
    assert "holds no tokenizer" in refused(run.path, "--to", "merged")


def test_a_place_that_exists_or_lies_in_the_run_is_refused(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="exists"):
        check_output(tmp_path, run.path)
    with pytest.raises(ExportError, match="inside the run"):
        check_output(run.path / "export", run.path)
    (tmp_path / "file").touch()
    with pytest.raises(ExportError, match="is not a folder"):
        check_output(tmp_path / "file" / "export", run.path)


def test_only_what_makes_up_a_model_is_exported(run: Run) -> None:
    names = {path.name for path in model_files(find_exported(run, 5))}
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= names
    assert not {"optimizer.pt", "training_args.bin", "manifest.json"} & names


def test_an_upload_from_a_folder_that_cannot_be_written_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    assert "cannot be written" in refused(run.path, "--to", "hub", "--repo-id", "me/mine", "--dry-run")


def test_gathered_logits_are_equal_and_merged_ones_as_near_as_their_rounding() -> None:
    torch.manual_seed(0)
    logits, update = torch.randn(3, 10), torch.randn(3, 10)
    check_logits([logits], [logits], None, torch.float32)
    trained = [logits + 0.01 * update]
    check_logits([logits + 0.0095 * update], trained, [logits], torch.bfloat16)
    for found, untrained in (
        (logits * 1.00001 + 1e-6 * update, None),
        (logits, [logits]),  # within bf16's tolerance, but the adapter is not in it
        (logits * float("nan"), [logits]),
    ):
        with pytest.raises(ExportError, match="not the one that was trained"):
            check_logits([found], trained if untrained else [logits], untrained, torch.bfloat16)


@pytest.mark.parametrize("model", ["llama", "gpt_neox"])
def test_config_json_says_how_positions_rotate_in_the_words_of_both_generations(model: str, tmp_path: Path) -> None:
    """GPT-NeoX is one whose theta transformers 5 reads from rope_scaling alone."""
    from transformers import AutoConfig

    rope = {"rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 8}
    write_json(tmp_path / "config.json", {"model_type": model, "use_cache": False, "rope_parameters": rope, **sizes})
    before = AutoConfig.from_pretrained(tmp_path)
    complete_config(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["rope_theta"], written["rope_scaling"]["factor"], written["use_cache"]) == (500000.0, 8.0, True)
    after = AutoConfig.from_pretrained(tmp_path)
    assert after.rope_parameters == before.rope_parameters


@pytest.mark.parametrize(
    ("heads", "of_keys", "width", "here", "size"),
    [(32, 8, 64, 6, 4), (28, 4, 56, 8, 4), (14, 2, None, 8, 2), (9, 3, 9, 2, 1)],
)
def test_as_many_gpus_as_divide_the_model_serve(
    heads: int, of_keys: int, width: int | None, here: int, size: int
) -> None:
    config = {"num_attention_heads": heads, "num_key_value_heads": of_keys, "intermediate_size": width}
    assert tensor_parallel_size(config, None, here)[0] == size
    assert tensor_parallel_size(config, size, 0) == (size, "--gpus")
    with pytest.raises(ExportError, match=rf"width {width} .* Possible: 1,?.*\."):
        tensor_parallel_size(config, heads + 1, here)


def test_the_command_for_vllm_is_complete(run: Run) -> None:
    source = find_exported(run, None)
    server = VllmServer(source, 2, None, "my model")
    server.write(run.final, SimpleNamespace(chat_template=None))
    command = (run.final / "serve.sh").read_text().replace(" \\\n ", "")
    assert """vllm serve "$folder" --served-model-name 'my model' --dtype float32 --tensor-parallel-size 2""" in command
    assert "--max-model-len 1024 --generation-config auto" in command
    assert "trained on at most 128 tokens" in server.reasons[1]
    assert """--override-generation-config '{"temperature": 0.0}' --chat-template""" in command
    with pytest.raises(ExportError, match="from 1 to 1024"):
        context_length(source, 1025)
    assert context_length(source, 1024)[0] == 1024


def test_sampling_is_complete_because_servers_have_other_defaults(tmp_path: Path) -> None:
    write_json(tmp_path / "generation_config.json", {"do_sample": False, "temperature": 0.6})
    assert sampling(tmp_path) == {"temperature": 0.0, "repetition_penalty": 1.0}
    write_json(tmp_path / "generation_config.json", {"do_sample": True, "temperature": 0.6, "top_k": 20})
    assert sampling(tmp_path) == {"temperature": 0.6, "top_p": 1.0, "top_k": 20, "repetition_penalty": 1.0}


def test_vllm_is_told_of_the_sampling_that_it_would_not_find(tmp_path: Path) -> None:
    for written, told in (
        ({"temperature": 0.6}, {"temperature": 0.0}),
        ({"do_sample": True, "temperature": 0.6}, {"top_k": 50}),
        ({"do_sample": True, "top_k": 0}, {}),
    ):
        write_json(tmp_path / "generation_config.json", written)
        assert missing_sampling(tmp_path) == told


def test_ollama_is_given_only_what_its_import_reads(tmp_path: Path) -> None:
    check_architecture({"architectures": ["LlamaForCausalLM"], "rope_parameters": {"rope_type": "llama3"}})
    with pytest.raises(ExportError, match="not import Qwen3ForCausalLM"):
        check_architecture({"architectures": ["Qwen3ForCausalLM"]})
    with pytest.raises(ExportError, match="'yarn'"):
        check_architecture({"architectures": ["Qwen2ForCausalLM"], "rope_parameters": {"rope_type": "yarn"}})
    write_json(tmp_path / "tokenizer.json", {"model": {"type": "BPE", "byte_fallback": True}})
    with pytest.raises(ExportError, match="SentencePiece"):
        check_vocabulary(tmp_path)


def test_a_recipe_is_shown_without_places_trackers_and_keys(run: Run) -> None:
    shown = public_recipe(run.recipe())
    values = yaml.safe_load(shown)
    assert [one["path"] for one in values["data"]["train"]] == ["chats.jsonl", "owner/dataset"]
    assert values["train"] == {
        "global_batch_size": 8,
        "deepspeed": "zero2",
        "callbacks": [{"path": "hooks.py:Mine", "arguments": {"file": "a.json", "more": {"out": "b.json"}}}],
        "trainer_args": {"logging_dir": "logs"},
    }
    assert values["eval"] == {"system_instruction": "/no_think Say yes/no/maybe."}
    assert "secret" not in shown
    assert "my-company" not in shown


def test_the_cards_head_names_only_what_the_hub_knows(run: Run) -> None:
    head = metadata(find_exported(run, None), "apache-2.0").to_dict()
    assert head["datasets"] == ["owner/dataset"]
    assert head["license"] == "apache-2.0"
    assert "base_model" not in head, "the demo is on no hub"
    text = run.recipe_file.read_text().replace("builtin:demo", "owner/model")
    run.recipe_file.write_text(text)
    assert metadata(find_exported(run, None), None).to_dict()["base_model"] == "owner/model"


def test_the_card_has_the_verdicts_and_no_place_of_this_machine(run: Run, demo: Demo, tmp_path: Path) -> None:
    from huggingface_hub import ModelCard
    from transformers import AutoTokenizer

    tokens = {"in": 30, "trained": 10, "masked": 20, "truncated": 0, "dropped": 0}
    account = {"source": "/data/secret/chats.jsonl", "rows": {"in": 3, "used": 3}, "tokens": tokens}
    write_json(run.ledger_file, {"sources": [account]})
    run.comparison_file.parent.mkdir()
    scores = {"task": "arc", "metric": "acc", "documents": 50, "base": 0.1, "tuned": 0.4, "difference": 0.3}
    scores |= {"interval_95": [0.2, 0.4], "verdict": "IMPROVED"}
    write_json(run.comparison_file, {"metrics": [scores], "note": "A note.", "settings": {"limit": 50}})
    run.metrics_file.write_text('{"step": 5, "loss": 0.5, "learning_rate": 0.1}\n')
    folder = tmp_path / "export"
    shutil.copytree(demo.model, folder)
    write_card(find_exported(run, None), folder, AutoTokenizer.from_pretrained(folder), None)
    text = (folder / "README.md").read_text()
    assert "| arc | acc | 50 | 0.1000 | 0.4000 | +0.3000 | [+0.2000, +0.4000] | IMPROVED |" in text
    assert "`chats.jsonl`" in text
    assert "secret" not in text
    assert (folder / "loss.png").is_file()
    assert ModelCard(text).data.pipeline_tag == "text-generation"
    check_private(find_exported(run, None), folder)
    write_card(find_exported(run, 5), folder, AutoTokenizer.from_pretrained(folder), None)
    assert "not of this checkpoint" in (folder / "README.md").read_text()


@pytest.mark.parametrize("planted", ["the run's folder", "a token"])
def test_a_place_or_a_key_in_what_would_be_handed_over_ends_it(planted: str, run: Run, tmp_path: Path) -> None:
    source = find_exported(run, None)
    text = {"the run's folder": f'{{"at": "{run.path}/x"}}', "a token": json.dumps("hf_" + "a" * 34)}[planted]
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "tokenizer_config.json").write_text(text)
    with pytest.raises(ExportError, match=r"tokenizer_config.json") as told:
        check_private(source, tmp_path / "export")
    assert "hf_aaaaaaaa" not in str(told.value)
