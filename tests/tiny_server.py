"""A small OpenAI-compatible server that really serves models, on a CPU, with transformers: what an evaluation by server is tested with.

    python tests/tiny_server.py [--port 8000] [--openai NAME] [--key SECRET] [--die-after 20] NAME=FOLDER ...

It answers as vLLM does: prompts as text or token ids, `echo` with `logprobs`, `stop`, `stop_token_ids`, `ignore_eos`,
`repetition_penalty`, `return_token_ids`; and where a request leaves out how to sample, the served model's own generation config
decides. A model that `--openai` names follows only the keys of OpenAI's API. The address is printed once it answers.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

VLLM_KEYS = (
    "stop_token_ids",
    "ignore_eos",
    "repetition_penalty",
    "top_k",
    "min_p",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "chat_template_kwargs",
)


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Served:
    """One model."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.own = (
            GenerationConfig.from_pretrained(folder)
            if (Path(folder) / "generation_config.json").is_file()
            else GenerationConfig()
        )
        self.length = int(self.model.config.max_position_embeddings)

    def own_stops(self) -> set[int]:
        """Tokens that end an answer without being asked to."""
        ids = self.own.eos_token_id
        return {self.tokenizer.eos_token_id, *([ids] if isinstance(ids, int) else ids or [])} - {None}

    def ids_of(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt)["input_ids"])
        if any(not 0 <= one < self.model.config.vocab_size for one in prompt):
            raise Refused(400, f"Token id {max(prompt)} is out of vocabulary")
        return prompt

    def new_text(self, prompt: list[int], answer: list[int]) -> str:
        """What the answer adds to the prompt's text: with the space before its first word, unlike the answer decoded by itself."""
        before = self.tokenizer.decode(prompt, skip_special_tokens=True)
        return str(self.tokenizer.decode(prompt + answer, skip_special_tokens=True))[len(before) :]

    @torch.no_grad()
    def score(self, ids: list[int], as_ids: bool) -> tuple[dict[str, Any], int]:
        """Log probabilities of each token and of the likeliest one, and the token that comes next."""
        logits = self.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        following = int(logits[-1].argmax())
        values: list[float | None] = [None]
        tops: list[dict[str, float] | None] = [None]
        for position, token in enumerate([*ids[1:], following]):
            best = int(logits[position].argmax())
            values.append(float(logits[position, token]))
            tops.append({self.name(one, as_ids): float(logits[position, one]) for one in (token, best)})
        tokens = [self.name(one, as_ids) for one in [*ids, following]]
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops}, following

    def name(self, token: int, as_ids: bool) -> str:
        return f"token_id:{token}" if as_ids else str(self.tokenizer.decode([token]))

    @torch.no_grad()
    def answer(self, prompt: list[int], request: dict[str, Any]) -> tuple[str, list[int], str]:
        """An answer's text, its token ids, and why it ended."""
        stop = request.get("stop") or []
        stop = [stop] if isinstance(stop, str) else stop
        ends = set(request.get("stop_token_ids") or ())
        ends |= set() if request.get("ignore_eos") else self.own_stops()
        penalty = request.get("repetition_penalty", self.own.repetition_penalty) or 1.0
        temperature = request.get("temperature", self.own.temperature)
        generator = torch.Generator().manual_seed(int(request.get("seed") or 0))
        answer: list[int] = []
        past, step = None, prompt
        while len(answer) < request.get("max_tokens", 16):
            output = self.model(torch.tensor([step]), past_key_values=past, use_cache=True)
            past, logits = output.past_key_values, output.logits[0, -1].float()
            seen = torch.tensor(sorted({*prompt, *answer}))
            logits[seen] = torch.where(logits[seen] < 0, logits[seen] * penalty, logits[seen] / penalty)
            if temperature:
                token = int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
            else:
                token = int(logits.argmax())
            answer, step = [*answer, token], [token]
            if token in ends:
                return self.new_text(prompt, answer[:-1]), answer, "stop"
            text = self.new_text(prompt, answer)
            found = [text.find(one) for one in stop if one in text]
            if found:
                return text[: min(found)], answer, "stop"
        return self.new_text(prompt, answer), answer, "length"


