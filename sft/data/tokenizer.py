"""Loads the tokenizer, and decides and checks its chat template, padding and end-of-turn token before any weight loads.

Keeps the promise that the model learns to stop: the end-of-turn token is trained, stops generation, and is not the padding token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sft.data.template_checks import end_of_turn
from sft.errors import ModelError, did_you_mean
from sft.hub.names import BUILTIN, looks_local, model_path
from sft.hub.remote_code import HOW_TO_ALLOW, is_refusal
from sft.recipe.load import find_file
from sft.recipe.schema import Recipe

TEMPLATES = Path(__file__).parent / "chat_templates"
CHOICES = (
    "model.chat_template: `chatml` (needs <|im_start|> and <|im_end|>, if need be in model.new_tokens), `plain` (words for roles, the "
    "tokenizer's own EOS), or a .jinja file."
)
"""What to do about a missing chat template."""

_PADDING_ALONE = re.compile(r"^\W*pad\W*$", re.IGNORECASE)
_PADDING = re.compile(r"(?<![^\W_])pad(ding)?(?![^\W_])", re.IGNORECASE)
_UNUSED = re.compile(r"endoftext|end_of_text|reserved|unused|extra", re.IGNORECASE)
_MEDIA = re.compile(r"vision|image|video|audio", re.IGNORECASE)


def find_chat_template(name: str) -> str:
    """The text of a .jinja file, or of one of sft/data/chat_templates by name. Raises ModelError where there is none."""
    shipped = TEMPLATES / f"{name}.jinja"
    path = shipped if shipped.is_file() else find_file(name)
    if not path.is_file():
        names = sorted(file.stem for file in TEMPLATES.glob("*.jinja"))
        raise ModelError(
            f"model.chat_template={name}: there is no such file{did_you_mean(name, names, '.')} "
            f"Give a .jinja file, or one of: {', '.join(names)}."
        )
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"model.chat_template={name}: the file cannot be read as UTF-8 text: {error}.") from None


def read_tokenizer(recipe: Recipe) -> Any:
    """The model's tokenizer as it is. Raises ModelError where it cannot be loaded."""
    from transformers import AutoTokenizer

    model, path = recipe.model, model_path(recipe)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, revision=model.revision, trust_remote_code=model.trust_remote_code
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        if is_refusal(error):
            raise ModelError(
                f"model.name_or_path={model.name_or_path}: its tokenizer_config.json names code of its own (auto_map), which is not run "
                f"unless the recipe says so. {HOW_TO_ALLOW}"
            ) from None
        where = "its folder" if looks_local(path) or model.name_or_path == BUILTIN else "the hub"
        raise ModelError(
            f"The tokenizer of {model.name_or_path} cannot be loaded from {where}: {str(error).splitlines()[0]}"
        ) from None
    if not tokenizer.is_fast:
        raise ModelError(
            f"The tokenizer of {model.name_or_path} has no fast version (tokenizer.json), whose character offsets the loss mask needs."
        )
    return tokenizer


def load_tokenizer(recipe: Recipe) -> Any:
    """A transformers tokenizer with what the recipe says of it.

    `eos_token` is the end of the assistant's turn if there is a chat template, `pad_token` is another token, and padding is on the
    right, so that position ids start at 0 as they did in pretraining. Raises ModelError where it cannot be loaded, or lacks something
    that the recipe does not name.
    """
    model, tokenizer = recipe.model, read_tokenizer(recipe)
    _add_new_tokens(tokenizer, recipe)
    for key in ("eos_token", "pad_token"):
        token = getattr(model, key)
        if token is not None and token not in tokenizer.get_vocab():
            raise ModelError(
                f"model.{key}={token} is not in the tokenizer's vocabulary. Its special tokens: "
                f"{', '.join(list(tokenizer.all_special_tokens)[:8])}. A new one is added by model.new_tokens."
            )
        if token is not None:
            setattr(tokenizer, key, token)
    _settle_template(tokenizer, recipe)
    _settle_padding(tokenizer, recipe)
    tokenizer.padding_side = "right"
    return tokenizer


