"""A run writes into its own folder and nowhere else: the names that lead there, and links in it that lead away.

A recipe names the folder; a folder that somebody else has packed may hold links to any place of this machine. Checked before a run
that exists is written to: a new one is empty.
"""

from __future__ import annotations

import os
from pathlib import Path

from sft.errors import RecipeError, RunError

LATEST = "latest"
"""The link to the newest run, beside the runs."""


def check_names(recipe_path: Path, run_name: str | None) -> None:
    """Refuse names that would not be folders of their own under output_dir.

    Raises:
        RecipeError: The recipe's file or the run is called so.
    """
    if recipe_path.stem.startswith("."):
        raise RecipeError(
            f"{recipe_path.name}: runs go to a folder called like the recipe's file, and {recipe_path.stem!r} is hidden or leads "
            "elsewhere. Give the file a name that does not begin with a dot."
        )
    if run_name == LATEST:
        raise RecipeError(f"tracking.run_name={LATEST} is the name of the link to the newest run. Choose another name.")


def check_inside(run: Path, parent: Path | None = None) -> None:
    """Refuse to write to a run that lies, or leads, elsewhere.

    Args:
        run: The run's folder, links resolved.
        parent: The folder that it must be in; None where the user has named the run itself.

    Raises:
        RunError: It lies elsewhere, or holds links out of it.
    """
    if parent is not None and run.parent != parent:
        raise RunError(
            f"{parent / LATEST} leads to {run}, which is not in {parent}: this start would write there. Remove the link, and name the "
            "run's own place with output_dir."
        )
    leading_away = [link for link in _links(run) if not _is_in(link, run)]
    if leading_away:
        link = leading_away[0]
        more = f" (and {len(leading_away) - 1} more links)" if len(leading_away) > 1 else ""
        raise RunError(
            f"{link} is a link to {link.readlink()}, outside of the run's folder, which would be written to{more}. Put what it leads to "
            "in its place, or remove it; for another disk set output_dir."
        )


def _links(folder: Path) -> list[Path]:
    found = []
    for place, folders, files in os.walk(folder):  # follows none
        found += [path for name in (*folders, *files) if (path := Path(place, name)).is_symlink()]
        if Path(place) == folder and "wandb" in folders:
            folders.remove("wandb")  # it links its logs to the user's cache, and each start writes to a new folder
    return sorted(found)


def _is_in(link: Path, folder: Path) -> bool:
    try:
        return link.resolve().is_relative_to(folder)
    except (OSError, RuntimeError):  # a link to itself
        return False
