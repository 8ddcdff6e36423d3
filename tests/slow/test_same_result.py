"""Same result on any number of GPUs: launcher, engine and number of ranks change who computes what, never the result.

The runs are those of engine_runs.py, which other files read too. The rows of launchers start as a user would.
"""

import json
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from sft.data.prepared import entry_folder
from sft.data.store import DocumentStore, SequenceIndex
from sft.launch.job import open_recipe
from sft.recipe.schema import REPOSITORY
from sft.run.directory import Run
from sft.train.batches import Sequences, contents_of
from tests.slow.conftest import decisions, latest, losses, write_recipe
from tests.slow.engine_runs import (
    ENGINES,
    STEPS,
    STEPS_PER_EPOCH,
    EngineRuns,
    assert_same_training,
    assert_same_weights,
    lines,
    make_qwen3,
    norms,
)
from tests.slow.ranks import Ranks
from tests.test_safe_path import plant

pytestmark = pytest.mark.slow
Command = Callable[..., subprocess.CompletedProcess[str]]

WITH_ADAPTERS = ["2 DDP", "2 pipeline parallel", "2 ZeRO-1", "2 ZeRO-3", "2 ZeRO-3 offload", "2 FSDP2"]
PADDED = ["2 ZeRO-2", "2 ZeRO-3", "2 tensor parallel", "2 pipeline parallel", "2 ZeRO-2, sequence parallel"]
CASES = [
    *(("packed", engine) for engine in list(ENGINES)[1:]),
    *(("padded", engine) for engine in PADDED),
    *(("padded, adapters", engine) for engine in WITH_ADAPTERS),
    *((kind, "2 pipeline parallel") for kind in ("packed, partly frozen", "packed, new tokens", "packed, pissa")),
]


REPEATED = {
    ("packed", "1, compiled"),
    ("packed", "2 ZeRO-2 offload"),
    ("packed", "4 ZeRO-2"),
    ("packed", "3 pipeline parallel"),
    ("packed, partly frozen", "2 pipeline parallel"),
    ("packed, new tokens", "2 pipeline parallel"),
    ("packed, pissa", "2 pipeline parallel"),
    ("padded", "2 ZeRO-2"),
    ("padded, adapters", "2 ZeRO-1"),
    ("padded, adapters", "2 ZeRO-3 offload"),
}
"""Whose law another row holds too."""


@pytest.mark.parametrize(
    ("kind", "name"), [pytest.param(*case, marks=pytest.mark.extra if case in REPEATED else ()) for case in CASES]
)
def test_every_engine_and_number_of_ranks_trains_the_same(kind: str, name: str, runs: EngineRuns) -> None:
    """On the same rows, with the same eval loss, and on the engine that the recipe names: as the runtime check has read it."""
    run, alone, row = runs(name, kind), runs("1", kind), ENGINES[name]
    running = {"engine": row.engine, "processes": str(row.ranks), "sharded": row.sharded, "offloaded": row.offloaded}
    assert run.record["running"].items() >= (running | row.running).items()
    planned = decisions(run)
    sharing = 3 if name == "3 pipeline parallel" else 2 if "parallel" in name else 1
    assert planned["data_parallel_ranks"] == row.ranks // sharing
    slots = planned["micro_batch_size"] * planned["gradient_accumulation_steps"] * planned["data_parallel_ranks"]
    assert slots - planned["empty_sequences_per_step"] == planned["global_batch_size"] == 8
    assert planned["empty_sequences_per_step"] == (1 if "filled" in name else 0)
    assert planned["steps_per_epoch"] == decisions(alone)["steps_per_epoch"] == STEPS_PER_EPOCH
    # CPU Adam sums in another order.
    assert_same_training(run, alone, loss=1e-5 if row.offloaded == "nothing" else 1e-4)
    for key in ("tokens_seen", "learning_rate", "epoch"):
        assert [line[key] for line in lines(run)] == pytest.approx([line[key] for line in lines(alone)]), key
    before, expected = (each.record["held_out_loss_before"] for each in (run, alone))
    assert before == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", ["1", "2 ZeRO-2", "2 FSDP2"])
def test_bf16_with_fp32_copies_trains_as_fp32_does(name: str, runs: EngineRuns) -> None:
    """By our AdamW, by DeepSpeed's, and on shards in fp32."""
    run, exact = runs(name, "packed, bf16"), runs("1")
    live = json.loads((run.path / "observed" / "live.json").read_text())
    assert live["moments"] == ["torch.float32"]
    assert live["weights"] == ["torch.float32" if "FSDP2" in name else "torch.bfloat16"]
    assert losses(run) == pytest.approx(losses(exact), rel=0.02)
    assert norms(run) == pytest.approx(norms(exact), rel=0.1)


