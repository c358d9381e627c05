"""The same load on any OpenAI-compatible server: N streamed requests from one small client.

The client only searches for event boundaries, so that it uses little of the CPU that it shares with the
server.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from itertools import count

from peers_engines import BUILDS, MODELS, PeerError, environment
from peers_rows import OUTPUT, PROMPT, THREADS

VOCAB = 49000
START_TIMEOUT_S = 60
_seeds = count(1)


async def one(port: int) -> float:
    """Send a request with a unique prompt; return the seconds to its first event. It generates OUTPUT
    tokens."""
    drawn = random.Random(next(_seeds))
    body = json.dumps(
        {
            "prompt": [drawn.randrange(VOCAB) for _ in range(PROMPT)],
            "max_tokens": OUTPUT,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    sent = time.perf_counter()
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    first, text = 0.0, b""
    while b"data: [DONE]" not in text[-4096:]:
        part = await reader.read(2**16)
        if not part:
            raise PeerError(f"the server ended the stream: {text[-300:]!r}")
        text += part
        if not first and b"data: {" in text:
            first = time.perf_counter() - sent
    writer.close()
    if f'"completion_tokens":{OUTPUT}'.encode() not in text.replace(b" ", b""):
        raise PeerError(f"the completion does not have {OUTPUT} tokens: {text[-300:]!r}")
    return first


async def burst(port: int, n_streams: int) -> tuple[float, list[float]]:
    """Return the seconds until all completions end, and each one's seconds to the first event."""
    start = time.perf_counter()
    firsts = await asyncio.gather(*(one(port) for _ in range(n_streams)))
    return time.perf_counter() - start, sorted(firsts)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class ServerProcess:
    """A server process, ready when made. `ready`: the path that returns 200 once it serves requests."""

    def __init__(self, command: list[str], port: int, ready: str, env: dict[str, str] | None) -> None:
        self.port = port
        # If this process is killed, the server goes with it.
        self.process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "--", *command],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=env,
        )
        end = time.monotonic() + START_TIMEOUT_S
        while not _answers(f"http://127.0.0.1:{port}{ready}"):
            if self.process.poll() is not None or time.monotonic() > end:
                self.close()
                raise PeerError(f"{' '.join(command)} does not start; run it by hand to see why")
            time.sleep(0.1)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class Server(ServerProcess):
    """A server process, ready when made and warmed up by one request for each stream."""

    def __init__(self, engine: str, file: str, n_streams: int) -> None:
        self.n_streams = n_streams
        model, port, n = str(MODELS / file), str(free_port()), str(n_streams)
        common = ["--port", port, "--threads" if engine == "llama.cpp" else "--num-threads", str(THREADS)]
        is_ours = engine.startswith("llaisys")
        if is_ours:
            command = [sys.executable, "-m", "llaisys", "serve", model, *common]
            command += ["--max-num-seqs", "32", "--log-level", "warning"]
            command += ["--speculative-config", '{"method": "none"}']
            setting = engine.partition("/")[2]
            command += ["--quantization", setting] if setting else []
        else:
            cells = n_streams * (PROMPT + OUTPUT + 16)
            command = [str(BUILDS[engine] / "llama-server"), "-m", model, *common, "-np", n, "-c", str(cells)]
            command += ["-fa", "on", "-b", "2048", "-ub", "512", "--cache-ram", "0"]
        env = None if is_ours else environment(engine)
        super().__init__(command, int(port), "/ready" if is_ours else "/health", env)
        self.http(n_streams)

    def http(self, n_streams: int) -> dict[str, float]:
        """Return output tokens per second, and the median seconds to the first event."""
        seconds, firsts = asyncio.run(burst(self.port, n_streams))
        return {"0": n_streams * OUTPUT / seconds, "first_s": firsts[len(firsts) // 2]}


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
