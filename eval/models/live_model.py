"""Give lm_eval the model that is being trained.

Under ZeRO-3 and FSDP2 a rank holds a shard of each weight, and each forward pass is a collective of all ranks. So all ranks measure the
same documents in the same order, with the same number of passes, whatever the answers are.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from eval.tasks.settings import Settings

if TYPE_CHECKING:
    from lm_eval.models.huggingface import HFLM


class LeftOff(Exception):
    """Training is to stop, and the measurement with it."""


class Live:
    """Wraps the trainer's model for lm_eval. It is no module: lm_eval would change a module's mode and tie its weights again."""

    def __init__(self, trainer: Any, settings: Settings, pad_token_id: int) -> None:
        from transformers import GenerationConfig

        self.trainer = trainer
        self.config = deepcopy(trainer.accelerator.unwrap_model(trainer.model).config)
        self.device = trainer.accelerator.device
        self.generation = GenerationConfig(
            **settings.generation, eos_token_id=list(settings.stop_token_ids), pad_token_id=pad_token_id
        )
        self.sharded = is_sharded(trainer)
        self.answering = False
        """Whether it is in a batch; stays true where the batch failed."""

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """Around a batch, which all ranks run; LeftOff on all ranks before it where training is to stop."""
        from sft.train.watchdog import EVALUATION

        self.answering = True
        self.trainer.progress.at(EVALUATION)
        if self.trainer.stopping.stops():
            raise LeftOff
        with self.trainer.compute_loss_context_manager():
            yield
        self.answering = False

    def __call__(self, ids: Any) -> Any:
        """One forward pass, as in training but for its mode."""
        with self._in_step():
            return self.trainer.model(ids)

    def generate(self, **arguments: Any) -> Any:
        """Answers; where weights are sharded, each rank runs as many passes as the longest answer on any rank takes."""
        from transformers import StoppingCriteria

        from sft.train.watchdog import EVALUATION

        progress = self.trainer.progress

        class Moves(StoppingCriteria):  # type: ignore[misc]
            """Stops nothing: reports that this rank makes progress."""

            def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
                import torch

                progress.at(EVALUATION)
                return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

        arguments["stopping_criteria"].append(Moves())
        with self._in_step():
            return self._generate(**arguments, generation_config=self.generation, synced_gpus=self.sharded)

    def _generate(self, **arguments: Any) -> Any:
        whole = self.trainer.model
        if not hasattr(whole, "get_base_model"):
            return whole.generate(**arguments)
        below = whole.get_base_model()  # peft's own `generate` changes the model's generation config
        if not self.trainer.is_fsdp_enabled:
            return below.generate(**arguments)
        from torch.distributed.fsdp import register_fsdp_forward_method

        # Weights that belong to no layer are gathered when the outermost module, which is peft's, is called.
        whole.generate_below = below.generate
        register_fsdp_forward_method(whole, "generate_below")
        try:
            return whole.generate_below(**arguments)
        finally:
            del whole.generate_below


def is_sharded(trainer: Any) -> bool:
    """Whether each rank holds only a shard of the weights."""
    stage = trainer.model_wrapped.zero_optimization_stage() if trainer.is_deepspeed_enabled else 0
    return trainer.accelerator.num_processes > 1 and (stage == 3 or trainer.is_fsdp_enabled)


def language_model(live: Live, tokenizer: Any, settings: Settings) -> HFLM:
    """lm_eval's model around it."""
    from lm_eval.models.huggingface import HFLM

    return HFLM(
        pretrained=live,
        tokenizer=deepcopy(tokenizer),  # it sets a padding side
        backend="causal",
        max_length=settings.max_length,
        batch_size=settings.batch_size,
        add_bos_token=settings.add_bos_token,
        enable_thinking=settings.enable_thinking,
        trust_remote_code=False,  # it is loaded
    )


@contextmanager
def undisturbed(model: Any) -> Iterator[None]:
    """Restore what a measurement changes: the random state of this rank, and the mode of each module."""
    import numpy as np
    import torch

    modes = {module: module.training for module in model.modules()}
    streams = random.getstate(), np.random.get_state()
    gpus = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(gpus):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        random.setstate(streams[0])
        np.random.set_state(streams[1])
        torch.cuda.empty_cache()
