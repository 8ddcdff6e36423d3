"""Programs that tests use and our environment does not hold, each in an environment of its own."""

import os
from pathlib import Path

import pytest


def python_with(package: str) -> Path:
    """The Python of an environment with a package, which PYTHON_WITH_<PACKAGE> names; skips the test where none does."""
    variable = f"PYTHON_WITH_{package.upper()}"
    if not os.environ.get(variable):
        pytest.skip(
            f"{variable} names no Python with {package}: uv venv X; uv pip install --python X/bin/python {package}"
        )
    return Path(os.environ[variable]).absolute()
