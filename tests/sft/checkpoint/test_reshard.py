"""Whole tensors out of the files of one process and into another optimizer; engines on real ranks: tests/slow/test_resume.py."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sft.checkpoint.reshard import load_torch, open_full, source_names, start_random_streams, with_parameters
from sft.checkpoint.resume import Writer
from sft.checkpoint.zero import STEP, Piece, _pieces_of_groups
from sft.errors import RunError
from sft.parallel.optimizer import MasterAdamW

WRITER = Writer("one process", 1, "fp32", "fp32")


def network(dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3), torch.nn.Linear(3, 2)).to(dtype)


def groups(model: torch.nn.Module, turned: bool = False) -> list[dict[str, object]]:
    """Weight decay for matrices only; or the other way about, so that every number means another parameter."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    both: list[dict[str, object]] = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return both[::-1] if turned else both


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    dtype = next(model.parameters()).dtype
    for number in range(steps):
        torch.manual_seed(number)
        model(torch.randn(5, 4).to(dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def save(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Writer:
    save_file(dict(model.state_dict()), folder / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    return with_parameters(WRITER, model, optimizer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_with_its_groups_the_other_way_about_goes_on_alike(dtype: torch.dtype, tmp_path: Path) -> None:
    stayed, moved = network(dtype), network(dtype)
    first = MasterAdamW(groups(stayed), accumulate_in_fp32=False, lr=0.1)
    train(stayed, first, 3)
    writer = save(tmp_path, stayed, first)
    second = MasterAdamW(groups(moved, turned=True), accumulate_in_fp32=False, lr=0.1)
    whole = open_full(tmp_path, writer, {})
    load_torch(moved, second, whole, source_names(moved, whole))
    train(stayed, first, 3)
    train(moved, second, 3)
    for one, other in zip(stayed.parameters(), moved.parameters(), strict=True):
        assert torch.equal(one, other)
    assert [group["weight_decay"] for group in second.param_groups] == [0.0, 0.1]


def test_bf16_weights_go_on_from_their_fp32_copies_under_an_optimizer_of_fp32_weights(tmp_path: Path) -> None:
    rounded, exact = network(torch.bfloat16), network()
    optimizer = MasterAdamW(groups(rounded), accumulate_in_fp32=False, lr=0.1)
    train(rounded, optimizer, 3)
    whole = open_full(tmp_path, save(tmp_path, rounded, optimizer), {})
    other = torch.optim.AdamW(groups(exact), lr=0.1)
    load_torch(exact, other, whole, source_names(exact, whole))
    for master, parameter in zip(optimizer.masters, [p for g in other.param_groups for p in g["params"]], strict=True):
        assert torch.equal(master, parameter)
        assert not torch.equal(parameter.bfloat16().float(), parameter)
        assert other.state[parameter][STEP] == 3


def test_a_checkpoint_of_other_parameters_is_refused(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.AdamW(groups(model), lr=0.1)
    train(model, optimizer, 1)
    whole = open_full(tmp_path, save(tmp_path, model, optimizer), {})
    model[2].requires_grad_(False)
    with pytest.raises(RunError, match=r"0 trained here are not in it .*, 2 in it are not trained here"):
        source_names(model, whole)
    other = torch.nn.Sequential(model, torch.nn.Linear(2, 2))
    with pytest.raises(RunError, match="holds other parameters"):
        source_names(other, whole)


def test_a_tied_weight_is_found_by_another_of_its_names(tmp_path: Path) -> None:
    model = torch.nn.Module()
    model.embedding, model.head = torch.nn.Embedding(4, 3), torch.nn.Linear(3, 4, bias=False)
    optimizer = torch.optim.AdamW([model.head.weight], lr=0.1)
    model.head.weight.sum().backward()
    optimizer.step()
    save_file({"head.weight": model.head.weight.detach()}, tmp_path / "model.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    whole = open_full(tmp_path, Writer("one process", 1, "fp32", "fp32", parameters=("head.weight",)), {})
    model.head.weight = model.embedding.weight
    assert source_names(model, whole) == {"embedding.weight": "head.weight"}


def test_pieces_of_several_ranks_are_put_together_in_the_order_of_the_ranks() -> None:
    from deepspeed.utils.tensor_fragment import fragment_address

    shares = [
        {"param_slice_mappings": [{"a": fragment_address(numel=3, start=0), "b": fragment_address(numel=2, start=3)}]},
        {"param_slice_mappings": [{"b": fragment_address(numel=4, start=0)}]},
    ]
    assert _pieces_of_groups(shares) == {"a": [Piece(0, 0, 0, 3)], "b": [Piece(0, 0, 3, 2), Piece(1, 0, 0, 4)]}


def test_random_streams_differ_between_ranks_and_steps_and_repeat() -> None:
    def drawn(*place: int) -> float:
        start_random_streams(*place)
        return float(torch.rand(()))

    places = [(1, 10, 0), (1, 10, 1), (1, 11, 0), (2, 10, 0)]
    first = [drawn(*place) for place in places]
    assert len(set(first)) == len(places)
    assert [drawn(*place) for place in places] == first
