"""A server with a full disk, and stores that cannot be used."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from serving import COMMAND, END_S, GOLDENS, Server, environment, long_model, serving

MODEL = str(GOLDENS / "qwen2-tied-bf16")
SPARE_BYTES = 64 * 1024  # for the log, which is on the same disk


@contextmanager
def full_disk(server: Server) -> Iterator[None]:
    """Limit the file size of the server's processes to slightly more than that of its log."""
    server_process = psutil.Process(server.process.pid)
    pids = [server_process.pid, *(child.pid for child in server_process.children())]
    limit = server.log.stat().st_size + SPARE_BYTES
    before = {
        pid: resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY)) for pid in pids
    }
    try:
        yield
    finally:
        for pid, limits in before.items():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("flags", [(), ("--engine-process",)])
def test_a_full_disk_fails_only_the_write(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """A limit on the size of files simulates a full disk: the system rejects the write."""
    chat_store, session_store = tmp_path / "chats.db", tmp_path / "sessions"
    stores = ("--chat-store", str(chat_store), "--session-store", str(session_store))
    with serving(tmp_path, MODEL, "--dtype", "float32", *stores, *flags) as server:
        http = server.http
        prompt = [i % 500 for i in range(200)]
        body = {"prompt": prompt, "max_tokens": 2, "ignore_eos": True, "session_id": "chat"}
        assert http.post("/v1/completions", json=body).status_code == 200
        assert http.put("/v1/chats/one", json={"base": 0, "chat": {}}).status_code == 200
        large = {"base": 1, "chat": {"text": "x" * 4 * SPARE_BYTES}}
        with full_disk(server):
            for code, status, rejected in (
                ("storage_full", 507, http.post("/v1/sessions/chat/save", json={"file": "f"})),
                ("storage_error", 500, http.put("/v1/chats/one", json=large)),
            ):
                assert (rejected.status_code, rejected.json()["error"]["code"]) == (status, code)
                assert str(tmp_path) not in rejected.text
            assert http.get("/v1/chats/one").json()["revision"] == 1
            assert http.post("/v1/completions", json=body).status_code == 200
        (folder,) = session_store.iterdir()
        assert [*folder.iterdir()] == [], "a partial file stays"
        server.wait_logged(
            f"the saved session {folder / 'f.kv'}: File too large",
            f"the chat store {chat_store}: disk I/O error",
        )
        assert "Traceback" not in server.log.read_text("utf-8")
        assert http.post("/v1/sessions/chat/save", json={"file": "f"}).status_code == 200
        assert http.put("/v1/chats/one", json=large).json()["revision"] == 2
        assert server.stop() == 0


def test_an_unusable_store_prevents_the_start(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    flags = ("--port", "0", "--no-preload", "--session-store", str(tmp_path / "plain"))
    done = subprocess.run(
        [*COMMAND, "serve", MODEL, *flags], capture_output=True, text=True, env=environment(), timeout=END_S
    )
    assert done.returncode == 1, done.stderr
    assert f"session_store: {tmp_path / 'plain'} is not a writable folder" in done.stderr
    assert "Traceback" not in done.stderr


def test_background_responses_outlive_the_server(tmp_path: Path) -> None:
    """A response that the server cannot finish is stored as failed before the server ends."""
    model = str(long_model(tmp_path))
    store = ("--response-store", str(tmp_path / "responses.db"))
    flags = ("--dtype", "float32", "--num-kv-cells", "65536", "--shutdown-timeout-s", "0", *store)
    url = "/v1/responses"
    with serving(tmp_path, model, *flags) as server:
        http = server.http
        body = {"input": "Hi", "background": True, "ignore_eos": True}
        short = http.post(url, json={**body, "max_output_tokens": 4}).json()["id"]
        assert "response.incomplete" in http.get(f"{url}/{short}", params={"stream": True}).text
        long = http.post(url, json={**body, "max_output_tokens": 60_000}).json()["id"]
        server.wait_for(lambda: http.get(f"{url}/{long}").json()["status"] == "in_progress")
        assert server.stop() == 0
    with serving(tmp_path, model, *flags) as server:
        assert server.http.get(f"{url}/{short}").json()["status"] == "incomplete"
        left = server.http.get(f"{url}/{long}").json()
        assert (left["status"], left["error"]["message"]) == ("failed", "The server is shutting down.")
        assert "Traceback" not in server.log.read_text("utf-8")
