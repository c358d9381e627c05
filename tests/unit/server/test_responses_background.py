"""Background responses: generated without a client, followed, re-attached, canceled, and bounded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types import responses as openai_responses
from pydantic import TypeAdapter

from asgi_client import StalledClient
from fakes.service import FakeService, Piece, default_config
from llaisys.config import Config
from llaisys.errors import ContextLengthError, ExhaustedError, QueueFullError, RequestFailedError
from llaisys.registry import ModelRegistry
from llaisys.server.app import create_app
from llaisys.server.http_errors import ApiError
from llaisys.server.responses import background
from llaisys.server.responses.background import BackgroundRun, BackgroundRuns, EventBuffer
from llaisys.server.responses.store import ResponseStore
from llaisys.server.state import ServerState
from sse import named_events
from waiting import until

URL = "/v1/responses"
EVENT: TypeAdapter[Any] = TypeAdapter(openai_responses.ResponseStreamEvent)
BODY = {"input": "Hi", "background": True}


class AbortableService(FakeService):
    """A service whose script waits for `gate` before its last piece, which an abort replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.script = [Piece(["Hel"]), Piece(["lo"], "stop", gate=self.gate)]

    def abort(self, request_id: str) -> None:  # noqa: ARG002 -- AsyncLLM's signature
        self.script[-1].finish = "abort"  # type: ignore[union-attr]
        self.gate.set()


@pytest.fixture
def engine() -> AbortableService:
    return AbortableService()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ResponseStore]:
    with closing(ResponseStore(tmp_path / "responses.db", 1 << 20)) as made:
        yield made


@pytest.fixture
def state(engine: AbortableService, store: ResponseStore) -> ServerState:
    return ServerState(default_config(), models=ModelRegistry([engine]), responses=store)  # type: ignore[list-item]


