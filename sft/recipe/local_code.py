"""Finds and loads the Python that a recipe names in files of its own: `my_rows.py:convert`. Imports no torch.

A path is relative to the recipe's folder. A run keeps a copy of each file in its folder `code`, which a start from that folder runs.
"""

from __future__ import annotations

import ast
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from copy import deepcopy
from hashlib import sha256
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any

from sft.errors import RecipeError, did_you_mean
from sft.recipe.schema import Recipe, Source
from sft.recipe.train import Callback

CODE = "code"
"""In a run's folder: the copies."""

Row = dict[str, Any]
RowFunction = Callable[[Row], list[Row]]
"""The rows that one becomes; none where it is left out."""


def references(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Each `file.py:name` of a recipe, with the key that names it."""
    if recipe.data.function:
        yield "data.function", recipe.data.function
    for key, sources in (("data.train", recipe.sources), ("data.held_out", recipe.held_out_sources)):
        yield from ((key, source.function) for source in sources if source.function)
    yield from (("train.callbacks", callback.path) for callback in callbacks(recipe))


def callbacks(recipe: Recipe) -> list[Callback]:
    """The callbacks of a recipe, whichever way they were written."""
    return [Callback(path=one) if isinstance(one, str) else one for one in recipe.train.callbacks]


def _copied(path: str) -> Path:
    """Where a run's folder keeps a file, below `code`.

    >>> str(_copied("../mine/rows.py"))
    'mine/rows.py'
    """
    return Path(*(part for part in PurePath(path).parts if part not in ("/", "..", "~")))


def code_file(recipe: Recipe, reference: str) -> Path:
    """The file that a reference names."""
    path = reference.rpartition(":")[0]
    if (recipe.folder / "run.json").is_file():
        return recipe.folder / CODE / _copied(path)
    return recipe.folder / Path(path).expanduser()


def code_hashes(recipe: Recipe, section: str = "") -> dict[str, str]:
    """The SHA-256 of each file that a section names, by its path in the recipe. Raises RecipeError where one is missing."""
    named = [one for one in references(recipe) if one[0].startswith(section)]
    found = {reference.rpartition(":")[0]: (key, reference) for key, reference in named}
    return {path: sha256(_text(recipe, *named)).hexdigest() for path, named in found.items()}


def copy_code(recipe: Recipe, run: Path) -> None:
    """Keep a copy of each file in a run's folder."""
    for _, reference in references(recipe):
        copy = run / CODE / _copied(reference.rpartition(":")[0])
        copy.parent.mkdir(parents=True, exist_ok=True)
        if code_file(recipe, reference).resolve() != copy.resolve():
            shutil.copyfile(code_file(recipe, reference), copy)


def check_code(recipe: Recipe) -> None:
    """Refuse a file that is missing, is no Python, or does not define the name. Runs nothing.

    Raises:
        RecipeError: A line for each.
    """
    lines, copies = [], dict[Path, str]()
    for key, reference in references(recipe):
        path, _, name = reference.rpartition(":")
        try:
            if copies.setdefault(_copied(path), path) != path:
                raise RecipeError(
                    f"{key}={reference}: the run keeps a copy of it, in the place of {copies[_copied(path)]}'s. Rename it."
                )
            defined = _defined(_text(recipe, key, reference), key, reference)
            if name not in defined:
                hint = did_you_mean(name, sorted(defined)) or "."
                raise RecipeError(f"{key}={reference}: {path} defines no {name}{hint}")
        except RecipeError as error:
            lines.append(str(error))
    if lines:
        raise RecipeError("\n".join(dict.fromkeys(lines)))


def _text(recipe: Recipe, key: str, reference: str) -> bytes:
    file = code_file(recipe, reference)
    try:
        return file.read_bytes()
    except OSError as error:
        raise RecipeError(
            f"{key}={reference}: {file} cannot be read ({error.strerror}). The path is relative to the recipe's folder; write it as "
            "file.py:name."
        ) from None


def _defined(text: bytes, key: str, reference: str) -> set[str]:
    """The names that a module defines at its top."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError) as error:
        at = f"{error.msg} (line {error.lineno})" if isinstance(error, SyntaxError) else str(error)
        raise RecipeError(f"{key}={reference}: it is no Python: {at}.") from None
    names = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)}
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {one.asname or one.name for one in node.names}
        elif isinstance(node, ast.Assign):
            names |= {one.id for one in node.targets if isinstance(one, ast.Name)}
    return names


def load_code(recipe: Recipe, key: str, reference: str) -> Any:
    """Run the file, once in a process, and return what it defines under the name.

    Raises:
        RecipeError: The file cannot be run; with its line, and no traceback.
    """
    file = code_file(recipe, reference).resolve()
    module = f"_recipe_code_{sha256(str(file).encode()).hexdigest()[:12]}"
    if module not in sys.modules:
        sys.modules[module] = _run_module(module, file, f"{key}={reference}")
    return getattr(sys.modules[module], reference.rpartition(":")[2])


def _run_module(name: str, file: Path, what: str) -> ModuleType:
    module = ModuleType(name)
    module.__file__ = str(file)
    sys.modules[name] = module  # dataclasses and pickle look their module up while it runs
    try:
        # No import: a `__pycache__` beside the file could hold other code than what its reader has read.
        exec(compile(file.read_bytes(), file, "exec", dont_inherit=True), module.__dict__)  # noqa: S102
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise RecipeError(f"{what} cannot be loaded: {explained(error, file)}.") from None
    return module


def explained(error: BaseException, file: Path) -> str:
    """An error of the user's code as one line: what, and the last line of their file that it passed."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == file]
    place = f" ({file.name}, line {own[-1].lineno}: {own[-1].line})" if own else ""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}{f': {first}' if first else ''}{place}"


def row_function(recipe: Recipe, key: str, source: Source) -> RowFunction | None:
    """The function that a source's rows go through, its own or data.function; None where there is none.

    What it returns raises ValueError where the user's function fails, or returns something else than rows.
    """
    reference = source.function or recipe.data.function
    if reference is None:
        return None
    key = f"{key}.function" if source.function else "data.function"
    file = code_file(recipe, reference).resolve()
    function = load_code(recipe, key, reference)
    if not callable(function):
        raise RecipeError(f"{key}={reference} is no function, but {type(function).__name__}.")

    def convert(row: Row) -> list[Row]:
        try:
            made = function(deepcopy(row))
        except Exception as error:
            raise ValueError(f"{key}={reference} fails: {explained(error, file)}") from None
        rows = [] if made is None else [made] if isinstance(made, dict) else made
        if not isinstance(rows, list | tuple) or not all(isinstance(one, dict) for one in rows):
            kind = type(made).__name__
            raise ValueError(f"{key}={reference} returns {kind}, not a dict, a list of dicts or None")
        return list(rows)

    return convert
