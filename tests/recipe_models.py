"""Stand-ins for what the shipped recipes download: models of the published shapes or shrunk, tokenizers, and rows in the same columns.

Hidden sizes, special tokens and columns are those of the published models and datasets. Text and weights are made here.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ATTENTION = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
)
ENTRIES = 640
"""Rows of a shrunken model's embedding; its tokenizer has fewer tokens."""
SMALL = dict(zip(ATTENTION, (64, 2, 4, 2, 128, ENTRIES), strict=True))
SMALL |= {"max_position_embeddings": 2048, "initializer_range": 0.12}


@dataclass(frozen=True)
class Tokens:
    """What a published tokenizer has besides its text."""

    special: tuple[str, ...]
    bos: str | None = None
    eos: str | None = None
    pad: str | None = None
    template: str | None = None
    """The file of the same template that TRL ships."""
    in_config: tuple[str | None, str | None, str | None] = (None, None, None)
    """What config.json calls BOS, EOS and padding, which need not be what the tokenizer says."""


END = "<|endoftext|>"
QWEN = Tokens((END, "<|im_start|>", "<|im_end|>"), None, END, END, "qwen2_5.jinja", (END, END, None))
QWEN3 = Tokens((*QWEN.special, "<think>", "</think>"), None, END, END, "qwen3.jinja", (END, END, None))
BEGIN_TEXT, END_TEXT, PAD_TEXT = "<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>"
# Its config.json knows BOS; here it does not, and the trainer changes the live model's.
LLAMA = Tokens((BEGIN_TEXT, END_TEXT, PAD_TEXT, "<|eot_id|>"), BEGIN_TEXT, END_TEXT)
GEMMA = Tokens(
    ("<pad>", "<eos>", "<bos>", "<unk>", "<end_of_turn>"), "<bos>", "<eos>", "<pad>", None, ("<bos>", "<eos>", "<pad>")
)
MISTRAL = Tokens(
    ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[control_768]"), "<s>", "</s>", None, None, ("<s>", "</s>", None)
)
SMOLLM3 = Tokens(
    (*LLAMA.special, "<|im_start|>", "<|im_end|>"), BEGIN_TEXT, END_TEXT, None, None, (BEGIN_TEXT, END_TEXT, PAD_TEXT)
)


@dataclass(frozen=True)
class Published:
    """A published model, and how it is shrunk so that what is particular about its architecture still happens."""

    model_type: str
    sizes: tuple[int, ...]
    """In the order of ATTENTION."""
    tokens: Tokens
    tied: bool = False
    more: dict[str, Any] = field(default_factory=dict)
    """Other keys of its config.json that decide its size."""
    shrunk: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] = field(default_factory=dict)
    """Of a model that also sees: the configuration of its eyes, which text does not train."""

    def config(self, small: bool) -> dict[str, Any]:
        """What config.json holds."""
        # The first entries of a vocabulary here are its special tokens; larger vocabularies hold these ids too.
        named = zip(("bos_token_id", "eos_token_id", "pad_token_id"), self.tokens.in_config, strict=True)
        ids = {name: token and self.tokens.special.index(token) for name, token in named}
        text = dict(zip(ATTENTION, self.sizes, strict=True)) | {"max_position_embeddings": 32768} | ids | self.more
        if small:
            text |= SMALL | self.shrunk
        if not self.vision:
            return text | {"model_type": self.model_type, "tie_word_embeddings": self.tied}
        vision = self.vision | (SMALL_VISION if small else {})
        image = {
            "image_token_index": 5,
            "boi_token_index": 6,
            "eoi_token_index": 7,
            "mm_tokens_per_image": 4 if small else 256,
        }
        return {
            "model_type": self.model_type,
            "text_config": text | {"model_type": f"{self.model_type}_text"},
            "vision_config": vision,
        } | image


