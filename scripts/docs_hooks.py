"""What mkdocs runs while it builds the site: writes the reference of recipe keys, and unlinks files of the repository.

mkdocs build --strict checks every link between pages. Links to code lead somewhere on a code host only, and stay as plain text here.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic_core import PydanticUndefined

from sft.convert.main import TOOLS
from sft.recipe import changes  # not its function on_resume: mkdocs takes every on_... of this module for an event
from sft.recipe.schema import Recipe, Section
from sft.recipe.section import sections_in

REFERENCE = "reference/recipe.md"
_INTRODUCTION = """\
# Recipe keys

A recipe is a YAML file with the sections below. Write only what differs from the defaults; an unknown key is an error. On the command line
`section.key=value` overrides a key. Each key is listed with its type, its default, and whether it may change when an unfinished run resumes
([Resume](../resume.md#if-you-changed-the-recipe)): "free" keys may, "named" keys if `train.resume_allow_changes` lists them, "fixed" keys
may not.
"""
_RESUME = {"free": "free on resume", "named": "named on resume", "fixed": "fixed on resume"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated page."""
    files.append(File.generated(config, REFERENCE, content=reference()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links that lead out of docs/ into their text, and write the tables of other tools' keys."""
    if page.file.src_uri == REFERENCE:
        return markdown
    markdown = re.sub(r"<!-- keys of (\S+) -->", lambda match: keys_of(match[1]), markdown)
    return re.sub(r"\[([^\]]+)\]\((?:\.\./)+(?!docs/)[^)]*\)", r"\1", markdown)


def reference() -> str:
    """Every key of a recipe with its type, default and description."""
    keys = Recipe.model_fields
    top = [name for name in keys if not list(sections_in(keys[name].annotation))]
    lines = [_INTRODUCTION, *_keys(Recipe, only=top)]
    for name in keys:
        for schema in sections_in(keys[name].annotation):
            lines += [
                f"## {name}",
                "",
                (schema.__doc__ or "").strip(),
                "",
                *_keys(schema, f"{name}."),
                *_nested(schema, name),
            ]
    return "\n".join(lines) + "\n"


def keys_of(tool: str) -> str:
    """The keys of another tool, as `sft convert` reads them: a table, and what is not carried over by its reason."""
    carried: dict[tuple[str, str], list[str]] = {}
    dropped: dict[str, list[str]] = {}
    for key, row in TOOLS[tool][1].items():
        default = f"its default, {json.dumps(row.default)}, is written" if row.default is not None else ""
        note = html.escape("; ".join(filter(None, [row.note, default])), quote=False)
        keys = carried.setdefault((row.to, note), []) if row.to else dropped.setdefault(note, [])
        keys.append(f"`{key}`")
    lines = ["## Keys", "", f"| {tool} | here | what differs |", "|---|---|---|"]
    lines += [f"| {', '.join(keys)} | `{to}` | {note} |" for (to, note), keys in carried.items()]
    lines += ["", "## Not carried over", ""]
    return "\n".join([*lines, *(f"- {', '.join(keys)}: {note}" for note, keys in dropped.items())])


def _nested(schema: type[Section], prefix: str) -> Iterator[str]:
    shown: dict[type[Section], str] = {}
    for name, field in schema.model_fields.items():
        for inner in sections_in(field.annotation):
            yield from [f"### {prefix}.{name}", ""]
            if inner in shown:
                yield from [f"The keys of [{shown[inner]}](#{shown[inner].replace('.', '')}).", ""]
                continue
            shown[inner] = f"{prefix}.{name}"
            yield from [(inner.__doc__ or "").strip(), "", *_keys(inner, f"{prefix}.{name}.")]
            yield from _nested(inner, f"{prefix}.{name}")


def _keys(schema: type[Section], prefix: str = "", only: list[str] | None = None) -> Iterator[str]:
    for name, field in schema.model_fields.items():
        if only is not None and name not in only:
            continue
        default = (
            "required" if field.default is PydanticUndefined and field.default_factory is None else _default(field)
        )
        resume = _RESUME[changes.on_resume(f"{prefix}{name}").kind]
        yield f"`{name}` ({_type(field.annotation)}; {default}; {resume})"
        yield f":   {_escaped(field.description or '')}"
        yield ""


def _escaped(text: str) -> str:
    """On one line, with angle brackets outside code as text, and links to the pages it names."""
    parts = " ".join(text.split()).split("`")
    text = "`".join(part if number % 2 else html.escape(part, quote=False) for number, part in enumerate(parts))
    return re.sub(r"docs/([\w-]+\.md)", r"[docs/\1](../\1)", text)


def _default(field: Any) -> str:
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Section):
        value = value.model_dump(mode="json")
    words = {None: "null", True: "true", False: "false"}.get(value) if isinstance(value, bool | NoneType) else None
    return f"default `{words or value}`"


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments) if len(arguments) < 9 else "one of a list of names"
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_type(one) for one in arguments if one is not NoneType))
    if origin in (list, tuple, frozenset):
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return f"mapping of {_type(arguments[0])} to {_type(arguments[1])}"
    if isinstance(annotation, type):
        names = {str: "text", int: "integer", float: "number", bool: "true or false"}
        return names.get(annotation, annotation.__name__)
    return "text"
