"""What does our entry cost over a bare SFTTrainer, and over `trl sft`?

    python benchmarks/overhead.py

Makes a small random Qwen2 and the demo's rows, and runs the same job four ways, each in processes of its own: `bash scripts/sft.sh`,
`python -m sft.train`, a script of thirty lines around SFTTrainer, and `trl sft`. First the losses must agree: of one step over the
same documents on all four, and of each step over the same packs between ours and the bare script. Then, round by round:

- time to the first step: from the command to the line that reports it. Every side starts from the rows; ours also once more with
  the data that its first start has prepared.
- time per step in the steady state: between the lines of later steps, on the same packs in the same order. Both sides of a round
  run in turn.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

from machine import described
from side_by_side import ROOT, check_agreement, losses, seconds_to_steps, show, turned, use_the_cores

sys.path.insert(0, str(ROOT))

BARE = """
import sys
from datasets import Dataset, load_from_disk
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

model, data, folder, steps, micro_batch_size, accumulation, max_length = sys.argv[1:]
packs = not data.endswith(".jsonl")
arguments = SFTConfig(
    output_dir=folder,
    max_steps=int(steps),
    per_device_train_batch_size=int(micro_batch_size),
    gradient_accumulation_steps=int(accumulation),
    max_length=int(max_length),
    packing=True,
    dataset_kwargs={"skip_prepare_dataset": packs},
    train_sampling_strategy="sequential" if packs else "random",
    assistant_only_loss=not packs,
    learning_rate=1e-3,
    lr_scheduler_type="linear",
    adam_beta2=0.95,
    max_grad_norm=1.0,
    gradient_checkpointing=False,
    seed=0,
    use_cpu=True,
    bf16=False,
    logging_steps=10,
    logging_first_step=True,
    save_strategy="steps",
    save_steps=int(steps),
    report_to="none",
    disable_tqdm=True,
)
network = AutoModelForCausalLM.from_pretrained(model, dtype="float32", attn_implementation="sdpa")
rows = load_from_disk(data) if packs else Dataset.from_json(data, cache_dir=folder + "/cache")
tokenizer = AutoTokenizer.from_pretrained(model)
SFTTrainer(network, arguments, train_dataset=rows, processing_class=tokenizer).train()
"""

TRL_SFT = """
model_name_or_path: {model}
dataset_name: {data}
dtype: float32
attn_implementation: sdpa
output_dir: {folder}
max_steps: {steps}
per_device_train_batch_size: {micro_batch_size}
gradient_accumulation_steps: {accumulation}
max_length: {max_length}
packing: true
assistant_only_loss: true
learning_rate: 1.0e-3
lr_scheduler_type: linear
adam_beta2: 0.95
max_grad_norm: 1.0
gradient_checkpointing: false
seed: 0
use_cpu: true
bf16: false
logging_steps: 10
logging_first_step: true
save_strategy: steps
save_steps: {steps}
report_to: none
disable_tqdm: true
"""

RECIPE = """
schema_version: 1
version: 1
output_dir: {folder}
model: {{name_or_path: {model}, attn_implementation: sdpa, kernels: none}}
data: {{train: {data}, max_length: {max_length}, special_tokens: keep}}
train:
  global_batch_size: {sequences}
  micro_batch_size: {micro_batch_size}
  max_steps: {steps}
  learning_rate: 1e-3
  lr_scheduler_type: linear
  precision: fp32
  logging_steps: 10
  save_steps: {steps}
  resume: never
