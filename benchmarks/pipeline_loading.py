"""How much of a machine's memory does each pipeline stage take while the model loads?

    python benchmarks/pipeline_loading.py

A random Llama of 215 million weights, in a file of bf16, loads in fp32 as for training. Each stage loads in a process of its own: once the
whole model, of which it then keeps its part, and once its part alone. Measured is VmHWM, above what the process held before; the stage's
parameters are compared with the file.
"""

import sys
import tempfile
from multiprocessing import get_context
from pathlib import Path

import torch
from machine import described
from safetensors import safe_open
from side_by_side import ROOT
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(ROOT))
from sft.hub.demo import make_demo
from sft.model.load import load_base
from sft.parallel.pipeline import of_other_stages, take_stage
from sft.plan.pipeline import split_layers
from sft.recipe.schema import Model

LAYERS = 16


def peak(folder: Path, count: int, index: int, whole: bool) -> int:
    """MiB that a stage takes at most."""
    tokenizer, stages = AutoTokenizer.from_pretrained(folder), split_layers(LAYERS, count, head=2)
    before = memory("VmRSS")
    without = None if whole else lambda model: of_other_stages(model, stages, index)
    model = load_base(Model(name_or_path=str(folder)), str(folder), torch.float32, tokenizer, without=without)
    take_stage(model, stages, index)
    taken, file = memory("VmHWM") - before, safe_open(folder / "model.safetensors", "pt")
    assert all(torch.equal(one, file.get_tensor(name).float()) for name, one in model.named_parameters())
    return taken // 1024


def memory(what: str) -> int:
    """KiB of this process, as the kernel counts them."""
    return next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith(what))


if __name__ == "__main__":
    folder, config = Path(tempfile.mkdtemp(), "model"), LlamaConfig(hidden_size=896, intermediate_size=2432)
    demo = make_demo(folder.parent).model
    config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, config.vocab_size = (
        LAYERS,
        14,
        14,
        32768,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    AutoTokenizer.from_pretrained(demo).save_pretrained(folder)
    print(described(("torch", "transformers", "safetensors")))
    for count in (2, 4):
        for index in range(count):
            with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
                both = [pool.apply(peak, (folder, count, index, whole)) for whole in (True, False)]
            print(
                f"stage {index + 1} of {count}: whole {both[0]} MiB, its part {both[1]} MiB, ratio {both[1] / both[0]:.2f}"
            )
