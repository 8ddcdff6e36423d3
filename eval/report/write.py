"""Pages are written whole or not at all, and without secrets."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from sft.credentials import redact
from sft.errors import RunError


def write_page(path: Path, text: str) -> None:
    """Write a page so that a reader sees the old one or the new one, never a part.

    Raises:
        RunError: It cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(redact(text), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise RunError(f"The report cannot be written: {error}.") from None
    finally:
        with suppress(OSError):
            temporary.unlink()
