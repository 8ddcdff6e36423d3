"""Servers that are not as they should be, each one message before a task is loaded. They are threads here and have no model."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from eval.models.served import Served, find_served, score_choice
from eval.run import main
from eval.tasks.reference import Reference
from eval.tasks.settings import Settings
from sft.errors import EvaluationError, UserError
from sft.recipe.eval import Server
from sft.run.directory import Run

Answer = tuple[int, Any]
Canned = Callable[[str, dict[str, Any]], Answer]
Serve = Callable[[Canned], str]
Change = Callable[["Fake", str, dict[str, Any]], Answer]


class Fake:
    """What a server of one model answers; each test changes a part of it."""

    def __init__(self, reference: Reference) -> None:
        self.tokenizer = reference.tokenizer
        self.length = 1024
        self.extra_tokens = 0
        self.echoes = True
        self.seen: list[tuple[bool, dict[str, str]]] = []
        """Of each request, whether it asks for an answer of a task, and its headers."""

    def __call__(self, path: str, payload: dict[str, Any]) -> Answer:
        if path == "/v1/models":
            return 200, {"data": [{"id": "tuned", "owned_by": "vllm", "max_model_len": self.length}]}
        if path != "/v1/completions":
            return 404, {"detail": "Not Found"}
        prompt = payload["prompt"]
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt[0]
        choice: dict[str, Any] = {"index": 0, "text": "a", "finish_reason": "length", "logprobs": None}
        if payload.get("echo") and self.echoes:
            values, tops = [None, *[-1.0] * len(ids)], [None, *[{"a": -1.0}] * len(ids)]
            choice["logprobs"] = {"token_logprobs": values, "top_logprobs": tops}
        return 200, {"choices": [choice], "usage": {"prompt_tokens": len(ids) + self.extra_tokens}}


@pytest.fixture
def fake(reference: Reference) -> Fake:
    return Fake(reference)


@pytest.fixture
def serve(fake: Fake) -> Iterator[Serve]:
    """Answer with a function; returns the address without /v1."""
    servers: list[ThreadingHTTPServer] = []

    def start(answer: Canned) -> str:
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                payload = json.loads(body) if body else {}
                fake.seen.append(("stop" in payload, dict(self.headers)))
                status, value = answer(self.path, payload)
                text = (value if isinstance(value, str) else json.dumps(value)).encode()
                self.send_response(status)
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
def refusal(tuned_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The message on a server that cannot be asked."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("eval.models.server.SECONDS_BETWEEN_TRIES", 0.0)

    def run(base_url: str, *arguments: str) -> str:
        arguments = ("tasks=builtin:demo", *arguments)
        with pytest.raises(UserError) as refused:
            main([str(tuned_model), "backend=server", f"server.base_url={base_url}", "server.model=tuned", *arguments])
        assert not list(tmp_path.rglob("results.json"))
        return str(refused.value)

    return run


@pytest.mark.parametrize(
    ("status", "value", "message"),
    [
        (404, "Not Found", "answers 404: 'Not Found'. Check eval.server.base_url, which ends in /v1, the key"),
        (200, "<html>welcome</html>", "'<html>welcome</html>' is no JSON object"),
        (200, {"data": [{"id": "tunde"}]}, "serves no model `tuned`; did you mean `tunde`? It serves `tunde`."),
    ],
)
def test_a_server_that_lists_no_such_model(
    status: int, value: Any, message: str, serve: Serve, refusal: Callable[..., str]
) -> None:
    assert message in refusal(serve(lambda *_: (status, value)) + "/v1")


def test_no_server(refusal: Callable[..., str]) -> None:
    assert "No server answers at http://127.0.0.1:9/v1/models within 10 s" in refusal("http://127.0.0.1:9/v1")


def test_no_key_of_another_service_is_sent_and_an_error_fails_the_task(
    serve: Serve,
    refusal: Callable[..., str],
    fake: Fake,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password sesame-0123456789\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("OPENAI_API_KEY", "sesame-0123456789")
    address = serve(lambda path, payload: (500, "Internal") if "stop" in payload else fake(path, payload))
    refusal(address + "/v1", "limit=1")
    assert "answers 500: 'Internal'" in capsys.readouterr().out
    assert [asked for asked, _ in fake.seen].count(True) == 3  # tries
    assert not any("Authorization" in headers for _, headers in fake.seen)


def test_a_model_that_is_not_listed_is_found_by_its_answer_where_other_names_are_refused(serve: Serve) -> None:
    def strict(path: str, payload: dict[str, Any]) -> Answer:
        if path == "/v1/models":
            return 200, {"data": [{"id": "of the cache", "meta": {"n_ctx": 256}}]}
        return (200, {"choices": []}) if payload["model"] == "tuned" else (422, {"detail": "pinned"})

    address = serve(strict) + "/v1"
    assert find_served(Server(base_url=address, model="tuned"), "tuned", "folder", True).name == "tuned"
    assert find_served(Server(base_url=address, model="of the cache"), "tuned", "folder", True).max_model_len == 256
    with pytest.raises(EvaluationError, match=r"serves no model `folder`.*It serves `of the cache`"):
        find_served(Server(base_url=address), "tuned", "folder", True)


def _shorter(fake: Fake, path: str, payload: dict[str, Any]) -> Answer:
    fake.length = 512
    return fake(path, payload)


def _another_tokenizer(fake: Fake, path: str, payload: dict[str, Any]) -> Answer:
    fake.extra_tokens = 3 if isinstance(payload.get("prompt"), str) else 0
    return fake(path, payload)


def _no_token_ids(fake: Fake, path: str, payload: dict[str, Any]) -> Answer:
    return (400, {"error": "prompt must be a string"}) if "prompt" in payload else fake(path, payload)


def _another_template(fake: Fake, path: str, payload: dict[str, Any]) -> Answer:
    if path != "/v1/chat/completions":
        return fake(path, payload)
    return 200, {"choices": [{"message": {"content": "a"}, "index": 0}], "usage": {"prompt_tokens": 7}}


@pytest.mark.parametrize(
    ("change", "argument", "message"),
    [
        (_shorter, "limit=1", "is served with a context of 512 tokens, and the evaluation asks for up to 1024"),
        (_another_tokenizer, "limit=1", "It has another tokenizer or chat template"),
        (_no_token_ids, "limit=1", "a server that takes no token ids needs chat"),
        (_another_template, "server.api=chat", "It has another tokenizer or chat template"),
    ],
)
def test_a_server_that_would_measure_something_else_is_refused(
    change: Change, argument: str, message: str, serve: Serve, refusal: Callable[..., str], fake: Fake
) -> None:
    address = serve(lambda path, payload: change(fake, path, payload))
    assert message in refusal(address + "/v1", argument)


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_tasks_that_the_server_cannot_be_asked_are_refused(
    api: str, serve: Serve, refusal: Callable[..., str], fake: Fake, write_task: Callable[..., Path]
) -> None:
    def answer(path: str, payload: dict[str, Any]) -> Answer:
        fake.echoes = False
        if path == "/v1/chat/completions":
            return 200, {"choices": [{"index": 0, "message": {"content": "a"}, "finish_reason": "stop"}]}
        return fake(path, payload)

    choose = write_task("choose", output_type="loglikelihood", generation_kwargs=None)
    prefixed = write_task("prefixed", gen_prefix="Answer:")
    refused = refusal(serve(answer) + "/v1", f"tasks={choose},{prefixed}", f"server.api={api}").splitlines()
    assert refused[0].startswith("choose scores given answers, and ")
    reason = "give no log probabilities" if api == "chat" else "gives no log probabilities"
    assert reason in refused[0]
    assert ["prefixed begins the answer itself" in line for line in refused[1:]] == [True] * (api == "chat")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"choices": [{"index": 0}]}, "answers without a text"),
        ("nonsense", "is no JSON object"),
    ],
)
def test_an_answer_that_is_none_fails_its_task(
    value: Any, message: str, serve: Serve, refusal: Callable[..., str], fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    """lm_eval's own client of chats would take an empty text for the answer."""
    refusal(serve(lambda path, payload: (200, value) if "stop" in payload else fake(path, payload)) + "/v1", "limit=2")
    shown = capsys.readouterr().out
    assert "demo_extraction failed: EvaluationError: " in shown
    assert message in shown


