"""Chats with a model in the terminal: `sft chat outputs/tiny/latest`.

The answer is shown as it is generated. Ctrl-C stops an answer, Ctrl-D exits. From a pipe, each line is a turn.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval.chat.model import ChatFormat, Messages, find_model
from eval.tasks.output import chatter_to
from sft.errors import EvaluationError
from sft.program import exit_on_error
from sft.terminal import visible

HELP = """\
/system TEXT  start over with this system prompt; without TEXT: with none
/reset        start over
/exit         exit; so does Ctrl-D. Ctrl-C stops an answer"""

EXAMPLES = """\
  sft chat outputs/tiny/latest                   the tuned model, final/
  sft chat outputs/tiny/latest --base            the model it was trained from, through the same template
  sft chat outputs/tiny/latest --checkpoint 400
  sft chat Qwen/Qwen2.5-0.5B-Instruct --system "Answer in French." --temperature 0.7 --max-new-tokens 256

/help lists the commands. From a pipe, each line is a turn."""


class Streamer:
    """Shows text as soon as its tokens make whole characters; `generate` calls it.

    transformers' TextStreamer waits for a space, and decodes each line alone, which costs some tokenizers its indentation.
    """

    def __init__(self, chat_format: ChatFormat, show: Callable[[str], None]) -> None:
        self.chat_format, self.show = chat_format, show
        self.ids: list[int] = []
        """All generated tokens."""
        self._shown = 0
        self._prompt = True

    def put(self, value: Any) -> None:
        """Take new tokens: first those of the prompt, then one at a time."""
        if not self._prompt:
            self.ids += value.flatten().tolist()
            # Else the rest of a character comes with the next token.
            if not self.chat_format.text(self.ids).endswith("\ufffd"):
                self.end()
        self._prompt = False

    def end(self) -> None:
        """Show what is left."""
        text = self.chat_format.text(self.ids)
        self.show(text[self._shown :])
        self._shown = len(text)


@dataclass
class Conversation:
    """The turns so far, and the model that answers."""

    model: Any
    chat_format: ChatFormat
    generation: Any
    """transformers' GenerationConfig, with the length of an answer."""

    messages: Messages = field(default_factory=list)

    def begin(self, system: str | None) -> None:
        """Start over."""
        messages = [{"role": "system", "content": system}] if system else []
        if messages:  # refused where the template drops it
            self.chat_format.render([*messages, {"role": "user", "content": "?"}])
        self.messages = messages

    def command(self, line: str) -> str:
        """Run a line that starts with a slash; returns a note for the user."""
        name, _, rest = line.partition(" ")
        if name == "/reset":
            system = next((turn["content"] for turn in self.messages[:1] if turn["role"] == "system"), None)
            self.begin(system)
            return "(a new conversation)"
        if name == "/system":
            self.begin(rest.strip() or None)
            return f"(a new conversation, {'with this' if rest.strip() else 'without'} system prompt)"
        return HELP if name == "/help" else f"({name} is not a command)\n{HELP}"

    def fit(self, question: str) -> tuple[Messages, list[int]]:
        """The conversation with a new question, and its token ids, which leave room for an answer."""
        messages = [*self.messages, {"role": "user", "content": question}]
        ids, context = self.chat_format.render(messages), self.chat_format.context
        if context is not None and len(ids) > context - self.generation.max_new_tokens:
            raise EvaluationError(f"The context of {context} tokens is full. /reset starts over.")
        return messages, ids

    def answer(self, question: str, show: Callable[[str], None]) -> Iterator[str]:
        """Answer a question; yields notes for the user."""
        import torch

        chat_format = self.chat_format
        messages, prompt = self.fit(question)
        streamer, stopped = Streamer(chat_format, show), False
        ids = torch.tensor([prompt], device=self.model.device)
        mask = torch.ones_like(ids)
        try:
            self.model.generate(ids, attention_mask=mask, generation_config=self.generation, streamer=streamer)
        except KeyboardInterrupt:
            streamer.end()
            stopped = True
        if streamer.ids:
            show("\n")
            self.messages = [*messages, {"role": "assistant", "content": chat_format.text(streamer.ids)}]
        if stopped or not streamer.ids:
            yield "(stopped)"
        elif streamer.ids[-1] not in chat_format.stops:
            yield f"(cut at {len(streamer.ids)} tokens before it ended; --max-new-tokens raises the limit)"


