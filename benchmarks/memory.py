"""Does the plan's memory agree with what a training takes?

    python benchmarks/memory.py
    python benchmarks/memory.py --only lora

Random models of 25 to 130 million parameters train for three steps of two micro-batches through `python -m sft.train`, on a CPU, in what
a GPU would compute in (bf16) and in fp32. Of the third step is measured, by the allocator's own events (torch.profiler), the peak; and
weights, gradients and optimizer state as the live objects hold them. Activations are the rest of the peak. Beside it stands the peak of
the process in the second step (VmHWM above what it held before, and weights and states), which includes what the allocator keeps.

What a CPU would do otherwise than a GPU is made equal: TRL folds a tile of logits in place on a GPU, and in fp32 copies of it on a CPU;
here it folds row by row.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import runpy
import shutil
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from machine import described
from side_by_side import ROOT, use_the_cores
from transformers.trainer_callback import TrainerCallback

sys.path.insert(0, str(ROOT))

MIB = 2**20
PLAIN = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8}
"""Of 25 million parameters without the embedding."""
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2Config", PLAIN | {"num_key_value_heads": 2, "vocab_size": 32768, "tie_word_embeddings": True}),
    "llama": ("LlamaConfig", PLAIN | {"num_key_value_heads": 8, "vocab_size": 16384, "tie_word_embeddings": False}),
    "qwen3": ("Qwen3Config", PLAIN | {"num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32768}),
    "gemma3": ("Gemma3TextConfig", PLAIN | {"num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32768}),
    "gpt_neox": ("GPTNeoXConfig", PLAIN | {"intermediate_size": 2048, "vocab_size": 32768}),
    "large": (
        "Qwen2Config",
        PLAIN
        | {"hidden_size": 768, "intermediate_size": 2688, "num_hidden_layers": 12}
        | {"num_key_value_heads": 4, "num_attention_heads": 12, "vocab_size": 32768, "tie_word_embeddings": True},
    ),
}
LORA, QLORA = "model.lora={r: 16}", "model.quantization=nf4"
OFF, ON, SECOND = (f"train.gradient_checkpointing={mode}" for mode in ("false", "true", "2"))
CASES: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "full, off, short": ("qwen2", 512, (OFF,)),
    "full, off, long": ("qwen2", 2048, (OFF,)),
    "full, on, long": ("qwen2", 2048, (ON,)),
    "full, every second, long": ("qwen2", 2048, (SECOND,)),
    "lora, off, long": ("qwen2", 2048, (LORA, OFF)),
    "lora, on, short": ("qwen2", 512, (LORA, ON)),
    "qlora, off, short": ("qwen2", 512, (LORA, QLORA, OFF)),
    "qlora, on, long": ("llama", 2048, (LORA, QLORA, ON)),
    "full, fp32, off, short": ("qwen2", 512, (OFF, "train.precision=fp32")),
    "lora, every second, long": ("llama", 2048, (LORA, SECOND)),
    "gemma3, full, off, long": ("gemma3", 2048, (OFF,)),
    "gpt_neox, full, off, long": ("gpt_neox", 2048, (OFF,)),
    "large, full, on, long": ("large", 2048, (ON,)),
    "full, selective, long": ("qwen2", 2048, ("train.gradient_checkpointing=selective",)),
}

RECIPE = """
schema_version: 1
version: 1
output_dir: {folder}
model: {{name_or_path: {model}, kernels: none, attn_implementation: varlen}}
data: {{train: {rows}, max_length: {tokens}}}
train:
  global_batch_size: 2
  micro_batch_size: 1
  max_steps: 3
  learning_rate: 1e-4
  precision: bf16
  save_steps: 1000000
  save_canary: false
  resume: never
  callbacks: [{{path: "{code}:PeakMemory", arguments: {{file: {folder}.json}}}}]
