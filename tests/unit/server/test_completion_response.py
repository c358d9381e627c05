"""Clients that disconnect in every phase, with and without streaming: their requests end completely."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from starlette.types import ASGIApp

from asgi_client import AsgiClient, StalledClient
from fakes.service import FakeService, Piece
from llaisys.config import Config
from llaisys.errors import EngineDeadError
from llaisys.server.app import create_app
from llaisys.server.state import ServerState
from waiting import until


@pytest.fixture
def connect(app: ASGIApp) -> Callable[[str, dict[str, Any]], AsgiClient]:
    return lambda path, body: AsgiClient(app, path, body)


BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": ["a", "b"]},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8},
    "/v1/responses": {"input": "Hi"},
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", sorted(BODIES))
async def test_disconnect_before_the_first_token(
    engine: FakeService, connect: Callable[[str, dict[str, Any]], AsgiClient], path: str, stream: bool
) -> None:
    engine.script = [Piece(["never"], "stop", gate=asyncio.Event())]
    client = connect(path, {**BODIES[path], "stream": stream})
    work = client.open()
    await until(lambda: bool(engine.calls))
    client.disconnect()
    await work
    assert all(call.ended for call in engine.calls)
    assert client.raw() == b""


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", sorted(BODIES))
async def test_disconnect_during_the_response(
    engine: FakeService, connect: Callable[[str, dict[str, Any]], AsgiClient], path: str, stream: bool
) -> None:
    second = asyncio.Event()
    engine.script = [
        Piece(["Hel"]),
        Piece(["lo"], gate=second),
        Piece(["never"], "stop", gate=asyncio.Event()),
    ]
    client = connect(path, {**BODIES[path], "stream": stream})
    work = client.open()
    await until(lambda: bool(engine.calls))
    if stream:
        await until(lambda: b"Hel" in client.raw())
    second.set()
    client.disconnect()
    await work
    assert all(call.ended for call in engine.calls)
    assert b"[DONE]" not in client.raw()
    assert b"response.completed" not in client.raw()


async def test_a_stalled_stream_has_an_end_reason_and_is_counted(
    engine: FakeService, state: ServerState, caplog: pytest.LogCaptureFixture
) -> None:
    impatient = ServerState(Config(send_timeout_s=0.01), models=state.models)
    engine.script = [Piece(["Hel"]), Piece(["never"], "stop", gate=asyncio.Event())]
    app = create_app(impatient, 8000)
    with caplog.at_level("INFO", "llaisys.request"):
        await StalledClient(
            app, "/v1/chat/completions", {**BODIES["/v1/chat/completions"], "stream": True}
        ).open()
    (record,) = (r for r in caplog.records if r.name == "llaisys.request")
    line = json.loads(record.getMessage())
    assert (line["end_reason"], line["status"]) == ("send_timeout", 200)
    counted = impatient.metrics.render(None).decode()
    assert 'llaisys:rejected_total{reason="send_timeout"} 1.0' in counted
    assert engine.calls[0].ended


async def test_a_disconnect_is_logged(
    engine: FakeService,
    connect: Callable[[str, dict[str, Any]], AsgiClient],
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine.script = [Piece(["Hel"]), Piece(["never"], "stop", gate=asyncio.Event())]
    with caplog.at_level("INFO", "llaisys.request"):
        client = connect("/v1/chat/completions", {**BODIES["/v1/chat/completions"], "stream": True})
        work = client.open()
        await until(lambda: b"Hel" in client.raw())
        client.disconnect()
        await work
    (record,) = (r for r in caplog.records if r.name == "llaisys.request")
    line = json.loads(record.getMessage())
    assert (line["end_reason"], line["completion_tokens"], line["status"]) == ("client_gone", 1, 200)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_complete_response_is_not_logged_as_a_disconnect(
    engine: FakeService,
    connect: Callable[[str, dict[str, Any]], AsgiClient],
    caplog: pytest.LogCaptureFixture,
    stream: bool,
) -> None:
    engine.script = [Piece(["Hello"], "stop")]
    with caplog.at_level("INFO", "llaisys.request"):
        await connect("/v1/chat/completions", {**BODIES["/v1/chat/completions"], "stream": stream}).open()
    (record,) = (r for r in caplog.records if r.name == "llaisys.request")
    assert json.loads(record.getMessage())["end_reason"] == "stop"


async def test_no_task_is_left_after_disconnects(
    engine: FakeService, connect: Callable[[str, dict[str, Any]], AsgiClient]
) -> None:
    before = asyncio.all_tasks()
    engine.script = [Piece(["a"], gate=asyncio.Event())]
    works = []
    for stream in (True, False):
        for path, body in BODIES.items():
            client = connect(path, {**body, "stream": stream})
            works.append(client.open())
            await until(lambda: len({re.split("[-_]", c.request_id)[1] for c in engine.calls}) == len(works))
            client.disconnect()
    await asyncio.gather(*works)
    await until(lambda: asyncio.all_tasks() == before)


async def test_a_shutdown_ends_a_stream_with_an_error_and_a_terminator(
    state: ServerState, engine: FakeService, connect: Callable[[str, dict[str, Any]], AsgiClient]
) -> None:
    """The engine error of a stream that a shutdown ends becomes `shutting_down` and a terminator."""
    end = asyncio.Event()
    engine.script = [Piece(["Hel"]), Piece(gate=end), EngineDeadError("shutting down")]
    client = connect("/v1/chat/completions", {**BODIES["/v1/chat/completions"], "stream": True})
    work = client.open()
    await until(lambda: bool(engine.calls))
    state.draining = True
    end.set()
    await work
    assert b'"code":"shutting_down"' in client.raw()
    assert client.raw().endswith(b"data: [DONE]\n\n")
    assert client.raw().count(b"[DONE]") == 1


async def test_an_internal_error_is_a_500_with_the_request_id(
    state: ServerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llaisys.server.chat.served_name", lambda *_: 1 / 0)
    client = AsgiClient(create_app(state, 8000), "/v1/chat/completions", BODIES["/v1/chat/completions"])
    await client.open()
    assert client.sent[0]["status"] == 500
    request_id = dict(client.sent[0]["headers"])[b"x-request-id"].decode()
    error = json.loads(client.raw())["error"]
    assert request_id in error["message"]
    assert error["code"] == "internal_error"