def lines() -> Iterator[str]:
    """The user's lines, until the input ends."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\r\n") for line in sys.stdin)
        return
    import readline  # noqa: F401 - line editing and history for input()

    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            print("\n(Ctrl-D exits)", file=sys.stderr)
        except EOFError:
            print()
            return


def converse(conversation: Conversation) -> None:
    """Chat until the user exits."""

    def show(text: str) -> None:
        print(visible(text), end="", flush=True)  # without control sequences for the terminal

    for line in filter(str.strip, lines()):
        if line.strip() == "/exit":
            return
        try:
            commands = [conversation.command(line.strip())] if line.startswith("/") else None
            for note in commands or conversation.answer(line, show):
                print(note, file=sys.stderr, flush=True)
        except EvaluationError as error:
            print(f"({error})", file=sys.stderr, flush=True)
        except KeyboardInterrupt:  # before the first token
            print("(stopped)", file=sys.stderr, flush=True)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line; a mistake in it exits with status 2."""
    parser = argparse.ArgumentParser(
        prog="sft chat", epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    option = parser.add_argument
    option("model", help="a run's folder, a model's, or an id on the hub")
    option("--base", action="store_true", help="the model that the run was trained from")
    option("--trust-remote-code", action="store_true", help="run the Python files of the run's model")
    option("--checkpoint", type=int, metavar="N", help="the run's checkpoint of step N")
    option("--system", metavar="TEXT", help="system prompt; default: the recipe's eval.system_instruction")
    option("--max-new-tokens", type=int, metavar="N", help="longest answer; default: 1024, or half the context")
    option("--temperature", type=float, metavar="T", help="0: greedy decoding. Default: as saved with the model")
    found = parser.parse_args(arguments)
    if found.max_new_tokens is not None and found.max_new_tokens < 1:
        parser.error("--max-new-tokens must be at least 1")
    if found.temperature is not None and not 0 <= found.temperature < float("inf"):
        parser.error("--temperature must be 0 or more")
    return found


def generation_config(chat_format: ChatFormat, max_new_tokens: int | None, temperature: float | None) -> Any:
    """The saved generation config with the command line's values."""
    config, context = deepcopy(chat_format.generation_config), chat_format.context
    config.max_new_tokens = max_new_tokens or min(1024, (context or 2048) // 2)
    if context is not None and config.max_new_tokens >= context:
        raise EvaluationError(
            f"--max-new-tokens {max_new_tokens} leaves no room for a question in a context of {context}."
        )
    if temperature is not None:
        config.do_sample = temperature > 0
        config.temperature = temperature or None
        if not temperature:
            config.top_p = config.top_k = None
    return config


def main(arguments: list[str]) -> None:
    """Load the model and chat."""
    given = parse(arguments)
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    print("Loading ...", file=sys.stderr, flush=True)
    with chatter_to(Path(os.devnull)):
        found = find_model(given.model, given.base, given.checkpoint, given.trust_remote_code)
        model, chat_format = found.load()
        import torch

        torch.seed()  # otherwise each conversation draws the same
    generation = generation_config(chat_format, given.max_new_tokens, given.temperature)
    conversation = Conversation(model, chat_format, generation)
    conversation.begin(given.system or found.evaluation.system_instruction)
    device = f"{model.device}, {str(model.dtype).removeprefix('torch.')}"
    opening = f"{found.target.label}: {found.target.model} ({device}). /help lists the commands."
    print(opening, file=sys.stderr, flush=True)
    converse(conversation)


if __name__ == "__main__":
    with exit_on_error():
        main(sys.argv[1:])
