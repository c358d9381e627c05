"""Phase 5: a server on the GPU: one completion, many streams, two CUDA settings, a restart after a fault.

usage: phase5_server.py --out DIR [--inputs DIR] [--dry-run] [--budget-s 240] [--fresh]

Each row starts `llaisys serve`, is a client of it, and stops it with SIGTERM, after which its exit status
must be 0. The fault is a real one: `fault/driver.c`, which is compiled here, launches a kernel that writes to
an illegal address.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import models
from common import Column, Failure, Phase, Row, Skip, arguments

READY = re.compile(r"LLAISYS serving \S+ at (http://\S+)")
FAULT = "CUDA_ERROR_ILLEGAL_ADDRESS (700)"
# For a request, and for the end of the server.
TIMEOUT_S = 60.0
PROMPT = "The capital of France is"
TINY_SETTINGS = ("--num-kv-cells", "256", "--max-num-batched-tokens", "32", "--max-num-seqs", "4")
COLUMNS = [
    Column("n_requests", "requests"),
    Column("n_out", "tokens out"),
    Column("seconds", "s", "{:.2f}"),
    Column("start_s", "start, s", "{:.1f}"),
    Column("result", "result"),
]


class Server:
    """A running server. `log` is the file of its stderr."""

    def __init__(self, process: subprocess.Popen[str], url: str, log: Path, start_s: float) -> None:
        self.process, self.url, self.log, self.start_s = process, url, log, start_s

    def post(self, **body: Any) -> tuple[int, dict[str, Any]]:
        """Send a completion; return the HTTP status and the response."""
        try:
            with self._open(body) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as refused:
            return refused.code, json.load(refused)

    def timed(self, **body: Any) -> tuple[str, float]:
        """Return the text of a completion, and its seconds. Raises Failure."""
        begun = time.monotonic()
        text = self.completed(**body)
        return text, time.monotonic() - begun

    def values(self, n_requests: int, n_out: int, seconds: float, result: str) -> dict[str, Any]:
        """Return a row's values."""
        values = {"n_requests": n_requests, "n_out": n_out, "seconds": seconds, "result": result}
        return {**values, "start_s": self.start_s}

    def completed(self, **body: Any) -> str:
        """Return the text of a completion. Raises Failure."""
        status, answer = self.post(**body)
        if status != 200:
            raise Failure(f"status {status}: {answer}")
        text: str = answer["choices"][0]["text"]
        return text

    def streamed(self, **body: Any) -> tuple[str, int]:
        """Return text and number of tokens of a streamed completion, which must end exactly once."""
        with self._open({**body, "stream": True, "stream_options": {"include_usage": True}}) as response:
            lines = [line.decode().strip() for line in response]
        events = [line.removeprefix("data: ") for line in lines if line]
        chunks = [json.loads(event) for event in events if event != "[DONE]"]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
        if events[-1] != "[DONE]" or events.count("[DONE]") != 1 or reasons != ["length"]:
            raise Failure(f"a stream ended with {events[-2:]}, finish reasons {reasons}")
        return "".join(choice["text"] for choice in choices), chunks[-1]["usage"]["completion_tokens"]

    def _open(self, body: Mapping[str, Any]) -> Any:
        data = json.dumps({"model": "model", "temperature": 0, "ignore_eos": True, **body}).encode()
        request = urllib.request.Request(
            f"{self.url}/v1/completions", data, {"content-type": "application/json"}
        )
        return urllib.request.urlopen(request, timeout=TIMEOUT_S)


class ServerPhase(Phase):
    """The phase with the checkpoint that is served."""

    def __init__(self, options: Any) -> None:
        super().__init__(5, "A server", COLUMNS, options)
        self.out: Path = options.out
        self.inputs: Path = options.inputs
        self.n_tokens = 6 if self.dry_run else 64
        self.n_streams = 4 if self.dry_run else 64

    def model(self) -> Path:
        """Return the first layers of SmolLM2, or the tiny checkpoint of dry runs."""
        if self.dry_run:
            return models.random_model(self.out, self.inputs, "tiny", models.TINY)
        return models.smollm2(self.out, self.inputs)

    @contextmanager
    def serving(self, *flags: str, **extra: str) -> Iterator[Server]:
        """Start a server with these flags and environment variables. Raises Failure if it ends badly."""
        command = [sys.executable, "-m", "llaisys", "serve", str(self.model()), "--port", "0"]
        command += ["--device", "cuda", "--served-model-name", "model", *flags]
        command += TINY_SETTINGS if self.dry_run else []
        log, begun = self.out / "server.log", time.monotonic()
        with (
            log.open("w", encoding="utf-8") as stderr,
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=stderr, text=True, env={**os.environ, **extra}
            ) as process,
        ):
            try:
                assert process.stdout is not None
                ready = READY.match(process.stdout.readline())
                if ready is None:
                    raise Failure(f"the server did not start: {log.read_text('utf-8')[-600:]}")
                yield Server(process, ready[1], log, time.monotonic() - begun)
                process.send_signal(signal.SIGTERM)
                if (status := process.wait(TIMEOUT_S)) != 0:
                    raise Failure(f"exit status {status} after SIGTERM: {log.read_text('utf-8')[-600:]}")
            finally:
                process.kill()


