"""The parts of gpu.py, which starts each as a process: `python benchmarks/gpu_parts.py PART FOLDER [--cpu]` writes FOLDER/PART.jsonl.

Model and documents are made on the spot. Whoever trains, trains the same documents whole, all of them in each step; before a speed is
shown, the loss of the first step must be the one that the documents have one at a time, without padding or packing. Only real tokens are
counted, no padding. MFU counts FLOPs as in docs/architecture.md. Our own runs end after their last step, before a checkpoint is written;
their engine is the one process, so that a small card measures the same or does not fit.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpu_sizes import LENGTHS, PACKS, SHAPES, Bench

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

CHECKPOINTING = ["train.gradient_checkpointing=true"]
LORA = ["model.lora={}", "train.learning_rate=1e-5"]
ARTICLE = {"batch": 11, "packing": False, "checkpointing": True, "liger": True, "zero": True}
OUT_OF_MEMORY = r"out of (GPU )?memory"
"""How torch says it, and sft/train/out_of_memory.py."""
Row = dict[str, Any]


class DidNotFit(Exception):
    """The GPU's memory ran out."""


def laws(bench: Bench) -> Iterator[Row]:
    """Count the tests of tests/gpu as they end."""
    words = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-p", "no:cacheprovider", "tests/gpu"]
    counts: Counter[str] = Counter()
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            test = re.match(r"\S+::(.+) (PASSED|FAILED|SKIPPED|ERROR)\b", line)
            if test is None:
                continue
            name, word = test[1], test[2].lower()
            counts[word] += 1
            yield {"what": "tests/gpu", "text": ", ".join(f"{count} {word}" for word, count in counts.items())}
            if word in ("failed", "error"):
                yield {"what": name, "text": word}
    if process.returncode:
        raise SystemExit(1)


def kernels(bench: Bench) -> Iterator[Row]:
    import kernels_gpu

    yield from kernels_gpu.rows("cuda" if bench.gpu else "cpu")