EXPERTS = {
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
FEW_EXPERTS = {"head_dim": 16, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
# A window that is shorter than a document, and a layer of each kind.
WINDOW = {"head_dim": 32, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
EYES = {"model_type": "siglip_vision_model", "hidden_size": 1152, "num_hidden_layers": 27, "num_attention_heads": 16}
EYES |= {"intermediate_size": 4304, "image_size": 896, "patch_size": 14, "vision_use_head": False}
SMALL_VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "image_size": 56,
}
MODELS = {
    "Qwen/Qwen2.5-0.5B": Published("qwen2", (896, 24, 14, 2, 4864, 151936), QWEN, tied=True),
    "Qwen/Qwen2.5-3B": Published("qwen2", (2048, 36, 16, 2, 11008, 151936), QWEN, tied=True),
    "Qwen/Qwen2.5-7B": Published("qwen2", (3584, 28, 28, 4, 18944, 152064), QWEN),
    "Qwen/Qwen3-4B-Base": Published(
        "qwen3", (2560, 36, 32, 8, 9728, 151936), QWEN3, True, {"head_dim": 128}, {"head_dim": 32}
    ),
    "Qwen/Qwen3-8B-Base": Published(
        "qwen3", (4096, 36, 32, 8, 12288, 151936), QWEN3, False, {"head_dim": 128}, {"head_dim": 32}
    ),
    "Qwen/Qwen3-30B-A3B-Base": Published(
        "qwen3_moe", (2048, 48, 32, 4, 6144, 151936), QWEN3, False, EXPERTS, FEW_EXPERTS
    ),
    "meta-llama/Llama-3.1-8B": Published("llama", (4096, 32, 32, 8, 14336, 128256), LLAMA),
    "google/gemma-3-1b-pt": Published(
        "gemma3_text", (1152, 26, 4, 1, 6912, 262144), GEMMA, True, {"head_dim": 256, "sliding_window": 512}, WINDOW
    ),
    "google/gemma-3-4b-pt": Published(
        "gemma3", (2560, 34, 8, 4, 10240, 262208), GEMMA, True, {"head_dim": 256, "sliding_window": 1024}, WINDOW, EYES
    ),
    "mistralai/Mistral-7B-v0.3": Published(
        "mistral", (4096, 32, 32, 8, 14336, 32768), MISTRAL, False, {"sliding_window": None}
    ),
    # One layer with rotary positions and one without.
    "HuggingFaceTB/SmolLM3-3B-Base": Published(
        "smollm3", (2048, 36, 16, 4, 11008, 128256), SMOLLM3, True, {}, {"no_rope_layers": [1, 0]}
    ),
}
"""By the name on the hub."""


def model_folder(name: str, folder: Path, small: bool) -> Path:
    """A model's config.json in its published size, or a shrunken model with weights and a tokenizer like its own."""
    folder.mkdir(parents=True)
    published = MODELS[name]
    (folder / "config.json").write_text(
        json.dumps(published.config(small) | {"dtype": "float32" if small else "bfloat16"})
    )
    _write_tokenizer(folder, published.tokens)
    if small:
        _write_weights(folder)
    else:
        import numpy as np
        from safetensors.numpy import save_file

        save_file({"no.weights": np.zeros(1, np.float32)}, folder / "model.safetensors")
    return folder


def _write_weights(folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)


def _write_tokenizer(folder: Path, tokens: Tokens) -> None:
    import importlib.util

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=ENTRIES - 8,
        special_tokens=list(tokens.special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([line for count in range(60) for line in _exchange(random.Random(count))], trainer)
    if tokens.bos:
        begin = (tokens.bos, tokenizer.token_to_id(tokens.bos))
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{tokens.bos} $A", special_tokens=[begin])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
    }
    named = {"bos_token": tokens.bos, "eos_token": tokens.eos, "pad_token": tokens.pad}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings | {name: token for name, token in named.items() if token})
    )
    if tokens.template:
        package = importlib.util.find_spec("trl")
        assert package is not None
        assert package.origin is not None
        template = Path(package.origin).parent / "chat_templates" / tokens.template
        (folder / "chat_template.jinja").write_text(template.read_text(encoding="utf-8"), encoding="utf-8")


