"""OwnServer: starts `llaisys serve` on a free port with its log in a file, and reads its log and metrics."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

CLIENT_CORE = 1
_END_LINE = re.compile(r"\bstatus\W+(\d+)\W+seconds\W+([\d.]+)")


@dataclass(frozen=True)
class OwnServer:
    """A running server. `start_s`: seconds from the start of the process to /ready."""

    url: str
    process: psutil.Process
    log: Path
    start_s: float

    def metric(self, name: str, label: str = "") -> float:
        """Return the sum of the samples of a metric whose labels contain `label`."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if re.match(rf"{name}[ {{]", line) and label in line
        )

    def response_seconds(self, status: int, since: int = 0) -> list[float]:
        """Return the seconds of all requests with this status, from the server's log.

        `since`: the size of the log at which to start reading.
        """
        text = self.log.read_bytes()[since:].decode("utf-8", "replace")
        return [float(seconds) for found, seconds in _END_LINE.findall(text) if int(found) == status]


@contextmanager
def own_server(*flags: str) -> Iterator[OwnServer]:
    """Start a server; yield it when it is ready, and stop it afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        command = [sys.executable, "-m", "llaisys", "serve", "--port", "0", *flags]
        start_s = time.perf_counter()
        with log.open("w", encoding="utf-8") as stderr:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
        assert process.stdout is not None
        try:
            url = next((line.split()[-1] for line in process.stdout if "http" in line), None)
            if url is None:
                sys.exit(f"the server did not start: {log.read_text('utf-8')}")
            while httpx.get(f"{url}/ready").status_code != 200:
                time.sleep(0.01)
            yield OwnServer(url, psutil.Process(process.pid), log, time.perf_counter() - start_s)
        finally:
            if process.poll() is not None:
                end = log.read_text("utf-8")[-4000:]
                print(
                    f"the server ended with code {process.returncode}:\n{end}",
                    file=sys.stderr,
                )
            process.terminate()
            process.wait(30)


@contextmanager
def on_client_core() -> Iterator[None]:
    """Bind this process and new children to one core; a server that is running keeps its cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, before & {CLIENT_CORE} or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
