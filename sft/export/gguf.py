"""Convert a model to GGUF with llama.cpp's converter, and check the file with llama.cpp's own reader."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from sft.errors import ExportError
from sft.export import llama_cpp
from sft.export.serving import sampling
from sft.export.source import Exported, read_config

CONVERTER = "convert_hf_to_gguf.py"
GGUF = "model.gguf"
_OUTTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
_REMEDIES = (
    f"Install a module that is missing: {sys.executable} -m pip install sentencepiece (google is protobuf). A tokenizer.model that is "
    "missing lies in the base model's folder: copy it into final/ and add --accept-edits. A tokenizer trained from scratch, as the demo's "
    f"is, needs {llama_cpp.PACKAGE} for its comparison. Or use --to vllm or --to merged."
)
_OPTIONS = {
    "temperature": "--temp",
    "top_k": "--top-k",
    "top_p": "--top-p",
    "min_p": "--min-p",
    "repetition_penalty": "--repeat-penalty",
}
"""llama-server's options, by transformers' names."""
_UNKNOWN = "pre-tokenizer was not recognized"
_NAMED = """\
import runpy, sys
from pathlib import Path

name, sys.argv = sys.argv[1], sys.argv[2:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
from conversion.base import TextModel

TextModel.get_vocab_base_pre = lambda *_: name
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs the converter with the name of a pre-tokenizer, for which it has no option."""
_EOS, _TEMPLATE = "tokenizer.ggml.eos_token_id", "tokenizer.chat_template"


def find_converter() -> Path:
    """llama.cpp's converter on PATH, or in the folder that LLAMA_CPP names. Raises ExportError where it is in neither."""
    found = shutil.which(CONVERTER) or shutil.which(CONVERTER, path=os.environ.get("LLAMA_CPP"), mode=os.F_OK)
    if found is None:
        raise ExportError(
            f"GGUF needs llama.cpp's {CONVERTER}, which is neither on PATH nor in the folder that LLAMA_CPP names. "
            "Clone https://github.com/ggml-org/llama.cpp and set LLAMA_CPP to that folder. The converter runs in this "
            f"environment and needs one more package: {sys.executable} -m pip install sentencepiece. Do not install "
            "llama.cpp's own requirements here: they replace torch and transformers."
        )
    return Path(found).resolve()


class GgufModel:
    """model.gguf for llama.cpp. Raises ExportError where the converter is missing, or knows no such tokenizer or architecture."""

    def __init__(self, source: Exported, name: str | None) -> None:
        self.name = name or source.title
        self.converter = find_converter()
        if source.holds_model:
            check_convertible(self.converter, source.folder)

    def write(self, folder: Path, tokenizer: Any) -> None:
        """Replace the folder's safetensors by model.gguf, with errors as `convert`."""
        convert(self.converter, folder, tokenizer, self.name)

    def usage(self, folder: Path) -> str:
        """What the user reads."""
        options = " ".join(f"{_OPTIONS[key]} {value:g}" for key, value in sampling(folder).items())
        command = (
            f"llama-server -m {shlex.quote(str(folder / GGUF))} --alias {shlex.quote(self.name)} --jinja {options}"
        )
        compared = (
            f"pip install {llama_cpp.PACKAGE}, and an export also lets llama.cpp load the file and compare tokens.\n"
        )
        return f"{'' if llama_cpp.is_installed() else compared}Serve it with llama.cpp:\n  {command}"


def check_convertible(converter: Path, folder: Path) -> None:
    """Convert the vocabulary alone, which takes seconds where the weights take minutes.

    Raises ExportError where llama.cpp knows no such tokenizer or architecture, or a package is missing.
    """
    with tempfile.TemporaryDirectory() as scratch:
        _run(converter, folder, Path(scratch) / GGUF, "--vocab-only")


def convert(converter: Path, folder: Path, tokenizer: Any, name: str) -> None:
    """Replace a folder's safetensors by one GGUF file that holds the same weights, and `name`.

    Raises ExportError where the conversion failed, or the file is not the model.
    """
    config = read_config(folder, "config.json")
    dtype = _OUTTYPES.get(str(config.get("dtype") or config.get("torch_dtype")), "auto")
    _run(converter, folder, folder / GGUF, "--outtype", dtype, "--model-name", name)
    quants, reader = _read(converter, folder / GGUF)
    _write_scores(reader, read_config(folder, "tokenizer.json"))
    _leave_out_bos(reader, tokenizer)
    fault = _fault(folder, tokenizer, quants, reader)
    if fault is None and llama_cpp.is_installed():
        fault = llama_cpp.fault(folder / GGUF, tokenizer)
    if fault is not None:
        raise ExportError(f"{CONVERTER} wrote a GGUF file that is not the model: {fault}. Nothing was exported.")
    for path in folder.glob("model*.safetensors*"):
        path.unlink()


def _write_scores(reader: Any, tokenizer: dict[str, Any]) -> None:
    """Give each token of a SentencePiece vocabulary the rank of its merge, which llama.cpp merges by.

    Without tokenizer.model, which transformers 5 does not save, the converter writes one score for all tokens: texts become other tokens.
    """
    scores, merges = reader.fields.get("tokenizer.ggml.scores"), (tokenizer.get("model") or {}).get("merges") or []
    if scores is None or len(set(scores.contents())) > 1:
        return
    ids = {token: number for number, token in enumerate(reader.fields["tokenizer.ggml.tokens"].contents())}
    for rank, merge in reversed(list(enumerate(merges))):
        token = ids["".join(merge.split(" ") if isinstance(merge, str) else merge)]
        scores.parts[scores.data[token]][0] = -rank
    reader.data.flush()


def _leave_out_bos(reader: Any, tokenizer: Any) -> None:
    """Have no BOS put before chats whose template writes none: llama.cpp adds it to every prompt, and the training did not."""
    adds = reader.fields.get("tokenizer.ggml.add_bos_token")
    if adds is not None and tokenizer.chat_template and not _begins_with_bos(tokenizer):
        adds.parts[adds.data[0]][0] = False
        reader.data.flush()


def _begins_with_bos(tokenizer: Any) -> bool:
    """Whether the chat template, which the training has checked with such a message, writes BOS."""
    chat = [{"role": "user", "content": "Hi"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    return bool(ids[0] == tokenizer.bos_token_id)


def _run(converter: Path, folder: Path, target: Path, *options: str) -> None:
    done = _start([str(converter)], folder, target, *options)
    byte_fallback = (read_config(folder, "tokenizer.json").get("model") or {}).get("byte_fallback")
    can_compare = llama_cpp.is_installed() and (converter.parent / "conversion").is_dir()
    if _UNKNOWN in done.stderr and not byte_fallback and can_compare:
        # The converter knows tokenizers by a checksum of what they make of one text. llama.cpp itself compares the tokens afterwards.
        done = _start(["-c", _NAMED, _pre_tokenizer(folder), str(converter)], folder, target, *options)
    if done.returncode == 0 and target.is_file():
        return
    last = ((done.stderr or done.stdout).strip().splitlines() or ["it printed nothing"])[-1]
    raise ExportError(f"{converter} ended with status {done.returncode}: {last}. Nothing was exported. {_REMEDIES}")


def _start(words: list[str], folder: Path, target: Path, *options: str) -> subprocess.CompletedProcess[str]:
    # The converter imports modules from its own folder, which a safe path would leave out.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    with tempfile.TemporaryDirectory() as scratch:
        # It writes what it makes of the folder's name into the file, and `folder` has a temporary one.
        named = Path(scratch) / "model"
        named.symlink_to(folder.resolve())
        words = [sys.executable, *words, str(named), "--outfile", str(target), *options]
        return subprocess.run(words, capture_output=True, text=True, check=False, env=environment)


def _pre_tokenizer(folder: Path) -> str:
    """llama.cpp's name of the pre-tokenizer that a tokenizer trained from scratch most likely has."""
    splits = json.dumps(read_config(folder, "tokenizer.json").get("pre_tokenizer"))
    return "llama-bpe" if "{1,3}" in splits else "qwen2" if "(?i:" in splits else "gpt-2"


def _fault(folder: Path, tokenizer: Any, quants: Any, reader: Any) -> str | None:
    """How the GGUF file differs from the folder's safetensors and tokenizer; None if it does not.

    Some weights change their order on the way, so all are counted, and the embeddings compared.
    """
    import numpy as np
    from safetensors import safe_open

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

        return quants, GGUFReader(path, "r+")
    except ImportError:
        raise ExportError(
            f"The GGUF file cannot be checked: llama.cpp's Python package gguf is neither in {beside} nor installed. "
            f"Install it: {sys.executable} -m pip install gguf."
        ) from None
    except (ValueError, KeyError, IndexError) as error:
        raise ExportError(f"{CONVERTER} wrote a file that is no GGUF: {error}. Nothing was exported.") from None
    finally:
        sys.path.remove(beside)
