"""The server process: bind, answer probes at once, load, serve, and end in order.

uvicorn waits for open streams before it runs any shutdown hook, so the signals are ours: the first ends the
engine, which ends every stream with its terminator; then uvicorn has nothing left to wait for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import uvicorn

from llaisys.config import Config
from llaisys.logs import STDOUT, LineHandler, LineWriter, start_log
from llaisys.registry import ModelRegistry
from llaisys.server.app import create_app
from llaisys.server.chat_store import ChatStore
from llaisys.server.connection import connection_class
from llaisys.server.connection_limit import (
    ACCEPTS_PER_TURN,
    PROBE_CONNECTIONS,
    REQUESTS_MAX,
    Listener,
    RequestBound,
)
from llaisys.server.gate import check_exposure
from llaisys.server.keys import Keyring
from llaisys.server.lag import keep_measuring
from llaisys.server.listen import address_of, allow_files, listening, tls_options
from llaisys.server.memory import keep_trimmed
from llaisys.server.spans import Spans
from llaisys.server.state import ServerState

EXIT_OK, EXIT_ENGINE_DEAD, EXIT_KILLED = 0, 70, 130
CLOSE_CONNECTIONS_S = 1
PULSES_A_WINDOW = 24  # of `watchdog_window_s`, of which a sixth without one is logged and all is a verdict

log = logging.getLogger("llaisys.server")


def serve(config: Config) -> int:
    """Serves until a signal. Returns the exit code: 0, or 70 if the engine died on the way.

    Raises RejectedError for settings that cannot be served (an exposed host without a key, a taken port, a
    certificate that is none) and what loading the model raises.
    """
    check_exposure(config)
    log_writer = _start_log(config)
    n_connections = allow_files()
    tls = tls_options(config)
    keys = Keyring.of(config)
    config = config.model_copy(update={"api_key": ()})  # from here on there are hashes only
    with listening(config) as listener, _chats(config) as chats, _spans(config) as spans:
        listener.limit.maximum = n_connections
        state = ServerState(config, keys=keys, chats=chats, spans=spans)
        state.metrics.count_connections(listener.limit.stats, log_writer)
        return asyncio.run(Lifecycle(config, listener, state, tls).run())


def _start_log(config: Config) -> LineWriter:
    """Everything to stderr; the line of each request bare, so that it is a JSON object."""
    writer = start_log(config.log_level.upper())
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    requests = logging.getLogger("llaisys.request")
    requests.addHandler(LineHandler(writer, "%(message)s"))
    requests.propagate = False
    return writer


@contextlib.contextmanager
def _spans(config: Config) -> Iterator[Spans | None]:
    """What sends traces, with what waits sent at the end; None without. Raises RejectedError, saying why."""
    if config.otlp_traces_endpoint is None:
        yield None
        return
    with contextlib.closing(Spans.to(config.otlp_traces_endpoint)) as spans:
        yield spans


@contextlib.contextmanager
def _chats(config: Config) -> Iterator[ChatStore | None]:
    """The chat store, closed at the end; None without. Raises RejectedError for a file of another kind."""
    if config.chat_store is None:
        yield None
        return
    with contextlib.closing(ChatStore(config.chat_store, config.max_chat_bytes_per_key)) as chats:
        yield chats


class Lifecycle:
    """Loading -> serving -> draining -> gone. Owns the signals, uvicorn and the server's state.

    The first SIGINT or SIGTERM stops; a second one cuts the drain short; a third ends the process at once.
    """

    def __init__(
        self,
        config: Config,
        listener: Listener,
        state: ServerState | None = None,
        tls: Mapping[str, Any] | None = None,
    ) -> None:
        """`tls`: uvicorn's options for it."""
        self._config = config
        self._listener = listener
        # A Unix socket has no port; clients that name one mean the setting.
        self._port = int(listener.getsockname()[1]) if config.uds is None else config.port
        self._state = state or ServerState(config)
        self._tls = tls or {}
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self) -> int:
        """Serves until a signal; the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        web = self._web_server()
        serving = asyncio.ensure_future(web.serve(sockets=[self._listener]))
        serving.add_done_callback(lambda _: self._stop.set())
        n_clients = self._state.keys.n_clients
        loading = asyncio.ensure_future(ModelRegistry.start(self._config, n_clients=n_clients))
        exit_code = EXIT_OK
        try:
            await _first_of(loading, self._stop)
            if loading.done():
                exit_code = await self._serve_until_stopped(loading.result())
        finally:
            self._state.draining = True
            web.should_exit = True
            await serving
        if not loading.done():
            _leave(EXIT_OK)
        return exit_code

    async def _pulse(self, models: ModelRegistry) -> None:
        """Tells the watchdogs that the loop turns, and hears them: a stuck engine ends the server, as does
        one that has died for good."""
        while not models.is_stuck():
            if models.is_lost():
                self._stop.set()  # and goes on: a drain without beats would be a loop that has stopped
            models.beat()
            await asyncio.sleep(self._config.watchdog_window_s / PULSES_A_WINDOW)
        self._stop.set()

    def _on_signal(self) -> None:
        if self._hurry.is_set():
            _leave(EXIT_KILLED)
        (self._hurry if self._stop.is_set() else self._stop).set()

    def _web_server(self) -> _Uvicorn:
        limit = self._listener.limit
        app = create_app(self._state, self._port)
        return _Uvicorn(
            uvicorn.Config(
                RequestBound(app, limit.stats, limit.maximum - PROBE_CONNECTIONS),
                http=connection_class(self._config.upload_timeout_s, limit),
                ws="none",
                log_config=None,
                access_log=False,
                lifespan="off",
                proxy_headers=False,
                server_header=False,
                backlog=ACCEPTS_PER_TURN,
                timeout_graceful_shutdown=CLOSE_CONNECTIONS_S,
                timeout_keep_alive=self._config.timeout_keep_alive_s,  # type: ignore[arg-type]  # only waited for
                **self._tls,
            )
        )

    async def _serve_until_stopped(self, models: ModelRegistry) -> int:
        """Ready goes off before anything else; then the engine ends its streams, each with a terminator."""
        self._state.models = models
        names = ",".join(each.model_names[0] for each in models.services)
        LineWriter(STDOUT).write(f"LLAISYS serving {names} at {address_of(self._config, self._port)}")
        duties = (self._pulse(models), keep_trimmed(), keep_measuring(self._state.metrics.loop_came_late))
        meanwhile = [asyncio.ensure_future(duty) for duty in duties]
        await self._stop.wait()
        exit_code = EXIT_OK if models.is_alive() else EXIT_ENGINE_DEAD
        self._state.draining = True
        log.info("ending; open requests may go on for %g s", self._config.shutdown_timeout_s)
        closing = asyncio.ensure_future(models.close(self._config.shutdown_timeout_s))
        await _first_of(closing, self._hurry)
        if not closing.done():
            closing.cancel()
            await asyncio.gather(closing, return_exceptions=True)
            await models.close()
        for task in meanwhile:  # not before: without a pulse a drain would be a loop that has stopped
            task.cancel()
        return exit_code


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's. Its `backlog` bounds what asyncio accepts at once; more may wait in the kernel."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(REQUESTS_MAX)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves the signals to Lifecycle."""
        yield


async def _first_of(work: asyncio.Future[Any], event: asyncio.Event) -> None:
    """Returns when `work` is done or `event` is set; `work` goes on."""
    waiter = asyncio.ensure_future(event.wait())
    await asyncio.wait({work, waiter}, return_when=asyncio.FIRST_COMPLETED)
    waiter.cancel()


def _leave(exit_code: int) -> NoReturn:
    """Ends the process without waiting for threads: a model that is being read cannot be told to stop, and
    nothing that it holds outlives the process."""
    sys.stdout.flush()
    logging.shutdown()
    os._exit(exit_code)
