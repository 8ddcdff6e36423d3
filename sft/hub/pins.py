"""Which commit each name on the hub stood for, recorded with the run, and the lines that would keep it so.

A branch such as `main` is another model or dataset tomorrow: a recipe that is to give the same result again names commits.
"""

from __future__ import annotations

from typing import Any

from sft.hub.model_facts import ModelFacts
from sft.hub.names import hub_commit, is_commit, is_on_hub
from sft.recipe.schema import Recipe


def pinned(recipe: Recipe, model: ModelFacts) -> Recipe:
    """The recipe with the commit of its model that was looked up, so that whatever is loaded of it is of one commit."""
    if model.commit is None:
        return recipe
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"revision": model.commit})})


def hub_revisions(recipe: Recipe, model: ModelFacts) -> list[dict[str, Any]]:
    """What the recipe takes from the hub: `key`, `name`, `revision` as written, and the `commit` it stands for, None where unknown."""
    found: list[dict[str, Any]] = []

    def add(key: str, name: str, revision: str | None, commit: str | None) -> None:
        found.append({"key": key, "name": name, "revision": revision, "commit": commit})

    if model.commit is not None:
        add("model", recipe.model.name_or_path, recipe.model.revision, model.commit)
    for section, sources in (("data.train", recipe.sources), ("data.held_out", recipe.held_out_sources)):
        for source in sources:
            if is_on_hub(source):
                commit = source.revision if is_commit(source.revision) else hub_commit(source)
                add(section, source.path, source.revision, commit)
    return found


def pin_lines(revisions: list[dict[str, Any]]) -> list[str]:
    """What to write into the recipe, for each name that is not pinned to a commit."""
    lines = []
    for one in revisions:
        name, revision, commit = one["name"], one["revision"], one["commit"]
        where = "model.revision" if one["key"] == "model" else f"revision of {name} in {one['key']}"
        now = f"stands for {commit} today; to keep it" if commit else "cannot be looked up on the hub now; to pin it"
        if not is_commit(revision):
            lines.append(f"Not pinned: {name} {revision or 'main'} {now}, set {where}: {commit or '<commit>'}")
    return lines