@pytest.fixture
async def client(state: ServerState, make_client: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with make_client(state) as made:
        yield made


async def start(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    reply = await client.post(URL, json={**BODY, **body})
    assert reply.status_code == 200, reply.text
    openai_responses.Response.model_validate(reply.json())
    made: dict[str, Any] = reply.json()
    return made


async def read(client: httpx.AsyncClient, id: str) -> dict[str, Any]:
    reply = await client.get(f"{URL}/{id}")
    assert reply.status_code == 200, reply.text
    openai_responses.Response.model_validate(reply.json())
    made: dict[str, Any] = reply.json()
    return made


async def follow(client: httpx.AsyncClient, id: str, **params: Any) -> list[dict[str, Any]]:
    reply = await client.get(f"{URL}/{id}", params={"stream": True, **params})
    assert reply.status_code == 200, reply.text
    events = named_events(reply.content)
    for event in events:
        assert EVENT.validate_python(event).type == event["type"]
    return events


async def has_ended(client: httpx.AsyncClient, id: str) -> dict[str, Any]:
    """Return the response once it has ended, by following it."""
    made: dict[str, Any] = (await follow(client, id))[-1]["response"]
    return made


async def test_a_background_response(engine: AbortableService, client: httpx.AsyncClient) -> None:
    made = await start(client)
    assert (made["status"], made["background"], made["store"]) in (
        ("queued", True, True),
        ("in_progress", True, True),
    )
    assert (made["output"], made["usage"]) == ([], None)
    await until(lambda: bool(engine.calls) and engine.calls[0].n_deltas == 1)
    current = await read(client, made["id"])
    assert current["status"] == "in_progress"
    again = await client.post(URL, json={"input": "Hi", "previous_response_id": made["id"]})
    assert again.json()["error"]["param"] == "previous_response_id"
    engine.gate.set()
    done = await has_ended(client, made["id"])
    assert (done["status"], done["output"][0]["content"][0]["text"]) == ("completed", "Hello")
    assert await read(client, made["id"]) == done
    more = await client.post(URL, json={"input": "More", "previous_response_id": made["id"]})
    assert more.status_code == 200
    assert [m["content"] for m in engine.chats[-1][0]] == ["Hi", "Hello", "More"]


async def test_the_list_of_models_tells_whether_responses_are_stored(
    state: ServerState, client: httpx.AsyncClient
) -> None:
    assert (await client.get("/v1/models")).json()["stores_responses"] is True
    state.responses = None
    assert (await client.get("/v1/models")).json()["stores_responses"] is False


async def test_a_background_stream_is_followed_again(
    engine: AbortableService, client: httpx.AsyncClient
) -> None:
    """The request for a stream has all events; a later one has those after the number that it names."""
    first = asyncio.ensure_future(client.post(URL, json={**BODY, "stream": True, "request_id": "mine"}))
    await until(lambda: bool(engine.calls) and engine.calls[0].n_deltas == 1)
    second = asyncio.ensure_future(follow(client, "resp_mine", starting_after=2))
    await asyncio.sleep(0)
    engine.gate.set()
    events = named_events((await first).content)
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    names = [event["type"].removeprefix("response.") for event in events]
    assert names[:4] == ["created", "queued", "in_progress", "output_item.added"]
    assert names[-1] == "completed"
    assert await second == events[3:]
    assert await follow(client, "resp_mine") == events
    assert await follow(client, "resp_mine", starting_after=len(events) - 2) == events[-1:]


async def test_a_disconnected_client_does_not_end_the_response(
    engine: AbortableService, client: httpx.AsyncClient
) -> None:
    work = asyncio.ensure_future(client.post(URL, json={**BODY, "stream": True, "request_id": "mine"}))
    await until(lambda: bool(engine.calls))
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    assert not engine.calls[0].ended
    engine.gate.set()
    assert (await has_ended(client, "resp_mine"))["status"] == "completed"


async def test_a_client_that_disconnects_before_the_begin_finds_the_response(
    engine: AbortableService, client: httpx.AsyncClient, state: ServerState, store: ResponseStore
) -> None:
    """As a page does that is reloaded at once. The response begins when the store has saved it."""
    may_save = threading.Event()
    saving = asyncio.to_thread(store._file.writer.run_blocking, lambda _: may_save.wait())
    waiting = asyncio.ensure_future(saving)
    work = asyncio.ensure_future(client.post(URL, json={**BODY, "stream": True, "request_id": "mine"}))
    await until(lambda: state.background.find("", "resp_mine") is not None)
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    may_save.set()
    await waiting
    engine.gate.set()
    assert (await has_ended(client, "resp_mine"))["status"] == "completed"


async def test_a_follower_that_reads_nothing_is_disconnected(
    engine: AbortableService, state: ServerState
) -> None:
    """Its stall is counted, and the response goes on."""
    impatient = ServerState(
        Config(send_timeout_s=0.01),
        models=state.models,
        responses=state.responses,
    )
    await StalledClient(create_app(impatient, 8000), URL, {**BODY, "stream": True}).open()
    counted = impatient.metrics.render(None).decode()
    assert 'llaisys:rejected_total{reason="send_timeout"} 1.0' in counted
    assert not engine.calls[0].ended
    engine.gate.set()
    await impatient.background.wait(10)


@pytest.mark.parametrize("path", [f"{URL}/resp_mine/cancel", "/v1/requests/resp_mine/cancel"])
async def test_a_background_response_can_be_canceled(
    engine: AbortableService, client: httpx.AsyncClient, path: str
) -> None:
    await start(client, request_id="mine")
    await until(lambda: bool(engine.calls) and engine.calls[0].n_deltas == 1)
    assert (await client.post(path)).status_code == 200
    last = (await follow(client, "resp_mine"))[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "cancelled")
    assert (await read(client, "resp_mine"))["status"] == "cancelled"
    again = await client.post(f"{URL}/resp_mine/cancel")
    assert (again.status_code, again.json()["status"]) == (200, "cancelled")


async def test_a_deleted_background_response_is_canceled(
    engine: AbortableService, client: httpx.AsyncClient
) -> None:
    await start(client, request_id="mine")
    await until(lambda: bool(engine.calls))
    assert (await client.delete(f"{URL}/resp_mine")).status_code == 200
    assert engine.calls[0].ended
    for params in ({}, {"stream": "true"}):
        assert (await client.get(f"{URL}/resp_mine", params=params)).status_code == 404


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RequestFailedError("boom"), "server_error"),
        (QueueFullError("full"), "rate_limit_exceeded"),
        (ContextLengthError("too long", param="prompt"), "context_length_exceeded"),
    ],
)
async def test_an_error_is_the_state_of_the_response(
    engine: AbortableService, client: httpx.AsyncClient, error: Exception, code: str
) -> None:
    engine.script = [error]
    made = await client.post(URL, json=BODY)
    assert made.status_code == 200
    id = made.json()["id"]
    reply = await client.get(f"{URL}/{id}", params={"stream": True})
    last = named_events(reply.content)[-1]
    assert (last["type"], last["response"]["error"]["code"]) == ("response.failed", code)
    stored = (await client.get(f"{URL}/{id}")).json()
    assert (stored["status"], stored["error"]) == ("failed", last["response"]["error"])


async def test_background_needs_a_store(
    engine: AbortableService, client: httpx.AsyncClient, make_client: Any
) -> None:
    error = (await client.post(URL, json={**BODY, "store": False})).json()["error"]
    assert (error["param"], "store: true" in error["message"]) == ("background", True)
    state = ServerState(default_config(), models=ModelRegistry([engine]))  # type: ignore[list-item]
    async with make_client(state) as without:
        error = (await without.post(URL, json=BODY)).json()["error"]
        assert (error["param"], "--response-store FILE" in error["message"]) == ("background", True)


