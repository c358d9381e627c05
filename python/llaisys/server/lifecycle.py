"""serve: runs the server process. It binds, serves probes, loads the models, serves requests and shuts down.

uvicorn waits for open streams before it runs any shutdown hook, so `Lifecycle` handles the signals. The first
signal closes the engines, which end every stream with its terminator. Then uvicorn has no open streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import uvicorn

from llaisys.config import Config
from llaisys.interpreter import responsive_interpreter
from llaisys.job_process import trim
from llaisys.logs import STDOUT, LineHandler, LineWriter, start_log
from llaisys.registry import ModelRegistry
from llaisys.server.app import create_app
from llaisys.server.connection import connection_class
from llaisys.server.listener import (
    ACCEPTS_PER_ITERATION,
    PROBE_CONNECTIONS,
    REQUESTS_MAX,
    Listener,
    address_of,
    listening,
    raise_file_limit,
    tls_options,
)
from llaisys.server.middleware.auth import Keyring
from llaisys.server.middleware.hosts import check_exposure
from llaisys.server.middleware.rate_limits import OpenRequestLimitMiddleware
from llaisys.server.middleware.root_path import RootPathMiddleware
from llaisys.server.responses.store import ResponseStore
from llaisys.server.state import ServerState
from llaisys.server.tracing import RequestTracer
from llaisys.server.webui.chat_store import ChatStore

# Seconds between two samples of the event loop's lag, and between two trims of the heap.
LAG_INTERVAL_S = 0.25
TRIM_INTERVAL_S = 5.0
EXIT_OK, EXIT_ENGINE_DEAD, EXIT_KILLED = 0, 70, 130
CLOSE_CONNECTIONS_S = 1
# Seconds for background responses, whose generation has ended, to be stored.
CLOSE_BACKGROUND_S = 5.0
BEATS_PER_WINDOW = 24  # heartbeats per `watchdog_window_s`; a late event loop is logged after a sixth of it

log = logging.getLogger("llaisys.server")


async def measure_loop_lag(observe: Callable[[float], None], interval_s: float = LAG_INTERVAL_S) -> None:
    """Report every `interval_s` seconds by how many seconds this task woke up late. Never returns."""
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + interval_s
        await asyncio.sleep(interval_s)
        observe(max(0.0, loop.time() - due_s))


async def trim_memory(interval_s: float = TRIM_INTERVAL_S, work: Callable[[], None] = trim) -> None:
    """Return freed memory to the system every `interval_s` seconds, on a thread. Never returns.

    glibc keeps freed memory in the malloc arenas of its threads. Without this, the server's memory grows for
    an hour (docs/decisions/0009-processes-and-models.md).
    """
    while True:
        await asyncio.sleep(interval_s)
        await asyncio.to_thread(work)


def serve(config: Config) -> int:
    """Serve until a signal. Return the exit code: 0, or 70 if an engine died.

    Raises RejectedError for invalid settings (an exposed host without a key, a port in use, an invalid
    certificate), and the errors of loading the model.
    """
    check_exposure(config)
    log_writer = start_server_log(config)
    n_connections = raise_file_limit()
    tls = tls_options(config)
    with listening(config) as listener, server_state(config) as state:
        listener.limit.maximum = n_connections
        state.metrics.count_connections(listener.limit.stats, log_writer)
        return asyncio.run(Lifecycle(state.config, listener, state, tls).run())


@contextlib.contextmanager
def server_state(config: Config) -> Iterator[ServerState]:
    """Yield the state of a server that is loading, with its stores and its tracer; close them at the end.

    Its configuration has no API keys, only their hashes. Raises RejectedError for invalid files.
    """
    keys = Keyring.of(config)
    config = config.model_copy(update={"api_key": ()})
    with _chats(config) as chats, _responses(config) as responses, _tracer(config) as tracer:
        yield ServerState(config, keys=keys, chats=chats, responses=responses, tracer=tracer)


def start_server_log(config: Config) -> LineWriter:
    """Log to stderr. The lines of requests have no prefix, because they are JSON objects."""
    writer = start_log(config.log_level.upper())
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    requests = logging.getLogger("llaisys.request")
    requests.addHandler(LineHandler(writer, "%(message)s"))
    requests.propagate = False
    return writer


@contextlib.contextmanager
def _tracer(config: Config) -> Iterator[RequestTracer | None]:
    """Yield the tracer if one is configured; flush it at the end. Raises RejectedError."""
    if config.otlp_traces_endpoint is None:
        yield None
        return
    with contextlib.closing(RequestTracer.to(config.otlp_traces_endpoint)) as tracer:
        yield tracer


@contextlib.contextmanager
def _chats(config: Config) -> Iterator[ChatStore | None]:
    """Yield the chat store if one is configured; close it at the end. Raises RejectedError."""
    if config.chat_store is None:
        yield None
        return
    with contextlib.closing(ChatStore(config.chat_store, config.max_chat_bytes_per_key)) as chats:
        yield chats


@contextlib.contextmanager
def _responses(config: Config) -> Iterator[ResponseStore | None]:
    """Yield the response store if one is configured; close it at the end. Raises RejectedError."""
    if config.response_store is None:
        yield None
        return
    bytes_max = config.max_stored_response_bytes_per_key
    with contextlib.closing(ResponseStore(config.response_store, bytes_max)) as responses:
        yield responses


class Lifecycle:
    """Runs a server: loading -> serving -> draining -> closed. Owns signals, uvicorn and the server's state.

    The first SIGINT or SIGTERM starts the drain, the second ends it, the third exits the process at once.
    """

    def __init__(
        self,
        config: Config,
        listener: Listener,
        state: ServerState | None = None,
        tls: Mapping[str, Any] | None = None,
    ) -> None:
        """`tls`: uvicorn's TLS options."""
        self._config = config
        self._listener = listener
        # A Unix socket has no port; Host headers then have the configured one.
        self._port = int(listener.getsockname()[1]) if config.uds is None else config.port
        self._state = state or ServerState(config)
        self._tls = tls or {}
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()

    async def run(self) -> int:
        """Serve until a signal; return the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        server = self._web_server()
        serving = asyncio.ensure_future(server.serve(sockets=[self._listener]))
        serving.add_done_callback(lambda _: self._stop.set())
        n_clients = self._state.keys.n_clients
        loading = asyncio.ensure_future(ModelRegistry.start(self._config, n_clients=n_clients))
        exit_code = EXIT_OK
        try:
            await _first_of(loading, self._stop)
            if loading.done():
                with responsive_interpreter():
                    exit_code = await self._serve_until_stopped(loading.result())
        finally:
            self._state.draining = True
            server.should_exit = True
            await serving
        if not loading.done():
            _exit_now(EXIT_OK)
        return exit_code

    async def _beat_watchdogs(self, models: ModelRegistry) -> None:
        """Send heartbeats of the event loop to the watchdogs.

        Stops the server if an engine is stuck, or dead and not restarted.
        """
        while not models.is_stuck():
            if models.is_lost():
                self._stop.set()  # continue, because a drain needs heartbeats, too
            models.beat()
            await asyncio.sleep(self._config.watchdog_window_s / BEATS_PER_WINDOW)
        self._stop.set()

    def _on_signal(self) -> None:
        if self._stop_now.is_set():
            _exit_now(EXIT_KILLED)
        (self._stop_now if self._stop.is_set() else self._stop).set()

    def _web_server(self) -> _Uvicorn:
        limit = self._listener.limit
        app = create_app(self._state, self._port)
        app = OpenRequestLimitMiddleware(app, limit.stats, limit.maximum - PROBE_CONNECTIONS)
        if self._config.root_path:
            app = RootPathMiddleware(app, self._config.root_path)
        return _Uvicorn(
            uvicorn.Config(
                app,
                http=connection_class(self._config.upload_timeout_s, limit),
                ws="none",
                log_config=None,
                access_log=False,
                lifespan="off",
                proxy_headers=False,
                server_header=False,
                backlog=ACCEPTS_PER_ITERATION,
                timeout_graceful_shutdown=CLOSE_CONNECTIONS_S,
                timeout_keep_alive=self._config.timeout_keep_alive_s,  # type: ignore[arg-type]  # a float works
                **self._tls,
            )
        )

    async def _serve_until_stopped(self, models: ModelRegistry) -> int:
        """Serve until stopped. Then readiness ends, and the engines end each stream with a terminator."""
        self._state.models = models
        names = ",".join(each.model_names[0] for each in models.services)
        LineWriter(STDOUT).write(f"LLAISYS serving {names} at {address_of(self._config, self._port)}")
        tasks = (
            self._beat_watchdogs(models),
            trim_memory(),
            measure_loop_lag(self._state.metrics.observe_loop_lag),
        )
        meanwhile = [asyncio.ensure_future(task) for task in tasks]
        await self._stop.wait()
        exit_code = EXIT_OK if models.is_alive() else EXIT_ENGINE_DEAD
        self._state.draining = True
        log.info("shutting down; open requests may continue for %g s", self._config.shutdown_timeout_s)
        closing = asyncio.ensure_future(models.close(self._config.shutdown_timeout_s))
        await _first_of(closing, self._stop_now)
        if not closing.done():
            closing.cancel()
            await asyncio.gather(closing, return_exceptions=True)
            await models.close()
        await self._state.background.wait(CLOSE_BACKGROUND_S)
        for task in meanwhile:  # not earlier: without heartbeats, a drain would count as a stuck event loop
            task.cancel()
        return exit_code


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start as uvicorn does. `backlog` bounds how many connections asyncio accepts at once; more wait in
        the kernel."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(REQUESTS_MAX)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to Lifecycle."""
        yield


async def _first_of(work: asyncio.Future[Any], event: asyncio.Event) -> None:
    """Return when `work` is done or `event` is set; `work` continues."""
    waiter = asyncio.ensure_future(event.wait())
    await asyncio.wait({work, waiter}, return_when=asyncio.FIRST_COMPLETED)
    waiter.cancel()


def _exit_now(exit_code: int) -> NoReturn:
    """Exit without waiting for threads. Loading a model cannot be interrupted, and it has no resources that
    outlive the process."""
    sys.stdout.flush()
    logging.shutdown()
    os._exit(exit_code)