def one_completion(phase: ServerPhase) -> dict[str, Any]:
    """A completion and its stream have the same text."""
    with phase.serving() as server:
        whole, seconds = server.timed(prompt=PROMPT, max_tokens=phase.n_tokens)
        streamed, n_out = server.streamed(prompt=PROMPT, max_tokens=phase.n_tokens)
        if (streamed, n_out) != (whole, phase.n_tokens):
            raise Failure(f"streamed {streamed!r} of {n_out} tokens, not {whole!r}")
        values = server.values(2, n_out, seconds, "the stream has the text of the completion")
        return {**values, "text": whole}


def many_streams(phase: ServerPhase) -> dict[str, Any]:
    """Every one of many streams ends once, with all tokens."""

    def one(server: Server, number: int) -> int:
        return server.streamed(prompt=f"{PROMPT} {number}", max_tokens=phase.n_tokens)[1]

    with phase.serving() as server, ThreadPoolExecutor(phase.n_streams) as pool:
        one(server, 0)
        begun = time.monotonic()
        n_out = list(pool.map(partial(one, server), range(phase.n_streams)))
        seconds = time.monotonic() - begun
        if set(n_out) != {phase.n_tokens}:
            raise Failure(f"tokens of the streams: {n_out}")
        result = f"each ended once; {sum(n_out) / seconds:.0f} tokens/s"
        return server.values(phase.n_streams, sum(n_out), seconds, result)


def same_text(phase: ServerPhase, flag: str) -> dict[str, Any]:
    """With this flag the completion has the text of the first row."""
    first = phase.done("one completion")
    if first is None:
        raise Skip("the first row has no text")
    with phase.serving(flag) as server:
        text, seconds = server.timed(prompt=PROMPT, max_tokens=phase.n_tokens)
        if text != first["text"]:
            raise Failure(f"{text!r} with {flag}, not {first['text']!r}")
        return server.values(1, phase.n_tokens, seconds, "the same text")


def restart(phase: ServerPhase) -> dict[str, Any]:
    """An engine process whose GPU faults is replaced by a new one, which computes the same text."""
    if phase.dry_run:
        raise Skip("a dry run has no real driver")
    folder = build_fault(phase.out / "fault")
    file = folder / "now"
    body = {"prompt": PROMPT, "max_tokens": phase.n_tokens}
    with phase.serving(
        "--engine-process",
        LD_LIBRARY_PATH=f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}",
        CUDA_FAULT_FILE=str(file),
    ) as server:
        first = server.completed(**body)
        file.touch()
        status, answer = server.post(**body)
        if status != 503 or file.exists():
            raise Failure(f"status {status} at the fault, launched: {not file.exists()}: {answer}")
        begun = time.monotonic()
        while (again := server.post(**body))[0] == 503 and time.monotonic() - begun < TIMEOUT_S:
            time.sleep(0.05)
        seconds = time.monotonic() - begun
        if again[0] != 200 or again[1]["choices"][0]["text"] != first:
            raise Failure(f"after the restart: {again}, not {first!r}")
        if FAULT not in server.log.read_text("utf-8"):
            raise Failure(f"the log does not name {FAULT}")
        result = f"{answer['error']['code']}, then the same text from a new process"
        return server.values(3, 2 * phase.n_tokens, seconds, result)


def build_fault(folder: Path) -> Path:
    """Compile the driver that faults to `folder/libcuda.so.1`. Raises Skip without a C compiler.

    Its dependency on the real driver has that file's path, because both have the same name: a library without
    a soname is needed under the path at which it was linked.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise Skip("there is no C compiler")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    ctypes.CDLL("libcuda.so.1")
    (found,) = {
        line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcuda.so" in line
    }
    real, source = folder / "real.so", Path(__file__).parent / "fault" / "driver.c"
    build = [compiler, "-shared", "-fPIC", "-x", "c"]
    subprocess.run([*build, "/dev/null", "-o", real], check=True)
    named = ["-x", "none", "-Wl,--no-as-needed", str(real), "-ldl"]
    library = folder / "libcuda.so.1"
    subprocess.run([*build, f'-DREAL="{real}"', source, *named, "-o", library], check=True)
    real.unlink()
    real.symlink_to(found)
    (folder / "libcuda.so").symlink_to(library)
    return folder


def main() -> int:
    """Parse the flags and measure."""
    phase = ServerPhase(arguments(__doc__).parse_args())
    rows = {
        "one completion": partial(one_completion, phase),
        f"{phase.n_streams} streams": partial(many_streams, phase),
        "--cuda-sync": partial(same_text, phase, "--cuda-sync"),
        "--cuda-overlap": partial(same_text, phase, "--cuda-overlap"),
        "restart after a fault": partial(restart, phase),
    }
    return phase.run([Row(name, measure, expected_s=20.0) for name, measure in rows.items()])


if __name__ == "__main__":
    sys.exit(main())
