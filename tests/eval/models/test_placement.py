import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from eval.models.placement import Placement, change_whole, check_placement, choose_placement, weights_size
from eval.tasks.reference import Reference
from sft.errors import EvaluationError
from sft.model.new_tokens import embed_new_tokens

GIB = 2**30


@pytest.mark.parametrize(
    ("parallelize", "processes", "weights", "free", "devices", "started"),
    [
        ("auto", "auto", 100, [], 0, 1),
        ("auto", 2, 100, [], 0, 2),
        ("auto", "auto", 40, [80, 80, 80], 1, 3),
        (
            "auto",
            "auto",
            40,
            [80, 80, 5, 80],
            1,
            2,
        ),  # somebody else uses the third: processes take GPUs from the first on
        (True, "auto", 16, [80, 80], 2, 1),
        ("auto", "auto", 65, [80, 80], 2, 1),
    ],
)
def test_a_process_for_each_gpu_with_room_and_layers_are_spread_where_none_has(
    parallelize: bool | str, processes: int | str, weights: int, free: list[int], devices: int, started: int
) -> None:
    placed = choose_placement(parallelize, processes, weights * GIB, [one * GIB for one in free])  # type: ignore[arg-type]
    assert (placed.devices, placed.processes) == (devices, started)


@pytest.mark.parametrize(
    ("parallelize", "processes", "weights", "free", "message"),
    [
        (False, "auto", 140, [80, 80], "140 GiB of weights do not fit. Free on the visible GPUs: 80 GiB, 80 GiB; 20%"),
        ("auto", "auto", 140, [80, 80], "140 GiB of weights do not fit"),
        ("auto", 3, 40, [80, 80], "eval.processes=3: 40 GiB of weights do not fit"),
    ],
)
def test_what_fits_nowhere_is_refused_with_its_arithmetic(
    parallelize: bool | str, processes: int | str, weights: int, free: list[int], message: str
) -> None:
    with pytest.raises(EvaluationError, match=message):
        choose_placement(parallelize, processes, weights * GIB, [one * GIB for one in free])  # type: ignore[arg-type]


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2), ("auto", 4)])
def test_the_weights_are_counted_as_they_lie_on_the_disk(
    dtype: str, width: int, tuned_model: Path, reference: Reference
) -> None:
    stored = load_file(tuned_model / "model.safetensors")
    assert weights_size(reference.config, dtype, False) == width * sum(weight.numel() for weight in stored.values())


def test_a_part_that_stays_off_the_gpus_is_refused() -> None:
    model = SimpleNamespace(hf_device_map={"embed": 0, "layers.0": 0, "layers.1": 1, "head": 1})
    check_placement(model, Placement(2))
    model.hf_device_map["head"] = "disk"
    with pytest.raises(EvaluationError, match="1 of its 4 parts would stay on disk"):
        check_placement(model, Placement(2))


def test_embeddings_of_a_spread_model_can_be_replaced(tuned_model: Path, reference: Reference) -> None:
    from accelerate import dispatch_model
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(tuned_model, dtype=torch.float32)
    spread = AutoModelForCausalLM.from_pretrained(tuned_model, dtype=torch.float32)
    parts = {name: "cpu" for name, module in spread.named_modules() if not list(module.children()) and name}
    spread = dispatch_model(spread, parts, main_device="cpu", force_hooks=True)
    tokenizer = copy.deepcopy(reference.tokenizer)
    rows = spread.get_input_embeddings().num_embeddings
    assert tokenizer.add_tokens([f"<new{n}>" for n in range(rows + 1 - len(tokenizer))])
    new = [name for name in tokenizer.get_vocab() if name.startswith("<new")]
    for model in (whole, spread):
        change_whole(model, lambda model=model: embed_new_tokens(model, tokenizer, new, "a test"))
    assert spread.get_input_embeddings().num_embeddings == rows + 1
    assert hasattr(spread.get_input_embeddings(), "_hf_hook")
    ids = torch.tensor([[3, 4, rows]])
    assert torch.equal(spread(ids).logits, whole(ids).logits)