eval: {{tasks: [], chat: false}}
"""


class PeakMemory(TrainerCallback):
    """Writes what the second step takes, in bytes; a callback of the recipe."""

    def __init__(self, file: str) -> None:
        import torch

        self.file, self.found = Path(file), dict[str, int]()
        self.profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
        )
        _as_on_a_gpu()

    def on_step_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **rest: Any
    ) -> None:
        if state.global_step == 1:  # the process, without what the profiler holds
            ctypes.CDLL("libc.so.6").malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
            self.resident = _status("VmRSS")
        if state.global_step != 2:
            return
        weights = _storages([*model.parameters(), *model.buffers(), *_quantized(model)])
        states = {pointer: size for pointer, size in _storages(_states(optimizer)).items() if pointer not in weights}
        self.found = {"weights": sum(weights.values()), "optimizer": sum(states.values())}
        self.profile.start()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any) -> None:
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        self.found["gradients"] = sum(_storages(grads).values())

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if state.global_step == 2:
            self.resident = _status("VmHWM") - self.resident
        if state.global_step != 3:
            return
        self.profile.stop()
        events = [one for one in self.profile.profiler.kineto_results.events() if one.name() == "[memory]"]
        now = peak = 0
        for event in sorted(events, key=lambda one: one.start_ns()):
            now += event.nbytes()
            peak = max(peak, now)
        base = self.found["weights"] + self.found["optimizer"]
        self.found |= {"peak": base + peak, "resident": base + self.resident}
        self.file.write_text(json.dumps(self.found))


def _as_on_a_gpu() -> None:
    """Replace what takes memory on a CPU and is one kernel on a GPU: TRL's fold of a tile of logits and its product, and attention."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention
    from trl.kernels import chunked_logprob

    from sft.model import attention

    def by_rows(fold: Any) -> Any:
        def call(tile: Any, stride: int, *arguments: Any, **options: Any) -> None:
            for row in range(len(tile)):
                parts = [one[row : row + 1] if torch.is_tensor(one) else one for one in arguments]
                fold(tile[row : row + 1], stride, *parts, **options)

        return call

    def add_product(total: Any, left: Any, right: Any) -> None:
        for start in range(0, len(right), 16):
            total.addmm_(left[:, start : start + 16].float(), right[start : start + 16].float())

    class OneKernel(torch.autograd.Function):
        """Attention that keeps its inputs and its output alone."""

        @staticmethod
        def forward(context: Any, *inputs: Any) -> Any:
            query, key, value, lengths, scale = inputs
            context.rest = lengths, scale
            output = query.new_empty(query.shape).transpose(1, 2).contiguous()
            for found, *parts in zip(
                *(one.split(lengths, 2) for one in (output.transpose(1, 2), query, key, value)), strict=True
            ):
                found.copy_(scaled_dot_product_attention(*parts, is_causal=True, scale=scale, enable_gqa=True))
            context.save_for_backward(query, key, value, output)
            return output

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            (lengths, scale), inputs = context.rest, context.saved_tensors[:3]
            results = [torch.empty_like(one) for one in inputs]
            several = [one.split(lengths, 2) for one in (*results, gradient.transpose(1, 2), *inputs)]
            for *found, grad, query, key, value in zip(*several, strict=True):
                parts = [one.detach().requires_grad_() for one in (query, key, value)]
                with torch.enable_grad():
                    output = scaled_dot_product_attention(*parts, is_causal=True, scale=scale, enable_gqa=True)
                for target, one in zip(found, torch.autograd.grad(output, parts, grad), strict=True):
                    target.copy_(one)
            return *results, None, None

    def one_by_one(states: Any, boundaries: list[int], scaling: float | None, window: int | None) -> Any:
        lengths = [end - start for start, end in pairwise(boundaries)]
        return OneKernel.apply(*states, lengths, scaling)

    for name in ("_forward_tile", "_backward_tile"):
        setattr(chunked_logprob, name, by_rows(getattr(chunked_logprob, name)))
    chunked_logprob._addmm_fp32 = add_product
    attention._one_by_one = one_by_one


def _storages(tensors: Iterable[Any]) -> dict[int, int]:
    return {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}


def _quantized(model: Any) -> list[Any]:
    """The scales beside 4-bit weights."""
    states = [one.quant_state for one in model.parameters() if getattr(one, "quant_state", None) is not None]
    inner = [one.state2 for one in states if one.state2 is not None]
    return [one for state in (*states, *inner) for one in (state.absmax, state.code) if one is not None]


def _states(optimizer: Any) -> list[Any]:
    import torch

    inner = getattr(optimizer, "optimizer", optimizer)
    held = [value for state in inner.state.values() for value in state.values() if torch.is_tensor(value)]
    return held + [one for group in inner.param_groups for one in group["params"]]


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


