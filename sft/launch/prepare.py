"""Prepares one recipe's data and stops: python -m sft.launch.prepare RECIPE [key=value ...]"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from sft.data.prepare import prepare
from sft.errors import RecipeError, run_main
from sft.launch.job import open_recipe
from sft.processes import end_with_parent


def main(argv: Sequence[str]) -> None:
    """Prepare one recipe's data, or find it prepared."""
    if not argv or argv[0].startswith("-") or "=" in argv[0]:
        raise RecipeError("usage: python -m sft.launch.prepare RECIPE [key=value ...]")
    if os.environ.get("SFT_PARENT"):
        end_with_parent(int(os.environ["SFT_PARENT"]), signal.SIGTERM)
    recipe, _, model = open_recipe(Path(argv[0]), argv[1:])
    prepare(recipe, model)


if __name__ == "__main__":
    run_main(main)
