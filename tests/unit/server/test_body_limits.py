"""Request body limits: bytes of one body, bytes of all bodies, and upload time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from starlette.types import Message, Receive, Scope, Send

from fakes.service import FakeService
from llaisys.config import Config
from llaisys.errors import QueueFullError
from llaisys.registry import ModelRegistry
from llaisys.server.http_errors import ApiError
from llaisys.server.middleware.body_limits import BodyLimitMiddleware, BodyLimits
from llaisys.server.middleware.rate_limits import QUEUEING
from llaisys.server.protocol import INLINE_BYTES_MAX
from llaisys.server.state import ServerState


class BlockedApp:
    """An application that reads its body and responds once `go` is set."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.have_read = asyncio.Semaphore(0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 -- ASGI
        try:
            while (await receive()).get("more_body"):
                pass
            self.have_read.release()
            await self.go.wait()
            status = 200
        except ApiError as e:
            status = e.status_code
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})


def send_body(gate: BodyLimitMiddleware, n_bytes: int, *, declared: bool) -> asyncio.Task[int]:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(n_bytes):
            yield b"x"

    async def post() -> int:
        content: Any = b"x" * n_bytes if declared else parts()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(gate), base_url="http://x") as client:
            response = await client.post("/", content=content)
            return response.status_code

    return asyncio.ensure_future(post())


@pytest.mark.parametrize("declared", [True, False])
async def test_bytes_of_all_bodies_are_bounded_until_their_requests_end(declared: bool) -> None:
    app = BlockedApp()
    gate = BodyLimitMiddleware(app, BodyLimits(bytes_max=60, bytes_in_flight=100, upload_s=30))
    first, second = send_body(gate, 60, declared=declared), send_body(gate, 40, declared=declared)
    for _ in range(2):
        await app.have_read.acquire()
    assert await send_body(gate, 1, declared=declared) == 429
    assert await send_body(gate, 61, declared=declared) == (413 if declared else 429)
    app.go.set()
    assert (await first, await second) == (200, 200)
    assert await send_body(gate, 60, declared=declared) == 200
    assert not gate._arrived
    assert not gate._unsent


async def test_an_upload_that_stalls_times_out() -> None:
    async def never() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    gate = BodyLimitMiddleware(BlockedApp(), BodyLimits(10, 10, 0.01))
    scope: Scope = {"type": "http", "method": "POST", "headers": [(b"content-length", b"3")]}
    await gate(scope, never, send)
    assert sent[0]["status"] == 408
    assert not gate._arrived
    assert not gate._unsent


async def test_body_bytes_are_shared_among_clients() -> None:
    """Of 64 bytes, 16 are reserved for each of two clients.

    Declared bytes that never arrive count only against their client.
    """
    never, gate = asyncio.Event(), BodyLimitMiddleware(ReadingApp(), BodyLimits(16, 64, 30), n_clients=2)

    async def post(client: str, declared: int, *parts: bytes) -> int:
        """Return the status, or 0 while the rest of the body is missing."""
        left, statuses = [*parts], []

        async def receive() -> Message:
            if not left:
                await never.wait()
            part = left.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(left) or declared > len(part)}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        headers = [(b"content-length", f"{declared}".encode())] if declared else []
        scope: Scope = {
            "type": "http",
            "method": "POST",
            "path": "/",
            "headers": headers,
            "state": {"client_id": client},
        }
        tasks.append(asyncio.ensure_future(gate(scope, receive, send)))
        for _ in range(20):
            await asyncio.sleep(0)
        return statuses[0] if statuses else 0

    tasks: list[asyncio.Future[None]] = []
    assert [await post("a", 16) for _ in range(4)] == [0, 0, 0, 429], "one client gets at most 48 of 64 bytes"
    assert [gate._counted(client) for client in "ab"] == [16, 0], "48 declared bytes that never arrive"
    assert [await post("b", 16, b"x" * 8) for _ in range(3)] == [0, 0, 0], (
        "declared bytes of one client do not block the other"
    )
    assert gate._counted("b") == 24 + 16
    assert await post("b", 0, b"x" * 9, b"") == 429, "8 bytes are left: 64 - 16 of a - 40 of b"
    assert await post("b", 0, b"x" * 8, b"") == 200
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not gate._arrived
    assert not gate._unsent
    assert await post("b", 3, b"xyz") == 200


