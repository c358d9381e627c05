"""The server in this process on a real socket: loading, serving, signals and exit codes."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import AsyncIterator

import httpx
import pytest

from fakes.service import FakeService
from llaisys.config import Config
from llaisys.errors import RejectedError
from llaisys.registry import ModelRegistry
from llaisys.server import lifecycle
from llaisys.server.lifecycle import Lifecycle
from llaisys.server.listener import Listener, address_of, bind
from waiting import until


class Loader:
    """Replaces `ModelRegistry.start`: waits until released, then returns the engine or raises."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.engine = FakeService()
        self.error: Exception | None = None
        self.closed_with: list[float] = []

    async def start(self, _: Config, *, n_clients: int) -> ModelRegistry:  # noqa: ARG002 -- as the real one
        await self.go.wait()
        if self.error is not None:
            raise self.error
        return ModelRegistry([self.engine])  # type: ignore[list-item]  # it has AsyncLLM's surface

    async def close(self, drain_s: float = 0.0) -> None:
        self.closed_with.append(drain_s)


@pytest.fixture
async def loader(monkeypatch: pytest.MonkeyPatch) -> Loader:
    made = Loader()
    monkeypatch.setattr(lifecycle.ModelRegistry, "start", made.start)
    monkeypatch.setattr(made.engine, "close", made.close, raising=False)
    return made


@pytest.fixture
async def listener() -> AsyncIterator[Listener]:
    with bind(Config(port=0)) as made:
        yield made


def client_of(listener: Listener) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=address_of(Config(), listener.getsockname()[1]), timeout=None)


async def is_ready(client: httpx.AsyncClient) -> bool:
    return (await client.get("/ready")).status_code == 200


async def test_probes_answer_while_the_model_loads(
    loader: Loader, listener: Listener, capfd: pytest.CaptureFixture[str]
) -> None:
    life = asyncio.create_task(Lifecycle(Config(port=0), listener).run())
    async with client_of(listener) as client:
        assert (await client.get("/livez")).status_code == 200
        for path in ("/health", "/ready"):
            assert (await client.get(path)).status_code == 503
        rejected = await client.post("/v1/completions", json={"prompt": "Hi"})
        assert rejected.json()["error"]["code"] == "model_loading"
        assert capfd.readouterr().out == ""
        loader.go.set()
        await until(lambda: is_ready(client))
        printed: list[str] = []

        def has_printed() -> bool:  # a thread writes the line
            printed.append(capfd.readouterr().out)
            return printed[-1].endswith("\n")

        await until(has_printed)
        assert "".join(printed) == f"LLAISYS serving tiny at {client.base_url}\n".replace("/\n", "\n")
        assert (await client.post("/v1/completions", json={"prompt": "Hi"})).status_code == 200
    os.kill(os.getpid(), signal.SIGTERM)
    assert await life == 0
    assert loader.closed_with == [30.0]


async def test_collections_skip_the_objects_of_the_start(loader: Loader, listener: Listener) -> None:
    life = asyncio.create_task(Lifecycle(Config(port=0), listener).run())
    assert gc.get_freeze_count() == 0
    loader.go.set()
    async with client_of(listener) as client:
        await until(lambda: is_ready(client))
    n_frozen = gc.get_freeze_count()
    assert n_frozen > 10_000
    os.kill(os.getpid(), signal.SIGTERM)
    assert await life == 0
    assert gc.get_freeze_count() == 0


async def test_a_model_that_fails_to_load_ends_the_server(loader: Loader, listener: Listener) -> None:
    loader.error = RejectedError("no such model", param="model")
    loader.go.set()
    with pytest.raises(RejectedError, match="no such model"):
        await Lifecycle(Config(port=0), listener).run()


async def test_a_signal_while_loading_does_not_wait_for_the_model(
    loader: Loader, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []
    monkeypatch.setattr(lifecycle, "_exit_now", left.append)
    life = asyncio.create_task(Lifecycle(Config(port=0), listener).run())
    async with client_of(listener) as client:
        assert (await client.get("/livez")).status_code == 200
    os.kill(os.getpid(), signal.SIGINT)
    await life
    assert left == [0]
    assert not loader.go.is_set()


async def test_a_dead_engine_sets_the_exit_code(loader: Loader, listener: Listener) -> None:
    loader.go.set()
    life = asyncio.create_task(Lifecycle(Config(port=0), listener).run())
    async with client_of(listener) as client:
        await until(lambda: is_ready(client))
        loader.engine.dead = True
        assert (await client.get("/health")).status_code == 503
    os.kill(os.getpid(), signal.SIGTERM)
    assert await life == 70


async def test_a_stuck_engine_ends_the_server(loader: Loader, listener: Listener) -> None:
    loader.go.set()
    life = asyncio.create_task(Lifecycle(Config(port=0, watchdog_window_s=0.1), listener).run())
    await until(lambda: loader.engine.n_beats > 3)
    loader.engine.dead = loader.engine.stuck = True
    assert await life == 70


async def test_an_engine_that_cannot_restart_ends_the_server(
    loader: Loader, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Open requests of other models continue, and the watchdogs keep getting heartbeats of the loop."""

    async def close(drain_s: float = 0.0) -> None:
        loader.closed_with.append(drain_s)
        n_beats = loader.engine.n_beats
        await until(lambda: loader.engine.n_beats > n_beats + 3)

    monkeypatch.setattr(loader.engine, "close", close)
    loader.go.set()
    settings = Config(port=0, watchdog_window_s=0.1, shutdown_timeout_s=9)
    life = asyncio.create_task(Lifecycle(settings, listener).run())
    await until(lambda: loader.engine.n_beats > 0)
    loader.engine.dead = loader.engine.lost = True
    assert await life == 70
    assert loader.closed_with == [9.0]


async def test_the_watchdogs_get_heartbeats_during_a_drain(
    loader: Loader, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats: list[int] = []

    async def close(_: float = 0.0) -> None:
        n_beats = loader.engine.n_beats
        await until(lambda: loader.engine.n_beats > n_beats + 3)
        beats.append(loader.engine.n_beats - n_beats)

    monkeypatch.setattr(loader.engine, "close", close)
    loader.go.set()
    life = asyncio.create_task(Lifecycle(Config(port=0, watchdog_window_s=0.1), listener).run())
    await until(lambda: loader.engine.n_beats > 0)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await life == 0
    (n_beats,) = beats
    assert n_beats > 3


async def test_a_third_signal_exits_immediately(
    loader: Loader, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []
    monkeypatch.setattr(lifecycle, "_exit_now", left.append)
    stuck = asyncio.Event()

    async def close(drain_s: float = 0.0) -> None:
        loader.closed_with.append(drain_s)
        await stuck.wait()

    monkeypatch.setattr(loader.engine, "close", close)
    loader.go.set()
    life = asyncio.create_task(Lifecycle(Config(port=0, shutdown_timeout_s=9), listener).run())
    async with client_of(listener) as client:
        await until(lambda: is_ready(client))
    os.kill(os.getpid(), signal.SIGTERM)
    await until(lambda: loader.closed_with == [9.0])
    os.kill(os.getpid(), signal.SIGTERM)
    await until(lambda: loader.closed_with == [9.0, 0.0])
    os.kill(os.getpid(), signal.SIGTERM)
    await until(lambda: left == [130])
    stuck.set()
    assert await life == 0
