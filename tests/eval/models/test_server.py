"""Servers that are not as they should be, each one message before a task is loaded. They are threads here and have no model."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from eval.models.server import Served, score_choice
from eval.reference import Reference
from eval.run import main
from eval.tasks.settings import Settings
from sft.errors import EvaluationError, UserError
from sft.run.directory import Run

pytest.importorskip("tenacity", reason="lm_eval's clients of servers need it")

Answer = tuple[int, Any]
Canned = Callable[[str, dict[str, Any]], Answer]


class Fake:
    """What a server of one model answers; each test changes a part of it."""

    def __init__(self, reference: Reference) -> None:
        self.tokenizer = reference.tokenizer
        self.owner = "vllm"
        self.length = 1024
        self.extra_tokens = 0
        self.echoes = True
        self.fails_to_answer = False
        self.seen: list[tuple[bool, dict[str, str]]] = []
        """Of each request, whether it asks for an answer of a task, and its headers."""

    def __call__(self, path: str, payload: dict[str, Any]) -> Answer:
        if path == "/v1/models":
            return 200, {"data": [{"id": "tuned", "owned_by": self.owner, "max_model_len": self.length}]}
        if self.fails_to_answer and "stop" in payload:
            return 500, "Internal Server Error"
        if path != "/v1/completions":
            return 404, {"detail": "Not Found"}
        prompt = payload["prompt"]
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt[0]
        choice: dict[str, Any] = {"index": 0, "text": "a", "finish_reason": "length", "logprobs": None}
        if payload.get("echo") and self.echoes:
            choice["logprobs"] = {
                "token_logprobs": [None, *[-1.0] * len(ids)],
                "top_logprobs": [None, *[{"a": -1.0}] * len(ids)],
            }
        return 200, {"choices": [choice], "usage": {"prompt_tokens": len(ids) + self.extra_tokens}}


@pytest.fixture
def fake(reference: Reference) -> Fake:
    return Fake(reference)


@pytest.fixture
def serve() -> Iterator[Callable[[Canned], str]]:
    """Answer with a function; returns the address without /v1."""
    servers: list[ThreadingHTTPServer] = []

    def start(answer: Canned) -> str:
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                payload = json.loads(body) if body else {}
                if isinstance(answer, Fake):
                    answer.seen.append(("stop" in payload, dict(self.headers)))
                status, value = answer(self.path, payload)
                text = (value if isinstance(value, str) else json.dumps(value)).encode()
                self.send_response(status)
                self.send_header("Content-Type", "text/html" if isinstance(value, str) else "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_POST = do_GET  # noqa: N815

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that has waited long enough is gone
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def ask(tuned_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What is told of a server that cannot be asked."""
    monkeypatch.chdir(tmp_path)

    def run(base_url: str, *arguments: str) -> str:
        arguments = (
            arguments if any(one.startswith("tasks=") for one in arguments) else (*arguments, "tasks=builtin:demo")
        )
        with pytest.raises(UserError) as told:
            main([str(tuned_model), "backend=server", f"server.base_url={base_url}", "server.model=tuned", *arguments])
        assert not list(tmp_path.rglob("results.json"))
        return str(told.value)

    return run


def always(status: int, value: Any) -> Canned:
    return lambda *_: (status, value)


def test_an_address_without_its_v1(serve: Callable[[Canned], str], ask: Callable[..., str], fake: Fake) -> None:
    address = serve(fake)
    assert f"answer under /v1: set eval.server.base_url={address}/v1" in ask(address)
    assert "Is eval.server.base_url right?" in ask(f"{address}/v2/v1")
    assert "No server can be reached at http://127.0.0.1:9/v1/models (Connection refused)" in ask(
        "http://127.0.0.1:9/v1"
    )


def test_a_key_that_is_wanted_or_not_taken(
    serve: Callable[[Canned], str], ask: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    address = serve(always(401, {"error": "Unauthorized"})) + "/v1"
    assert "answers 401" in ask(address)
    assert "name that one, server.api_key_env=MY_KEY" in ask(address)
    monkeypatch.setenv("THE_KEY", "sesame-0123456789")
    told = ask(address, "server.api_key_env=THE_KEY")
    assert "does not take the key in THE_KEY" in told
    assert "sesame" not in told


@pytest.mark.parametrize("at_once", [1, 2])
def test_no_key_of_another_service_is_sent(
    at_once: int,
    serve: Callable[[Canned], str],
    ask: Callable[..., str],
    fake: Fake,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """lm_eval's clients send OPENAI_API_KEY to whatever address they are given."""
    monkeypatch.setattr("eval.models.server_client.RETRIES", 1)
    monkeypatch.setenv("OPENAI_API_KEY", "sesame-0123456789")
    fake.fails_to_answer = True
    ask(serve(fake) + "/v1", f"server.num_concurrent={at_once}", "limit=1")
    assert "answers 500; the log says more" in capsys.readouterr().out
    assert {asked for asked, _ in fake.seen} == {False, True}
    assert not any("Authorization" in headers for _, headers in fake.seen)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (always(500, "Internal Server Error"), "answers 500: 'Internal Server Error'."),
        (always(200, "<html>welcome</html>"), "'<html>welcome</html>' is no JSON object"),
        (always(200, {"data": []}), "lists no models"),
        (always(200, {"data": [{"id": "tunde"}]}), "serves no model `tuned`; did you mean `tunde`? It serves `tunde`."),
    ],
)
def test_a_server_that_lists_no_such_model(
    answer: Canned, told: str, serve: Callable[[Canned], str], ask: Callable[..., str]
) -> None:
    assert told in ask(serve(answer) + "/v1")