@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_each_step_has_the_rows_of_the_recipes_order(kind: str, runs: EngineRuns) -> None:
    """By the fingerprints of the prepared rows; those of every engine are compared with these runs."""
    opened, _, facts = open_recipe(runs.recipe(kind), [])
    prepared = entry_folder(opened, facts) / "train.npz"
    index, store = SequenceIndex.load(prepared), DocumentStore.open(prepared.parent)
    sequences = Sequences(store, index, 8, 0, kind == "packed")
    order, collate = sequences.order(opened.train.seed), DataCollatorForLanguageModeling(0, kind == "packed")
    expected = []
    for epoch in (0, 1):
        order.set_epoch(epoch)
        slots = list(order)
        for start in range(0, len(slots), 8):
            batch = collate([sequences[number] for number in slots[start : start + 8]])
            expected.append(f"{contents_of(batch).fingerprint:016x}")
    assert [line["batch"] for line in lines(runs("1", kind))] == expected
    assert len(set(expected)) == STEPS


@pytest.mark.parametrize(
    ("name", "kind"), [("2 DDP", "packed"), ("2 ZeRO-2", "padded"), ("4 DDP", "packed"), ("3 DDP, filled", "packed")]
)
def test_metrics_count_what_the_ranks_were_given(name: str, kind: str, runs: EngineRuns) -> None:
    run = runs(name, kind)
    given, targets = Counter[int](), Counter[int]()
    for file in (run.path / "observed").glob("rank-*.jsonl"):
        for line in map(json.loads, file.read_text().splitlines()):
            given[line["step"]] += line["tokens"]
            targets[line["step"]] += line["target_tokens"]
    assert len(list((run.path / "observed").glob("rank-*.jsonl"))) == ENGINES[name].ranks
    seen = 0
    for line in (json.loads(text) for text in run.metrics_file.read_text().splitlines()):
        seen += given[line["step"]]
        assert line["tokens_seen"] == seen
        of_targets = line["labelled_tokens_per_second"] / line["tokens_per_second"]
        assert of_targets == pytest.approx(targets[line["step"]] / given[line["step"]])
        assert 0 <= line["data_seconds"] < line["seconds"]
    ledger = json.loads(run.ledger_file.read_text())["total"]["tokens"]
    assert ledger.pop("in") == sum(ledger.values())


def test_the_eval_loss_is_that_of_each_row_alone(runs: EngineRuns) -> None:
    run = runs("1")
    opened, _, facts = open_recipe(runs.recipe("packed"), [])
    prepared = entry_folder(opened, facts)
    model = AutoModelForCausalLM.from_pretrained(run.record["base_model"]["path"]).eval()
    store, index = DocumentStore.open(prepared), SequenceIndex.load(prepared / "held_out.npz")
    assert len(index)
    total, tokens = 0.0, 0
    for document in index.members:
        ids, trained = store.document(int(document))
        with torch.no_grad():
            logits = model(torch.tensor(ids[None].astype("int64"))).logits[0, :-1]
        kept = torch.tensor(trained[1:] == 1)
        of_tokens = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:].astype("int64")), reduction="none")
        total += float(of_tokens[kept].double().sum())
        tokens += int(kept.sum())
    assert run.record["held_out_loss_before"] == pytest.approx(total / tokens, abs=1e-4)


def test_norms_inside_heads_that_ranks_share_get_each_micro_batch_once(runs: EngineRuns) -> None:
    """transformers sums their gradients over ranks again with each micro-batch of a step."""
    model = make_qwen3(make_model_folder(runs), runs.folder / "normed", layers=2)
    short = (f"model.name_or_path={model}", "train.max_steps=6")
    runs.train("1", "packed", "normed-alone", *short)
    runs.train("2 tensor parallel", "packed", "normed", *short)
    run, alone = (runs.named("packed", name) for name in ("normed", "normed-alone"))
    assert decisions(run)["gradient_accumulation_steps"] == 4
    assert losses(run) == pytest.approx(losses(alone), abs=1e-5)
    assert norms(run) == pytest.approx(norms(alone), rel=1e-3)
    assert_same_weights(run, alone, 2e-4)


def make_model_folder(runs: EngineRuns) -> Path:
    """The demo's model."""
    return Path(runs("1").record["base_model"]["path"])


# Made of words, in the shapes that real ones have.
SECRETS = {
    "HF_TOKEN": "hf_PlantedPlantedPlantedPlantedPlanteA",
    "WANDB_API_KEY": "planted0" * 5,
    "OPENAI_API_KEY": "sk-proj-Planted0planted1planted2planted3",
    "AWS_ACCESS_KEY_ID": "AKIAPLANTED0PLANTED1",
    "AWS_SECRET_ACCESS_KEY": "Planted/of/words/in/a/row/of/forty/letter",
    "GIT_PASSWORD": "planted-password-of-the-remote",
}


