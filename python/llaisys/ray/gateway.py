"""Gateway: reads requests from Ray's proxy, passes each to a replica, and relays the response."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from llaisys.config import load_config
from llaisys.ray.affinity import affinity_of
from llaisys.ray.exchange import HttpExchange
from llaisys.server.http_errors import (
    ANTHROPIC_PATH,
    OLLAMA_PATH,
    ApiError,
    anthropic_error,
    engine_dead,
    ollama_error,
    send_error,
    to_json,
)
from llaisys.server.middleware.auth import AuthMiddleware, Keyring
from llaisys.server.middleware.body_limits import BodyLimitMiddleware, BodyLimits
from llaisys.server.middleware.hosts import PROBES
from llaisys.server.stream_writer import DATA_EVENTS, named_frame
from llaisys.server.streaming import until_done_or_gone
from llaisys.server.webui.static import load_webui

RESPONSES_PATH = "/v1/responses"
STREAMS = (b"text/event-stream", b"application/x-ndjson")
# Bytes of a body above which a thread reads the JSON.
LARGE_BYTES = 64 * 1024

log = logging.getLogger("llaisys.ray")


class Gateway:
    """An ASGI application in an actor of Ray Serve. It checks keys and bodies; a replica checks all the rest.

    A request runs at most once: if its replica dies, it ends with 503, or its stream with an error frame.
    """

    def __init__(self, settings: dict[str, Any], replicas: DeploymentHandle[Any]) -> None:
        """`settings`: as for `load_config`."""
        config = load_config(settings)
        keys = Keyring.of(config)
        self._replicas = replicas.options(stream=True)
        relay = BodyLimitMiddleware(self._relay, BodyLimits.of(config), keys.n_clients)
        self._app: ASGIApp = AuthMiddleware(relay, keys, PROBES | {"/"} | set(load_webui()))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application."""
        return self._app

    async def _relay(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request (ASGI)."""
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await self._relay_http(scope, receive, send)

    async def _relay_http(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await Request(scope, receive).body()
        except ApiError as e:
            await send_error(send, scope, e)
            return
        except ClientDisconnect:
            return
        exchange = HttpExchange.of(scope, body, affinity_of(scope["path"], await _json(body)))
        response = self._replicas.handle.remote(exchange)
        assert isinstance(response, DeploymentResponseGenerator)  # because of `stream`
        work = asyncio.ensure_future(Relay(scope, send).run(response))
        try:
            await until_done_or_gone(work, receive, lambda: True)
        finally:
            response.cancel()  # type: ignore[no-untyped-call]  # without an effect on a response that has ended
        if not work.cancelled():
            work.result()


class Relay:
    """Relays one response, and ends it if its replica is lost."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self._has_begun = False
        self._is_stream = False
        self._n_events = 0

    async def run(self, response: AsyncIterator[list[dict[str, Any]]]) -> None:
        """Send the messages of the response to its end."""
        try:
            async for messages in response:
                for message in messages:
                    self._note(message)
                    await self._send(message)
        except (RayError, RayServeException) as e:
            log.warning("a request to %s lost its replica: %s", self._scope["path"], e)
            await self._fail(engine_dead())

    def _note(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self._has_begun = True
            self._is_stream = dict(message["headers"]).get(b"content-type", b"").startswith(STREAMS)
        elif self._scope["path"] == RESPONSES_PATH:
            # JSON has no bare line break, so this counts events only.
            raw = message.get("body", b"")
            self._n_events += raw.count(b"\nevent: ") + raw.startswith(b"event: ")

    async def _fail(self, error: ApiError) -> None:
        """End the response: with a status if it has not begun, a stream with an error in its format."""
        if not self._has_begun:
            await send_error(self._send, self._scope, error)
        elif self._is_stream:
            raw = last_frames(self._scope["path"], error, self._n_events)
            await self._send({"type": "http.response.body", "body": raw})
        else:
            raise error  # Ray closes the connection, so that the client sees a truncated response


def last_frames(path: str, error: ApiError, n_events: int) -> bytes:
    """Return the frames that end a stream with an error, in the format of the protocol that serves `path`.

    `n_events`: the events so far; only OpenAI's Responses count them.
    """
    if path.startswith(ANTHROPIC_PATH):
        return named_frame(anthropic_error(error))
    if path.startswith(OLLAMA_PATH):
        return to_json(ollama_error(error)) + b"\n"
    if path == RESPONSES_PATH:
        event = {"type": "error", "code": error.code, "message": error.message, "param": None}
        return named_frame({**event, "sequence_number": n_events})
    return DATA_EVENTS.frame(error.body()) + DATA_EVENTS.terminator


async def _json(body: bytes) -> Any:
    """Return the body as JSON, or None: the replica reports the error."""
    try:
        return await asyncio.to_thread(json.loads, body) if len(body) > LARGE_BYTES else json.loads(body)
    except (ValueError, RecursionError):
        return None


async def _live(receive: Receive, send: Send) -> None:
    """Confirm the start and the end of the application (ASGI's lifespan)."""
    for event in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{event}.complete"})