def test_base_and_tuned_are_two_models(run: Run, serve: Serve, fake: Fake) -> None:
    asked = [str(run.path), "backend=server", f"server.base_url={serve(fake)}/v1"]
    with pytest.raises(EvaluationError, match=r"serves no model `/.*Set eval\.server\.base to one of them"):
        main(asked)
    with pytest.raises(EvaluationError, match="would both be tuned"):
        main([*asked, "server.base=tuned", "server.tuned=tuned"])
    with pytest.raises(EvaluationError, match=r"eval\.server\.model is given\. A single model"):
        main([*asked, "server.model=tuned"])


def test_openais_api_gets_no_more_texts_that_end_an_answer_than_it_takes_and_half_a_character_can_be_written(
    serve: Serve, settings: Callable[..., Settings], reference: Reference
) -> None:
    from lm_eval.api.instance import Instance

    from eval.models.server import ServedModel

    seen: list[dict[str, Any]] = []

    def answer(_: str, payload: dict[str, Any]) -> Answer:
        seen.append(payload)
        return 200, {"choices": [{"message": {"content": "half \ud83d, whole \ud83d\ude00 end 5 more"}}]}

    served = Served(serve(answer) + "/v1", "tuned", "chat", 1, 5, None)
    ends = [f"end {number}" for number in range(6)]
    prompt = json.dumps([{"role": "user", "content": "?"}])
    asked = Instance("generate_until", {}, (prompt, {"until": ends, "max_gen_toks": 9}), 0)  # type: ignore[arg-type]
    texts = ServedModel(served, reference.tokenizer, settings("mine")).generate_until([asked])
    assert texts == ["half ?, whole \U0001f600 "]
    assert seen[0]["stop"] == ends[:4]


@pytest.mark.parametrize(
    ("logprobs", "message"),
    [
        ({"token_logprobs": [None, -1.0, -2.0, -3.0]}, "gives no log probabilities"),
        ({"token_logprobs": [None, -1.0], "top_logprobs": [None, {"a": -1.0}]}, "reads the prompt as other tokens"),
        (
            {"token_logprobs": [None, -1.0, None, -3.0], "top_logprobs": [None, {"a": -1.0}, {}, {"a": 0.0}]},
            "leaves out",
        ),
    ],
)
def test_a_score_is_of_every_token_of_the_answer_or_none(logprobs: Any, message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        score_choice({"logprobs": logprobs}, 3, slice(1, 3), "it")


@pytest.mark.parametrize("generated", [0, 1])
def test_a_score_has_its_last_token_also_where_the_server_generates_none(generated: int) -> None:
    """lm_eval's own client takes the last value for that of a generated token, whether there is one or not."""
    tops = [None, {"a": -1.0}, {"b": -1.5, "c": -2.0}, {"d": 0.0}][: 3 + generated]
    values = [None, -1.0, -2.0, 0.0][: 3 + generated]
    logprobs = {"token_logprobs": values, "top_logprobs": tops}
    assert score_choice({"logprobs": logprobs}, 3, slice(1, 3), "it") == (-3.0, False)
    assert score_choice({"logprobs": logprobs}, 3, slice(1, 2), "it") == (-1.0, True)
