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
from sft.errors import PlanError
from sft.launch.job import open_job
from sft.model.gradient_checkpointing import check_checkpointing, checkpointed_layers, running_checkpointing, select
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
        self.layers, self.kind = checkpointed_layers(model), running_checkpointing(model)
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
    assert (plain.layers, plain.kind) == ((0, LAYERS), "off")
    cases = {"true": (4, "full", 2.0), "2": (2, "full", 1.5), "3": (2, "full", 1.5), "selective": (4, "selective", 1.0)}
    for value, (layers, kind, attention) in cases.items():
        found, operators = trained(make_job(f"train.gradient_checkpointing={value}", *adapters), trainer_of)
        assert (found.layers, found.kind) == ((layers, LAYERS), kind)
        assert operators.attention == attention * once.attention
        assert found.gradients.keys() == plain.gradients.keys() != set()
        for name, gradient in plain.gradients.items():
            torch.testing.assert_close(found.gradients[name], gradient, rtol=1e-6, atol=1e-6)


def test_what_was_switched_behind_the_plans_back_is_refused() -> None:
    model = qwen(64)
    check_checkpointing(model, False)
    for planned in (True, 2, "selective", "offload"):
        with pytest.raises(PlanError, match=f"gradient_checkpointing={planned}: .* of 4 layers .*and 0 do \\(off\\)"):
            check_checkpointing(model, planned)
    model.gradient_checkpointing_enable({"use_reentrant": False}, every_n_layers=3)
    assert checkpointed_layers(model) == (2, 4)
    check_checkpointing(model, 3)
    with pytest.raises(PlanError, match=r"4 of 4 layers should recompute \(full\), and 2 do \(full\). Set it to false"):
        check_checkpointing(model, True)
    model.gradient_checkpointing_enable({"use_reentrant": False}, offload=True)
    check_checkpointing(model, "offload")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    check_checkpointing(model, True)
    with pytest.raises(PlanError, match=r"should recompute \(selective\), and 4 do \(full\)"):
        check_checkpointing(model, "selective")
    select(model)
    check_checkpointing(model, "selective")
    with pytest.raises(PlanError, match=r"and 4 do \(selective\)"):
        check_checkpointing(model, True)
