"""What the recipe says now, where a checkpoint would say what it said then."""

from __future__ import annotations

from typing import Any

from transformers.trainer_callback import TrainerCallback


class ChangesTakeEffect(TrainerCallback):  # type: ignore[misc]
    """Sets what transformers takes from the checkpoint: the steps between lines and saves, and the peak learning rate.

    Args:
        learning_rate: The peak, as planned.
    """

    def __init__(self, learning_rate: float) -> None:
        self.learning_rate = learning_rate

    def on_train_begin(
        self, args: Any, state: Any, control: Any, lr_scheduler: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """After the checkpoint is loaded, before the first step."""
        if state.global_step == 0:
            return
        # trainer_state.json holds them, and is loaded over what was computed from the arguments.
        state.compute_steps(args, state.max_steps)
        set_peak(getattr(lr_scheduler, "scheduler", lr_scheduler), optimizer, self.learning_rate)


def set_peak(scheduler: Any, optimizer: Any, peak: float) -> None:
    """Have a schedule that was loaded follow the recipe's: its peak, and its shape, which is that of the new number of steps.

    Args:
        scheduler: torch's LambdaLR. Its state holds the peaks, and not the shape.
        optimizer: Whose groups the rates are written to.
        peak: Learning rate.
    """
    scheduler.base_lrs = [peak] * len(scheduler.base_lrs)
    rates = [peak * shape(scheduler.last_epoch) for shape in scheduler.lr_lambdas]
    scheduler._last_lr = rates
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["initial_lr"], group["lr"] = peak, rate
