"""A hub model is of one commit throughout: what was looked up is what is loaded and recorded, online and offline."""

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from sft.hub.demo import make_demo
from sft.recipe.schema import REPOSITORY
from tests.slow.conftest import write_recipe

pytestmark = pytest.mark.slow

OLD, NEW = "a" * 40, "b" * 40
LOAD = """
import json, sys
from pathlib import Path
from sft.plan.hardware import Hardware
from sft.launch.job import open_job
from sft.model.load import load_model
from sft.hub.pins import hub_revisions, pinned
from sft.data.tokenizer import load_tokenizer
recipe, main, old, new = sys.argv[1:]
if main:
    from huggingface_hub import hf_hub_download
    hf_hub_download("me/tiny", "config.json")
    Path(main).write_text(new)
job = open_job(Path(recipe), [], Hardware(None, 1, 1, 2, 16.0))
if main:
    Path(main).write_text(old)
tokenizer = load_tokenizer(pinned(job.recipe, job.model))
print(json.dumps({
    "commit": job.model.commit,
    "recorded": hub_revisions(job.recipe, job.model)[0]["commit"],
    "template": tokenizer.chat_template[-8:],
    "norm": load_model(job, tokenizer).model.norm.weight[0].item(),
}))
"""
"""Looks the model up when `main` has moved since it was cached, and loads it when `main` has moved again."""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A hub whose model has two commits, and the file that says which of them `main` is."""
    main = tmp_path / "main"
    demo = make_demo(tmp_path / "demo").model
    for commit, scale in ((OLD, 1.0), (NEW, 2.0)):
        folder = tmp_path / "hub" / commit
        shutil.copytree(demo, folder)
        tensors = load_file(folder / "model.safetensors")
        tensors["model.norm.weight"].fill_(scale)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        template = folder / "chat_template.jinja"
        template.write_text(template.read_text() + f"{{# {commit[:2]} #}}")

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

        def do_GET(self) -> None:
            parts = self.path.partition("?")[0].strip("/").split("/")
            asked = parts[-1] if parts[0] == "api" else parts[3] if len(parts) > 4 else ""
            commit = asked if asked in (OLD, NEW) else main.read_text()
            file = tmp_path / "hub" / commit / parts[-1]
            body = json.dumps({"id": "me/tiny", "sha": commit, "siblings": []}).encode()
            found = file.is_file() or (parts[:2] == ["api", "models"] and "tree" not in parts)
            if found and parts[0] != "api":
                body = file.read_bytes()
            self.send_response(200 if found else 404)
            code = {} if found else {"X-Error-Code": "EntryNotFound"}
            headers = {"X-Repo-Commit": commit, "ETag": f'"{commit}{parts[-1]}"', "Content-Length": str(len(body))}
            for name, value in (headers | code).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815 - its name

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", main
    server.shutdown()
    thread.join()
    server.server_close()


def test_what_was_looked_up_is_what_is_loaded(
    hub: tuple[str, Path], tmp_path: Path, command: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    url, main = hub
    recipe = write_recipe(
        tmp_path / "hub.yaml",
        model={"name_or_path": "me/tiny"},
        train={"global_batch_size": 8, "learning_rate": 1e-3, "max_steps": 1},
    )

    def load(url: str, main: str) -> dict[str, Any]:
        hub = {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        done = command([sys.executable, "-c", LOAD, recipe, main, OLD, NEW], PYTHONPATH=str(REPOSITORY), **hub)
        assert "Retrying" not in done.stderr
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    main.write_text(OLD)
    expected = {"commit": NEW, "recorded": NEW, "template": "{# bb #}", "norm": 2.0}
    assert load(url, str(main)) == pytest.approx(expected)
    assert load("http://127.0.0.1:9", "") == expected, (
        "the hub cannot be reached: what the cache holds is used and recorded"
    )