def _shorter(fake: Fake, path: str, payload: dict[str, Any]) -> Answer:
    fake.length = 512
    return fake(path, payload)


def _another_tokenizer(fake: Fake, path: str, payload: dict[str, Any]) -> Answer:
    fake.extra_tokens = 3 if isinstance(payload.get("prompt"), str) else 0
    return fake(path, payload)


def _one_token_more(fake: Fake, path: str, payload: dict[str, Any]) -> Answer:
    fake.extra_tokens = 1
    return fake(path, payload)


def _no_token_ids(fake: Fake, path: str, payload: dict[str, Any]) -> Answer:
    return (400, {"error": "prompt must be a string"}) if "prompt" in payload else fake(path, payload)


def _ollama(fake: Fake, path: str, payload: dict[str, Any]) -> Answer:
    fake.owner = "library"
    return fake(path, payload)


def _another_template(fake: Fake, path: str, payload: dict[str, Any]) -> Answer:
    if path != "/v1/chat/completions":
        return fake(path, payload)
    message = {"message": {"content": "a"}, "index": 0, "finish_reason": "stop"}
    return 200, {"choices": [message], "usage": {"prompt_tokens": 7}}


def _slow(fake: Fake, path: str, payload: dict[str, Any]) -> Answer:
    time.sleep(1.5 if payload else 0)
    return fake(path, payload)


@pytest.mark.parametrize(
    ("change", "argument", "told"),
    [
        (_shorter, "limit=1", "is served with a context of 512 tokens, and the evaluation asks for up to 1024"),
        (_another_tokenizer, "limit=1", "It has another tokenizer than"),
        (_one_token_more, "limit=1", "does not take token ids as they are"),
        (_no_token_ids, "limit=1", "are token ids"),
        (_ollama, "limit=1", "is Ollama, which puts every prompt into the model's template"),
        (_another_template, "server.api=chat", "It has another tokenizer or chat template than"),
        (_slow, "server.timeout=1", "has not answered within 1 s"),
    ],
)
def test_a_server_that_would_measure_something_else_is_refused(
    change: Callable[[Fake, str, dict[str, Any]], Answer],
    argument: str,
    told: str,
    serve: Callable[[Canned], str],
    ask: Callable[..., str],
    fake: Fake,
) -> None:
    def answer(path: str, payload: dict[str, Any]) -> Answer:
        return change(fake, path, payload)

    assert told in ask(serve(answer) + "/v1", argument)


@pytest.mark.parametrize("broken", ["no logprobs", "two tokens more"])
def test_tasks_that_score_given_answers_need_log_probabilities(
    broken: str, serve: Callable[[Canned], str], ask: Callable[..., str], fake: Fake, write_task: Callable[..., Path]
) -> None:
    def answer(path: str, payload: dict[str, Any]) -> Answer:
        fake.echoes = broken != "no logprobs"
        status, value = fake(path, payload)
        if payload.get("echo") and fake.echoes:
            value["choices"][0]["logprobs"]["token_logprobs"] += [-1.0, -1.0]
        return status, value

    choose = write_task(
        "choose", output_type="multiple_choice", doc_to_choice=["a", "b"], doc_to_target="0", generation_kwargs=None
    )
    told = ask(serve(answer) + "/v1", f"tasks={choose},{write_task('mine')}")
    assert told.startswith("choose scores given answers, and tuned at http://127.0.0.1:")
    assert ("gives no log probabilities" if broken == "no logprobs" else "it reads the prompt as other tokens") in told
    assert told.endswith("Use eval.backend=hf or vllm, or leave the task out.")


