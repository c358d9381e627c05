"""Canceling requests and their timelines, over the real service on the fake core."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import httpx
import pytest
from starlette.types import Message

from fakes import core
from llaisys.async_llm import AsyncLLM
from llaisys.config import Config
from llaisys.errors import RejectedError
from llaisys.lazy_engine import LazyEngine
from llaisys.registry import ModelRegistry
from llaisys.server.app import create_app
from llaisys.server.http_errors import ApiError
from llaisys.server.state import N_ENDED_MAX, RequestEntry, RequestRegistry, ServerState
from llaisys.server.stream_writer import StreamWriter
from sse import events
from waiting import until

KEYS = ("one", "two")
ONE, TWO = ({"authorization": f"Bearer {key}"} for key in KEYS)
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40},
    COMPLETIONS: {"prompt": ["a", "bc"], "max_tokens": 40, "n": 2},
}

pytestmark = pytest.mark.usefixtures("fake_model")


class Gate:
    """Blocks the engine inside a decode, after `n_free` decodes, until `opened` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.inside, self.opened = threading.Event(), threading.Event()
        self.n_free = 0
        decode = core.Context.decode

        def wait_then_continue(context: core.Context, *arrays: Any) -> Any:
            self.n_free -= 1
            if self.n_free < 0:
                self.inside.set()
                self.opened.wait(30)
            return decode(context, *arrays)

        monkeypatch.setattr(core.Context, "decode", wait_then_continue)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, fake_core: None) -> Iterator[Gate]:  # noqa: ARG001 -- used for its effect
    made = Gate(monkeypatch)
    yield made
    made.opened.set()


@pytest.fixture
async def state(gate: Gate, request: pytest.FixtureRequest) -> AsyncIterator[ServerState]:
    # Without speculation: the gate would stop the decodes that measure its costs.
    settings = {"speculative_config": None, **getattr(request, "param", {})}
    service = await AsyncLLM.start(Config(num_kv_cells=512, max_num_seqs=4, **settings))
    yield ServerState(Config(api_key=KEYS), models=ModelRegistry([service]))
    gate.opened.set()
    await service.close()


@pytest.fixture
async def http(state: ServerState) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(state, 8000))
    async with httpx.AsyncClient(
        transport=transport, base_url="http://127.0.0.1:8000", headers=ONE
    ) as client:
        yield client


def code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def services(state: ServerState) -> Sequence[AsyncLLM]:
    assert state.models is not None
    return state.models.services


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Return an event that is set when a stream has written frames."""
    event, frames = asyncio.Event(), StreamWriter.frames

    async def recorded(writer: StreamWriter, values: Sequence[Any]) -> None:
        await frames(writer, values)
        event.set()

    monkeypatch.setattr(StreamWriter, "frames", recorded)
    return event


@pytest.mark.parametrize("form", ["whole", "stream", "stream that has begun"])
@pytest.mark.parametrize(("path", "id"), [(CHAT, "chatcmpl-mine"), (COMPLETIONS, "cmpl-mine")])
async def test_a_canceled_request_ends_once(
    http: httpx.AsyncClient, gate: Gate, written: asyncio.Event, path: str, id: str, form: str
) -> None:
    gate.n_free = 3 if form == "stream that has begun" else 0
    body = {**BODIES[path], "request_id": "mine", "stream": form != "whole"}
    work = asyncio.create_task(http.post(path, json=body))
    await asyncio.to_thread(gate.inside.wait, 30)
    if form == "stream that has begun":
        await written.wait()
    for url in (f"/v1/requests/{id}", "/v1/requests/unknown"):
        rejected = await http.post(f"{url}/cancel", headers=TWO)
        assert code(rejected) == (404, "not_found")
        assert "mine" not in rejected.text
    assert not work.done()
    response = await http.post(f"/v1/requests/{id}/cancel")
    assert response.json() == {"id": id, "object": "request", "status": "cancelled"}
    gate.opened.set()
    ended = await work
    if form == "stream that has begun":
        *_, error, done = events(ended.content)
        assert (error["error"]["code"], done) == ("cancelled", "[DONE]")
        assert ended.text.count("[DONE]") == 1
        assert ended.text.count('"error"') == 1
    else:
        assert code(ended) == (499, "cancelled")
    again = await http.post(f"/v1/requests/{id}/cancel")
    assert again.json()["status"] == "ended"


async def test_a_canceled_request_leaves_no_choice_running(
    http: httpx.AsyncClient, gate: Gate, state: ServerState
) -> None:
    work = asyncio.create_task(http.post(COMPLETIONS, json={**BODIES[COMPLETIONS], "request_id": "m"}))
    await asyncio.to_thread(gate.inside.wait, 30)
    (service,) = services(state)
    client = service._client
    assert client is not None
    await until(lambda: len(client._open) == len(BODIES[COMPLETIONS]["prompt"]))
    await http.post("/v1/requests/cmpl-m/cancel")
    gate.opened.set()
    await work
    await until(lambda: service.stats().engine.finished.get("abort") == 4)
    assert service.stats().engine.num_running == service.stats().engine.num_waiting == 0


@pytest.mark.parametrize("state", [{"preload": False}], indirect=True)
async def test_a_request_is_canceled_while_its_model_is_loaded(
    http: httpx.AsyncClient, state: ServerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine never gets the request."""
    loading, go, made = asyncio.Event(), asyncio.Event(), LazyEngine._load

    async def wait_then_continue(engine: LazyEngine) -> None:
        loading.set()
        await go.wait()
        await made(engine)

    monkeypatch.setattr(LazyEngine, "_load", wait_then_continue)
    work = asyncio.create_task(http.post(COMPLETIONS, json={**BODIES[COMPLETIONS], "request_id": "m"}))
    await loading.wait()
    assert (await http.post("/v1/requests/cmpl-m/cancel")).status_code == 200
    go.set()
    assert code(await work) == (499, "cancelled")
    assert services(state)[0].stats().engine.num_submitted == 0


