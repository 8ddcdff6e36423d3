"""One training for each engine and kind of data, shared by all tests that read what such a run leaves.

A run is trained when a test first asks for it, by whichever pytest worker that is; the others wait for it. Tests that change a run
take a copy.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from sft.files import write_json
from sft.hub.demo import make_demo
from sft.recipe.schema import REPOSITORY
from sft.run.directory import Run
from tests.slow.conftest import losses, plain, write_recipe
from tests.slow.ranks import Ranks

OBSERVE = REPOSITORY / "tests" / "slow" / "observe.py"
STEPS, STEPS_PER_EPOCH, SAVED = 12, 6, 8
"""The checkpoint of step 8 is inside the second epoch; the last step of each epoch is not full."""


@dataclass(frozen=True)
class Engine:
    """Who computes, and what the runtime check must find."""

    ranks: int
    overrides: tuple[str, ...] = ()
    engine: str = "one process"
    sharded: str = "nothing"
    offloaded: str = "nothing"
    nodes: int = 1
    running: dict[str, str] = field(default_factory=dict)


ALL = "optimizer, gradients, parameters"


def zero(ranks: int, name: str, sharded: str, offloaded: str = "nothing", *overrides: str, **running: str) -> Engine:
    """DeepSpeed with a file under ds_configs/."""
    return Engine(ranks, (f"train.deepspeed={name}", *overrides), f"ZeRO-{name[4]}", sharded, offloaded, 1, running)


def fsdp(options: str = "", ranks: int = 2, nodes: int = 1, *overrides: str) -> Engine:
    """FSDP2 with options of its section."""
    return Engine(ranks, (f"train.fsdp={{{options}}}", *overrides), "FSDP2", ALL, nodes=nodes)


def stages(ranks: int, count: int, layers: str) -> Engine:
    """Pipeline stages, with the layers of each."""
    override = f"train.pipeline_parallel_size={count}"
    return Engine(ranks, (override,), "pipeline parallel", running={"layers of stages": layers})


SEQUENCE = ("train.sequence_parallel_size=2", "train.micro_batch_size=1")
ENGINES = {
    "1": Engine(1),
    "1, other micro-batch": Engine(1, ("train.micro_batch_size=4",)),
    "1, compiled": Engine(1, ("model.compile=true", "train.gradient_checkpointing=true")),
    "1 ZeRO-2": zero(1, "zero2", "optimizer, gradients"),
    "2 DDP": Engine(2, (), "DDP"),
    "2 ZeRO-1": zero(2, "zero1", "optimizer"),
    "2 ZeRO-2": zero(2, "zero2", "optimizer, gradients"),
    "2 ZeRO-3": zero(2, "zero3", ALL),
    "2 ZeRO-2 offload": zero(2, "zero2_offload", "optimizer, gradients", "optimizer on cpu"),
    "2 ZeRO-3 offload": zero(2, "zero3_offload", ALL, "optimizer on cpu, parameters on cpu"),
    "2 FSDP2": fsdp(),
    "2 FSDP2, full checkpoints": fsdp("state_dict_type: full", 2, 1, "train.gradient_checkpointing=true"),
    "2 tensor parallel": Engine(
        2, ("train.tensor_parallel_size=2",), "tensor parallel", running={"tensor_parallel_size": "2"}
    ),
    "2 pipeline parallel": stages(2, 2, "0-1 | 2"),
    "3 pipeline parallel": stages(3, 3, "0 | 1 | 2"),
    "4 pipeline parallel, 2 x 2": stages(4, 2, "0-1 | 2"),
    "2 ZeRO-2, sequence parallel": zero(
        2, "zero2", "optimizer, gradients", "nothing", *SEQUENCE, sequence_parallel_size="2"
    ),
    "2 ZeRO-3, sequence parallel": zero(2, "zero3", ALL, "nothing", *SEQUENCE, sequence_parallel_size="2"),
    "3 DDP, filled": Engine(3, ("train.remainder=fill", "train.micro_batch_size=1"), "DDP"),
    "4 DDP": Engine(4, (), "DDP"),
    "4 ZeRO-2": zero(4, "zero2", "optimizer, gradients"),
    "4 ZeRO-3": zero(4, "zero3", ALL),
    "4 FSDP2, hybrid": fsdp("sharding_strategy: hybrid_shard", 4, 2, "train.micro_batch_size=1"),
}
VERIFIED = ("1", "2 ZeRO-3", "2 FSDP2", "2 tensor parallel", "2 pipeline parallel")
"""Engines whose saves are verified, which takes seconds."""

_VERIFIED_KINDS = (
    "packed, new tokens",
    "padded, adapters, new tokens",
    "packed, nf4 and adapters",
    "packed, pissa",
)

LORA = ("model.lora={r: 4}", "train.learning_rate=5e-3")
NF4 = ("model.quantization=nf4", *LORA)
DROPOUT = ("model.lora={r: 4, lora_dropout: 0.1}", "train.learning_rate=5e-3")
ASKS = "model.chat_template=asks.jinja"
NEW = "model.new_tokens=[<|a|>, <|b|>, <|c|>, <|d|>, <|e|>]"  # more than the embedding has spare rows for
KINDS: dict[str, tuple[bool, tuple[str, ...]]] = {
    "packed": (True, ()),
    "padded": (False, ()),
    "padded, adapters": (False, LORA),
    "packed, nf4 and adapters": (True, NF4),
    "packed, adapters with dropout": (True, DROPOUT),
    "packed, DoRA": (True, ("model.lora={r: 4, use_dora: true}", LORA[1])),
    "packed, pissa": (True, ("model.lora={r: 4, init_lora_weights: pissa_niter_4}", LORA[1])),
    "packed, partly frozen": (True, (r"model.freeze=[embed_tokens, 'layers\.0\.']",)),
    "packed, bf16": (True, ("train.precision=bf16",)),
    "packed, new tokens": (True, (NEW, ASKS)),
    "padded, adapters, new tokens": (False, (NEW, ASKS, *LORA)),
}
"""Packed or padded sequences, and overrides."""

TEMPLATE = """\
{%- for message in messages -%}
{{- '<|a|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}{% generation %}{{- message['content'] + '<|im_end|>' -}}{% endgeneration %}
{%- else -%}{{- message['content'] + '<|im_end|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|a|>assistant\\n' -}}{%- endif -%}
"""
"""A chat template that uses a new token."""


class EngineRuns:
    """Trains the runs, each once.

    Args:
        folder: Where, for all workers.
        ranks: Of this worker.
    """

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self.folder, self.ranks = folder, ranks
        self.folder.mkdir(exist_ok=True)
        with self._alone("recipes"):
            if not (self.folder / "padded.yaml").exists():
                self._write_recipes()

    def _write_recipes(self) -> None:
        rows = make_demo(self.folder / "outputs").train.read_text().splitlines()
        (self.folder / "asks.jinja").write_text(TEMPLATE)
        (self.folder / "eval.jsonl").write_text("\n".join(rows[200:209]))
        for packed, name, count in ((True, "packed", 91), (False, "padded", 45)):
            (self.folder / f"{name}.jsonl").write_text("\n".join(rows[:count]))
            write_recipe(
                self.folder / f"{name}.yaml",
                model={"name_or_path": "builtin:demo"},
                data={
                    "train": str(self.folder / f"{name}.jsonl"),
                    "max_length": 128,
                    "packing": packed,
                    "held_out": str(self.folder / "eval.jsonl"),
                },
                train={
                    "global_batch_size": 8,
                    "micro_batch_size": 2,
                    "learning_rate": 1e-3,
                    "weight_decay": 0.1,
                    "warmup_steps": 3,
                    "max_steps": STEPS,
                    "logging_steps": 1,
                    "save_steps": SAVED,
                    "save_total_limit": 5,
                },
            )

    def _alone(self, name: str) -> _Lock:
        return _Lock(self.folder / f"{plain(name)}.lock")

    def recipe(self, kind: str) -> Path:
        """The recipe file of a kind of data."""
        return self.folder / ("packed.yaml" if KINDS[kind][0] else "padded.yaml")

    def named(self, kind: str, name: str) -> Run:
        """A run by its name."""
        return Run(self.folder / "outputs" / self.recipe(kind).stem / plain(name))

    def __call__(self, engine: str, kind: str = "packed") -> Run:
        """The finished run of an engine on a kind of data; not to be changed."""
        run = self.named(kind, f"{kind}-{engine}")
        with self._alone(run.path.name):
            if not run.path.exists():
                self.train(
                    engine, kind, f"{kind}-{engine}", f"train.save_canary={str(self.verified(engine, kind)).lower()}"
                )
        return run

    @staticmethod
    def verified(engine: str, kind: str) -> bool:
        """Whether the run's saves are verified."""
        return (engine in VERIFIED and kind == "packed") or kind in _VERIFIED_KINDS

    def tiny(self) -> Run:
        """The finished run of the tiny recipe as it is, but for an eval split; not to be changed."""
        folder = self.folder / "tiny"
        with self._alone("tiny"):
            if not folder.exists():
                words = [f"output_dir={folder}", "data.held_out=0.02", "train.save_canary=false"]
                self.ranks.run(1, ["sft.train", REPOSITORY / "recipes" / "tiny.yaml", *words])
        return Run((folder / "tiny" / "latest").resolve())

    def train(self, engine: str, kind: str, name: str, *overrides: str, expect: int = 0) -> dict[str, str]:
        """Train under a name; what the ranks print stays beside the run."""
        row = ENGINES[engine]
        of_kind = [word.replace("asks.jinja", str(self.folder / "asks.jinja")) for word in KINDS[kind][1]]
        words = [OBSERVE, self.recipe(kind), *of_kind, *row.overrides, f"tracking.run_name={plain(name)}", *overrides]
        printed = self.ranks.run(row.ranks, words, expect, nodes=row.nodes)
        (self.folder / f"{plain(name)}.txt").write_text(printed["stdout"] + printed["stderr"])
        return printed

    def printed(self, run: Run) -> str:
        """What a run's ranks have printed."""
        return (self.folder / f"{run.path.name}.txt").read_text()

    @staticmethod
    def killed_after_step(step: int, run: Run, name: str) -> Run:
        """A copy of a run as a kill leaves it some steps after the checkpoint of a step, the last line cut off."""
        copy = Run(run.path.parent / plain(name))
        shutil.copytree(run.path, copy.path, ignore=shutil.ignore_patterns("final", "report.*", "loss.png", "observed"))
        for checkpoint in copy.checkpoints.iterdir():
            if int(checkpoint.name.split("-")[1]) > step:
                shutil.rmtree(checkpoint)
        lines = copy.metrics_file.read_text().splitlines(keepends=True)
        copy.metrics_file.write_text("".join(lines[: step + 2]) + "".join(lines[step + 2 : step + 3])[:20])
        overrides = [word for word in run.record["overrides"] if not word.startswith("tracking.run_name")]
        session = run.record["sessions"][-1] | {"status": "running", "ended": None, "seconds": None, "last_step": None}
        changes = {
            "status": "running",
            "evaluation": None,
            "sessions": [session],
            "overrides": [*overrides, f"tracking.run_name={copy.path.name}"],
        }
        write_json(copy.path / "run.json", run.record | changes)
        return copy


class _Lock:
    """Held by one worker at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        self.file = self.path.open("w")
        fcntl.flock(self.file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        self.file.close()


def lines(run: Run) -> list[dict[str, Any]]:
    """What metrics.jsonl says, without what depends on the clock or the machine."""
    timed = ("seconds", "per_second", "peak", "mfu")
    found = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    return [{key: value for key, value in line.items() if not any(word in key for word in timed)} for line in found]


def norms(run: Run) -> list[float]:
    """The norm of the gradients at every step."""
    return [line["grad_norm"] for line in lines(run)]


def weights(run: Run) -> dict[str, torch.Tensor]:
    """The tensors of final/."""
    return {name: one for file in run.final.glob("*.safetensors") for name, one in load_file(file).items()}


def assert_same_weights(run: Run, other: Run, tolerance: float) -> None:
    """One model at the end; bit for bit where the tolerance is 0."""
    found, expected = weights(run), weights(other)
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[name], atol=tolerance, rtol=0, msg=name)


def assert_same_training(run: Run, other: Run, loss: float = 1e-5, weight: float = 2e-4) -> None:
    """One trajectory, on the same rows, and one model at its end."""
    assert run.record["status"] == other.record["status"] == "finished"
    assert [line["batch"] for line in lines(run)] == [line["batch"] for line in lines(other)]
    assert len(losses(run)) == len(losses(other)) == STEPS
    assert losses(run) == pytest.approx(losses(other), abs=loss)
    # AdamW gives the same weights for gradients of another scale, unless they are clipped.
    assert norms(run) == pytest.approx(norms(other), rel=max(1e-3, 100 * loss))
    assert_same_weights(run, other, weight)


def assert_identical(run: Run, other: Run) -> None:
    """The same training, bit by bit: losses, rates, tokens, rows of each batch, and weights."""
    assert [line["step"] for line in lines(run)] == list(range(1, STEPS + 1))
    assert lines(run) == lines(other)
    assert run.record["train_loss"] == other.record["train_loss"]
    assert_same_weights(run, other, 0)


def make_qwen3(demo: Path, folder: Path, layers: int) -> Path:
    """A random Qwen3, with norms inside heads and an output head of its own, beside the demo's tokenizer."""
    config = Qwen3Config(
        vocab_size=json.loads((demo / "config.json").read_text())["vocab_size"],
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.08,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    shutil.copytree(demo, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder
