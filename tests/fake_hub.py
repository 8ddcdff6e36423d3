"""A hub on this machine: the requests that huggingface_hub makes to upload a folder, answered as the real one does, over real HTTP."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_" + "t" * 34


@dataclass
class Repo:
    private: bool
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {".gitattributes": b""}})
    commits: list[tuple[str, str]] = field(default_factory=list)
    """Branch and title of each."""


@dataclass
class FakeHub:
    """What it holds, what it was asked, and what it is to get wrong."""

    url: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    stored: dict[str, bytes] = field(default_factory=dict)
    """LFS objects by their sha256."""

    asked: list[str] = field(default_factory=list)
    role: str = "write"
    refuse: dict[str, int] = field(default_factory=dict)
    """Status by the beginning of `METHOD path`, for as long as it stands here."""

    hang_up: str | None = None
    """Beginning of `METHOD path` of a request whose connection is cut."""

    lfs: bool = True
    """Weights go by LFS; else everything in the commit."""


def _oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None: ...

    def _answer(self, value: Any, status: int = 200) -> None:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if status >= 400:
            self.send_header("X-Error-Message", f"the fake hub says {status}")
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        self.wfile.write(body)

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        asked = f"{self.command} {path}"
        self.hub.asked.append(asked)
        if self.hub.hang_up and asked.startswith(self.hub.hang_up):
            self.close_connection = True
            self.connection.close()
            return None
        for beginning, status in self.hub.refuse.items():
            if asked.startswith(beginning):
                return self._answer({"error": "refused"}, status)
        if not path.startswith("/lfs/") and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._answer({"error": "Invalid credentials"}, 401)
        parts = path.strip("/").split("/")
        if path == "/api/whoami-v2":
            account = {"name": "me", "type": "user", "orgs": [{"name": "lab"}]}
            return self._answer(account | {"auth": {"accessToken": {"role": self.hub.role}}})
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return self._answer({"errors": [], "warnings": []})
        if parts[0] == "lfs":
            self.hub.stored[parts[1]] = body
            return self._answer({})
        if path.endswith(".git/info/lfs/objects/batch"):
            return self._answer(self._batch(json.loads(body)))
        repo = self.hub.repos.get("/".join(parts[2:4]))
        if repo is None:
            return self._answer({"error": "Repository not found"}, 404)
        return self._in_repo(repo, parts, body)

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = _handle  # noqa: N815 - their names

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        there = name in self.hub.repos
        if not there:
            self.hub.repos[name] = Repo(asked.get("visibility") == "private")
        self._answer({"url": f"{self.hub.url}/{name}"}, 409 if there else 200)

    def _batch(self, asked: dict[str, Any]) -> dict[str, Any]:
        missing = [one for one in asked["objects"] if one["oid"] not in self.hub.stored]
        actions = {one["oid"]: {"upload": {"href": f"{self.hub.url}/lfs/{one['oid']}"}} for one in missing}
        objects = [one | ({"actions": actions[one["oid"]]} if one in missing else {}) for one in asked["objects"]]
        return {"transfer": "basic", "objects": objects}

    def _in_repo(self, repo: Repo, parts: list[str], body: bytes) -> None:
        what = parts[4] if len(parts) > 4 else "info"
        branch = "/".join(parts[5:]) or "main"
        if what == "branch":
            there = branch in repo.branches
            repo.branches.setdefault(branch, dict(repo.branches["main"]))
            return self._answer({}, 409 if there else 200)
        if what in ("info", "revision"):
            name = "/".join(parts[2:4])
            return self._answer({"id": name, "sha": "0" * 40, "private": repo.private, "siblings": []})
        files = repo.branches.get(branch)
        if files is None:
            return self._answer({"error": "no such branch"}, 404)
        if what == "tree":
            listed = [{"type": "file", "path": name, "oid": _oid(one), "size": len(one)} for name, one in files.items()]
            return self._answer(listed)
        if what == "preupload":
            return self._answer({"files": [self._mode(one, files) for one in json.loads(body)["files"]]})
        if what == "commit":
            return self._commit("/".join(parts[2:4]), branch, [json.loads(line) for line in body.splitlines()])
        return self._answer({"error": f"the fake hub does not know {what}"}, 400)

    def _mode(self, one: dict[str, Any], files: dict[str, bytes]) -> dict[str, Any]:
        lfs = self.hub.lfs and one["path"].endswith(".safetensors")
        there = files.get(one["path"])
        oid = None if there is None else hashlib.sha256(there).hexdigest() if lfs else _oid(there)
        return {"path": one["path"], "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False, "oid": oid}

    def _commit(self, name: str, branch: str, lines: list[dict[str, Any]]) -> None:
        repo = self.hub.repos[name]
        files = dict(repo.branches[branch])
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.stored[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        repo.branches[branch] = files
        repo.commits.append((branch, lines[0]["value"]["summary"]))
        oid = hashlib.sha1(str(repo.commits).encode()).hexdigest()
        self._answer({"commitUrl": f"{self.hub.url}/{name}/commit/{oid}", "commitOid": oid})


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """Serve on a free port of this machine."""
    hub = FakeHub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
