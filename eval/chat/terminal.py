"""Chats with a model in the terminal: `sft chat outputs/tiny/latest`.

The answer is shown as it is generated. Ctrl-C stops an answer, Ctrl-D exits. From a pipe, each line is a turn.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval.chat.model import Asker, Messages, choose
from eval.quiet import chatter_to
from sft.errors import EvaluationError
from sft.program import exit_on_error
from sft.visible import visible

HELP = """\
/system TEXT  start over with this system prompt; without TEXT: with none
/reset        start over
/undo         remove the last question and its answer
/save FILE    append the conversation as a row of training data (`messages`)
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

    def __init__(self, asker: Asker, show: Callable[[str], None]) -> None:
        self.asker, self.show = asker, show
        self.ids: list[int] = []
        """All generated tokens."""
        self._from = self._shown = 0
        self._prompt = True

    def put(self, value: Any) -> None:
        """Take new tokens: first those of the prompt, then one at a time."""
        if not self._prompt:
            self.ids += value.flatten().tolist()
            self._show(final=False)
        self._prompt = False

    def end(self) -> None:
        """Show what is left."""
        self._show(final=True)

    def _show(self, final: bool) -> None:
        # How a token decodes depends on those before it; the last ones are enough.
        before = self.asker.tokenizer.decode(self.ids[self._from : self._shown])
        text = self.asker.text(self.ids[self._from :])
        if text.endswith("\ufffd") and not final:
            return  # the rest of a character comes with the next token
        if len(text) > len(before):
            self.show(text[len(before) :])
        self._from, self._shown = self._shown, len(self.ids)


def fit(messages: Messages, length: Callable[[Messages], int], most: int) -> tuple[Messages, int]:
    """The conversation without its oldest turns, as far as it is too long.

    Args:
        messages: A system turn or none, then questions and answers; the last is a question.
        length: Of a conversation in tokens.
        most: Tokens that there is room for.

    Returns:
        The conversation, and the number of turns left out.

    Raises:
        EvaluationError: The last question alone is too long.
    """
    system = [message for message in messages[:1] if message["role"] == "system"]
    turns = messages[len(system) :]
    for start in range(0, len(turns), 2):
        if length(system + turns[start:]) <= most:
            return system + turns[start:], start
    raise EvaluationError(f"This is longer than the {most} tokens that there is room for. Shorten it.")


@dataclass
class Conversation:
    """The turns so far, and the model that answers."""

    model: Any
    asker: Asker
    generation: Any
    """transformers' GenerationConfig, with the length of an answer."""

    messages: Messages = field(default_factory=list)

    def begin(self, system: str | None) -> None:
        """Start over."""
        messages = [{"role": "system", "content": system}] if system else []
        if messages:
            self.asker.render([*messages, {"role": "user", "content": "?"}])  # refused where the template drops it
        self.messages = messages

    def undo(self) -> bool:
        """Remove a question and its answer; False where there is none."""
        if len(self.messages) < 2 or self.messages[-1]["role"] != "assistant":
            return False
        del self.messages[-2:]
        return True

    def ask(self, question: str, show: Callable[[str], None]) -> Iterator[str]:
        """Answer a question; yields notes for the user.

        Raises:
            EvaluationError: There is no room for it, or the template refuses it.
        """
        messages = [*self.messages, {"role": "user", "content": question}]
        room = self.asker.context - self.generation.max_new_tokens if self.asker.context is not None else sys.maxsize
        kept, dropped = fit(messages, lambda some: len(self.asker.render(some)), room)
        if dropped:
            yield f"(the context of {self.asker.context} tokens is full: the oldest {dropped} turns are left out)"
        streamer = Streamer(self.asker, show)
        stopped = self._generate(self.asker.render(kept), streamer)
        if streamer.ids:
            show("\n")
            self.messages = [*kept, {"role": "assistant", "content": self.asker.text(streamer.ids)}]
        if stopped or not streamer.ids:
            yield "(stopped)"
        elif streamer.ids[-1] not in self.asker.stops:
            yield f"(cut at {len(streamer.ids)} tokens before it ended; --max-new-tokens raises the limit)"

    def _generate(self, prompt: list[int], streamer: Streamer) -> bool:
        """Whether Ctrl-C stopped it."""
        import torch

        ids = torch.tensor([prompt], device=self.model.device)
        mask = torch.ones_like(ids)
        try:
            self.model.generate(ids, attention_mask=mask, generation_config=self.generation, streamer=streamer)
        except KeyboardInterrupt:
            streamer.end()
            return True
        return False


def save(messages: Messages, path: Path) -> str:
    """Append the conversation to a file as a row of training data; returns a note for the user."""
    try:
        with path.expanduser().open("a", encoding="utf-8") as file:
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
    except OSError as error:
        return f"(cannot be written: {error})"
    return f"(added to {path})"


def command(conversation: Conversation, line: str) -> str:
    """Run a line that starts with a slash; returns a note for the user."""
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    if name == "/reset":
        system = next((turn["content"] for turn in conversation.messages[:1] if turn["role"] == "system"), None)
        conversation.begin(system)
        return "(a new conversation)"
    if name == "/system":
        conversation.begin(rest or None)
        return f"(a new conversation, {'with this' if rest else 'without'} system prompt)"
    if name == "/undo":
        return "(undone)" if conversation.undo() else "(nothing to undo)"
    if name == "/save":
        return save(conversation.messages, Path(rest or time.strftime("chat-%Y%m%d-%H%M%S.jsonl")))
    return HELP if name == "/help" else f"({name} is not a command)\n{HELP}"


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
            notes = (
                iter([command(conversation, line.strip())]) if line.startswith("/") else conversation.ask(line, show)
            )
            for note in notes:
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


def generation_config(asker: Asker, max_new_tokens: int | None, temperature: float | None) -> Any:
    """The saved generation config with the command line's values.

    Raises:
        EvaluationError: The answer is as long as the context.
    """
    config, context = deepcopy(asker.generation_config), asker.context
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
        chosen = choose(given.model, given.base, given.checkpoint, given.trust_remote_code)
        model, asker = chosen.load()
        import torch

        torch.seed()  # otherwise each conversation draws the same
    conversation = Conversation(model, asker, generation_config(asker, given.max_new_tokens, given.temperature))
    conversation.begin(given.system or chosen.evaluation.system_instruction)
    device = f"{model.device}, {str(model.dtype).removeprefix('torch.')}"
    print(
        f"{chosen.target.label}: {chosen.target.model} ({device}). /help lists the commands.",
        file=sys.stderr,
        flush=True,
    )
    converse(conversation)


if __name__ == "__main__":
    with exit_on_error():
        main(sys.argv[1:])
