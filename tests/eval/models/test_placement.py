import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from eval.models.placement import (
    Placement,
    change_whole,
    check_placement,
    choose_placement,
    choose_processes,
    weights_size,
)
from eval.reference import Reference
from sft.errors import EvaluationError
from sft.model.new_tokens import embed_new_tokens

GIB = 2**30


@pytest.mark.parametrize(
    ("wanted", "weights", "free", "devices"),
    [
        ("auto", 100, [], 0),
        ("auto", 64, [80], 1),
        (False, 16, [80, 80], 1),
        (True, 16, [80, 80], 2),
        ("auto", 65, [80, 80], 2),
        ("auto", 256, [80, 80, 80, 80], 4),
        ("auto", 16, [10, 80], 2),  # what another process holds on the first GPU counts
    ],
)
def test_layers_are_spread_where_one_gpu_has_no_room(
    wanted: bool | str, weights: int, free: list[int], devices: int
) -> None:
    assert choose_placement(wanted, weights * GIB, [one * GIB for one in free]).devices == devices  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wanted", "weights", "free", "told"),
    [
        (True, 16, [], "eval.parallelize=true spreads layers over GPUs, and 0 are visible"),
        (True, 16, [80], "and 1 are visible"),
        (False, 140, [80, 80], "140 GiB of weights do not fit on 1 GPU: 80 GiB are free"),
        ("auto", 140, [80, 80], "140 GiB of weights do not fit on 2 GPUs: 160 GiB are free"),
    ],
)
def test_what_fits_nowhere_is_refused_with_its_arithmetic(
    wanted: bool | str, weights: int, free: list[int], told: str
) -> None:
    with pytest.raises(EvaluationError, match=told):
        choose_placement(wanted, weights * GIB, [one * GIB for one in free])  # type: ignore[arg-type]


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2), ("auto", 4)])
def test_the_weights_are_counted_as_they_lie_on_the_disk(
    dtype: str, width: int, tuned_model: Path, reference: Reference
) -> None:
    stored = load_file(tuned_model / "model.safetensors")
    assert weights_size(reference.config, dtype, False) == width * sum(weight.numel() for weight in stored.values())


@pytest.mark.parametrize(
    ("wanted", "free", "launched", "expected"),
    [
        ("auto", [100] * 4, 1, 4),
        ("auto", [100, 100, 5, 100], 1, 2),  # somebody else uses the third: ranks take GPUs from the first on
        ("auto", [], 1, 1),
        (1, [100] * 4, 1, 1),
        (2, [], 1, 2),
        ("auto", [], 3, 3),
        (3, [100] * 4, 3, 3),
    ],
)
def test_there_is_a_process_for_each_gpu_with_room_or_as_many_as_asked(
    wanted: int | str, free: list[int], launched: int, expected: int
) -> None:
    placement = choose_placement("auto", 40, free)
    assert choose_processes(wanted, placement, 40, free, launched).processes == expected  # type: ignore[arg-type]


def test_a_model_over_several_gpus_is_one_process() -> None:
    placement = choose_placement("auto", 100, [100, 100])
    assert choose_processes("auto", placement, 100, [100, 100]).processes == 1
    with pytest.raises(EvaluationError, match=r"eval\.processes=2, and the layers are spread over 2 GPUs"):
        choose_processes(2, placement, 100, [100, 100])


@pytest.mark.parametrize(
    ("wanted", "launched", "told"),
    [
        (3, 1, r"eval\.processes: 3, each on a GPU of its own, and 2 of 2"),
        ("auto", 3, "Processes that were started: 3, each on a GPU of its own, and 2 of 2"),
        (2, 3, r"eval\.processes=2, and 3 processes were started"),
    ],
)
def test_more_processes_than_gpus_are_refused(wanted: int | str, launched: int, told: str) -> None:
    with pytest.raises(EvaluationError, match=told):
        choose_processes(wanted, Placement(1, "a test"), 40, [100, 100], launched)  # type: ignore[arg-type]


def test_a_part_that_stays_off_the_gpus_is_refused() -> None:
    spread = Placement(2, "a test")
    model = SimpleNamespace(hf_device_map={"embed": 0, "layers.0": 0, "layers.1": 1, "head": 1})
    assert check_placement(model, spread) == {"0": 2, "1": 2}
    model.hf_device_map["head"] = "disk"
    with pytest.raises(EvaluationError, match="1 of its 4 parts would stay on disk"):
        check_placement(model, spread)


def test_a_model_that_lm_eval_spreads_says_the_same(tuned_model: Path, reference: Reference, tmp_path: Path) -> None:
    """`parallelize` without a GPU: what does not fit into the memory that it is given stays on the disk."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    def load(**keys: object) -> HFLM:
        return HFLM(str(tuned_model), tokenizer=reference.tokenizer, dtype="float32", device="cpu", **keys)

    whole = load(parallelize=False)
    memory = 0.6 * sum(weight.nbytes for weight in whole.model.parameters())
    spread = load(parallelize=True, max_cpu_memory=int(memory), offload_folder=str(tmp_path))
    assert set(spread.model.hf_device_map.values()) == {"cpu", "disk"}
    asked = [
        Instance("loglikelihood", {}, (f"Number {n}?", f" {n}"), n, metadata=("", 0, 1))  # type: ignore[arg-type]
        for n in range(3)
    ]
    assert spread.loglikelihood(asked) == whole.loglikelihood(asked)


def test_embeddings_of_a_spread_model_can_be_replaced(tuned_model: Path, reference: Reference) -> None:
    from accelerate import dispatch_model
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(tuned_model, dtype=torch.float32)
    spread = AutoModelForCausalLM.from_pretrained(tuned_model, dtype=torch.float32)
    parts = {name: "cpu" for name, module in spread.named_modules() if not list(module.children()) and name}
    spread = dispatch_model(spread, parts, main_device="cpu", force_hooks=True)
    assert hasattr(spread.get_input_embeddings(), "_hf_hook")
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
