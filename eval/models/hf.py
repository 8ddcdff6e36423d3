"""Loads lm_eval's transformers model, and has helper processes answer a part of its requests.

lm_eval runs in this process alone: it draws the examples, applies the filters and computes the scores as for a single process. Only the
requests are shared, by document, so that the number of processes moves no score. (Under accelerate lm_eval itself would draw other few-shot
examples, repeat requests and reorder documents.)
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from lm_eval.models.huggingface import HFLM
from transformers import AutoTokenizer, GenerationConfig

from eval.models.placement import Placement, change_whole, check_placement
from eval.models.target import Target
from eval.tasks.output import summary
from eval.tasks.settings import Settings
from sft.errors import EvaluationError, LostRank
from sft.plan.hardware import cpu_cores
from sft.program import end_with_parent
from sft.signals import held_back

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Requests = Sequence[Any]
"""lm_eval's instances, or what has their `args`."""


def load_hf(target: Target, tokenizer: PreTrainedTokenizerBase, settings: Settings, placement: Placement) -> SharedHFLM:
    """Load the weights, here and in each helper process.

    Raises:
        EvaluationError: They do not load, or part of them would stay off the GPUs.
    """
    number = placement.processes
    if number > 1:  # for the helpers, which import torch anew, and for this process
        threads = int(os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cpu_cores() // number))))
        torch.set_num_threads(threads)
    helpers = [Helper(target, tokenizer.name_or_path, settings, process) for process in range(1, number)]
    try:
        model = _load(target, tokenizer, settings, placement.spread, 0)
        check_placement(model.model, placement)
        for helper in helpers:
            helper.reply()
    except BaseException:
        for helper in helpers:
            helper.process.terminate()
            helper.close()
        raise
    model.helpers = helpers
    return model


def _load(
    target: Target, tokenizer: PreTrainedTokenizerBase, settings: Settings, spread: bool, process: int
) -> SharedHFLM:
    device = "cpu" if not torch.cuda.is_available() else "cuda" if spread else f"cuda:{process}"
    model = SharedHFLM(
        pretrained=target.model,
        revision=target.revision or "main",
        tokenizer=tokenizer,
        dtype=settings.dtype,
        max_length=settings.max_length,
        batch_size=settings.batch_size,
        add_bos_token=settings.add_bos_token,
        enable_thinking=settings.enable_thinking,
        device=device,
        parallelize=spread,
        trust_remote_code=target.trust_remote_code,
    )
    if target.new_tokens:
        from sft.model.new_tokens import embed_new_tokens

        change_whole(model.model, lambda: embed_new_tokens(model.model, tokenizer, target.new_tokens, target.model))
    # The base model's own would stop it at another token, or repeat less. Its lengths would overrule lm_eval's.
    model.model.generation_config = GenerationConfig(
        **settings.generation, eos_token_id=list(settings.stop_token_ids), pad_token_id=model.tokenizer.pad_token_id
    )
    model.half_precision = settings.dtype != "float32"
    return model


class SharedHFLM(HFLM):  # type: ignore[misc]  # lm_eval ships no types
    """HFLM that sends each helper its part of the requests, and follows the batch sizes of an earlier model."""

    helpers: Sequence[Helper] = ()
    _given: Sequence[int] = ()
    half_precision = False
    _found: Sequence[int] = ()

    def follow(self, given: Sequence[int]) -> None:
        """Use these batch sizes of the base model, from its `sizes_found`, in the next searches; empty: search freely."""
        number = len(given) // (len(self.helpers) + 1)
        self._given, self._found = given[:number], []
        for place, helper in enumerate(self.helpers, 1):
            helper.call("follow", given[place * number : (place + 1) * number])

    def sizes_found(self) -> list[int]:
        """The batch sizes that all processes have searched for since `follow`."""
        return [*self._found, *(size for helper in self.helpers for size in helper.call("sizes_found"))]

    def _detect_batch_size(self, requests: Requests | None = None, pos: int = 0) -> int:
        size = int(super()._detect_batch_size(requests, pos))
        given = self._given[len(self._found)] if len(self._found) < len(self._given) else size
        if size < given and self.half_precision:
            raise EvaluationError(
                f"the base model was measured in batches of {given}, and there is memory for {size} now: in half precision that moves "
                f"answers. Set eval.batch_size={size}, or end what else uses the GPU."
            )
        self._found = [*self._found, min(size, given)]
        return self._found[-1]

    def loglikelihood(self, requests: Requests, disable_tqdm: bool = False) -> list[Any]:
        """Score given answers."""
        return self._share("loglikelihood", requests, disable_tqdm)

    def loglikelihood_rolling(self, requests: Requests, disable_tqdm: bool = False) -> list[Any]:
        """Score whole texts."""
        return self._share("loglikelihood_rolling", requests, disable_tqdm)

    def generate_until(self, requests: Requests, disable_tqdm: bool = False) -> list[Any]:
        """Generate answers."""
        return self._share("generate_until", requests, disable_tqdm)

    def _share(self, method: str, requests: Requests, disable_tqdm: bool) -> list[Any]:
        number = len(self.helpers) + 1
        # A document's requests stay together: lm_eval computes the prompt that they share once.
        parts = [
            [place for place, request in enumerate(requests) if number == 1 or request.doc_id % number == process]
            for process in range(number)
        ]
        busy = [(helper, part) for helper, part in zip(self.helpers, parts[1:], strict=True) if part]
        for helper, part in busy:
            helper.send(method, [SimpleNamespace(args=requests[place].args, doc_id=0) for place in part], True)
        own = [requests[place] for place in parts[0]]
        try:
            answers = dict(zip(parts[0], getattr(super(), method)(own, disable_tqdm=disable_tqdm), strict=True))
        except Exception:
            for helper, _ in busy:  # else their answers would be taken for those to the next task
                helper.receive()
            raise
        replies = [helper.receive() for helper, _ in busy]
        for reply, (_, part) in zip(replies, busy, strict=True):
            if isinstance(reply, Exception):
                raise reply
            answers |= zip(part, reply, strict=True)
        return [answers[place] for place in range(len(requests))]

    def close(self) -> None:
        """End the helpers, which frees their GPUs."""
        for helper in self.helpers:
            helper.close()


class Helper:
    """A process with a full model of its own that answers what it is sent; its number, from 1, is the GPU that it uses."""

    def __init__(self, target: Target, tokenizer: str, settings: Settings, process: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.number = process
        arguments = (other, os.getpid(), target, tokenizer, settings, process)
        self.process = context.Process(target=_help, args=arguments, daemon=True)
        with held_back():
            self.process.start()
        other.close()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of its model."""
        self.send(method, *arguments)
        return self.reply()

    def send(self, method: str, *arguments: Any) -> None:
        """Send a call, whose reply is received later."""
        try:
            self.connection.send((method, arguments))
        except OSError:
            raise self._lost() from None

    def receive(self) -> Any:
        """Wait for the reply, or the exception in its place: first to loading the model, then to each call."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            raise self._lost() from None

    def reply(self) -> Any:
        """Wait for the reply, and raise it where it is an exception."""
        reply = self.receive()
        if isinstance(reply, Exception):
            raise reply
        return reply

    def close(self) -> None:
        """End the process."""
        self.connection.close()
        self.process.join()

    def _lost(self) -> LostRank:
        self.process.join(5)
        ended = f"has ended with exit status {self.process.exitcode}"
        return LostRank(f"Process {self.number} of the evaluation {ended}. The same command starts it again.")


def _help(
    connection: Connection, parent: int, target: Target, tokenizer: str, settings: Settings, process: int
) -> None:
    """Answer requests until the connection is closed; what a helper process runs."""
    end_with_parent(parent, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends this process
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    logging.basicConfig(level=logging.INFO)  # standard error is the log of the evaluation
    try:
        reader = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=target.trust_remote_code)
        model = _load(target, reader, settings, False, process)
    except Exception as error:
        connection.send(EvaluationError(f"Process {process} cannot load {target.model}: {summary(error)}"))
        return
    reply: Any = None
    while True:
        try:
            connection.send(reply)
            method, arguments = connection.recv()
        except (EOFError, OSError):
            return
        try:
            reply = getattr(model, method)(*arguments)
        except Exception as error:
            logging.exception("Process %d failed", process)
            reply = RuntimeError(summary(error))