"""

SIDES = ("bash scripts/sft.sh", "python -m sft.train", "bare SFTTrainer", "trl sft")


@dataclass(frozen=True)
class Work:
    """One job, in the words of all four sides."""

    model: Path
    data: Path
    steps: int
    micro_batch_size: int
    accumulation: int
    max_length: int

    def words(self, folder: Path) -> dict[str, object]:
        sequences = self.micro_batch_size * self.accumulation
        return vars(self) | {"folder": folder, "sequences": sequences}


def main() -> None:
    arguments = read_arguments()
    use_the_cores()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, rows = make_job(folder)
        check_first_step(model, rows, folder)
        work = Work(model, rows, 1, 4, 1, 256)
        measure_start(work, folder, arguments.rounds)
        packs = make_packs(work, folder)
        measure_steps(work, packs, folder, arguments.rounds, arguments.steps)
    print(described(["torch", "transformers", "trl", "datasets"]), f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}")


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200, help="of a steady-state run")
    return parser.parse_args()


def make_job(folder: Path) -> tuple[Path, Path]:
    """A model of four million weights with the demo's tokenizer, and the demo's rows."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from sft.hub.demo import VOCABULARY, make_demo

    demo = make_demo(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = Qwen2Config(vocab_size=VOCABULARY, num_key_value_heads=2, initializer_range=0.05, pad_token_id=0, **sizes)
    model = folder / "model"
    Qwen2ForCausalLM(config).save_pretrained(model)
    for file in demo.model.glob("*token*"):
        shutil.copyfile(file, model / file.name)
    shutil.copyfile(demo.model / "chat_template.jinja", model / "chat_template.jinja")
    rows = folder / "rows" / "train.jsonl"
    rows.parent.mkdir()
    shutil.copyfile(demo.train, rows)
    return model, rows


def command(side: str, work: Work, folder: Path) -> list[str]:
    """The command of one side; its files go to a new folder."""
    folder.mkdir(parents=True, exist_ok=True)
    words = work.words(folder)
    if side == "bare SFTTrainer":
        names = ("model", "data", "folder", "steps", "micro_batch_size", "accumulation", "max_length")
        return [sys.executable, "-c", BARE, *(str(words[name]) for name in names)]
    if side == "trl sft":
        config = folder / "trl.yaml"
        config.write_text(TRL_SFT.format(**words | {"data": work.data.parent}))
        return [str(Path(sys.executable).with_name("trl")), "sft", "--config", str(config)]
    recipe = Path(f"{folder}.yaml")
    recipe.write_text(RECIPE.format(**words))
    if side == "python -m sft.train":
        return [sys.executable, "-m", "sft.train", str(recipe)]
    return ["bash", str(ROOT / "scripts" / "sft.sh"), str(recipe)]


def run(side: str, work: Work, folder: Path, until_first: bool = False) -> list[float]:
    return seconds_to_steps(command(side, work, folder), folder, until_first)


def check_first_step(model: Path, rows: Path, folder: Path) -> None:
    """One step over all of the first 64 rows, so that it does not matter how they are packed."""
    few = folder / "few" / "train.jsonl"
    few.parent.mkdir()
    few.write_text("".join(rows.read_text().splitlines(keepends=True)[:64]))
    work = Work(model, few, 1, 4, 8, 256)
    found = {}
    for number, side in enumerate(SIDES):
        run(side, work, folder / f"check-{number}")
        found[side] = losses(folder / f"check-{number}")[:1]
    check_agreement(found, "a step over the same 64 documents")


def measure_start(work: Work, folder: Path, rounds: int) -> None:
    """Print the time to the first step of each side, and its ratio to `trl sft`'s."""
    times: dict[str, list[float]] = {}
    for number in range(rounds):
        for side in turned(SIDES, number):
            target = folder / f"start-{number}-{SIDES.index(side)}"
            times.setdefault(side, []).append(run(side, work, target, until_first=True)[0])
        prepared = folder / f"start-{number}-0"
        seconds = run(SIDES[0], work, prepared, until_first=True)[0]
        times.setdefault(f"{SIDES[0]}, second start", []).append(seconds)
    show("seconds to the first step", times, "trl sft", "s")


def make_packs(work: Work, folder: Path) -> Path:
    """The packs that ours prepares, in the order in which it trains on them, as a dataset for the bare script."""
    from datasets import Dataset

    from sft.data.store import DocumentStore, SequenceIndex
    from sft.train.batches import Sequences

    entry = next(folder.glob("start-0-0/.prepared/*/prepared.json")).parent
    index = SequenceIndex.load(entry / "train.npz")
    sequences = Sequences(DocumentStore.open(entry), index, work.micro_batch_size * work.accumulation, 0, packed=True)
    order = sequences.order(seed=0)
    Dataset.from_list([sequences[number] for number in order]).save_to_disk(folder / "packs")
    return folder / "packs"


def measure_steps(work: Work, packs: Path, folder: Path, rounds: int, steps: int) -> None:
    """Print the time of a step of ours, and its ratio to the bare script's."""
    times: dict[str, list[float]] = {}
    sides = {"python -m sft.train": work.data, "bare SFTTrainer": packs}
    for number in range(rounds):
        found = {}
        for side in turned(list(sides), number):
            target = folder / f"steps-{number}-{SIDES.index(side)}"
            lines = run(side, replace(work, data=sides[side], steps=steps), target)
            found[side] = losses(target)
            # Lines come at steps 1, 10, 20, ...: the first two intervals warm up.
            between = [(later - earlier) / 10 for earlier, later in pairwise(lines[2:])]
            times.setdefault(side, []).append(1000 * median(between))
        check_agreement(found, f"{steps} steps over the same packs")
    show("milliseconds per step", times, "bare SFTTrainer", "ms")


if __name__ == "__main__":
    main()
