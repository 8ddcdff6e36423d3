"""As train_and_probe.py, with a new token in the prompt: `torchrun ... train_new_tokens.py RECIPE ...`.

With STOP_AT_CHECKPOINT in the environment the process ends at the first checkpoint, as if it were stopped there.
"""

import os
from typing import Any

import torch

from sft.train.trainer import RecipeTrainer

OWN = 541  # tokens of the demo's tokenizer; the first new one is the next
PROBE = torch.arange(OWN - 39, OWN + 1).reshape(2, 20)


def main() -> None:
    import train_and_probe  # beside this program; not to be found where pytest looks for doctests

    train_and_probe.PROBE = PROBE
    if os.environ.get("STOP_AT_CHECKPOINT"):
        save = RecipeTrainer._save_checkpoint

        def save_and_stop(trainer: RecipeTrainer, model: Any, trial: Any) -> None:
            save(trainer, model, trial)
            raise SystemExit(1)

        RecipeTrainer._save_checkpoint = save_and_stop  # type: ignore[method-assign]
    train_and_probe.main()


if __name__ == "__main__":
    main()