class Handler(BaseHTTPRequestHandler):
    """The endpoints."""

    protocol_version = "HTTP/1.1"
    models: dict[str, Served]
    openai: list[str]
    key: str | None
    die_after: int | None
    answered = 0
    lock = threading.Lock()

    def log_message(self, *_: Any) -> None:
        pass

    def send(self, status: int, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def serve(self, handle: Any) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            if self.key is not None and self.headers.get("Authorization") != f"Bearer {self.key}":
                raise Refused(401, "Unauthorized")
            with Handler.lock:
                value = handle(json.loads(body) if body else {})
        except Refused as error:
            self.send(error.status, {"error": {"message": str(error), "code": error.status}})
            return
        self.send(200, value)

    def do_GET(self) -> None:
        self.serve(self.list_models)

    def do_POST(self) -> None:
        self.serve(self.complete)

    def list_models(self, _: dict[str, Any]) -> dict[str, Any]:
        if self.path != "/v1/models":
            raise Refused(404, "Not Found")
        data = [
            {"id": name, "owned_by": "openai" if name in self.openai else "vllm", "max_model_len": one.length}
            for name, one in self.models.items()
        ]
        return {"object": "list", "data": data}

    def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        Handler.answered += 1
        if self.die_after is not None and Handler.answered > self.die_after:
            os._exit(1)
        if request.get("model") not in self.models:
            raise Refused(404, f"The model `{request.get('model')}` does not exist.")
        if request["model"] in self.openai:
            request = {key: value for key, value in request.items() if key not in VLLM_KEYS}
        served = self.models[request["model"]]
        if self.path == "/v1/chat/completions":
            thinking = request.get("chat_template_kwargs") or {}
            text = served.tokenizer.apply_chat_template(
                request["messages"], tokenize=False, add_generation_prompt=True, **thinking
            )
            prompts = [list(served.tokenizer(text, add_special_tokens=False)["input_ids"])]
        elif self.path == "/v1/completions":
            given = request["prompt"]
            several = isinstance(given, list) and not isinstance(given[0], int)
            prompts = [served.ids_of(one) for one in (given if several else [given])]
        else:
            raise Refused(404, "Not Found")
        choices = [self.choice(served, index, prompt, request) for index, prompt in enumerate(prompts)]
        counts = {
            "prompt_tokens": sum(map(len, prompts)),
            "completion_tokens": sum(one.pop("count") for one in choices),
        }
        # Not in the order of the prompts: a client goes by `index`.
        return {"object": "answer", "model": request["model"], "choices": choices[::-1], "usage": counts}

    def choice(self, served: Served, index: int, prompt: list[int], request: dict[str, Any]) -> dict[str, Any]:
        asked = len(prompt) + request.get("max_tokens", 16)
        if asked > served.length:
            raise Refused(
                400, f"This model's maximum context length is {served.length} tokens, and {asked} were requested."
            )
        if request.get("echo"):
            logprobs, following = served.score(prompt, bool(request.get("return_tokens_as_token_ids")))
            text = served.tokenizer.decode([*prompt, following])
            return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": "length", "count": 1}
        text, ids, why = served.answer(prompt, request)
        said = (
            {"message": {"role": "assistant", "content": text}}
            if "messages" in request
            else {"text": text, "logprobs": None}
        )
        more = {"token_ids": ids} if request.get("return_token_ids") else {}
        return {"index": index, "finish_reason": why, "count": len(ids), **said, **more}


def main() -> None:
    """Serve until it is ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--openai", action="append", default=[], metavar="NAME")
    parser.add_argument("--key")
    parser.add_argument("--die-after", type=int, help="completions after which the process ends without a word")
    parser.add_argument("models", nargs="+", metavar="NAME=FOLDER")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    Handler.models = {name: Served(folder) for name, _, folder in (one.partition("=") for one in arguments.models)}
    Handler.openai, Handler.key, Handler.die_after = arguments.openai, arguments.key, arguments.die_after
    server = ThreadingHTTPServer(("127.0.0.1", arguments.port), Handler)
    print(f"http://127.0.0.1:{server.server_port}/v1", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        sys.exit(0)


if __name__ == "__main__":
    main()
