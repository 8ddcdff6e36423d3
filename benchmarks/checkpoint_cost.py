"""What does a checkpoint that is complete or absent cost, in time and bytes?

    python benchmarks/checkpoint_cost.py --rounds 5

One model, one optimizer and one schedule in one process, saved and loaded in turn:

- transformers: SFTTrainer's own _save_checkpoint; it returns while most of the bytes are still in memory
- transformers, synced: the same, and its files synced to the disk: what the disk takes
- ours: written by the same calls beside its place, synced, every file summed, the manifest, renamed

and loaded by transformers' calls, ours after all of it was compared with the manifest. The files are dropped from memory before each
load, as after a restart. First it checks that both have written the same tensors, and ours verifies.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from machine import described
from safetensors.torch import load_file
from side_by_side import ROOT, show, turned, use_the_cores

sys.path.insert(0, str(ROOT))

from sft.checkpoint.manifest import entries, fault, files_in, size, sync

STEP = 7
# hidden, intermediate, layers, heads, vocabulary
SIZES = {"tiny": (64, 128, 2, 2, 512), "100M": (640, 1728, 12, 10, 49_152)}
SAVED = ["ours", "transformers", "transformers, synced"]
LOADED = ["ours", "transformers"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="100M")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path, help="where the checkpoints go: the disk that is measured")
    arguments = parser.parse_args()
    use_the_cores()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(dir=arguments.work) as name:
        trainers = both(Path(name), arguments.size)
        checkpoints = {side: Path(name) / side / f"checkpoint-{STEP}" for side in LOADED}
        for side in LOADED:
            save(trainers[side])
        check_same(*checkpoints.values())
        saving: dict[str, list[tuple[float, float]]] = {side: [] for side in SAVED}
        loading: dict[str, list[tuple[float, float]]] = {side: [] for side in LOADED}
        summing: list[float] = []
        for number in range(arguments.rounds):
            for side in turned(SAVED, number):
                who = side.split(",")[0]
                saving[side].append(timed_save(trainers[who], checkpoints[who], side.endswith("synced")))
            summing.append(timed_sums(checkpoints["ours"]))
            for side in turned(LOADED, number):
                loading[side].append(timed_load(trainers[side], checkpoints[side], side == "ours"))
        for kind, what in enumerate(("seconds", "processor seconds, which others on the machine do not lengthen,")):
            show(f"{what} to save", one_kind(saving, kind), "transformers, synced", "s")
            show(f"{what} to load", one_kind(loading, kind), "transformers", "s")
        print(
            f"\nsumming all files for the manifest, a part of ours: {median(summing):.3f} s ({min(summing):.3f} to {max(summing):.3f}), "
            f"{median(summing) / median(seconds for seconds, _ in saving['transformers, synced']):.1%} of transformers' synced save"
        )
        for side, checkpoint in checkpoints.items():
            print(f"{side:40} {size(checkpoint):,} bytes in {len(list(checkpoint.rglob('*')))} files")
    print(described(["torch", "transformers", "trl", "xxhash"]))


def both(folder: Path, name: str) -> dict[str, Any]:
    """The trainer of each side, with the same model, optimizer and schedule."""
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
    from trl import SFTTrainer

    from sft.checkpoint.resume import Writer
    from sft.checkpoint.write import CheckpointWriter
    from sft.hub.demo import make_demo
    from sft.train.trainer import RecipeTrainer
    from sft.train.watchdog import Progress

    class SavesOnly(RecipeTrainer):
        """Ours, without what a training hands in."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            SFTTrainer.__init__(self, *arguments, **options)
            self.stopping, self.saving, self.resume_plan = None, Progress().saving, None
            self.reshards = self.saves_full = False
            self.checkpoints = CheckpointWriter(folder / "ours", 1, {"ranks": 1, "recipe": {}}, 0)
            self.writer = Writer("one process", 1, "fp32", "fp32")

    hidden, intermediate, layers, heads, vocabulary = SIZES[name]
    config = Qwen2Config(vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate)
    config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads = layers, heads, heads
    config.layer_types, config.tie_word_embeddings = ["full_attention"] * layers, True
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    print(
        f"{sum(parameter.numel() for parameter in model.parameters()) / 1e6:.1f}M parameters, fp32, AdamW", flush=True
    )
    tokenizer = AutoTokenizer.from_pretrained(make_demo(folder).model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    state = (model, tokenizer, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0))
    theirs, ours = (
        make_trainer(SFTTrainer, folder / "transformers", *state),
        make_trainer(SavesOnly, folder / "ours", *state),
    )
    return {"ours": ours, "transformers": theirs}


