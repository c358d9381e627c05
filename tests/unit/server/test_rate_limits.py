"""A client's rate and its open requests: 429 with what a stock client reads, and nobody else's business."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from llaisys.server.middleware.rate_limits import RateLimitMiddleware


class Door:
    """An application that answers when it is told to, behind a RateLimitMiddleware on a clock of its own."""

    def __init__(self, at_once: int | None = None, a_minute: int | None = None) -> None:
        self.now_s = 1000.0
        self.go = asyncio.Event()
        self.go.set()
        self.came = asyncio.Semaphore(0)
        self.gate = RateLimitMiddleware(self._answer, at_once, a_minute, lambda: self.now_s)

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
async def two_at_once() -> Door:
    return Door(at_once=2)


async def test_one_more_than_at_once_is_refused_until_one_has_ended(two_at_once: Door) -> None:
    door = two_at_once
    door.go.clear()
    open_ones = [asyncio.ensure_future(door.post()) for _ in range(2)]
    for _ in open_ones:
        await door.came.acquire()
    refused = await door.post()
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    others = [door.post("b"), door.post(path="/v1/requests/x/cancel"), door.post(method="GET")]
    waiting = [asyncio.ensure_future(other) for other in others]
    door.go.set()
    assert [(await each).status_code for each in [*open_ones, *waiting]] == [200] * 5
    assert (await door.post()).status_code == 200


async def test_who_has_its_answer_may_ask_again() -> None:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})
        if scope["path"] == "/first":  # the client has all of it, and this has not returned
            await gate({**scope, "path": "/second"}, receive, second)

    statuses = []

    async def second(message: Message) -> None:
        statuses.append(message.get("status"))

    gate = RateLimitMiddleware(answer, at_once=1, a_minute=None)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(gate), base_url="http://x") as http:
        assert (await http.post("/first")).status_code == 200
    assert statuses[0] == 200


async def test_a_minute_s_requests_come_back_evenly() -> None:
    door = Door(a_minute=6)
    for left in (5, 4, 3, 2, 1, 0):
        answer = await door.post()
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-limit-requests"] == "6"
        assert answer.headers["x-ratelimit-remaining-requests"] == str(left)
        assert answer.headers["x-ratelimit-reset-requests"] == f"{10 * (6 - left)}.000s"
    refused = await door.post()
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "10")
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert (await door.post("b")).status_code == 200
    door.now_s += 9.9
    assert (await door.post()).headers["retry-after"] == "1"
    door.now_s += 0.2
    assert (await door.post()).status_code == 200
    assert (await door.post()).status_code == 429
    door.now_s += 10_000
    assert (await door.post()).headers["x-ratelimit-remaining-requests"] == "5"


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
async def test_writes_and_deletions_are_counted(method: str) -> None:
    """Those of chats and sessions, as a POST; what only reads is not."""
    door = Door(at_once=1, a_minute=2)
    door.go.clear()
    writing = asyncio.ensure_future(door.post(method=method))
    await door.came.acquire()
    assert (await door.post(method=method)).status_code == 429
    door.go.set()
    assert (await writing).status_code == 200
    assert (await door.post(method=method)).headers["x-ratelimit-remaining-requests"] == "0"
    assert (await door.post()).status_code == 429
    for reading in ("GET", "HEAD", "OPTIONS"):
        assert (await door.post(method=reading)).status_code == 200


async def test_without_a_rate_nothing_is_told(two_at_once: Door) -> None:
    assert not any(name.startswith("x-ratelimit") for name in (await two_at_once.post()).headers)
