"""Requests per minute and open requests per client: 429 responses with standard headers."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from fastapi.routing import APIRoute
from starlette.types import Message, Receive, Scope, Send

from llaisys.server.middleware.rate_limits import QUEUEING, RateLimitMiddleware


class RateLimitedApp:
    """An application that responds once `go` is set, behind a RateLimitMiddleware with a fake clock."""

    def __init__(self, max_open: int | None = None, per_minute: int | None = None) -> None:
        self.now_s = 1000.0
        self.go = asyncio.Event()
        self.go.set()
        self.came = asyncio.Semaphore(0)
        self.gate = RateLimitMiddleware(self._answer, max_open, per_minute, lambda: self.now_s)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 -- ASGI
        self.came.release()
        await self.go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def post(self, client: str = "a", path: str = "/v1/x", method: str = "POST") -> httpx.Response:
        async def named(scope: Scope, receive: Receive, send: Send) -> None:
            scope["state"] = {"client_id": client}
            await self.gate(scope, receive, send)

        transport = httpx.ASGITransport(named)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            return await http.request(method, path)


@pytest.fixture
async def two_at_once() -> RateLimitedApp:
    return RateLimitedApp(max_open=2)


async def test_concurrent_requests_per_client_are_bounded(two_at_once: RateLimitedApp) -> None:
    app = two_at_once
    app.go.clear()
    open_ones = [asyncio.ensure_future(app.post()) for _ in range(2)]
    for _ in open_ones:
        await app.came.acquire()
    rejected = await app.post()
    assert (rejected.status_code, rejected.headers["retry-after"]) == (429, "1")
    assert rejected.json()["error"]["code"] == "rate_limit_exceeded"
    others = [app.post("b"), app.post(path="/v1/requests/x/cancel"), app.post(method="GET")]
    waiting = [asyncio.ensure_future(other) for other in others]
    app.go.set()
    assert [(await each).status_code for each in [*open_ones, *waiting]] == [200] * 5
    assert (await app.post()).status_code == 200


async def test_a_client_with_its_whole_response_may_send_the_next_request() -> None:
    async def response(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})
        if scope["path"] == "/first":  # the client has the whole response, but this call has not returned
            await gate({**scope, "path": "/second"}, receive, second)

    statuses = []

    async def second(message: Message) -> None:
        statuses.append(message.get("status"))

    gate = RateLimitMiddleware(response, max_open=1, per_minute=None)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(gate), base_url="http://x") as http:
        assert (await http.post("/first")).status_code == 200
    assert statuses[0] == 200


async def test_requests_per_minute_refill_evenly() -> None:
    app = RateLimitedApp(per_minute=6)
    for left in (5, 4, 3, 2, 1, 0):
        response = await app.post()
        assert response.status_code == 200
        assert response.headers["x-ratelimit-limit-requests"] == "6"
        assert response.headers["x-ratelimit-remaining-requests"] == str(left)
        assert response.headers["x-ratelimit-reset-requests"] == f"{10 * (6 - left)}.000s"
    rejected = await app.post()
    assert (rejected.status_code, rejected.headers["retry-after"]) == (429, "10")
    assert rejected.headers["x-ratelimit-remaining-requests"] == "0"
    assert (await app.post("b")).status_code == 200
    app.now_s += 9.9
    assert (await app.post()).headers["retry-after"] == "1"
    app.now_s += 0.2
    assert (await app.post()).status_code == 200
    assert (await app.post()).status_code == 429
    app.now_s += 10_000
    assert (await app.post()).headers["x-ratelimit-remaining-requests"] == "5"


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
async def test_puts_and_deletes_count(method: str) -> None:
    """PUT and DELETE of chats and sessions count like a POST; reads do not count."""
    app = RateLimitedApp(max_open=1, per_minute=2)
    app.go.clear()
    writing = asyncio.ensure_future(app.post(method=method))
    await app.came.acquire()
    assert (await app.post(method=method)).status_code == 429
    app.go.set()
    assert (await writing).status_code == 200
    assert (await app.post(method=method)).headers["x-ratelimit-remaining-requests"] == "0"
    assert (await app.post()).status_code == 429
    for reading in ("GET", "HEAD", "OPTIONS"):
        assert (await app.post(method=reading)).status_code == 200


async def test_without_a_rate_limit_there_are_no_rate_headers(two_at_once: RateLimitedApp) -> None:
    assert not any(name.startswith("x-ratelimit") for name in (await two_at_once.post()).headers)


def test_every_route_that_queues_is_refused_while_the_queue_is_full(routes: list[APIRoute]) -> None:
    """A request with a priority enters the queue of a model."""
    bodies = {route.path: route.body_field.field_info.annotation for route in routes if route.body_field}
    queueing = {path for path, body in bodies.items() if "priority" in getattr(body, "model_fields", {})}
    assert len(queueing) >= 4
    assert queueing <= QUEUEING
