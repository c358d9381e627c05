"""SIGTERM at random moments of a busy server: `/ready` fails before any request is rejected.

Every response has exactly one end, and the process exits with 0. `DRAIN_SEED` chooses other moments.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

import pytest

from serving import END_S, Server, long_model, serving
from sse import events

SEED = int(os.environ.get("DRAIN_SEED", "20261121"))
N_MOMENTS, N_PARTS, N_CLIENTS = 20, 4, 12
LONG = 2_500  # tokens: more than a completion gets before the second signal
JSON = {"content-type": "application/json"}
FLAGS = (
    *("--num-kv-cells", "16384", "--max-num-seqs", "6", "--max-num-queued-reqs", "64", "--dtype", "float32"),
    *("--timeout-keep-alive", "60"),
)


@dataclass
class Crowd:
    """Clients that send requests until the server has ended. `n_pieces`: what all have read."""

    server: Server
    bodies: list[dict[str, Any]]
    n_pieces: int = 0
    n_whole: int = 0
    n_cut: int = 0
    n_refused: int = 0
    faults: list[str] = field(default_factory=list)
    moved: threading.Condition = field(default_factory=threading.Condition)

    def until(self, n_pieces: int) -> None:
        """Wait until the clients have read this many pieces, one failed, or the server has ended."""
        with self.moved:
            while self.n_pieces < n_pieces and not self.faults and self.server.process.poll() is None:
                self.moved.wait(timeout=0.1)

    def count(self, **news: int) -> None:
        with self.moved:
            for name, n in news.items():
                setattr(self, name, getattr(self, name) + n)
            self.moved.notify_all()

    def work(self, seed: int) -> None:
        """Run one client on a keep-alive connection."""
        random = Random(seed)
        connection = HTTPConnection(urlsplit(self.server.url).netloc)
        while True:
            body = random.choice(self.bodies)
            try:
                connection.request("POST", "/v1/completions", json.dumps(body), JSON)
                response = connection.getresponse()
            except OSError:  # the server no longer listens, or closed the idle connection
                return None
            except Exception as e:  # noqa: BLE001 -- the test reports it, not this thread
                return self.fault(f"{body}: no response: {e!r}")
            try:
                raw = b""
                while piece := response.read1(65536):
                    raw += piece
                    self.count(n_pieces=1)
                response.close()  # `read1` leaves a response of a known length open
            except Exception as e:  # noqa: BLE001 -- as above
                return self.fault(f"{body}: a truncated response: {e!r} {raw[-200:]!r}")
            if not self.check_response(response.status, response.headers, raw, body):
                return None
            if response.status == 503:
                return self.probe()

    def check_response(self, status: int, headers: Any, raw: bytes, body: dict[str, Any]) -> bool:
        """Record one response; return False if it is not allowed."""
        if status not in (200, 503):
            fits = False
        elif status == 503:
            error = json.loads(raw)["error"]["code"]
            self.count(n_refused=1)
            fits = error == "shutting_down" and int(headers["retry-after"]) > 0
        elif body["stream"]:
            *frames, done = [event for event in events(raw) if event != "ping"]
            ends = [f for f in frames if "error" in f or f["choices"][0]["finish_reason"]]
            is_cut = "error" in ends[-1]
            self.count(n_cut=is_cut, n_whole=not is_cut)
            fits = status == 200 and done == "[DONE]" and len(ends) == 1 and frames[-1] is ends[0]
            fits = fits and (not is_cut or ends[0]["error"]["code"] == "shutting_down")
        else:
            self.count(n_whole=1)
            fits = status == 200 and json.loads(raw)["choices"][0]["finish_reason"] == "length"
        if not fits:
            self.fault(f"{body}: {status} {raw[-300:]!r}")
        return fits

    def probe(self) -> None:
        """Check that the server is alive and not ready after a rejection, or has ended."""
        for path, status in (("/ready", 503), ("/health", 503), ("/livez", 200)):
            connection = HTTPConnection(urlsplit(self.server.url).netloc)
            try:
                connection.request("GET", path)
                found = connection.getresponse().status
            except OSError:
                return
            if found != status:
                self.fault(f"{path} was {found} after a rejection")

    def fault(self, text: str) -> None:
        with self.moved:
            self.faults.append(text)
            self.moved.notify_all()


@dataclass(frozen=True)
class Moment:
    """When the signal is sent, in pieces read, and how the server drains.

    `second`: send another signal this many pieces later.
    """

    seed: int
    n_pieces: int
    drain_s: float
    second: int | None
    lengths: tuple[int, ...]


def moments() -> list[Moment]:
    """Return moments with drains that are zero, long enough for all requests, or cut by a second signal."""
    random = Random(SEED)
    made = []
    for i in range(N_MOMENTS):
        drain_s, second, lengths = random.choice(
            ((0.0, None, (30, LONG)), (600.0, None, (5, 40)), (600.0, random.randint(1, 50), (30, LONG)))
        )
        made.append(Moment(SEED + i, random.randint(1, 300), drain_s, second, lengths))
    return made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return long_model(tmp_path_factory.mktemp("drain"))


@pytest.mark.timeout(900)  # a quarter of a minute on two quiet cores
@pytest.mark.parametrize("part", [0, *(pytest.param(i, marks=pytest.mark.long) for i in range(1, N_PARTS))])
def test_a_signal_at_random_moments(model: Path, tmp_path: Path, part: int) -> None:
    """Run a part of the moments, two servers at a time: one starts while the other ends."""
    chosen = moments()[part::N_PARTS]
    with ThreadPoolExecutor(2) as pool:
        crowds = list(pool.map(lambda moment: end_one(model, tmp_path, moment), chosen))
    faults = [(moment, crowd.faults) for moment, crowd in zip(chosen, crowds, strict=True) if crowd.faults]
    assert not faults
    for moment, crowd in zip(chosen, crowds, strict=True):
        if moment.drain_s and moment.second is None:
            assert crowd.n_cut == 0, "the drain was long enough for all requests"
    assert sum(crowd.n_cut for crowd in crowds) > 0
    assert sum(crowd.n_refused for crowd in crowds) > 0
    assert sum(crowd.n_whole for crowd in crowds) > 0


def end_one(model: Path, tmp_path: Path, moment: Moment) -> Crowd:
    """Run a server under load from its start to its end."""
    folder = tmp_path / f"{moment.seed}"
    folder.mkdir()
    random = Random(moment.seed)
    bodies = [
        {
            "prompt": [random.randrange(3, 500) for _ in range(random.choice((2, 40)))],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": stream,
        }
        for max_tokens in moment.lengths
        for stream in (True, True, True, False)
    ]
    flags = (*FLAGS, "--shutdown-timeout", f"{moment.drain_s}")
    with serving(folder, str(model), *flags) as server:
        crowd = Crowd(server, bodies)
        clients = [threading.Thread(target=crowd.work, args=(moment.seed + i,)) for i in range(N_CLIENTS)]
        for client in clients:
            client.start()
        crowd.until(moment.n_pieces)
        server.process.send_signal(signal.SIGTERM)
        if moment.second is not None:
            crowd.until(crowd.n_pieces + moment.second)
            server.process.send_signal(signal.SIGTERM)
        attempt(crowd, lambda: server.process.wait(timeout=moment.drain_s + END_S), want=0)
        for client in clients:
            client.join()
        attempt(crowd, lambda: "Traceback" in server.log.read_text("utf-8"), want=False)
    return crowd


def attempt(crowd: Crowd, ask: Callable[[], Any], want: Any) -> None:
    """Record a fault unless `ask` returns `want`."""
    try:
        found = ask()
    except Exception as e:  # noqa: BLE001 -- the test reports it
        found = e
    if found != want:
        crowd.fault(f"{found!r}, not {want!r}: {crowd.server.log.read_text('utf-8')[-2000:]}")