class ReadingApp:
    """An application that responds once it has read its body, with the status of the rejection if any."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 -- ASGI
        status = 200
        try:
            while (await receive()).get("more_body"):
                pass
        except ApiError as e:
            status = e.status_code
        await send({"type": "http.response.start", "status": status, "headers": []})


async def unread() -> AsyncIterator[bytes]:
    raise AssertionError("the body was read")
    yield b""


def test_every_route_that_generates_is_queueing(routes: list[APIRoute]) -> None:
    """Such a route declares 499, the status of a canceled generation."""
    generating = {route.path for route in routes if 499 in route.responses and "POST" in route.methods}
    assert generating <= QUEUEING
    assert len(generating) >= 3


async def test_with_a_full_queue_no_body_is_read(
    engine: FakeService, make_client: Callable[..., httpx.AsyncClient]
) -> None:
    """Routes that queue requests respond 429 before the body; other routes and free queues work."""
    other = FakeService(model_names=("other",))
    state = ServerState(Config(max_body_bytes=100), models=ModelRegistry([engine, other]))  # type: ignore[list-item]  # as conftest's
    client = make_client(state)
    engine.full, other.full = QueueFullError("x", retry_after_s=1000), QueueFullError("x", retry_after_s=20)
    for path in sorted(QUEUEING):
        rejected = await client.post(path, content=unread())
        assert rejected.status_code == 429
        assert rejected.json()["error"], "in the format of the path's protocol"
        assert 16 <= int(rejected.headers["retry-after"]) <= 24, "the soonest time, within 20 % jitter"
    too_large = await client.post("/v1/completions", content=b"x" * 101)
    assert too_large.status_code == 413
    assert (await client.post("/tokenize", json={"prompt": "x"})).status_code == 200
    assert (await client.get("/v1/models")).status_code == 200
    counted = (await client.get("/metrics")).text
    assert f'llaisys:rejected_total{{reason="server_overloaded"}} {len(QUEUEING)}.0' in counted
    other.full = None
    assert (await client.post("/v1/completions", json={"prompt": "x", "model": "other"})).status_code == 200
    engine.full, other.full = None, engine.full
    assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200
    engine.full, state.draining = other.full, True
    assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 503


@pytest.fixture
def large(engine: FakeService, make_client: Callable[..., httpx.AsyncClient]) -> httpx.AsyncClient:
    return make_client(ServerState(Config(), models=ModelRegistry([engine])))  # type: ignore[list-item]  # as conftest's


@pytest.mark.parametrize("n_bytes", [0, INLINE_BYTES_MAX])
async def test_small_and_large_bodies_get_equal_responses(
    large: httpx.AsyncClient, engine: FakeService, n_bytes: int
) -> None:
    pad = "x" * n_bytes
    headers = {"content-type": "application/json"}
    response = await large.post("/v1/completions", json={"prompt": pad + "Hi"})
    assert response.status_code == 200
    assert engine.calls[-1].prompt == pad + "Hi"
    for raw, code, words in (
        (f'{{"prompt": "{pad}", x'.encode(), "invalid_json", f"at byte {n_bytes + 15}"),
        (b'{"prompt": "' + pad.encode() + b'\xff"}', "invalid_request", "cannot be read"),
        (b"[" * 5000 + pad.encode(), "invalid_request", "cannot be read"),
        (f'{{"prompt": "{pad}", "x": {"[" * 40}{"]" * 40}}}'.encode(), "invalid_value", "x is nested"),
        (f'"{pad}"'.encode(), "invalid_body", "JSON object"),
        (f'{{"prompt": "{pad}", "n": "x"}}'.encode(), "invalid_type", "n: "),
    ):
        rejected = await large.post("/v1/completions", content=raw, headers=headers)
        error = rejected.json()["error"]
        assert (rejected.status_code, error["code"]) == (400, code), error
        assert words in error["message"]