def model(bench: Bench) -> Iterator[Row]:
    """Write the model with the demo's tokenizer, and the loss of its documents one at a time."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from sft.hub.demo import make_demo
    from sft.hub.flops import model_flops
    from sft.plan.gpus import find_gpu

    hidden, intermediate, layers, heads, kv_heads, vocabulary = SHAPES[bench.gpu]
    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, tie_word_embeddings=True, max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda" if bench.gpu else "cpu"):
        made = Qwen2ForCausalLM(config).to(torch.bfloat16 if bench.gpu else torch.float32)
    made.save_pretrained(bench.model)
    demo = make_demo(bench.work)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(demo.model / name, bench.model / name)
    flops = model_flops(made)
    assert flops is not None
    known = find_gpu(torch.cuda.get_device_name(0) if bench.gpu else "")
    facts: dict[str, Any] = {"peak": known.half_flops if known else None}
    for kind in LENGTHS:
        documents, total = bench.documents(kind), 0.0
        with torch.no_grad():
            for line in documents.rows.read_text().splitlines():
                row = json.loads(line)
                ids = torch.tensor([row["input_ids"]], device=made.device)
                labels = torch.tensor(row["labels"][1:], device=made.device)
                logits = made(input_ids=ids).logits[0, :-1].float()
                total += float(torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"))
        loss, lengths = total / documents.labelled, documents.lengths
        facts[kind] = {"loss": loss, "flops": flops.of(lengths, documents.labelled), "tokens": int(lengths.sum())}
        words = f"{len(lengths)} of {lengths.mean():.0f} tokens on average and {lengths.max()} at most, loss {loss:.4f}"
        yield {"what": f"{kind} documents", "text": words}
    (bench.model / "facts.json").write_text(json.dumps(facts))


def ours(bench: Bench) -> Iterator[Row]:
    """Short and long documents without checkpointing; where that does not fit, with."""
    row = trained(bench, "short", "short documents, no checkpointing")
    yield row
    words, how = (CHECKPOINTING, "checkpointing") if row.get("does_not_fit") else ([], "no checkpointing")
    if words:
        yield trained(bench, "short", f"short documents, {how}", words)
    yield trained(bench, "long", f"long documents, {how}", words)


def article(bench: Bench) -> Iterator[Row]:
    """The bare trainer, and how much faster ours was."""
    row = bare_trainer(bench, "short documents", **ARTICLE)
    yield row
    for line in (bench.work / "ours.jsonl").read_text().splitlines() if (bench.work / "ours.jsonl").exists() else ():
        one = json.loads(line)
        if "short" in one["what"] and one.get("tokens_per_second") and row.get("tokens_per_second"):
            yield {"what": f"ours to it ({one['what']})", "ratio": one["tokens_per_second"] / row["tokens_per_second"]}


def memory(bench: Bench) -> Iterator[Row]:
    """Planned peaks beside measured ones; the part `ours` has more of them."""
    yield trained(bench, "short", "full, checkpointing", CHECKPOINTING, steps=2)
    if bench.gpu:  # a miniature shows enough with two
        yield trained(
            bench, "short", "full, checkpointing every second layer", ["train.gradient_checkpointing=2"], steps=2
        )
        yield trained(bench, "short", "LoRA, no checkpointing", LORA, steps=2)
    yield trained(bench, "short", "LoRA, checkpointing", LORA + CHECKPOINTING, steps=2)


def tuning(bench: Bench) -> Iterator[Row]:
    """The trials that auto-tuning makes, and what it chooses."""
    recipe = write_recipe(bench, "tuning", "short", 1)
    words = [sys.executable, "-m", "sft.launch.auto_tune", str(recipe)]
    words += ["train.micro_batch_size=auto", "train.gradient_checkpointing=auto"]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        chosen = ""
        for line in process.stdout:
            print(line, end="", flush=True)
            chosen = line.strip() or chosen
            trial = re.match(r"  (gradient_checkpointing=\S+ micro_batch_size=\d+): (.*)", line)
            if trial:
                yield {"what": trial[1], "text": trial[2]}
    if process.returncode:
        raise SystemExit(1)
    yield {"what": "chosen", "text": chosen}


def profile(bench: Bench) -> Iterator[Row]:
    """Summarize the trace that train.profile writes; with checkpointing where it does not fit without."""
    import gpu_trace

    words, folder = ["train.profile=true", "train.global_batch_size=1"], bench.work / "run-profile"
    try:
        train_ours(bench, "short", folder, words, steps=12)  # docs/debugging.md: it traces three of the first nine
    except DidNotFit:
        yield {"what": "no checkpointing", "does_not_fit": True}
        folder = bench.work / "run-profile-checkpointing"
        train_ours(bench, "short", folder, [*words, *CHECKPOINTING], steps=12)
    yield from gpu_trace.rows(next(folder.glob("*/[0-9]*/profile/rank0.json.gz")))


def bare(bench: Bench) -> Iterator[Row]:
    yield bare_trainer(bench, "short documents", batch=8, packing=False, checkpointing=True, liger=False, zero=False)


def packed(bench: Bench) -> Iterator[Row]:
    yield bare_trainer(bench, "short documents", batch=1, packing=True, checkpointing=False, liger=False, zero=False)


def ladder(bench: Bench) -> Iterator[Row]:
    """Each row keeps what the one before has changed; the last is ours."""
    zero = ["train.deepspeed=zero2"] if bench.gpu else []
    masked = [*zero, *CHECKPOINTING, "model.attn_implementation=sdpa"]
    documents = len(bench.documents("short").lengths)
    padded = ["data.packing=false", "train.micro_batch_size=11", "train.remainder=fill"]
    padded.append(f"train.global_batch_size={documents}")
    yield trained(bench, "short", "padding, 11 a batch", [*masked, *padded])
    yield trained(bench, "short", "+ packing, a mask over the pack", masked)
    yield trained(bench, "short", "+ attention within documents", [*zero, *CHECKPOINTING])
    yield trained(bench, "short", "+ no checkpointing", zero)
    yield trained(bench, "short", "+ one process without ZeRO: ours")


def trained(bench: Bench, kind: str, what: str, words: list[str] | None = None, steps: int = 8) -> Row:
    """Train our recipe: speed after the second step, memory planned and measured."""
    folder = bench.work / f"run-{re.sub(r'[^a-z0-9]+', '-', what)}"
    try:
        lines = train_ours(bench, kind, folder, words or [], steps)
    except DidNotFit:
        return {"what": what, "does_not_fit": True}
    plan = json.loads(next(folder.glob("*/[0-9]*/plan.json")).read_text())
    shutil.rmtree(folder)
    check(what, lines[0]["loss"], bench.facts[kind]["loss"])
    peak = max(line["peak_memory_gib"] for line in lines)
    found = {"what": what, "peak_gib": peak}
    planned = allocated(plan)
    if planned:
        found |= {"planned_gib": planned, "off": planned / peak - 1}
    if steps > 2:
        tokens, seconds = (lines[-1][key] - lines[1][key] for key in ("tokens_seen", "seconds"))
        found |= speed(bench, kind, tokens / seconds)
    return found


def allocated(plan: dict[str, Any]) -> float | None:
    """GiB that the plan expects torch to allocate: its peak without the reserve, which torch does not count; None on a CPU."""
    sizes = plan["memory"]
    return (sizes["peak"] - sizes["reserve"]) / 2**30 if sizes else None


def train_ours(bench: Bench, kind: str, folder: Path, words: list[str], steps: int) -> list[dict[str, Any]]:
    """Train until so many lines are in metrics.jsonl, and end the run there; its lines.

    Raises:
        DidNotFit: The GPU's memory ran out.
        SystemExit: It failed otherwise; its output is in the log.
    """
    recipe = write_recipe(bench, folder.name, kind, steps + 1)
    log, lines, ended = folder.with_suffix(".log"), [], False
    with log.open("w") as file:
        command = [sys.executable, "-m", "sft.train", str(recipe), *words]
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)
        while not ended and len(lines) < steps:
            time.sleep(0.05)
            ended = process.poll() is not None
            metrics = next(folder.glob("*/[0-9]*/metrics.jsonl"), None)
            lines = metrics.read_text().rpartition("\n")[0].splitlines() if metrics else []
        process.kill()
        process.wait()
    if len(lines) < steps:
        if re.search(OUT_OF_MEMORY, log.read_text()):
            raise DidNotFit
        raise SystemExit(
            f"{' '.join(command)} ended with status {process.returncode} after {len(lines)} of {steps} steps"
        )
    return [json.loads(line) for line in lines[:steps]]


def write_recipe(bench: Bench, name: str, kind: str, steps: int) -> Path:
    """Our recipe, with a step that holds all documents."""
    recipe = bench.work / f"{name}.yaml"
    recipe.write_text(f"""\