# Rows


def _exchange(generator: random.Random) -> tuple[str, str]:
    first, second = generator.randrange(2, 60), generator.randrange(2, 60)
    return f"What is {first} and {second} together?", f"{first} and {second} are {first + second} together."


def _messages(generator: random.Random, system: str = "") -> list[dict[str, str]]:
    turns = [{"role": "system", "content": system}] if system else []
    for _ in range(generator.choice((1, 1, 2, 3))):
        question, answer = _exchange(generator)
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return turns


def _tulu(number: int, generator: random.Random) -> dict[str, Any]:
    return {
        "id": f"row_{number}",
        "messages": _messages(generator, "Add." * (number % 9 == 0)),
        "source": "ai2-adapt-dev/made_here",
    }


def _smol_smoltalk(number: int, generator: random.Random) -> dict[str, Any]:
    return {"messages": _messages(generator, "Answer in one sentence." * (number % 5 == 0)), "source": "made-here"}


def _ultrachat(number: int, generator: random.Random) -> dict[str, Any]:
    messages = _messages(generator)
    return {"prompt": messages[0]["content"], "prompt_id": f"{number:064x}", "messages": messages}


def _smoltalk2(number: int, generator: random.Random) -> dict[str, Any]:
    arguments = {
        "custom_instructions": "Answer in one sentence." * (number % 4 == 0),
        "enable_thinking": False,
        "python_tools": [],
        "xml_tools": [],
    }
    return {"messages": _messages(generator), "chat_template_kwargs": arguments, "source": "made-here_no_think"}


def _infinity_instruct(number: int, generator: random.Random) -> dict[str, Any]:
    names = {"user": "human", "assistant": "gpt"}
    turns = [{"from": names[turn["role"]], "value": turn["content"]} for turn in _messages(generator)]
    label = {"ability_en": ["addition"], "cate_ability_en": ["mathematics"]}
    return {"id": number, "conversations": turns, "label": label, "langdetect": "en", "source": "made_here"}


DATASETS = {
    "allenai/tulu-3-sft-mixture": _tulu,
    "HuggingFaceTB/smol-smoltalk": _smol_smoltalk,
    "HuggingFaceH4/ultrachat_200k": _ultrachat,
    "HuggingFaceTB/smoltalk2": _smoltalk2,
    "BAAI/Infinity-Instruct": _infinity_instruct,
}
"""A row in a dataset's columns, by its name on the hub."""


def data_file(name: str, file: Path, count: int, seed: int) -> Path:
    """Rows in the columns of a dataset on the hub, in the file format that it has there."""
    import pyarrow
    from pyarrow import parquet

    rows = [DATASETS[name](number, random.Random(seed * 100_000 + number)) for number in range(count)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file


def local_recipe(recipe: Path, folder: Path, rows: int) -> Path:
    """A shipped recipe with a shrunken model and rows made here in place of the hub's, and without evaluation and trackers."""
    text = yaml.safe_load(recipe.read_text())
    name = text["model"]["name_or_path"]
    if not (folder / "model").exists():
        model_folder(name, folder / "model", small=True)
    text["model"] |= {"name_or_path": str(folder / "model"), "revision": None}
    for key in ("train", "held_out"):
        for number, source in enumerate(text["data"].get(key, ())):
            file = data_file(
                source["path"], folder / f"{key}{number}.parquet", rows, number + 100 * (key == "held_out")
            )
            kept = {name: source[name] for name in source.keys() - {"name", "revision", "split", "rows"}}
            text["data"][key][number] = kept | {"path": str(file)}
    text.pop("tracking", None)
    text["eval"], text["output_dir"] = {"chat": False}, str(folder / "outputs")
    file = folder / recipe.name
    file.write_text(yaml.safe_dump(text))
    return file