def files_with_secrets(folder: Path) -> list[tuple[str, str]]:
    """Files that hold one, and which."""
    found = []
    for place, _, names in os.walk(folder):
        for path in (Path(place, name) for name in names if not Path(place, name).is_symlink()):
            content = path.read_bytes()
            found += [(str(path), name) for name, secret in SECRETS.items() if secret.encode() in content]
    return found


def test_sft_sh_trains_the_same_and_no_secret_of_the_environment_is_in_what_it_leaves(
    runs: EngineRuns, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole way of a user: two ranks, checkpoints, trackers, evaluation, report. No module beside the recipe runs."""
    text = runs.recipe("packed").read_text().replace(str(runs.folder / "outputs"), str(tmp_path / "outputs"))
    (tmp_path / "mine.yaml").write_text(text)
    ran = plant(tmp_path)
    monkeypatch.chdir(tmp_path)
    words = ["bash", REPOSITORY / "scripts" / "sft.sh", "mine.yaml", "tracking.run_name=mine"]
    words += ["tracking.report_to=[wandb, tensorboard]", "eval.tasks=[builtin:demo]", "eval.limit=4"]
    done = command(words, NPROC="2", WANDB_MODE="offline", **SECRETS)
    assert not ran.exists(), ran.read_text()
    run = Run(tmp_path / "outputs" / "mine" / "mine")
    assert_same_training(run, runs("1"))
    assert run.record["evaluation"] == "finished"
    assert list((run.path / "wandb").glob("offline-run-*/*.wandb"))
    assert list((run.path / "tensorboard").iterdir())
    assert run.comparison_file.is_file() and run.report_file.is_file()
    assert "leaked" not in done.stderr  # what a library's objects say that were not freed
    assert files_with_secrets(tmp_path) == []
    assert not [name for name, secret in SECRETS.items() if secret in done.stdout + done.stderr]


def test_an_override_with_a_token_starts_nothing_and_is_not_repeated(tmp_path: Path, ranks: Ranks) -> None:
    recipe = write_recipe(tmp_path / "job.yaml", model={"name_or_path": "builtin:demo"}, data={"train": "builtin:demo"})
    token = SECRETS["HF_TOKEN"]
    printed = ranks.run(2, ["sft.train", recipe, f"train.trainer_args.hub_token={token}"], expect=2)
    assert "train.trainer_args.hub_token" in printed["stderr"]
    assert token not in printed["stdout"] + printed["stderr"]
    assert files_with_secrets(tmp_path) == [] and not (tmp_path / "outputs").exists()


@pytest.mark.extra  # in a new environment DeepSpeed builds its operations for minutes first
@pytest.mark.skipif(not Path("/usr/include/libaio.h").exists(), reason="DeepSpeed reads from disks with libaio-dev")
def test_weights_and_adam_on_a_disk_train_the_same(runs: EngineRuns, tmp_path: Path, ranks: Ranks) -> None:
    demo, model = make_model_folder(runs), tmp_path / "large"
    # Wide enough that a rank's part of a matrix is more than the 1 MiB that DeepSpeed leaves in memory.
    wide = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 8}
    config = AutoConfig.from_pretrained(demo, **wide, num_key_value_heads=8, layer_types=["full_attention"] * 2)
    shutil.copytree(demo, model, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    shipped = json.loads((REPOSITORY / "ds_configs" / "zero3_nvme.json").read_text())
    for section in ("offload_optimizer", "offload_param"):
        shipped["zero_optimization"][section]["nvme_path"] = str(tmp_path / "disk")
    shipped["zero_optimization"]["offload_param"]["buffer_size"] = 2_000_000
    (tmp_path / "nvme.json").write_text(json.dumps(shipped))
    recipe = write_recipe(
        tmp_path / "job.yaml",
        model={"name_or_path": str(model)},
        train={
            "global_batch_size": 4,
            "micro_batch_size": 2,
            "max_steps": 4,
            "logging_steps": 1,
            "learning_rate": 1e-3,
        },
    )
    ranks.run(1, ["sft.train", recipe])
    alone = losses(latest(recipe))
    ranks.run(2, ["sft.train", recipe, f"train.deepspeed={tmp_path / 'nvme.json'}"])
    assert latest(recipe).record["running"]["offloaded"] == "optimizer on nvme, parameters on nvme"
    assert losses(latest(recipe)) == pytest.approx(alone, abs=1e-4)
    # A part of fp32 weights and two moments is 8.9M x 12 / 2 bytes.
    assert sum(file.stat().st_size for file in (tmp_path / "disk").rglob("*.swp")) > 40_000_000
