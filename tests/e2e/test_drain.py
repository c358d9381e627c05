"""SIGTERM at random moments of a busy server: readiness goes off before any refusal, every answer has exactly
one end, and the process exits with 0. `DRAIN_SEED` chooses other moments."""

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
N_MOMENTS, N_CLIENTS = 20, 12
LONG = 2_500  # tokens: no answer of this length ends by itself before the second signal
JSON = {"content-type": "application/json"}
FLAGS = (
    *("--num-kv-cells", "16384", "--max-num-seqs", "6", "--max-num-queued-reqs", "64", "--dtype", "float32"),
    *("--timeout-keep-alive", "60"),
)


@dataclass
class Crowd:
    """Clients that ask until the server has gone. `n_pieces`: what they have read, together."""

    server: Server
    bodies: list[dict[str, Any]]
    n_pieces: int = 0
    n_whole: int = 0
    n_cut: int = 0
    n_refused: int = 0
    faults: list[str] = field(default_factory=list)
    moved: threading.Condition = field(default_factory=threading.Condition)

    def until(self, n_pieces: int) -> None:
        """Returns when so many pieces of answers were read, or nobody gives any more."""
        with self.moved:
            while self.n_pieces < n_pieces and not self.faults and self.server.process.poll() is None:
                self.moved.wait(timeout=0.1)

    def count(self, **news: int) -> None:
        with self.moved:
            for name, n in news.items():
                setattr(self, name, getattr(self, name) + n)
            self.moved.notify_all()

    def work(self, seed: int) -> None:
        """One client, on a connection that it keeps."""
        random = Random(seed)
        connection = HTTPConnection(urlsplit(self.server.url).netloc)
        while True:
            body = random.choice(self.bodies)
            try:
                connection.request("POST", "/v1/completions", json.dumps(body), JSON)
                answer = connection.getresponse()
            except OSError:  # nobody listens any more, or the idle connection was closed: nothing was begun
                return None
            except Exception as e:  # noqa: BLE001 -- told by the test, not by a thread
                return self.fault(f"{body}: no answer: {e!r}")
            try:
                raw = b""
                while piece := answer.read1(65536):
                    raw += piece
                    self.count(n_pieces=1)
                answer.close()  # `read1` leaves an answer of a known length open
            except Exception as e:  # noqa: BLE001 -- as above
                return self.fault(f"{body}: a cut answer: {e!r} {raw[-200:]!r}")
            if not self.judge(answer.status, answer.headers, raw, body):
                return None
            if answer.status == 503:
                return self.probe()

    def judge(self, status: int, headers: Any, raw: bytes, body: dict[str, Any]) -> bool:
        """One answer; False if it is not what it may be."""
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
        """A client that was refused finds the server alive and not ready; or gone."""
        for path, status in (("/ready", 503), ("/health", 503), ("/livez", 200)):
            connection = HTTPConnection(urlsplit(self.server.url).netloc)
            try:
                connection.request("GET", path)
                found = connection.getresponse().status
            except OSError:
                return
            if found != status:
                self.fault(f"{path} was {found} after a refusal")

    def fault(self, text: str) -> None:
        with self.moved:
            self.faults.append(text)
            self.moved.notify_all()


@dataclass(frozen=True)
class Moment:
    """When the signal comes, in pieces read, and what the server may do then. `second`: pieces later comes
    another signal."""

    seed: int
    n_pieces: int
    drain_s: float
    second: int | None
    lengths: tuple[int, ...]


def moments() -> list[Moment]:
    """Drains that nobody waits out, that are long enough for all, and that a second signal cuts."""
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


@pytest.mark.timeout(900)  # half a minute on two quiet cores
@pytest.mark.parametrize("half", [0, 1])
def test_a_signal_at_random_moments(model: Path, tmp_path: Path, half: int) -> None:
    """Half of the moments, two servers at a time: one starts while the other ends."""
    chosen = moments()[half::2]
    with ThreadPoolExecutor(2) as pool:
        crowds = list(pool.map(lambda moment: end_one(model, tmp_path, moment), chosen))
    faults = [(moment, crowd.faults) for moment, crowd in zip(chosen, crowds, strict=True) if crowd.faults]
    assert not faults
    for moment, crowd in zip(chosen, crowds, strict=True):
        if moment.drain_s and moment.second is None:
            assert crowd.n_cut == 0, "there was time for all of them"
    assert sum(crowd.n_cut for crowd in crowds) > 0
    assert sum(crowd.n_refused for crowd in crowds) > 0
    assert sum(crowd.n_whole for crowd in crowds) > 0


def end_one(model: Path, tmp_path: Path, moment: Moment) -> Crowd:
    """A server from its start to its end under a crowd."""
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
    """A fault of the crowd unless it gives what is wanted."""
    try:
        found = ask()
    except Exception as e:  # noqa: BLE001 -- told by the test
        found = e
    if found != want:
        crowd.fault(f"{found!r}, not {want!r}: {crowd.server.log.read_text('utf-8')[-2000:]}")
