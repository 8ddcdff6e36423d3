"""Trains with Liger's layers on a CPU, in Triton's interpreter. tests/slow/test_liger.py starts it on a copy of Liger that runs there.

python -m tests.slow.liger_on_cpu compare RECIPES...         each model's loss and gradients with and without, as JSON
python -m tests.slow.liger_on_cpu train RECIPE OVERRIDES...   sft.train with the plan's kernels replaced
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

import sft.train.main as training
from sft.data.tokenizer import load_tokenizer
from sft.hub.pins import pinned
from sft.launch.job import open_job
from sft.launch.rank import main
from sft.model.load import load_model
from sft.parallel.process_group import job_hardware
from sft.plan.job import Job
from sft.plan.plan import Decision
from sft.train.isolation_probe import check_probe, probe

LENGTHS = (6, 9, 3, 7)  # the interpreter takes about 20 ms a token


def with_liger(job: Job) -> Job:
    """The job as a GPU's plan has it; without a GPU no recipe leads to Liger."""
    return replace(job, plan=replace(job.plan, kernels=Decision("liger", "Triton's interpreter")))


def compare(recipe: Path) -> dict[str, Any]:
    """One packed batch through TRL's trainer, on plain layers and then on Liger's, which replaces functions of the whole process."""
    job = open_job(recipe, [], job_hardware())
    (plain, expected, _), (fused, gradients, trainer) = (step(one) for one in (job, with_liger(job)))
    assert gradients.keys() == expected.keys()
    found = probe(trainer, documents(), packed=True)
    check_probe(found, job.plan.attention.value, packed=True)
    modules = [type(one).__name__ for one in trainer.model.modules() if "liger" in of(one)]
    return {
        "loss": [plain, fused],
        "apart": max(float((gradients[name] - expected[name]).abs().max()) for name in expected),
        "probe": [found.moved, found.differ],
        "layers": Counter(modules),
    }


def of(module: torch.nn.Module) -> str:
    """Where its forward is from."""
    return str(module.forward.__module__)


def step(job: Job) -> tuple[float, dict[str, torch.Tensor], Any]:
    """Load as training does, and compute one loss and its gradients."""
    tokenizer = load_tokenizer(pinned(job.recipe, job.model))
    model = load_model(job, tokenizer)
    arguments = SFTConfig(
        output_dir=str(job.recipe_path.parent / "trl"), use_cpu=True, bf16=False, packing=True, max_length=128, report_to="none",
        dataset_kwargs={"skip_prepare_dataset": True}, gradient_checkpointing=False,
    )  # fmt: skip
    rows = [{"input_ids": one, "labels": one, "seq_lengths": [len(one)]} for one in documents()]
    trainer = SFTTrainer(model, arguments, train_dataset=Dataset.from_list(rows[:1]), processing_class=tokenizer)
    loss = trainer.compute_loss(model.train(), trainer.data_collator(rows))
    loss.backward()
    gradients = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    return loss.item(), gradients, trainer


def documents() -> list[np.ndarray]:
    """Token ids, the same in each call."""
    generator = np.random.default_rng(1)
    return [generator.integers(5, 500, length) for length in LENGTHS]


if __name__ == "__main__":
    if sys.argv[1] == "compare":
        print(json.dumps({Path(recipe).stem: compare(Path(recipe)) for recipe in sys.argv[2:]}))
    else:
        real = training.train
        training.train = lambda job, *rest: real(with_liger(job), *rest)
        main(sys.argv[2:])
