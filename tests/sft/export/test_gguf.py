"""GGUF: what the converter lacks is named; a file that is not the model is refused. A stand-in converts with llama.cpp's writer."""

import os
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from sft.errors import ExportError
from sft.export.gguf import CONVERTER, check_convertible, convert, find_converter
from sft.hub.demo import Demo

WRITES = """\
import sys
from pathlib import Path

from gguf import GGUFWriter
from safetensors.numpy import load_file

folder, target, eos, scale, count, template = Path(sys.argv[1]), sys.argv[3], {eos}, {scale}, {count}, {template!r}
writer = GGUFWriter(target, "qwen2")
writer.add_eos_token_id(eos)
writer.add_chat_template(template or (folder / "chat_template.jinja").read_text())
weights = load_file(folder / "model.safetensors")
for name in sorted(weights)[:count]:
    writer.add_tensor(name.replace("model.embed_tokens", "token_embd"), weights[name] * scale)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
"""
SAME = {"eos": 2, "scale": 1, "count": None, "template": ""}


@pytest.fixture
def folder(demo: Demo, tmp_path: Path) -> Path:
    """The demo's model, to be converted."""
    folder = tmp_path / "model"
    folder.mkdir()
    for path in demo.model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def converter(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "llama.cpp" / CONVERTER
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def test_the_weights_lie_there_once_when_the_file_is_the_model(folder: Path, tmp_path: Path) -> None:
    convert(converter(tmp_path, WRITES.format(**SAME)), folder, AutoTokenizer.from_pretrained(folder))
    assert (folder / "model.gguf").is_file()
    assert not list(folder.glob("*.safetensors*"))


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ({"eos": 0}, "stops at token 0"),
        ({"scale": 2}, "embeddings"),
        ({"count": 5}, "weights"),
        ({"template": "{{ 1 }}"}, "chat template"),
    ],
)
def test_a_file_that_is_not_the_model_is_refused(
    folder: Path, tmp_path: Path, fault: dict[str, object], named: str
) -> None:
    writes = converter(tmp_path, WRITES.format(**(SAME | fault)))
    with pytest.raises(ExportError, match=named):
        convert(writes, folder, AutoTokenizer.from_pretrained(folder))
    assert list(folder.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("program", "named"),
    [
        ("import sentencepiece_that_is_not_there", f"{sys.executable} -m pip install sentencepiece_that_is_not_there"),
        ("from google.not_protobuf import x", "pip install protobuf"),
        ("raise NotImplementedError('BPE pre-tokenizer was not recognized - update it')", "trained from scratch"),
        ("raise SystemExit('Model FooForCausalLM is not supported')", "FooForCausalLM"),
        ("open(__import__('sys').argv[3], 'w').write('no GGUF')", "no GGUF"),
        ("pass", "printed nothing"),
    ],
)
def test_a_conversion_that_fails_says_why_and_what_to_do(
    folder: Path, tmp_path: Path, program: str, named: str
) -> None:
    with pytest.raises(ExportError) as failed:
        convert(converter(tmp_path, program), folder, AutoTokenizer.from_pretrained(folder))
    assert named in str(failed.value)


def test_the_converter_finds_the_modules_beside_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    found = converter(tmp_path, "import sys, beside; open(sys.argv[3], 'w').write('vocabulary')")
    (found.parent / "beside.py").write_text("")
    check_convertible(found, folder)


def test_a_converter_that_is_missing_is_named_with_the_package_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ExportError, match=f"{CONVERTER}.*LLAMA_CPP.*pip install sentencepiece"):
        find_converter()


@pytest.mark.slow
@pytest.mark.extra
@pytest.mark.skipif("LLAMA_CPP" not in os.environ, reason="LLAMA_CPP names no llama.cpp")
def test_the_real_converter_refuses_the_demos_tokenizer(folder: Path) -> None:
    with pytest.raises(ExportError, match="trained from scratch"):
        check_convertible(find_converter(), folder)