@dataclass(frozen=True)
class Case:
    """One training."""

    name: str
    model: Path
    tokens: int
    overrides: tuple[str, ...]


def make_model(family: str, folder: Path) -> Path:
    """A model of random weights with the demo's tokenizer."""
    import torch
    import transformers

    from sft.hub.demo import make_demo

    if (folder / family).exists():
        return folder / family
    demo = make_demo(folder)
    kind, sizes = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**sizes | {"max_position_embeddings": 8192, "pad_token_id": None})
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / family)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(demo.model / file, folder / family / file)
    return folder / family


def measure(case: Case, folder: Path) -> dict[str, int]:
    """What the training took, in bytes."""
    rows, recipe, found = folder / f"{case.tokens}.jsonl", Path(f"{folder}/case.yaml"), folder / "run.json"
    # Two documents to a pack, and packs that are full.
    halves = ([10 + (place + row) % 500 for place in range(case.tokens // 2)] for row in range(16))
    rows.write_text("".join(json.dumps({"input_ids": half}) + "\n" for half in halves))
    recipe.write_text(
        RECIPE.format(folder=folder / "run", model=case.model, rows=rows, tokens=case.tokens, code=Path(__file__))
    )
    log, child = folder / "log", os.fork()
    if not child:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        sys.argv = ["sft.train", str(recipe), *case.overrides]
        runpy.run_module("sft.train", run_name="__main__")
        os._exit(0)
    os.waitpid(child, 0)
    if not found.exists():
        raise SystemExit(f"{case.name} failed:\n{log.read_text()[-3000:]}")
    measured: dict[str, int] = json.loads(found.read_text())
    shutil.rmtree(folder / "run", ignore_errors=True)
    found.unlink()
    return measured


def predict(case: Case, folder: Path) -> tuple[dict[str, float], dict[str, float]]:
    """What the plan says of the same training, simulated and by arithmetic alone, on a GPU whose kernels are those of this CPU."""
    from sft.launch.job import open_recipe
    from sft.plan.hardware import Gpu, machine
    from sft.plan.memory import estimate_memory

    recipe, _, facts = open_recipe(folder / "case.yaml", case.overrides)
    gpu = machine(Gpu("CPU", 80.0, 9.0), 1, 1)
    estimates = [estimate_memory(recipe, gpu, one, None) for one in (facts, replace(facts, config=None))]
    simulated, formula = (
        {name: size for name, size in one.gpu.items() if name != "reserve"} | {"simulated": one.simulated}
        for one in estimates
    )
    assert simulated.pop("simulated")
    assert not formula.pop("simulated")
    return tuple(parts | {"peak": sum(parts.values())} for parts in (simulated, formula))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose names match")
    arguments = parser.parse_args()
    use_the_cores()
    import sft.launch.rank
    import sft.train.main  # noqa: F401 (once, and not in each child)

    print(HEADER)
    with tempfile.TemporaryDirectory() as name:
        for title, (family, tokens, overrides) in CASES.items():
            if re.search(arguments.only, title):
                case = Case(title, make_model(family, Path(name)), tokens, overrides)
                measured = measure(case, Path(name))
                show(case, measured, predict(case, Path(name)))
    print(described(["torch", "transformers", "trl", "bitsandbytes"]))


HEADER = """
MiB; activations are the rest of the peak. In brackets: the error of the peak, of the simulated and of the formula's.

| case, tokens | weights | gradients | optimizer | activations | peak | simulated | formula | process |
|---|---:|---:|---:|---:|---:|---:|---:|---:|"""


def show(case: Case, measured: dict[str, int], predicted: tuple[dict[str, float], dict[str, float]]) -> None:
    """A row of the table."""
    states = [measured[name] for name in ("weights", "gradients", "optimizer")]
    sizes = [*states, measured["peak"] - sum(states), measured["peak"]]
    cells = [f"{size / MIB:,.1f}" for size in sizes]
    cells += [f"{one['peak'] / MIB:,.1f} ({one['peak'] / measured['peak'] - 1:+.1%})" for one in predicted]
    cells += [f"{measured['resident'] / MIB:,.0f}"]
    print(f"| {case.name}, {case.tokens:,} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
