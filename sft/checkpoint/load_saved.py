"""Loads a saved model as a user does, and compares it with what it is sent. Run as a program by sft/checkpoint/loader_process.py.

Knows nothing of this project: it imports transformers and torch, is handed a folder, and calls `from_pretrained` on it. It reads
requests from standard input, a line of JSON each, and answers each with a line:

| request | behind the line | answer |
|---|---|---|
| `{"load": folder, "ids": rows, "text": ..., "trust_remote_code": ...}` | | what was loaded; or `{"error": ...}` |
| `{"logits": shape}` | the expected logits, fp32 | their distance |
| `{"tensor": name, "shape": ..., "dtype": ..., "allowed": ...}` | the expected values | none, until the end |
| `{"end": true}` | | what differs |
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

if __name__ == "__main__":  # before the imports, which take seconds
    # What a terminal or a queue sends to the whole job is for the training, which ends this process by closing the pipe.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    # The training may be killed while a model is loaded here, which takes minutes.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

_AT_ONCE = 2**24
"""Elements compared at a time: copies of a whole embedding in fp32 would take gigabytes."""


@dataclass
class Loaded:
    """A model from disk, and what was found about it."""

    model: Any
    logits: torch.Tensor
    tensors: dict[str, torch.Tensor]
    wrong: list[dict[str, Any]] = field(default_factory=list)
    compared: set[str] = field(default_factory=set)


def own_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers, each once, by its first name."""
    saved = model.state_dict(keep_vars=True)
    once = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor for name, tensor in once if name in saved}


def load(request: dict[str, Any]) -> tuple[Loaded, dict[str, Any]]:
    """The model, and what is told of it and its tokenizer."""
    folder, remote = request["load"], request["trust_remote_code"]
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=remote)
    # Tensors of another shape are an error without that, which does not name them.
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=remote, ignore_mismatched_sizes=True, output_loading_info=True
    )
    logits, failure = torch.empty(0), None
    try:
        with torch.no_grad():
            logits = model.eval()(input_ids=torch.tensor(request["ids"]), use_cache=False).logits.float()
    except (IndexError, RuntimeError) as error:  # such as a token without a row; its tensors tell more
        failure = f"{type(error).__name__}: {error}"
    facts = {
        "failure": failure,
        "missing": sorted(map(str, info["missing_keys"])),
        "unexpected": sorted(map(str, info["unexpected_keys"])),
        "mismatched": sorted((str(name), list(saved), list(own)) for name, saved, own in info["mismatched_keys"]),
        "dtype": str(model.dtype).removeprefix("torch."),
        "stops_at": model.generation_config.eos_token_id,
        "rows": model.get_input_embeddings().num_embeddings,
        "tokens": max(tokenizer.get_vocab().values()) + 1,
        "eos_token": tokenizer.eos_token,
        "pad_token": tokenizer.pad_token,
        "chat_template": tokenizer.chat_template,
        "text_ids": tokenizer(request["text"], add_special_tokens=False)["input_ids"],
    }
    return Loaded(model, logits, own_tensors(model)), facts


def distance(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Norm of the difference over the norm, of logits without the part that all of a token have in common.

    Tokens whose logits are no numbers in memory (the training has diverged) are left out: what was saved is told by the tensors.

    >>> distance(torch.tensor([[1.0, 3.0]]), torch.tensor([[2.0, 4.0]]))
    0.0
    """
    if expected.shape != found.shape:
        return float("inf")
    numbers = expected.isfinite().all(-1)
    if not found[numbers].isfinite().all():
        return float("inf")
    one, other = (logits[numbers] - logits[numbers].mean(-1, keepdim=True) for logits in (expected, found))
    return float((one - other).norm() / one.norm().clamp(min=1e-12))


def differs(expected: torch.Tensor, found: torch.Tensor, allowed: float) -> dict[str, Any] | None:
    """How two tensors of one shape differ, or None.

    Args:
        expected: As it is in memory.
        found: As it was loaded, in whatever format.
        allowed: Norm of the difference that is none; 0: every element is the same.
    """
    largest, squares, count = 0.0, 0.0, 0
    both = (torch.split(tensor.flatten(), _AT_ONCE) for tensor in (expected, found))
    for one, other in zip(*both, strict=True):
        one, other = one.double(), other.double()
        different = (one != other) & ~(one.isnan() & other.isnan())
        if not different.any():
            continue
        apart = (one - other)[different].abs()
        # Not a number beside a number is as far apart as can be.
        apart = apart.nan_to_num(nan=float("inf"))
        largest, count = max(largest, float(apart.max())), count + int(different.sum())
        squares += float((apart**2).sum())
    if not count or squares**0.5 <= allowed:
        return None
    return {"largest": largest, "elements": count, "of": expected.numel()}


def compare(loaded: Loaded, request: dict[str, Any], values: bytearray) -> None:
    """Note how a tensor differs, where it does."""
    name, shape = request["tensor"], request["shape"]
    loaded.compared.add(name)
    found = loaded.tensors.get(name)
    if found is None:
        loaded.wrong.append({"name": name, "why": "is not in the saved model"})
    elif list(found.shape) != shape:
        loaded.wrong.append({"name": name, "why": f"has shape {list(found.shape)}, in memory {shape}"})
    elif found.numel():
        expected = torch.frombuffer(values, dtype=getattr(torch, request["dtype"])).reshape(shape)
        difference = differs(expected, found.detach(), request["allowed"])
        if difference is not None:
            loaded.wrong.append({"name": name} | difference)


def read_values(stream: BinaryIO, request: dict[str, Any]) -> bytearray:
    """The bytes of a tensor."""
    values = bytearray(request["bytes"])
    view, filled = memoryview(values), 0
    while filled < len(values):
        count = stream.readinto(view[filled:])  # type: ignore[attr-defined]
        if not count:
            raise EOFError
        filled += count
    return values


def answer(loaded: Loaded | None, request: dict[str, Any], values: bytearray) -> tuple[Loaded | None, Any]:
    """What a request leaves loaded, and the answer to it; None for none."""
    if "load" in request:
        return load(request)
    assert loaded is not None
    if "logits" in request:
        expected = torch.frombuffer(values, dtype=torch.float32).reshape(request["logits"])
        return loaded, {"distance": distance(expected, loaded.logits)}
    if "tensor" in request:
        compare(loaded, request, values)
        return loaded, None
    only_saved = [name for name in loaded.tensors if name not in loaded.compared]
    extra = [{"name": name, "why": "is in the saved model only"} for name in only_saved]
    return None, {"wrong": loaded.wrong + extra, "compared": len(loaded.compared)}


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer until there are no more requests. After an error what belongs to the same model is read and not looked at."""
    loaded: Loaded | None = None
    failed = False
    while line := requests.readline():
        request = json.loads(line)
        values = read_values(requests, request) if "bytes" in request else bytearray()
        if "load" in request:
            loaded, failed = None, False
        if failed:
            continue
        try:
            loaded, said = answer(loaded, request, values)
        except Exception as error:
            loaded, failed, said = None, True, {"error": f"{type(error).__name__}: {error}"}
        if said is not None:
            answers.write(json.dumps(said).encode() + b"\n")
            answers.flush()


def main() -> None:
    """Serve the process that started this one, until it closes the pipe."""
    # Where memory runs out, this is the process to end, and not the training.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with suppress(EOFError, BrokenPipeError):
        serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
