import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.trainer_callback import TrainerCallback

from sft.data.tokenizer import load_tokenizer
from sft.launch.job import open_job
from sft.model.gradient_checkpointing import planned_checkpointing, running_checkpointing, select
from sft.plan.hardware import Hardware
from sft.plan.job import Job

# transformers 5.23 renames the gradient checkpointing arguments; the range of versions knows only the old names.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`gradient_checkpointing:FutureWarning", "ignore:`is_gradient_checkpointing:FutureWarning"
)

CPU = Hardware(None, 1, 1, 2, 16.0)
LAYERS = 4


class Operators(TorchDispatchMode):
    """Counts the operators that run under it."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))

    @property
    def attention(self) -> int:
        """Forward passes of attention."""
        return sum(n for name, n in self.counts.items() if "scaled_dot" in name and "backward" not in name)


class Gradients(TrainerCallback):  # type: ignore[misc]
    """Keeps the gradients of the only step, and what the model said of itself during it."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = kwargs["model"]
        self.running = running_checkpointing(model)
        self.gradients = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def qwen(vocabulary: int) -> Any:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocabulary,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            attn_implementation="sdpa",
        )
    )


@pytest.fixture
def make_job(recipe_file: Path, outputs: Path, tmp_path: Path) -> Callable[..., Job]:
    rows = tmp_path / "rows.jsonl"
    talks = [{"prompt": f"Count to {n}", "completion": " ".join(map(str, range(n)))} for n in range(3, 20)]
    rows.write_text("".join(json.dumps(talk) + "\n" for talk in talks))

    def make(*overrides: str) -> Job:
        fixed = [f"output_dir={outputs}", f"data.train={rows}", "train.max_steps=1", "train.micro_batch_size=1"]
        return open_job(recipe_file, [*fixed, "train.global_batch_size=2", *overrides], CPU)

    return make


def trained(job: Job, trainer_of: Callable[..., Any]) -> tuple[Gradients, Operators]:
    """One step of the real trainer on packed documents."""
    seen, operators = Gradients(), Operators()
    trainer = trainer_of(job, lambda trainer: seen, model=qwen(len(load_tokenizer(job.recipe))))
    with operators:
        trainer.train()
    return seen, operators


@pytest.mark.parametrize("adapters", [[], ["model.lora={}", "train.seed=3"]], ids=["all weights", "adapters"])
def test_gradients_are_those_without_checkpointing_and_the_layers_are_as_many_as_asked_for(
    adapters: list[str], make_job: Callable[..., Job], trainer_of: Callable[..., Any]
) -> None:
    """Adapters too: TRL's selective checkpointing would recompute all of their model, in silence."""
    plain, once = trained(make_job("train.gradient_checkpointing=false", *adapters), trainer_of)
    assert plain.running == "off"
    cases = {"true": ("4 of 4 layers, full", 2.0), "2": ("2 of 4 layers, full", 1.5), "3": ("2 of 4 layers, full", 1.5)}
    for value, (running, attention) in (cases | {"selective": ("4 of 4 layers, selective", 1.0)}).items():
        found, operators = trained(make_job(f"train.gradient_checkpointing={value}", *adapters), trainer_of)
        assert found.running == running
        assert operators.attention == attention * once.attention
        assert found.gradients.keys() == plain.gradients.keys() != set()
        for name, gradient in plain.gradients.items():
            torch.testing.assert_close(found.gradients[name], gradient, rtol=1e-6, atol=1e-6)


def test_what_runs_is_told_from_everything_else_that_could_be_planned() -> None:
    model = qwen(64)

    def planned_as_found() -> list[object]:
        ways: tuple[bool | int | str, ...] = (False, True, 3, "selective", "offload")
        return [one for one in ways if planned_checkpointing(model, one) == running_checkpointing(model)]

    assert planned_as_found() == [False]
    for arguments, way in (({}, True), ({"every_n_layers": 3}, 3), ({"offload": True}, "offload")):
        model.gradient_checkpointing_enable({"use_reentrant": False}, **arguments)
        assert planned_as_found() == [way]
    model.gradient_checkpointing_enable({"use_reentrant": False})
    select(model)
    assert planned_as_found() == ["selective"]
    model.model.layers[1].gradient_checkpointing = False
    assert planned_as_found() == []
