"""One arm of throughput_gpu.py that is not ours: a bare SFTTrainer. Also what makes the model, and its loss without any batch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

GPU = torch.cuda.is_available()
DTYPE = torch.bfloat16 if GPU else torch.float32


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text())
    measured = make(given) if given["what"] == "make" else train(given)
    Path(given["folder"], "measured.json").write_text(json.dumps(measured))


def make(given: dict[str, Any]) -> dict[str, Any]:
    """Write the model with the demo's tokenizer; the loss per labelled token of each document by itself."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from sft.hub.demo import make_demo

    folder = Path(given["model"])
    hidden, intermediate, layers, heads, kv_heads, vocabulary, tied = given["shape"]
    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, tie_word_embeddings=tied, max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda" if GPU else "cpu"):
        model = Qwen2ForCausalLM(config).to(DTYPE)
    model.save_pretrained(folder)
    demo = make_demo(folder.parent)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((demo.model / name).read_bytes())
    total, labelled = 0.0, 0
    with torch.no_grad():
        for line in Path(given["rows"]).read_text().splitlines():
            row = json.loads(line)
            ids = torch.tensor([row["input_ids"]], device=model.device)
            labels = torch.tensor(row["labels"][1:], device=model.device)
            logits = model(input_ids=ids).logits[0, :-1].float()
            total += float(torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"))
            labelled += int((labels != -100).sum())
    print(f"step 1/1  loss {total / labelled}", flush=True)
    return {"loss": total / labelled}


def train(given: dict[str, Any]) -> dict[str, Any]:
    """Train, and say what the trainer has counted."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    zero = json.loads((Path(__file__).parent.parent / "ds_configs" / "zero2.json").read_text())
    checkpointing = {"gradient_checkpointing_kwargs": {"use_reentrant": False}} if given["checkpointing"] else {}
    arguments = SFTConfig(
        output_dir=given["folder"], max_steps=given["steps"], per_device_train_batch_size=given["batch"],
        gradient_accumulation_steps=given["accumulation"], max_length=given["max_length"], packing=given["packing"],
        gradient_checkpointing=given["checkpointing"], deepspeed=zero if given["zero"] and GPU else None, bf16=GPU,
        use_cpu=not GPU, learning_rate=1e-6, lr_scheduler_type="constant", adam_beta2=0.95, seed=0, logging_steps=1,
        save_strategy="steps", save_steps=given["steps"], save_only_model=True, report_to="none", disable_tqdm=True,
        **checkpointing,
    )  # fmt: skip
    # `trl sft` loads fp32; an engine that keeps an fp32 copy of its own takes bf16.
    dtype = torch.bfloat16 if given["zero"] and GPU else torch.float32
    model = AutoModelForCausalLM.from_pretrained(given["model"], dtype=dtype, attn_implementation="sdpa")
    if given["liger"] and GPU:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model, fused_linear_cross_entropy=False, cross_entropy=False)
    rows = Dataset.from_json(given["rows"], cache_dir=given["folder"] + "/cache")
    tokenizer = AutoTokenizer.from_pretrained(given["model"])
    trainer = SFTTrainer(model, arguments, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    counted = [line["num_tokens"] for line in trainer.state.log_history if "loss" in line]
    return {"tokens": counted, "peak": torch.cuda.max_memory_allocated() / 2**30 if GPU else 0.0}


if __name__ == "__main__":
    main()
