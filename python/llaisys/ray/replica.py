"""Replica: a whole server in an actor of Ray Serve, without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

from ray import serve
from starlette.types import Message

from llaisys.config import Config, load_config
from llaisys.ray.exchange import REPLICA_HEADER, AsgiPipe, HttpExchange
from llaisys.registry import ModelRegistry
from llaisys.server.app import create_app
from llaisys.server.lifecycle import (
    BEATS_PER_WINDOW,
    measure_loop_lag,
    server_state,
    start_server_log,
    trim_memory,
)


class Replica:
    """Owns the engines of one replica. Ray runs all methods on one event loop."""

    async def __init__(self, settings: dict[str, Any]) -> None:  # type: ignore[misc]  # Ray awaits it
        """Load the models. `settings`: as for `load_config`; this machine's environment has the keys."""
        config = load_config(settings)
        start_server_log(config)
        self._name = serve.get_replica_context().replica_id.unique_id.encode()
        self._stores = ExitStack()
        self._state = self._stores.enter_context(server_state(config))
        self._models = await ModelRegistry.start(config, n_clients=self._state.keys.n_clients)
        self._state.models = self._models
        self._app = create_app(self._state, config.port)
        upkeep = (self._beat(config), trim_memory(), measure_loop_lag(self._state.metrics.observe_loop_lag))
        self._upkeep = [asyncio.ensure_future(each) for each in upkeep]
        self._open: set[asyncio.Task[None]] = set()

    async def handle(self, exchange: HttpExchange) -> AsyncIterator[list[Message]]:
        """Run a request, and yield the messages of its response. It ends early if the consumer leaves."""
        pipe = AsgiPipe(exchange.body)
        work = asyncio.ensure_future(self._run(exchange, pipe))
        self._open.add(work)  # a task without a reference may disappear
        work.add_done_callback(self._open.discard)
        try:
            async for messages in pipe:
                yield [self._signed(message) for message in messages]
            await work
        finally:
            await pipe.close()

    def check_health(self) -> None:
        """Raise if the replica must be replaced, as Ray asks."""
        if self._models.is_stuck() or self._models.is_lost():
            raise RuntimeError("an engine is stuck, or dead and not restarted; see the log of this replica")

    async def __del__(self) -> None:
        """Close the engines. Ray calls it once the open requests have ended, or after their deadline."""
        self._state.draining = True
        await self._models.close()
        for task in self._upkeep:
            task.cancel()
        self._stores.close()

    async def _run(self, exchange: HttpExchange, pipe: AsgiPipe) -> None:
        try:
            await self._app(exchange.scope, pipe.receive, pipe.send)
        finally:
            await pipe.finish()

    def _signed(self, message: Message) -> Message:
        """Add the name of the replica to the head of a response. Ray's proxy adds the request's id."""
        if message["type"] != "http.response.start":
            return message
        headers = [each for each in message["headers"] if each[0] != b"x-request-id"]
        return {**message, "headers": [*headers, (REPLICA_HEADER, self._name)]}

    async def _beat(self, config: Config) -> None:
        """Send heartbeats of the event loop to the watchdogs. Never returns."""
        while True:
            self._models.beat()
            await asyncio.sleep(config.watchdog_window_s / BEATS_PER_WINDOW)
