"""What can be known of the model before its weights load: its config.json, and which files hold its weights."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

from sft.errors import ModelError
from sft.hub.model_facts import ModelFacts
from sft.hub.names import hub_answers, is_commit, model_path
from sft.hub.remote_code import check_remote_code
from sft.plan.architecture import read_architecture
from sft.recipe.schema import Recipe

_ONE_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"

_ENCODERS = frozenset(
    "bert big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta roberta-prelayernorm roc_bert roformer "
    "xlm-roberta xlm-roberta-xl xmod".split()
)
"""Types that transformers loads as causal language models too, and whose tokens see those behind them unless is_decoder is set."""

_ENCODER_DECODERS = frozenset(["t5", "mt5", "umt5", "bart", "mbart", "pegasus"])


def _hub_file(name: str, revision: str | None, file: str) -> Path | None:
    """A file of a hub repository; of a branch or tag the newest where the hub answers: the cache may hold an older commit."""
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        cached = try_to_load_from_cache(name, file, revision=revision)
        known = Path(cached) if isinstance(cached, str) else None
        if known and is_commit(revision):
            return known
        if not hub_answers():
            # What loads from here on takes the cache at once: upstream's own calls retry for a minute.
            constants.HF_HUB_OFFLINE = True
            return known
        try:
            return Path(hf_hub_download(name, file, revision=revision))
        except (HfHubHTTPError, OSError):
            if known is None:
                raise
            return known
    except HFValidationError:
        raise ModelError(
            f"model.name_or_path={name}: there is no such folder, and it is no hub id (owner/name)."
        ) from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"model.name_or_path={name}: the hub has no such model, or it needs a login (hf auth login)."
        ) from None
    except RevisionNotFoundError:
        raise ModelError(f"model.revision={revision}: the hub's {name} has no such revision.") from None
    except (HfHubHTTPError, OSError, ValueError):
        return None


def _hub_size(path: str, revision: str | None, download: bool) -> int:
    """Bytes of the weights of a hub model: of its one file, or from the index of several; 0 where neither is to be had."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if not download:
        return 0
    try:
        cached = try_to_load_from_cache(path, _ONE_FILE, revision=revision)
        if isinstance(cached, str):
            return Path(cached).stat().st_size
        index = _hub_file(path, revision, _INDEX)
        if index:
            return int(json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"])
        return (get_hf_file_metadata(hf_hub_url(path, _ONE_FILE, revision=revision)).size or 0) if hub_answers() else 0
    except (OSError, ValueError, KeyError, TypeError, HfHubHTTPError, HFValidationError, ModelError):
        return 0


def _weight_files(folder: Path) -> list[Path]:
    """The files that transformers loads of a local model: others, such as `consolidated.safetensors`, may lie beside them.

    Raises:
        ModelError: There is none, one that the index names is missing, or one holds no weights but a pointer to them.
    """
    index = folder / _INDEX
    files = [folder / _ONE_FILE]
    if not files[0].is_file() and index.is_file():
        try:
            files = [
                folder / name
                for name in sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            ]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} cannot be read: {error}. Copy it again.") from None
    elif not files[0].is_file():
        files = sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        raise ModelError(
            f"model.name_or_path={folder}: the folder holds no weights ({_ONE_FILE}, or {_INDEX} and the files that it names). Copy the "
            "model's files there."
        )
    missing = next((file.name for file in files if not file.is_file()), None)
    if missing:
        raise ModelError(
            f"model.name_or_path={folder}: {missing} is missing. Copy or download the model's files again."
        )
    if files == [folder / _ONE_FILE] and index.is_file():
        _refuse_two_models(files[0], index)
    return files