def _add_new_tokens(tokenizer: Any, recipe: Recipe) -> None:
    known = [token for token in recipe.model.new_tokens if token in tokenizer.get_vocab()]
    if known:
        raise ModelError(
            f"model.new_tokens: {', '.join(known)}: in the tokenizer's vocabulary already. Leave it out, it can be used as it is."
        )
    if recipe.model.new_tokens:
        tokenizer.add_special_tokens(
            {"additional_special_tokens": list(recipe.model.new_tokens)}, replace_extra_special_tokens=False
        )


def _settle_template(tokenizer: Any, recipe: Recipe) -> None:
    """Take the recipe's chat template or the tokenizer's own, and make the token that ends its turns the EOS."""
    model = recipe.model
    if model.chat_template is not None:
        tokenizer.chat_template = find_chat_template(model.chat_template)
    if isinstance(tokenizer.chat_template, dict):
        names = tokenizer.chat_template
        if "default" not in names:
            raise ModelError(
                f"{model.name_or_path} has several chat templates ({', '.join(names)}) and none called default. Save one as a .jinja file, "
                "and name that in model.chat_template."
            )
        tokenizer.chat_template = names["default"]
    if tokenizer.chat_template is not None:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end_of_turn(tokenizer))
    elif tokenizer.eos_token is None:
        raise ModelError(
            f"{model.name_or_path} has neither a chat template nor an end-of-sequence token: a model trained so never learns to stop. Set "
            "model.eos_token."
        )
    elif (recipe.eval.tasks or recipe.eval.suite) and recipe.eval.apply_chat_template:
        raise ModelError(
            f"{model.name_or_path} has no chat template, which conversations need, and the evaluation (eval.apply_chat_template=true). Set "
            f"{CHOICES} For a model of plain text set eval.apply_chat_template=false."
        )


def _settle_padding(tokenizer: Any, recipe: Recipe) -> None:
    """Keep the tokenizer's padding token; replace one that is the end-of-turn token, which padding would keep from being trained."""
    stop, name = tokenizer.eos_token_id, recipe.model.name_or_path
    if tokenizer.pad_token_id not in (None, stop):
        return
    found = padding_choice(tokenizer, stop)
    if tokenizer.pad_token_id is not None and recipe.model.pad_token is None and found is not None:
        tokenizer.pad_token = found
        tokenizer.padding_note = (
            f"Padding: {found}, because {name} pads with its end-of-turn token {tokenizer.eos_token}, which is trained. Another: "
            "model.pad_token."
        )
        return
    problem = "has no padding token" if tokenizer.pad_token_id is None else "pads with the end-of-turn token"
    example = (
        f", for example {found}." if found else "; it has no other to spare, so add one: model.new_tokens=[<|pad|>]."
    )
    raise ModelError(
        f"{name} {problem}. Set model.pad_token to a token of its vocabulary other than the end-of-turn token {tokenizer.eos_token}, "
        f"which must be trained{example}"
    )


def padding_choice(tokenizer: Any, stop: int) -> str | None:
    """The special token that is best padded with: one made for it, else one that no text is written with; None if there is none."""
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    taken = {stop, tokenizer.bos_token_id}
    names = [name for name in added if tokenizer.convert_tokens_to_ids(name) not in taken and not _MEDIA.search(name)]
    for pattern in (_PADDING_ALONE, _PADDING, _UNUSED):
        for name in names:
            if pattern.search(name):
                return str(name)
    unknown = tokenizer.unk_token
    return str(unknown) if unknown in names else names[0] if names else None


def new_token_ids(tokenizer: Any, new_tokens: Sequence[str]) -> list[int]:
    """The ids of model.new_tokens."""
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[token] for token in new_tokens]


def check_vocabulary(tokenizer: Any, new_tokens: Sequence[str], rows: int, name: str) -> None:
    """Raise ModelError where a tokenizer has more tokens than the model's embedding rows, which grow for `new_tokens` alone."""
    own = max(set(tokenizer.get_vocab().values()) - set(new_token_ids(tokenizer, new_tokens))) + 1
    if own > rows:
        raise ModelError(
            f"The tokenizer of {name} has {own} tokens, and the model's embedding {rows} rows. "
            "They do not belong together: give a folder where they do."
        )
