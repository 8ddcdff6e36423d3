"""Law 2 on two ranks: one training step on packed documents, against each document alone in one process.

torchrun --standalone --nproc-per-node 2 packed_and_separate.py ddp|zero2 FOLDER

Loops over architectures, attention functions and checkpointing, and writes the largest relative difference of the loss and of
any parameter's gradient for each to FOLDER/differences.json.
"""

import copy
import gc
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    TrainerCallback,
)
from trl import SFTConfig, SFTTrainer

from sft.hub.demo import make_demo
from sft.model import attention
from sft.parallel import process_group as distributed
from sft.plan.deepspeed import load_deepspeed

PACKS = [[5, 17, 1, 30, 8], [9, 2, 21]]  # one for each rank
LENGTHS = [length for pack in PACKS for length in pack]
TRAINED = sum(LENGTHS) - len(LENGTHS)
SMALL = {
    "vocab_size": 544,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
WINDOW = {"sliding_window": 8}
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {}),
    "llama": (LlamaConfig, {}),
    "mistral": (MistralConfig, WINDOW),
    "gemma3": (Gemma3TextConfig, WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}),
    "phi3": (Phi3Config, WINDOW),
}
Gradients = dict[str, torch.Tensor]


def documents() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(5, 500, (length,), generator=generator).tolist() for length in LENGTHS]


def rows() -> Dataset:
    left = iter(documents())
    packs = [[next(left) for _ in pack] for pack in PACKS]
    joined = [[token for document in pack for token in document] for pack in packs]
    return Dataset.from_list(
        [{"input_ids": one, "labels": one, "seq_lengths": lengths} for one, lengths in zip(joined, PACKS, strict=True)]
    )


def separate(model: Any) -> tuple[float, Gradients]:
    """Each document by itself, on this process alone."""
    model = copy.deepcopy(model).train()
    model.set_attn_implementation("eager")
    loss = 0.0
    for document in documents():
        if len(document) > 1:
            tokens = torch.tensor([document])
            part = model(input_ids=tokens, labels=tokens, num_items_in_batch=TRAINED, use_cache=False).loss
            part.backward()
            loss += part.item()
    return loss, {name: parameter.grad for name, parameter in model.named_parameters()}


def zero2() -> dict[str, Any]:
    config = copy.deepcopy(load_deepspeed("zero2").config)
    config["zero_optimization"] |= {"reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000}
    return config


class Gradient(TrainerCallback):  # type: ignore[misc]
    """Keeps the whole gradient just before the optimizer takes it."""

    trainer: Any

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.found: Gradients = {}

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        engine = self.trainer.model_wrapped
        kind = "DeepSpeedEngine" if self.engine == "zero2" else "DistributedDataParallel"
        assert type(engine).__name__ == kind, type(engine)
        assert self.trainer.args.world_size == 2
        if self.engine == "zero2":
            assert engine.zero_optimization_stage() == 2
            step = engine.step

            def keep_and_step(*words: Any, **options: Any) -> Any:
                self.keep(engine.module)
                return step(*words, **options)

            engine.step = keep_and_step

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        if self.engine == "ddp":
            self.keep(self.trainer.model)

    def keep(self, model: Any) -> None:
        from deepspeed.utils import safe_get_full_grad

        read = safe_get_full_grad if self.engine == "zero2" else lambda parameter: parameter.grad
        self.found = {name: read(parameter).clone() for name, parameter in model.named_parameters()}


def packed(
    model: Any, function: str, checkpointing: bool, tokenizer: Any, engine: str, folder: Path
) -> tuple[float, Gradients]:
    """One step of the real trainer on both ranks."""
    model = copy.deepcopy(model)
    model.set_attn_implementation(function)
    gradient = Gradient(engine)
    AcceleratorState._reset_state(reset_partial_state=False)
    arguments = SFTConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        deepspeed=zero2() if engine == "zero2" else None,
        per_device_train_batch_size=1,
        max_steps=1,
        max_grad_norm=1e9,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        report_to="none",
        packing=True,
        max_length=64,
        dataset_kwargs={"skip_prepare_dataset": True},
        gradient_checkpointing=checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if checkpointing else None,
        ddp_find_unused_parameters=False,
    )
    trainer = SFTTrainer(model, arguments, train_dataset=rows(), processing_class=tokenizer, callbacks=[gradient])
    gradient.trainer = trainer
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(losses) == 1
    return losses[0], gradient.found


def main() -> None:
    engine, folder = sys.argv[1], Path(sys.argv[2])
    warnings.simplefilter("ignore")
    distributed.settle_environment(engine == "zero2", False, "fp32")
    distributed.quiet_frameworks()
    distributed.join_group(engine == "zero2", False, 60)
    attention.register()
    rank = torch.distributed.get_rank()
    tokenizer = AutoTokenizer.from_pretrained(make_demo(folder / str(rank)).model)
    gc.freeze()  # accelerate looks for garbage before each training, among all that was imported
    differences: dict[str, dict[str, float]] = {}
    for family, (configuration, extra) in FAMILIES.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(configuration(**SMALL | extra), attn_implementation="eager")
        expected_loss, expected = separate(model)
        for function in ("varlen", "sdpa", "eager"):
            for checkpointing in (False, True):
                loss, found = packed(model, function, checkpointing, tokenizer, engine, folder)
                assert found.keys() == expected.keys()
                gradients = {name: float((found[name] - one).norm() / one.norm()) for name, one in expected.items()}
                name = f"{family}, {function}, {'checkpointed' if checkpointing else 'kept'}"
                differences[name] = {
                    "loss": abs(loss / expected_loss - 1),
                    "gradient": max(gradients.values()),
                    "parameters": len(gradients),
                }
    if rank == 0:
        (folder / "differences.json").write_text(json.dumps(differences, indent=1))
    distributed.leave_group()
    gc.unfreeze()


if __name__ == "__main__":
    main()