def test_a_task_that_begins_the_answer_is_not_asked_by_chat(
    serve: Callable[[Canned], str], ask: Callable[..., str], fake: Fake, write_task: Callable[..., Path]
) -> None:
    def answer(path: str, _: dict[str, Any]) -> Answer:
        if path == "/v1/chat/completions":
            return 200, {"choices": [{"index": 0, "message": {"content": "a"}, "finish_reason": "stop"}]}
        return fake(path, {})

    prefixed, choose = (
        write_task("prefixed", gen_prefix="Answer:"),
        write_task("choose", output_type="loglikelihood", generation_kwargs=None),
    )
    told = ask(serve(answer) + "/v1", f"tasks={prefixed},{choose}", "server.api=chat")
    assert "prefixed begins the answer itself, which a chat request cannot carry" in told
    assert "choose scores given answers, and chat requests give no log probabilities of a prompt" in told


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"choices": []}, "which is not 1 choices"),
        ({"choices": [{"index": 0}]}, "answers without a text"),
        ("nonsense", "something that is no JSON"),
    ],
)
@pytest.mark.parametrize("at_once", [1, 2])
def test_an_answer_that_is_none_fails_its_task(
    value: Any,
    told: str,
    at_once: int,
    serve: Callable[[Canned], str],
    ask: Callable[..., str],
    fake: Fake,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """lm_eval's own client of chats would take an empty text for the answer."""
    monkeypatch.setattr("eval.models.server_client.RETRIES", 1)

    def answer(path: str, payload: dict[str, Any]) -> Answer:
        return (200, value) if "stop" in payload else fake(path, payload)

    ask(serve(answer) + "/v1", f"server.num_concurrent={at_once}", "limit=2")
    shown = capsys.readouterr().out
    assert "demo_extraction failed: NoAnswer: " in shown
    assert told in shown


def test_base_and_tuned_are_two_models(run: Run, serve: Callable[[Canned], str], fake: Fake) -> None:
    asked = [str(run.path), "backend=server", f"server.base_url={serve(fake)}/v1"]
    with pytest.raises(EvaluationError, match=r"serves no model `/.*Set eval\.server\.base to one of them"):
        main(asked)
    with pytest.raises(EvaluationError, match="would both be tuned"):
        main([*asked, "server.base=tuned", "server.tuned=tuned"])
    with pytest.raises(EvaluationError, match=r"eval\.server\.model is given, and a run has two models"):
        main([*asked, "server.model=tuned"])


def client(reference: Reference, settings: Settings, **keys: Any) -> Any:
    from eval.models.server_client import load_served

    served = Served("http://127.0.0.1:1/v1", "tuned", "chat", 1, 5, None, None)
    return load_served(replace(served, **keys), reference.tokenizer, settings)


def test_openais_api_gets_no_more_texts_that_end_an_answer_than_it_takes(
    settings: Callable[..., Settings], reference: Reference
) -> None:
    ends = [f"end {number}" for number in range(6)]
    keys = {"until": ends, "max_gen_toks": 9}
    plain, vllm = client(reference, settings("mine")), client(reference, settings("mine"), dialect="vllm")
    assert plain._create_payload([], generate=True, gen_kwargs=keys)["stop"] == ends[:4]
    assert vllm._create_payload([], generate=True, gen_kwargs=keys)["stop"] == ends


def test_an_answer_with_half_a_surrogate_pair_can_be_written(
    settings: Callable[..., Settings], reference: Reference
) -> None:
    message = {"message": {"content": "half \ud83d, whole \ud83d\ude00"}}
    assert client(reference, settings("mine")).text_of(message) == "half \ufffd, whole \U0001f600"


@pytest.mark.parametrize(
    ("logprobs", "told"),
    [
        (None, "gives no log probabilities"),
        ({"token_logprobs": [None, -1.0, -2.0, -3.0]}, "gives no log probabilities"),
        ({"token_logprobs": [None, -1.0], "top_logprobs": [None, {"a": -1.0}]}, "reads the prompt as other tokens"),
        (
            {"token_logprobs": [None, -1.0, None, -3.0], "top_logprobs": [None, {"a": -1.0}, {}, {"a": 0.0}]},
            "leaves out",
        ),
    ],
)
def test_a_score_is_of_every_token_of_the_answer_or_none(logprobs: Any, told: str) -> None:
    with pytest.raises(EvaluationError, match=told):
        score_choice({"logprobs": logprobs}, [5, 6, 7], slice(1, 3), "it")


@pytest.mark.parametrize("generated", [0, 1])
def test_a_score_has_its_last_token_also_where_the_server_generates_none(generated: int) -> None:
    """lm_eval's own client takes the last value for that of a generated token, whether there is one or not."""
    tops = [None, {"a": -1.0}, {"b": -1.5, "c": -2.0}, {"d": 0.0}][: 3 + generated]
    values = [None, -1.0, -2.0, 0.0][: 3 + generated]
    logprobs = {"token_logprobs": values, "top_logprobs": tops}
    assert score_choice({"logprobs": logprobs}, [5, 6, 7], slice(1, 3), "it") == (-3.0, False)
    assert score_choice({"logprobs": logprobs}, [5, 6, 7], slice(1, 2), "it") == (-1.0, True)