async def test_a_request_id_belongs_to_its_key(
    http: httpx.AsyncClient, gate: Gate, state: ServerState
) -> None:
    """A key may not reuse its open id. Another key may use that id, and it cancels only its own request."""
    body = {**BODIES[CHAT], "request_id": "mine"}
    one = asyncio.create_task(http.post(CHAT, json=body))
    await asyncio.to_thread(gate.inside.wait, 30)
    rejected = await http.post(CHAT, json=body)
    assert (rejected.status_code, rejected.json()["error"]["param"]) == (400, "request_id")
    two = asyncio.create_task(http.post(CHAT, json={**body, "n": 2}, headers=TWO))
    client = services(state)[0]._client
    assert client is not None
    await until(lambda: len(client._open) == 2)
    assert (await http.post("/v1/requests/chatcmpl-mine/cancel", headers=TWO)).json()["status"] == "cancelled"
    gate.opened.set()
    assert code(await two) == (499, "cancelled")
    response = await one
    assert (response.status_code, response.json()["id"]) == (200, "chatcmpl-mine")
    await until(lambda: not client._open)  # the engine has ended the canceled request too
    for _ in range(2):
        assert (await http.post(CHAT, json={**body, "n": 2}, headers=TWO)).status_code == 200
    for headers, n in ((ONE, 1), (TWO, 2)):
        reply = await http.get("/v1/requests/chatcmpl-mine/timeline", headers=headers)
        assert (reply.json()["id"], len(reply.json()["choices"])) == ("chatcmpl-mine", n)


async def test_no_route_shows_a_request_of_another_key(
    http: httpx.AsyncClient, gate: Gate, calls_with: Callable[[str, str], list[tuple[str, str]]]
) -> None:
    """Every route with a request's id is called; a new route is one more call."""
    work = asyncio.create_task(http.post(CHAT, json={**BODIES[CHAT], "request_id": "mine"}))
    await asyncio.to_thread(gate.inside.wait, 30)
    for method, path in calls_with("request_id", "chatcmpl-mine"):
        response = await http.request(method, path, headers=TWO)
        assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found"), path
    gate.opened.set()
    assert (await work).status_code == 200


