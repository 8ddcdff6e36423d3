"""What a run's folder may not decide by itself: it may have come from somebody else.

A recipe that is named on the command line is the user's choice, with all that it says. A run's folder brings a recipe along: what runs
code, sends a key or reads files elsewhere counts only where this command line says it too. Imports nothing of ours but the errors.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from sft.errors import RunError

OWN_RUN = "SFT_OWN_RUN"
"""Environment variable: the run that this job has opened, for what the training becomes or starts and for its launcher's restarts."""

TRUST = "model.trust_remote_code=true"
"""How a command line allows the code that a run's model brings along."""


def is_own(run: Path) -> bool:
    """Whether the command that is running has trained this run itself."""
    return os.environ.get(OWN_RUN) == str(run.resolve())


def check_model_code(run: Path, trust_remote_code: bool, allowed: bool, words: str = TRUST) -> None:
    """Refuse to run the Python files of a run's model.

    Args:
        run: The run's folder.
        trust_remote_code: What the run's recipe says.
        allowed: Whether the command line allows it.
        words: How it does.

    Raises:
        RunError: The run's recipe alone asks for it.
    """
    if trust_remote_code and not allowed and not is_own(run):
        raise RunError(
            f"{run}: its recipe has model.trust_remote_code=true, which runs the Python files that come with its model. A run's folder "
            f"may be somebody else's: read those files, and add {words} to this command."
        )


def check_consents(run: Path, consents: Iterable[str], overrides: Iterable[str]) -> None:
    """Refuse to start a run from its folder on consents that the folder alone gives.

    Args:
        run: The run's folder.
        consents: Keys that its recipe sets to true, such as `model.trust_remote_code`.
        overrides: `key=value` of this command line.

    Raises:
        RunError: The command line leaves some out.
    """
    given = {word.partition("=")[0] for word in overrides}
    missing = [key for key in consents if key not in given]
    if missing and not is_own(run):
        words = " ".join(f"{key}=true" for key in missing)
        raise RunError(
            f"{run}: its recipe allows code to run ({', '.join(missing)}). A run's folder may be somebody else's: read what would run, "
            f"and add {words} to this command."
        )
