"""Convert a model to GGUF with llama.cpp's converter, and check the file with llama.cpp's own reader."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from sft.errors import ExportError
from sft.export.source import read_config

CONVERTER = "convert_hf_to_gguf.py"
GGUF = "model.gguf"
_OUTTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
_PACKAGES = {"google": "protobuf", "mistral_common": "mistral-common"}
"""Names on the package index of modules that are called otherwise."""
_EOS, _TEMPLATE = "tokenizer.ggml.eos_token_id", "tokenizer.chat_template"


def find_converter() -> Path:
    """llama.cpp's converter on PATH, or in the folder that LLAMA_CPP names. Raises ExportError where it is in neither."""
    found = shutil.which(CONVERTER) or shutil.which(CONVERTER, path=os.environ.get("LLAMA_CPP"), mode=os.F_OK)
    if found is None:
        raise ExportError(
            f"--gguf needs llama.cpp's {CONVERTER}, which is neither on PATH nor in the folder that LLAMA_CPP names. "
            "Clone https://github.com/ggml-org/llama.cpp and set LLAMA_CPP to that folder. The converter runs in this "
            f"environment and needs one more package: {sys.executable} -m pip install sentencepiece. Do not install "
            "llama.cpp's own requirements here: they replace torch and transformers."
        )
    return Path(found).resolve()


def check_convertible(converter: Path, folder: Path) -> None:
    """Convert the vocabulary alone, which takes seconds where the weights take minutes.

    Raises ExportError where llama.cpp knows no such tokenizer or architecture, or a package is missing.
    """
    with tempfile.TemporaryDirectory() as scratch:
        _run(converter, folder, Path(scratch) / GGUF, "--vocab-only")


def convert(converter: Path, folder: Path, tokenizer: Any) -> None:
    """Replace a folder's safetensors by one GGUF file that holds the same weights.

    Raises ExportError where the conversion failed, or the file is not the model.
    """
    config = read_config(folder, "config.json")
    dtype = _OUTTYPES.get(str(config.get("dtype") or config.get("torch_dtype")), "auto")
    _run(converter, folder, folder / GGUF, "--outtype", dtype)
    if fault := _fault(converter, folder, tokenizer):
        raise ExportError(f"{CONVERTER} wrote a GGUF file that is not the model: {fault}. Nothing was exported.")
    for path in folder.glob("model*.safetensors*"):
        path.unlink()


def _run(converter: Path, folder: Path, target: Path, *options: str) -> None:
    words = [sys.executable, str(converter), str(folder), "--outfile", str(target), *options]
    # The converter imports modules from its own folder, which a safe path would leave out.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    if done.returncode == 0 and target.is_file():
        return
    last = ((done.stderr or done.stdout).strip().splitlines() or ["it printed nothing"])[-1]
    remedy = "Use --to vllm or --to merged."
    if missing := re.search(r"No module named '(\w+)", last):
        package = _PACKAGES.get(missing[1], missing[1])
        remedy = f"Install the package that it needs: {sys.executable} -m pip install {package}."
    elif "pre-tokenizer was not recognized" in last:
        remedy = (
            "llama.cpp knows only the tokenizers of published models; one trained from scratch, as the demo's is, cannot be converted. "
            "Use --to vllm, --to merged, or --to ollama without --gguf."
        )
    raise ExportError(f"{converter} ended with status {done.returncode}: {last}. Nothing was exported. {remedy}")


def _fault(converter: Path, folder: Path, tokenizer: Any) -> str | None:
    """How the GGUF file differs from the folder's safetensors and tokenizer; None if it does not.

    Some weights change their order on the way, so all are counted, and the embeddings compared.
    """
    import numpy as np
    from safetensors import safe_open

    quants, reader = _read(converter, folder / GGUF)
    eos, template = (reader.fields[name].contents() if name in reader.fields else None for name in (_EOS, _TEMPLATE))
    if eos != tokenizer.eos_token_id:
        return f"it stops at token {eos}, and the model at {tokenizer.eos_token_id}"
    if template is not None and template != tokenizer.chat_template:
        return "its chat template is another one"
    stored = {tensor.name: tensor for tensor in reader.tensors if not tensor.name.startswith("rope_")}
    expected, embeddings = 0, None
    for path in folder.glob("model*.safetensors"):
        with safe_open(path, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (not a dict)
                expected += int(np.prod(weights.get_slice(name).get_shape()))
                if name.endswith("embed_tokens.weight"):
                    embeddings = weights.get_tensor(name).float().numpy()
    count = sum(int(tensor.n_elements) for tensor in stored.values())
    if count != expected:
        return f"it holds {count:,} weights, and the model {expected:,}"
    tensor = stored.get("token_embd.weight")
    if embeddings is None or tensor is None:
        return None
    same = np.array_equal(quants.dequantize(tensor.data, tensor.tensor_type), embeddings)
    return None if same else "its embeddings are other numbers"


def _read(converter: Path, path: Path) -> tuple[Any, Any]:
    """llama.cpp's module for stored dtypes, and the file as its reader sees it."""
    beside = str(converter.parent / "gguf-py")
    sys.path.insert(0, beside)
    try:
        from gguf import GGUFReader, quants

        return quants, GGUFReader(path)
    except ImportError:
        raise ExportError(
            f"The GGUF file cannot be checked: llama.cpp's Python package gguf is neither in {beside} nor installed. "
            f"Install it: {sys.executable} -m pip install gguf."
        ) from None
    except (ValueError, KeyError, IndexError) as error:
        raise ExportError(f"{CONVERTER} wrote a file that is no GGUF: {error}. Nothing was exported.") from None
    finally:
        sys.path.remove(beside)