async def test_a_request_id_of_embeddings_belongs_to_its_key(http: httpx.AsyncClient, gate: Gate) -> None:
    body = {"input": "Hi", "request_id": "mine"}
    one = asyncio.create_task(http.post("/v1/embeddings", json=body))
    await asyncio.to_thread(gate.inside.wait, 30)
    rejected = await http.post("/v1/embeddings", json=body)
    assert (rejected.status_code, rejected.json()["error"]["param"]) == (400, "request_id")
    assert hashlib.sha256(b"one").hexdigest()[:16] not in rejected.text
    two = asyncio.create_task(http.post("/v1/embeddings", json=body, headers=TWO))
    gate.opened.set()
    assert [(await each).status_code for each in (one, two)] == [200, 200]


async def test_a_timeline_has_no_gaps_and_no_ids_of_other_keys(
    http: httpx.AsyncClient, gate: Gate, state: ServerState
) -> None:
    """The choices of key `two` use every sequence id, so the requests of key `one` wait for them."""
    works = [
        asyncio.create_task(
            http.post(CHAT, json={**BODIES[CHAT], "n": 4, "request_id": "theirs"}, headers=TWO)
        )
    ]
    await asyncio.to_thread(gate.inside.wait, 30)
    for name in ("a", "b"):
        body = {**BODIES[CHAT], "request_id": name}
        works.append(asyncio.create_task(http.post(CHAT, json=body)))
    client = services(state)[0]._client
    assert client is not None
    await until(lambda: len(client._open) == 3)
    gate.opened.set()
    for work in works:
        assert (await work).status_code == 200
    seen: set[str] = set()
    for name in ("a", "b"):
        reply = (await http.get(f"/v1/requests/chatcmpl-{name}/timeline")).json()
        (choice,) = reply["choices"]
        spans = choice["spans"]
        assert (reply["id"], choice["index"], choice["is_over"]) == (f"chatcmpl-{name}", 0, True)
        assert (spans[0]["start_s"], spans[-1]["end_s"]) == (0.0, choice["total_s"])
        assert all(a["end_s"] == b["start_s"] for a, b in itertools.pairwise(spans))
        assert sum(choice["seconds"].values()) == pytest.approx(choice["total_s"])
        assert {"queued", "decode"} >= {span["kind"] for span in spans} - {"own_chunk", "other_chunk"}
        seen |= {by for span in spans for by in span["by"]}
    assert seen <= {"other", "chatcmpl-a", "chatcmpl-b"}
    theirs = (await http.get("/v1/requests/chatcmpl-theirs/timeline", headers=TWO)).json()
    assert [choice["index"] for choice in theirs["choices"]] == [0, 1, 2, 3]
    for path in ("chatcmpl-theirs", "unknown"):
        assert code(await http.get(f"/v1/requests/{path}/timeline")) == (404, "not_found")


async def test_the_list_has_the_newest_requests_of_the_key(
    http: httpx.AsyncClient, gate: Gate, state: ServerState
) -> None:
    """Requests of other keys are not listed; `last_s` leaves out requests that ended before."""
    gate.n_free = 10**6
    for name, headers in (("a", ONE), ("theirs", TWO), ("b", ONE)):
        response = await http.post(CHAT, json={**BODIES[CHAT], "request_id": name}, headers=headers)
        assert response.status_code == 200
    gate.n_free = 0
    work = asyncio.create_task(http.post(CHAT, json={**BODIES[CHAT], "request_id": "open"}))
    await asyncio.to_thread(gate.inside.wait, 30)
    listing = asyncio.create_task(http.get("/v1/requests"))
    client = services(state)[0]._client
    assert client is not None
    await until(lambda: bool(client._calls))
    gate.opened.set()
    reply = (await listing).json()
    assert (await work).status_code == 200
    ids = [each["id"] for each in reply["data"]]
    assert (reply["object"], ids) == ("list", ["chatcmpl-open", "chatcmpl-b", "chatcmpl-a"])
    assert [each["choices"][0]["is_over"] for each in reply["data"]] == [False, True, True]
    assert all(each["choices"][0]["arrived_at"] <= reply["now"] for each in reply["data"])
    whole = (await http.get("/v1/requests/chatcmpl-b/timeline")).json()
    assert reply["data"][1]["choices"][0]["spans"] == whole["choices"][0]["spans"]
    assert (await http.get("/v1/requests", params={"last_s": 0})).json()["data"] == []
    assert len((await http.get("/v1/requests", params={"limit": 1})).json()["data"]) == 1
    for params in ({"limit": 0}, {"limit": 65}, {"last_s": -1}, {"last_s": "nan"}):
        assert (await http.get("/v1/requests", params=params)).status_code == 400


