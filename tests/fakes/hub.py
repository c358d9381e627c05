"""A fake Hugging Face Hub on a free port, with the endpoints that `huggingface_hub` calls for a model."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_letmein"


@dataclass
class Repo:
    """The files of one model, at one commit on `main`.

    - `gated`: the files need TOKEN. `private`: everything does.
    - `cut`: the connection is dropped after this many bytes of weights, in the first `n_cuts` responses.
    - `stall`: a response with weights waits in the middle until this is set.
    - `trickle`: a response with weights is sent byte by byte.
    """

    files: dict[str, bytes]
    gated: bool = False
    private: bool = False
    cut: int = 0
    n_cuts: int = 0
    stall: threading.Event | None = None
    trickle: bool = False

    @property
    def commit(self) -> str:
        return hashlib.sha1(b"".join(k.encode() + v for k, v in sorted(self.files.items()))).hexdigest()


@dataclass
class FakeHub:
    """`requests`: (method, path, Range header) of each, in order. `stalled`: set after the first weights."""

    repos: dict[str, Repo]
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    stalled: threading.Event = field(default_factory=threading.Event)
    closed: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def fetched(self) -> list[str]:
        """Return the names of the files that were fetched with GET, sorted."""
        return sorted(
            path.split("/")[-1]
            for method, path, _ in self.requests
            if method == "GET" and "/resolve/" in path
        )


@contextmanager
def fake_hub(**repos: Repo) -> Iterator[FakeHub]:
    """Serve `repos`; the name `acme__tiny` stands for the id `acme/tiny`."""
    hub = FakeHub({name.replace("__", "/"): repo for name, repo in repos.items()})

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.closed.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the tests use `requests`."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers.get("Range", "")))
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+)|/tree/(.+))?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        match = api or file
        repo = self.hub.repos.get(match[1]) if match else None
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token not in ("", TOKEN):
            return self._refuse(401, "", "Invalid credentials in Authorization header")
        if match is None or repo is None or (repo.private and not token):
            return self._refuse(404 if token else 401, "RepoNotFound", "Repository not found")
        if (match[2] or "main") not in ("main", repo.commit):
            return self._refuse(404, "RevisionNotFound", "Invalid rev id")
        if api:
            return self._json(self._facts(match[1], repo) if match[3] is None else self._tree(repo))
        if repo.gated and not token:
            return self._refuse(401, "GatedRepo", "Access to this model is restricted")
        if match[3] not in repo.files:
            return self._refuse(404, "EntryNotFound", "Entry not found")
        return self._file(repo, match[3])

    def _facts(self, id: str, repo: Repo) -> object:
        siblings = [{"rfilename": name, "size": len(data)} for name, data in repo.files.items()]
        return {
            "id": id,
            "sha": repo.commit,
            "gated": repo.gated,
            "private": repo.private,
            "siblings": siblings,
        }

    def _tree(self, repo: Repo) -> object:
        return [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in repo.files.items()
        ]

    def _refuse(self, status: int, code: str, message: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _file(self, repo: Repo, name: str) -> None:
        data = repo.files[name]
        first = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(first[1]) if first else 0
        self.send_response(206 if first else 200)
        self.send_header("X-Repo-Commit", repo.commit)
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("Content-Length", str(len(data) - start))
        if first:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "GET":
            self._send(repo, name, data[start:])

    def _send(self, repo: Repo, name: str, data: bytes) -> None:
        weights = name.endswith((".safetensors", ".gguf"))
        if weights and repo.n_cuts > 0:
            repo.n_cuts -= 1
            self.wfile.write(data[: repo.cut])
            self.close_connection = True
        elif weights and repo.stall is not None:
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            self.hub.stalled.set()
            repo.stall.wait()
            self.close_connection = True
        elif weights and repo.trickle:
            self._trickle(data)
        else:
            self.wfile.write(data)

    def _trickle(self, data: bytes) -> None:
        """Send a byte at a time, so that no time limit ends the response, until the client disconnects."""
        self.close_connection = True
        for byte in data:
            try:
                self.wfile.write(bytes([byte]))
                self.wfile.flush()
            except OSError:
                return
            self.hub.stalled.set()
            self.hub.closed.wait(0.1)