def _refuse_two_models(file: Path, index: Path) -> None:
    """Refuse a whole model beside the shards that an index names: transformers loads the former, other tools the latter."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        named = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()) - {file.name})
        if any((file.parent / name).is_file() for name in named):
            raise ModelError(
                f"model.name_or_path={file.parent}: the folder holds two sets of weights: {file.name}, and {named[0]} and whatever else "
                f"{index.name} names. Move the one that you do not mean out of the folder."
            )


def read_header(file: Path) -> dict[str, Any]:
    """What a safetensors file says of its tensors, by name; empty for a .bin file, of which only the form is checked.

    Raises:
        ModelError: The file is cut off, or holds no weights.
    """
    tensors: dict[str, Any] = {}
    size, problem = file.stat().st_size, None
    with file.open("rb") as opened:
        start = opened.read(60)
        if start.startswith(b"version https://git-lfs"):
            problem = "holds no weights, but a pointer of Git LFS to them (`git lfs pull` gets them)"
        elif not size:
            problem = "is empty"
        elif file.suffix == ".safetensors" and start[8:9] == b"{":
            length = int.from_bytes(start[:8], "little")
            opened.seek(8)
            try:
                tensors = json.loads(opened.read(min(length, size)))
                tensors.pop("__metadata__", None)
                length += 8 + max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
            except (ValueError, KeyError, TypeError, AttributeError, IndexError):
                length = max(length, size + 1)
            if size != length:
                problem = f"was cut off, or is damaged: it has {size} bytes, and its header says {length}"
        elif file.suffix == ".safetensors" or not start.startswith((b"PK", b"\x80")):
            problem = f"holds no weights: it begins with {start[:40]!r}"
        elif start.startswith(b"PK") and not is_zipfile(file):
            problem = "was cut off"
    if problem:
        raise ModelError(f"{file} {problem}. Copy or download it again.")
    return tensors


def _check_headers(files: list[Path], config: dict[str, Any]) -> None:
    """Refuse broken files, and tensors in float8 without the quantization_config that says where their scales are."""
    for file in files:
        for name, tensor in read_header(file).items():
            if str(tensor.get("dtype")).startswith("F8_") and not config.keys() & {
                "quantization_config",
                "compression_config",
            }:
                raise ModelError(
                    f"{file}: {name} is stored in {tensor['dtype']}, and config.json has no quantization_config, without which its "
                    "scales are ignored. Get the model in bfloat16, or the config.json that belongs to these weights."
                )


def _tokenizer_config(path: str, revision: str | None, download: bool) -> dict[str, Any]:
    """The model's tokenizer_config.json; empty where there is none to be read, which the tokenizer's loading tells."""
    name, local = "tokenizer_config.json", Path(path).is_dir()
    file = Path(path) / name if local else _hub_file(path, revision, name) if download else None
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _check_decoder(config: dict[str, Any], name: str) -> None:
    """Refuse a model that does not write from left to right, or of which only the decoder would load.

    Raises:
        ModelError: It is an encoder, or has one.
    """
    kind = config.get("model_type")
    pair = config.get("is_encoder_decoder") or kind in _ENCODER_DECODERS
    if pair or (kind in _ENCODERS and not config.get("is_decoder")):
        raise ModelError(
            f"model.name_or_path={name} is an encoder{'-decoder' if pair else ''} ({kind}), and only decoders (causal language models) can "
            "be trained here. Name one such as Qwen, Llama or Gemma."
        )


def inspect_model(recipe: Recipe, download: bool = True) -> ModelFacts:
    """Read the model's config.json.

    Args:
        recipe: Names the model.
        download: Fetch the file where the model is on the hub and not cached.

    Raises:
        ModelError: The model does not exist, is no decoder, its config.json is none, or it has code that may not be run.
    """
    path = model_path(recipe)
    folder = Path(path)
    if folder.is_dir():
        config_file: Path | None = folder / "config.json"
    else:
        config_file = _hub_file(path, recipe.model.revision, "config.json") if download else None
    if config_file is None:
        check_remote_code(recipe.model, path, None, {}, {})  # for what the recipe alone shows
        return ModelFacts(path)
    try:
        whole: dict[str, Any] = json.loads(config_file.read_text(encoding="utf-8"))
        config = whole.get("text_config") or whole
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{config_file} cannot be read: {error}.") from None
    if not (config.get("model_type") or whole.get("model_type")):
        raise ModelError(
            f"{config_file} has no model_type, which says what kind of model it is. Copy the model's own config.json."
        )
    commit = config_file.parent.name if config_file.parent.parent.name == "snapshots" else None
    revision = commit or recipe.model.revision
    check_remote_code(recipe.model, path, commit, whole, _tokenizer_config(path, revision, download))
    _check_decoder(config, recipe.model.name_or_path)
    local = folder.is_dir()
    dtype = config.get("dtype") or config.get("torch_dtype")
    width = 4 if dtype == "float32" else 2
    files = _weight_files(folder) if local else []
    _check_headers(files, whole)
    size = sum(file.stat().st_size for file in files) if local else _hub_size(path, revision, download)
    return ModelFacts(
        path=path,
        model_type=config.get("model_type") or whole.get("model_type"),
        dtype=dtype,
        max_position_embeddings=config.get("max_position_embeddings"),
        parameters=size // width or None,
        vocab_size=config.get("vocab_size"),
        hidden_size=config.get("hidden_size"),
        num_hidden_layers=config.get("num_hidden_layers"),
        num_attention_heads=config.get("num_attention_heads"),
        num_key_value_heads=config.get("num_key_value_heads") or config.get("num_attention_heads"),
        intermediate_size=config.get("intermediate_size"),
        sliding_window=config.get("sliding_window") if config.get("use_sliding_window", True) else None,
        architecture=read_architecture(config),
        commit=commit,
    )