async def test_a_rejected_request_hides_the_timeline_of_its_reused_id(
    http: httpx.AsyncClient, gate: Gate
) -> None:
    gate.opened.set()
    body = {**BODIES[CHAT], "request_id": "same"}
    assert (await http.post(CHAT, json={**body, "n": 3})).status_code == 200
    rejected = {**body, "max_tokens": 10**6}
    assert (await http.post(CHAT, json=rejected)).status_code == 400
    reply = (await http.get("/v1/requests/chatcmpl-same/timeline")).json()
    assert reply["choices"] == []


async def test_a_slow_reader_appears_in_the_timeline(
    state: ServerState, gate: Gate, http: httpx.AsyncClient
) -> None:
    """The client reads the first bytes, and the rest only after the engine has finished."""
    sent: list[Message] = []
    blocked, go = asyncio.Event(), asyncio.Event()

    async def send(message: Message) -> None:
        sent.append(message)
        if b"content" in message.get("body", b"") and not go.is_set():
            blocked.set()
            await go.wait()

    app = create_app(state, 8000)
    gate.n_free = 1
    request = httpx.Request("POST", f"http://127.0.0.1:8000{CHAT}", json={**BODIES[CHAT], "stream": True})
    body = [{"type": "http.request", "body": request.content, "more_body": False}]

    async def receive() -> Any:
        return body.pop() if body else await asyncio.Event().wait()

    headers = [(k.lower(), v) for k, v in request.headers.raw] + [(b"authorization", b"Bearer one")]
    scope = {
        "type": "http", "http_version": "1.1", "method": "POST", "path": CHAT, "raw_path": CHAT.encode(),
        "query_string": b"", "headers": headers, "client": ("127.0.0.1", 5), "server": ("127.0.0.1", 8000),
    }  # fmt: skip
    work = asyncio.create_task(app(scope, receive, send))
    await blocked.wait()
    gate.opened.set()
    (service,) = services(state)
    await until(lambda: service.stats().finished.get("length") == 1)
    go.set()
    await work
    raw = b"".join(message.get("body", b"") for message in sent)
    id = events(raw)[0]["id"]
    (choice,) = (await http.get(f"/v1/requests/{id}/timeline")).json()["choices"]
    assert choice["seconds"]["slow_reader"] > 0
    assert choice["spans"][-1]["kind"] == "slow_reader", "the slow reader outlasted the engine"
    assert choice["spans"][-1]["end_s"] == choice["total_s"]


def test_the_registry_keeps_the_newest_ended_requests() -> None:
    registry = RequestRegistry()
    for i in range(N_ENDED_MAX + 10):
        with registry.open(RequestEntry(f"{i}", "k", None, [f"{i}-0", f"{i}-1"], 1), lambda: None):  # type: ignore[arg-type]  # not used
            assert registry.find(f"{i}", "k").cancel is not None
    assert len(registry._entries) == len(registry._ended) == N_ENDED_MAX
    assert len(registry._by_request) == 2 * N_ENDED_MAX
    with pytest.raises(ApiError):
        registry.find("9", "k")
    assert registry.find("10", "k").cancel is None
    assert [registry.name(request, "k") for request in ("9-0", "10-1")] == ["other", "10"]
    assert registry.name("10-1", "x") == "other"
    with registry.open(RequestEntry("10", "x", None, ["x/10-0"], 1), lambda: None):  # type: ignore[arg-type]  # not used
        assert registry.find("10", "k").cancel is None, "an id of another key replaces nothing"
        with (
            pytest.raises(RejectedError, match="in use"),
            registry.open(RequestEntry("10", "x", None, [], 1), lambda: None),  # type: ignore[arg-type]  # not used
        ):
            pass
    with registry.open(RequestEntry("20", "k", None, ["20-0"], 1), lambda: None):  # type: ignore[arg-type]  # not used
        assert registry.name("20-1", "k") == "other", "the replaced request is gone"
    assert len(registry._entries) == N_ENDED_MAX
