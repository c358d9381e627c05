"""`serve --engine-process` on a real socket: what clients and probes see when the engine is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil

from serving import END_S, Server, long_model, serving
from sse import events

FLAGS = ("--num-kv-cells", "65536", "--dtype", "float32", "--engine-process")
LONG = {"prompt": "Hello", "max_tokens": 30_000, "ignore_eos": True, "stream": True}


def engines(server: Server) -> list[psutil.Process]:
    """The engine processes of a server; its text processes are left out."""
    children = psutil.Process(server.process.pid).children()
    return [child for child in children if "llaisys.engine.child" in " ".join(child.cmdline())]


def test_kill_9_of_the_engine(tmp_path: Path) -> None:
    """The stream gets its error frame and `[DONE]`; probes are red until the engine is back."""
    with serving(tmp_path, str(long_model(tmp_path)), *FLAGS) as server:
        (engine,) = engines(server)
        raw = b""
        with server.http.stream("POST", "/v1/completions", json=LONG) as answer:
            for part in answer.iter_raw():
                if not raw:
                    engine.kill()
                raw += part
        *_, error, done = events(raw)
        assert (error["error"]["code"], done) == ("engine_dead", "[DONE]")
        assert server.http.get("/livez").status_code == 200
        while server.http.get("/ready").status_code == 503:
            refused = server.http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 3})
            if refused.status_code != 200:
                assert refused.json()["error"]["code"] == "engine_dead"
                assert int(refused.headers["retry-after"]) >= 1
        assert server.http.get("/health").status_code == 200
        again = server.http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 3})
        assert again.json()["usage"]["completion_tokens"] == 3
        assert len(engines(server)) == 1
        assert server.stop() == 0


def test_ctrl_c_reaches_the_engine_through_the_server_alone(tmp_path: Path) -> None:
    """A signal to all of them, as a terminal or a service manager sends it, ends the stream in order."""
    with serving(tmp_path, str(long_model(tmp_path)), *FLAGS, "--shutdown-timeout", "250") as server:
        processes = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children()]
        raw = b""
        with server.http.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 500}) as answer:
            for part in answer.iter_raw():
                if not raw:
                    for each in processes:
                        os.kill(each.pid, signal.SIGTERM)
                raw += part
        assert server.process.wait(timeout=END_S) == 0
    *_, last, done = events(raw)
    assert (last["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
