"""`serve --engine-process`: what clients and probes get when the engine process is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import serving as server_process
from golden import FOLDER
from serving import END_S, Server, environment, long_model, serving
from sse import events
from waiting import block_until

FLAGS = ("--num-kv-cells", "65536", "--dtype", "float32", "--engine-process")
LONG = {"prompt": "Hello", "max_tokens": 30_000, "ignore_eos": True, "stream": True}


TESTS = str(Path(server_process.__file__).parent)


def patched(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """Start later servers with this change of `llaisys.engine.process`."""
    code = f"import sys; from llaisys.engine import process; {change}; "
    code += "from llaisys.cli.main import main; sys.exit(main())"
    monkeypatch.setattr(server_process, "COMMAND", (sys.executable, "-c", code))


def engines(server: Server) -> list[psutil.Process]:
    """Return the engine processes of a server, without its tokenizer workers."""
    found = []
    for child in psutil.Process(server.process.pid).children():
        with suppress(psutil.NoSuchProcess):  # it may just have ended
            if "llaisys.engine.process_main" in " ".join(child.cmdline()):
                found.append(child)
    return found


def kill_engine_during_a_stream(server: Server) -> None:
    """Kill the engine at the first piece of a stream, and check the stream's end."""
    (engine,) = engines(server)
    raw = b""
    with server.http.stream("POST", "/v1/completions", json=LONG) as response:
        for part in response.iter_raw():
            if not raw:
                engine.kill()
            raw += part
    *_, error, done = events(raw)
    assert (error["error"]["code"], done) == ("engine_dead", "[DONE]")


def test_a_killed_engine_ends_its_streams_and_is_restarted(tmp_path: Path) -> None:
    """The stream gets its error frame and `[DONE]`; `/ready` fails until the engine is back."""
    with serving(tmp_path, str(long_model(tmp_path)), *FLAGS) as server:
        kill_engine_during_a_stream(server)
        assert server.http.get("/livez").status_code == 200

        def is_back() -> bool:
            if server.http.get("/ready").status_code != 503:
                return True
            rejected = server.http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 3})
            if rejected.status_code != 200:
                assert rejected.json()["error"]["code"] == "engine_dead"
                assert int(rejected.headers["retry-after"]) >= 1
            return False

        server.wait_for(is_back)
        assert server.http.get("/health").status_code == 200
        again = server.http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 3})
        assert again.json()["usage"]["completion_tokens"] == 3
        assert len(engines(server)) == 1
        assert server.stop() == 0


def test_a_server_whose_engine_cannot_be_restarted_exits_with_70(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patched(monkeypatch, "process.RESTARTS_MAX = 0")
    with serving(tmp_path, str(long_model(tmp_path)), *FLAGS) as server:
        kill_engine_during_a_stream(server)
        assert server.process.wait(timeout=END_S) == 70
        assert "restarted 0 times, which is the limit" in server.log.read_text("utf-8")


@pytest.mark.parametrize(("point", "exit_code"), [("at once", 1), ("never", 0)])
def test_a_child_that_does_not_load_does_not_hang_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, exit_code: int
) -> None:
    """A child that dies ends the server, which logs its last lines; Ctrl-C ends a wait for a silent child."""
    boot = f"import sys; sys.path[:] = {{}}; sys.path.append({TESTS!r}); from dying_child import main; "
    patched(monkeypatch, f"process._BOOT = {boot + f'main({{}}, {point!r})'!r}")
    command = [*server_process.COMMAND, "serve", str(FOLDER), "--port", "0", *FLAGS]
    log = tmp_path / "log"
    with log.open("w") as file, subprocess.Popen(command, stderr=file, env=environment()) as process:
        if point == "never":
            block_until(lambda: process.poll() is not None or "here, and silent" in log.read_text("utf-8"))
            process.send_signal(signal.SIGINT)
        assert process.wait(timeout=END_S) == exit_code
    if point == "at once":
        *_, last, line = log.read_text("utf-8").splitlines()
        assert last.endswith("ended with exit code 7; the last lines of its log:")
        assert line == "dying at once"


def test_the_engine_process_ignores_signals_for_the_server(tmp_path: Path) -> None:
    """A signal to all processes, as from a terminal or a service manager, still drains the stream."""
    with serving(tmp_path, str(long_model(tmp_path)), *FLAGS, "--shutdown-timeout", "250") as server:
        processes = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children()]
        raw = b""
        with server.http.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 500}) as response:
            for part in response.iter_raw():
                if not raw:
                    for each in processes:
                        os.kill(each.pid, signal.SIGTERM)
                raw += part
        assert server.process.wait(timeout=END_S) == 0
    *_, last, done = events(raw)
    assert (last["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