def make_trainer(kind: Any, folder: Path, model: Any, tokenizer: Any, optimizer: Any, schedule: Any) -> Any:
    from datasets import Dataset
    from trl import SFTConfig

    arguments = SFTConfig(
        output_dir=str(folder),
        save_total_limit=1,
        report_to="none",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    row = Dataset.from_list([{"input_ids": [1, 2], "labels": [1, 2]}])
    trainer = kind(model, arguments, train_dataset=row, processing_class=tokenizer, optimizers=(optimizer, schedule))
    trainer.state.global_step = STEP
    return trainer


def save(trainer: Any) -> None:
    if hasattr(trainer, "checkpoints"):
        trainer.checkpoints.newest = None  # the same step again
    trainer._save_checkpoint(trainer.model, None)


def one_kind(measured: dict[str, list[tuple[float, float]]], kind: int) -> dict[str, list[float]]:
    return {side: [values[kind] for values in rounds] for side, rounds in measured.items()}


def timed_save(trainer: Any, checkpoint: Path, synced: bool) -> tuple[float, float]:
    """Seconds and processor seconds of a save, with nothing of the one before left on the disk or on its way to it."""
    shutil.rmtree(checkpoint)
    os.sync()
    started, worked = time.perf_counter(), time.process_time()
    save(trainer)
    if synced:
        for path in files_in(checkpoint).values():
            sync(path)
    return time.perf_counter() - started, time.process_time() - worked


def timed_sums(checkpoint: Path) -> float:
    """Seconds of what the manifest adds to a save: reading back what was just written and is on the disk already."""
    started = time.perf_counter()
    entries(checkpoint, files_in(checkpoint))
    return time.perf_counter() - started


def timed_load(trainer: Any, checkpoint: Path, verified: bool) -> tuple[float, float]:
    """Seconds and processor seconds from the disk."""
    for path in checkpoint.rglob("*"):
        if path.is_file():
            sync(path)
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
    started, worked = time.perf_counter(), time.process_time()
    if verified and (reason := fault(checkpoint)) is not None:
        raise SystemExit(f"It does not verify: {reason}.")
    trainer._load_from_checkpoint(str(checkpoint))
    trainer._load_optimizer_and_scheduler(str(checkpoint))
    return time.perf_counter() - started, time.process_time() - worked


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Weights and optimizer state by name."""
    state = torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"]
    moments = {f"{place}.{name}": value for place, values in state.items() for name, value in values.items()}
    return load_file(checkpoint / "model.safetensors") | moments


def check_same(ours: Path, theirs: Path) -> None:
    """Refuse to show a speed where the two sides did not write the same."""
    mine, others = tensors(ours), tensors(theirs)
    same = mine.keys() == others.keys() and all(
        mine[name].dtype == value.dtype and torch.equal(mine[name], value) for name, value in others.items()
    )
    if not same:
        raise SystemExit("The two sides did not write the same tensors: no speed is shown.")
    reason = fault(ours)
    if reason is not None:
        raise SystemExit(f"Ours does not verify: {reason}. No speed is shown.")
    print(f"Same work: both wrote the same {len(mine)} tensors.", flush=True)


if __name__ == "__main__":
    main()
