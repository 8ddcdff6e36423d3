"""Loads a GGUF file with llama.cpp, if xllamacpp is installed, and compares tokens and chat prompts with the tokenizer's. Imports no torch.

llama.cpp runs in a process of its own (this file, as a script): it logs what it likes, and may abort.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGE = "xllamacpp"
_TEXTS = ("The 3 quick brown foxes, née Müller, jump:\n\n  12 + 7 = 19.\t", "Don't! 你好, 1234567 🚀")
_CHATS = (
    [("user", 'Say {x} <b> "y"')],
    [("user", "Hi"), ("assistant", "Ho"), ("user", "1 + 1?")],
    [("system", "Be brief."), ("user", "Hi")],
)


def is_installed() -> bool:
    """Whether the check can run."""
    return importlib.util.find_spec(PACKAGE) is not None


def fault(path: Path, tokenizer: Any) -> str | None:
    """How llama.cpp reads texts or chats otherwise than the tokenizer, or why it cannot load the file; None if neither."""
    chats = list(_chats(tokenizer)) if tokenizer.chat_template else []
    special = not chats  # whether a text begins with BOS is what the chats show
    expected = [(text, list(tokenizer(text, add_special_tokens=special)["input_ids"])) for text in _TEXTS]
    request = {"texts": list(_TEXTS), "special": special, "chats": [chat for chat, _ in chats]}
    words = [sys.executable, "-P", __file__, str(path)]
    done = subprocess.run(words, input=json.dumps(request), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if " E " in line] or done.stderr.splitlines() or ["no word"]
        return f"llama.cpp ({PACKAGE} {version(PACKAGE)}) does not load it: {errors[0].strip()}"
    found = json.loads(done.stdout.splitlines()[-1])
    for (what, own), ids in zip([*expected, *chats], found, strict=True):
        if own != ids:
            same = next((at for at, (one, other) in enumerate(zip(own, ids, strict=False)) if one != other), len(own))
            parts = [tokenizer.decode(one[same : same + 3]) for one in (own, ids)]
            return f"of {what!r} llama.cpp makes other tokens than the training, {parts[1]!r} for {parts[0]!r} at token {same}"
    return None


def _chats(tokenizer: Any) -> Iterator[tuple[list[dict[str, str]], list[int]]]:
    for turns in _CHATS:
        chat = [{"role": role, "content": content} for role, content in turns]
        with suppress(Exception):  # a template may refuse a system message
            yield chat, list(tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"])


def _main(path: str) -> None:
    """Print the tokens that llama.cpp makes of the texts and chats on standard input."""
    import requests
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path, parameters.n_ctx, parameters.n_parallel, parameters.warmup = path, 512, 1, False
    parameters.n_gpu_layers, parameters.port = 0, 0
    server = xllamacpp.Server(parameters)

    def ask(where: str, **payload: Any) -> Any:
        answer = requests.post(server.listening_address + where, json=payload, timeout=60)
        answer.raise_for_status()
        return answer.json()

    asked = json.load(sys.stdin)
    prompts = [(text, asked["special"]) for text in asked["texts"]]
    prompts += [(ask("/apply-template", messages=chat)["prompt"], True) for chat in asked["chats"]]
    print(json.dumps([ask("/tokenize", content=text, add_special=special)["tokens"] for text, special in prompts]))


if __name__ == "__main__":
    _main(sys.argv[1])