async def test_an_id_is_used_once(
    engine: AbortableService, client: httpx.AsyncClient, state: ServerState
) -> None:
    await start(client, request_id="mine")
    again = await client.post(URL, json={**BODY, "request_id": "mine"})
    assert (again.status_code, again.json()["error"]["param"]) == (400, "request_id")
    engine.gate.set()
    assert (await has_ended(client, "resp_mine"))["status"] == "completed"
    state.background.remove("", "resp_mine")
    stored = await client.post(URL, json={**BODY, "request_id": "mine"})
    assert (stored.status_code, stored.json()["error"]["param"]) == (400, "request_id")
    assert state.background.find("", "resp_mine") is None


async def test_a_full_disk_is_a_507(client: httpx.AsyncClient, store: ResponseStore) -> None:
    store._file.writer.run_blocking(lambda db: db.execute("PRAGMA max_page_count = 1").fetchall())
    reply = await client.post(URL, json={**BODY, "input": "x" * 100_000})
    assert (reply.status_code, reply.json()["error"]["code"]) == (507, "storage_full")


async def test_a_response_that_a_stopped_server_left_has_failed(
    engine: AbortableService, client: httpx.AsyncClient, state: ServerState
) -> None:
    """Another server with the same file does not know the run."""
    made = await start(client)
    run = state.background.find("", made["id"])
    state.background.remove("", made["id"])
    left = await read(client, made["id"])
    assert (left["status"], left["error"]["code"]) == ("failed", "server_error")
    reply = await client.get(f"{URL}/{made['id']}", params={"stream": True})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "events_dropped")
    engine.gate.set()
    assert run is not None
    await run.task
    assert (await read(client, made["id"]))["status"] == "completed"


async def test_only_background_responses_keep_events(
    client: httpx.AsyncClient, engine: AbortableService
) -> None:
    engine.gate.set()
    made = (await client.post(URL, json={"input": "Hi"})).json()
    reply = await client.get(f"{URL}/{made['id']}", params={"stream": True})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "stream")
    assert (await client.post(f"{URL}/{made['id']}/cancel")).json() == made


# --- bounds ---


def frame(number: int) -> bytes:
    return b"event: x\ndata: %03d\n\n" % number


async def test_the_newest_events_are_kept() -> None:
    events = EventBuffer(bytes_max=3 * len(frame(0)))
    for number in range(5):
        events.append(frame(number))
    assert events.first == 2
    with pytest.raises(ApiError, match="starting_after is 0; events up to 1 are no longer kept"):
        events.check(1)
    events.append(b"event: " + b"x" * 1000 + b"\n\n")
    assert events.first == 5, "the newest event is kept, however large it is"
    events.end()
    assert [len(frames) async for frames in events.follow(5)] == [1]


async def test_events_that_were_dropped_cannot_be_followed(
    engine: AbortableService, client: httpx.AsyncClient, state: ServerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "EVENTS_BYTES_MAX", 2000)
    engine.script = [*(Piece([f"token {i} "]) for i in range(50)), Piece(["end"], "stop")]
    made = await start(client)
    run = state.background.find("", made["id"])
    assert run is not None
    await run.task
    reply = await client.get(f"{URL}/{made['id']}", params={"stream": True, "starting_after": 3})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "events_dropped")
    assert reply.json()["error"]["param"] == "starting_after"
    assert (await read(client, made["id"]))["status"] == "completed"


async def test_an_error_event_ends_a_stream_whose_next_event_was_dropped(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two opening events arrive together, so the first one is dropped before it is read."""
    monkeypatch.setattr(background, "EVENTS_BYTES_MAX", 1)
    (event,) = named_events((await client.post(URL, json={**BODY, "stream": True})).content)
    assert EVENT.validate_python(event).type == "error"
    assert event["code"] == "events_dropped"


async def waiting_run() -> BackgroundRun:
    """Return a run whose stream has begun and does not end."""

    async def app(scope: Any, receive: Any, send: Any) -> None:  # noqa: ARG001 -- ASGI's signature
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await receive()

    run = BackgroundRun(app, dict, lambda: None)
    assert await run.begin() is None
    return run


async def test_the_number_of_runs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "RUNS_MAX", 4)
    runs = BackgroundRuns(n_clients=2)
    started = [await waiting_run() for _ in range(3)]
    for i, run in enumerate(started):
        runs.check("a", f"r{i}")
        runs.add("a", f"r{i}", run)
    with pytest.raises(ExhaustedError):
        runs.check("a", "more")
    runs.check("b", "more")
    started[0].task.cancel()
    await asyncio.wait({started[0].task})
    runs.check("a", "more")
    for run in started:
        run.task.cancel()
    await runs.wait(10)


async def test_the_number_of_ended_runs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "ENDED_RUNS_MAX", 2)
    runs = BackgroundRuns()
    for i in range(5):
        run = await waiting_run()
        runs.add("", f"r{i}", run)
        run.task.cancel()
        await asyncio.wait({run.task})
    runs.add("", "last", await waiting_run())
    kept = [f"r{i}" for i in range(5) if runs.find("", f"r{i}") is not None]
    assert kept == ["r3", "r4"]
    last = runs.find("", "last")
    assert last is not None
    last.task.cancel()
    await runs.wait(10)