schema_version: 1
version: 1
output_dir: {bench.work / name}
model: {{name_or_path: {bench.model}, attn_implementation: varlen, kernels: liger}}
data: {{train: {bench.documents(kind).rows}, max_length: {bench.pack}, packing: true}}
train:
  global_batch_size: {PACKS}
  micro_batch_size: 1
  max_steps: {steps}
  learning_rate: 1e-6
  lr_scheduler_type: constant
  gradient_checkpointing: false
  logging_steps: 1
  save_strategy: "no"
  save_canary: false
  resume: never
""")
    return recipe


def bare_trainer(bench: Bench, what: str, **settings: Any) -> Row:
    """A bare SFTTrainer in this process, for six steps of all documents: speed after the second, and memory."""
    deepspeed = zero2(bench) if settings["zero"] else None
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    class Times(TrainerCallback):
        def on_log(
            self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
        ) -> None:
            if "loss" in (logs or {}):
                seconds.append(time.monotonic())

    seconds: list[float] = []
    documents = bench.documents("short")
    checkpointing = {"gradient_checkpointing_kwargs": {"use_reentrant": False}} if settings["checkpointing"] else {}
    arguments = SFTConfig(
        output_dir=str(bench.work / "bare"), max_steps=6, per_device_train_batch_size=settings["batch"],
        gradient_accumulation_steps=1_000_000, max_length=bench.pack, packing=settings["packing"],
        gradient_checkpointing=settings["checkpointing"], bf16=bench.gpu, use_cpu=not bench.gpu, learning_rate=1e-6,
        deepspeed=deepspeed,
        lr_scheduler_type="constant", adam_beta2=0.95, seed=0, logging_steps=1, save_strategy="no", report_to="none",
        disable_tqdm=True, **checkpointing,
    )  # fmt: skip
    # `trl sft` loads fp32; an engine that keeps an fp32 copy of its own takes bf16.
    dtype = torch.bfloat16 if deepspeed and bench.gpu else torch.float32
    try:
        network = AutoModelForCausalLM.from_pretrained(bench.model, dtype=dtype, attn_implementation="sdpa")
        if settings["liger"] and bench.gpu:
            from liger_kernel.transformers import _apply_liger_kernel_to_instance

            _apply_liger_kernel_to_instance(network, fused_linear_cross_entropy=False, cross_entropy=False)
        rows = Dataset.from_json(str(documents.rows), cache_dir=str(bench.work / "cache"))
        tokenizer = AutoTokenizer.from_pretrained(bench.model)
        trainer = SFTTrainer(network, arguments, train_dataset=rows, processing_class=tokenizer, callbacks=[Times()])
        trainer.train()
    except torch.OutOfMemoryError:
        return {"what": what, "does_not_fit": True}
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    check(what, losses[0], bench.facts["short"]["loss"])
    rate = bench.facts["short"]["tokens"] * (len(seconds) - 2) / (seconds[-1] - seconds[1])
    peak = torch.cuda.max_memory_allocated() / 2**30 if bench.gpu else None
    return {"what": what, "peak_gib": peak} | speed(bench, "short", rate)


def zero2(bench: Bench) -> dict[str, Any]:
    """ds_configs/zero2.json with the buckets that the plan would choose, and the environment of a launcher: DeepSpeed would ask MPI."""
    from sft.parallel.deepspeed import prepare_builds

    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
    }
    if not bench.gpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    prepare_builds([] if bench.gpu else ["deepspeed_shm_comm"])
    config = json.loads((ROOT / "ds_configs" / "zero2.json").read_text())
    bucket = 500_000_000 if bench.gpu else 1_000_000
    config["zero_optimization"] |= {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    return config


def check(what: str, loss: float, reference: float) -> None:
    """Refuse a speed where the first step's loss, over all documents, is another than the documents' own."""
    # bf16 rounds each logit to three digits; over tens of thousands of tokens the mean is better than that.
    if not abs(loss - reference) <= 5e-3:
        raise SystemExit(
            f"{what}: the loss of the first step is {loss:.5f}, one document at a time {reference:.5f}: no speed is shown."
        )
    print(f"{what}: same work, first loss {loss:.5f}", flush=True)


def speed(bench: Bench, kind: str, rate: float) -> Row:
    """Real tokens a second and MFU; on a CPU neither means anything."""
    if not bench.gpu:
        return {"text": "ran"}
    peak, facts = bench.facts["peak"], bench.facts[kind]
    return {"tokens_per_second": rate, "mfu": rate * facts["flops"] / facts["tokens"] / peak if peak else None}


def main() -> None:
    part, work = sys.argv[1], Path(sys.argv[2])
    parts: tuple[Callable[[Bench], Iterator[Row]], ...]
    parts = (laws, kernels, model, ours, article, memory, tuning, profile, bare, packed, ladder)
    chosen = next(one for one in parts if one.__name__ == part)
    with (work / f"{part}.jsonl").open("w") as file:
        for row in chosen(Bench(work, "--cpu" not in sys.argv)):
            print(json.dumps(row), file=file, flush=True)


if __name__ == "__main__":
    main()
