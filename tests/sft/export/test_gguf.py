"""GGUF: what the converter lacks is named; a file that is not the model is refused. A stand-in converts with llama.cpp's writer."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from sft.errors import ExportError
from sft.export.gguf import (
    CONVERTER,
    _leave_out_bos,
    _write_scores,
    check_convertible,
    convert,
    find_converter,
)
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


@pytest.fixture(autouse=True)
def _without_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the stand-in writes is no model: llama.cpp, where it is installed, would say so. tests/slow/test_llama_cpp.py has it."""
    monkeypatch.setattr("sft.export.llama_cpp.PACKAGE", "package_that_is_not_there")


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
    convert(converter(tmp_path, WRITES.format(**SAME)), folder, AutoTokenizer.from_pretrained(folder), "mine")
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
        convert(writes, folder, AutoTokenizer.from_pretrained(folder), "mine")
    assert list(folder.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("program", "named"),
    [
        ("import sentencepiece_that_is_not_there", "No module named 'sentencepiece_that_is_not_there'"),
        ("raise SystemExit('Model FooForCausalLM is not supported')", "FooForCausalLM"),
        ("open(__import__('sys').argv[3], 'w').write('no GGUF')", "no GGUF"),
    ],
)
def test_a_conversion_that_fails_says_why_and_what_to_do(
    folder: Path, tmp_path: Path, program: str, named: str
) -> None:
    with pytest.raises(ExportError) as failed:
        convert(converter(tmp_path, program), folder, AutoTokenizer.from_pretrained(folder), "mine")
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


def test_sentencepiece_pieces_are_scored_by_the_rank_of_their_merge(tmp_path: Path) -> None:
    from gguf import GGUFReader, GGUFWriter

    def written(scores: list[float]) -> list[float]:
        writer = GGUFWriter(tmp_path / "model.gguf", "llama")
        writer.add_token_list(["<unk>", "a", "b", "ab", "c", "bc", "abc"])
        writer.add_token_scores(scores)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        reader = GGUFReader(tmp_path / "model.gguf", "r+")
        _write_scores(reader, {"model": {"merges": [["b", "c"], ["a", "b"], "a bc", ["ab", "c"]]}})
        found: list[float] = GGUFReader(tmp_path / "model.gguf").fields["tokenizer.ggml.scores"].contents()
        return found

    assert written([-1000.0] * 7) == [-1000.0, -1000.0, -1000.0, -1.0, -1000.0, 0.0, -2.0]
    own = [0.0, -1.0, -2.0, -3.0, -4.0, -5.0, -6.0]
    assert written(own) == own, "tokenizer.model's own scores stay"


def test_no_bos_is_put_before_chats_whose_template_writes_none(demo: Demo, tmp_path: Path) -> None:
    from gguf import GGUFReader, GGUFWriter

    def adds_bos(tokenizer: object) -> bool:
        writer = GGUFWriter(tmp_path / "model.gguf", "llama")
        writer.add_add_bos_token(True)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        _leave_out_bos(GGUFReader(tmp_path / "model.gguf", "r+"), tokenizer)
        return bool(GGUFReader(tmp_path / "model.gguf").fields["tokenizer.ggml.add_bos_token"].contents())

    tokenizer = AutoTokenizer.from_pretrained(demo.model)
    tokenizer.bos_token = "<|im_start|>"
    assert adds_bos(tokenizer), "the template begins with it"
    tokenizer.bos_token = "<|endoftext|>"
    assert not adds_bos(tokenizer)
    tokenizer.chat_template = None
    assert adds_bos(tokenizer), "there is no chat to go by"
