"""Stored responses: conversations by previous_response_id, reading, deleting, isolation, and bounds."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types import responses as openai_responses

from fakes.service import FakeService, Piece
from llaisys.config import Config
from llaisys.errors import RejectedError, RequestFailedError
from llaisys.registry import ModelRegistry
from llaisys.server.middleware.auth import Keyring
from llaisys.server.responses import store as response_store
from llaisys.server.responses.store import ResponseStore, StoredResponse
from llaisys.server.state import ServerState
from sse import named_events

URL = "/v1/responses"
USER = {"role": "user", "content": "Hi"}
CONFIG = Config(
    api_key=("alice", "bob"),
    enable_auto_tool_choice=True,
    tool_call_parser="hermes",
    reasoning_parser="qwen3",
)
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'


@pytest.fixture
def engine() -> FakeService:
    return FakeService(config=CONFIG)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ResponseStore]:
    with closing(ResponseStore(tmp_path / "responses.db", 1 << 20)) as made:
        yield made


@pytest.fixture
async def clients(
    engine: FakeService, store: ResponseStore, make_client: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, httpx.AsyncClient]]:
    """Return clients of two keys."""
    state = ServerState(
        CONFIG,
        keys=Keyring.of(CONFIG),
        models=ModelRegistry([engine]),  # type: ignore[list-item]
        responses=store,
    )
    async with (
        make_client(state, authorization="Bearer alice") as alice,
        make_client(state, authorization="Bearer bob") as bob,
    ):
        yield alice, bob


@pytest.fixture
def alice(clients: tuple[httpx.AsyncClient, httpx.AsyncClient]) -> httpx.AsyncClient:
    return clients[0]


async def created(client: httpx.AsyncClient, input: Any = "Hi", **body: Any) -> dict[str, Any]:
    reply = await client.post(URL, json={"input": input, **body})
    assert reply.status_code == 200, reply.text
    made: dict[str, Any] = reply.json()
    return made


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_is_stored_before_the_client_has_all_of_it(
    alice: httpx.AsyncClient, stream: bool
) -> None:
    reply = await alice.post(URL, json={"input": "Hi", "stream": stream})
    made = named_events(reply.content)[-1]["response"] if stream else reply.json()
    assert made["store"] is True
    read = await alice.get(f"{URL}/{made['id']}")
    assert (read.status_code, read.json()) == (200, made)


async def test_a_conversation_continues(engine: FakeService, alice: httpx.AsyncClient) -> None:
    """Input and output of all previous responses come first; their instructions do not."""
    engine.script = [Piece(["<think>", "Hm", "</think>", CALL], "stop")]
    first = await created(alice, "Add", instructions="Be brief.", tools=[TOOL])
    call = first["output"][1]
    engine.script = [Piece(["Done"], "stop")]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "0"}
    second = await created(alice, [result], previous_response_id=first["id"], tools=[TOOL])
    assert second["previous_response_id"] == first["id"]
    third = await created(
        alice, "More", previous_response_id=second["id"], instructions="Be long.", truncation="auto"
    )
    assert third["instructions"] == "Be long."
    messages, _ = engine.chats[-1]
    assert messages == [
        {"role": "system", "content": "Be long."},
        {"role": "user", "content": "Add"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": call["call_id"], "type": "function", "function": {"name": "add", "arguments": "{}"}}
            ],
            "reasoning_content": "Hm",
        },
        {"role": "tool", "tool_call_id": call["call_id"], "name": "add", "content": "0"},
        {"role": "assistant", "content": "Done"},
        {"role": "user", "content": "More"},
    ]


async def test_a_reference_is_the_stored_item(engine: FakeService, alice: httpx.AsyncClient) -> None:
    """Vercel's AI SDK refers to output items instead of sending them again."""
    first = await created(alice)
    (item,) = first["output"]
    input: list[dict[str, Any]] = [USER, {"type": "item_reference", "id": item["id"]}, USER]
    second = await created(alice, input)
    messages, _ = engine.chats[-1]
    assert messages == [USER, {"role": "assistant", "content": "Hello!"}, USER]
    listed = (await alice.get(f"{URL}/{second['id']}/input_items?order=asc")).json()["data"]
    assert listed[1]["content"] == item["content"]
    unknown = [USER, {"type": "item_reference", "id": "msg_unknown"}]
    error = (await alice.post(URL, json={"input": unknown})).json()["error"]
    assert error["param"] == "input[1]"
    await alice.delete(f"{URL}/{second['id']}")
    await alice.delete(f"{URL}/{first['id']}")
    assert (await alice.post(URL, json={"input": input})).status_code == 400


async def test_without_a_store_the_errors_say_how_to_have_one(client: httpx.AsyncClient) -> None:
    made = await created(client, store=True)
    assert made["store"] is False
    error = (await client.post(URL, json={"input": "Hi", "previous_response_id": made["id"]})).json()["error"]
    assert error["param"] == "previous_response_id"
    assert "--response-store FILE" in error["message"]
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
        reply = await client.request(method, f"{URL}/{made['id']}{path}")
        assert reply.status_code == 404
        assert "--response-store FILE" in reply.json()["error"]["message"]
    reference = [{"type": "item_reference", "id": "msg_1"}]
    message = (await client.post(URL, json={"input": reference})).json()["error"]["message"]
    assert "--response-store FILE" in message


async def test_nothing_is_stored_if_the_client_says_so(alice: httpx.AsyncClient) -> None:
    made = await created(alice, store=False)
    assert made["store"] is False
    assert (await alice.get(f"{URL}/{made['id']}")).status_code == 404


async def test_a_failed_response_is_not_stored(engine: FakeService, alice: httpx.AsyncClient) -> None:
    engine.script = [Piece(["Hel"]), RequestFailedError("boom")]
    reply = await alice.post(URL, json={"input": "Hi", "stream": True})
    failed = named_events(reply.content)[-1]["response"]
    assert failed["status"] == "failed"
    assert (await alice.get(f"{URL}/{failed['id']}")).status_code == 404


async def test_an_unknown_previous_response(alice: httpx.AsyncClient) -> None:
    reply = await alice.post(URL, json={"input": "Hi", "previous_response_id": "resp_unknown"})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (
        400,
        "previous_response_not_found",
        "previous_response_id",
    )


async def test_a_deleted_response_is_gone(alice: httpx.AsyncClient) -> None:
    first = await created(alice)
    second = await created(alice, previous_response_id=first["id"])
    reply = await alice.delete(f"{URL}/{first['id']}")
    assert reply.json() == {"id": first["id"], "object": "response", "deleted": True}
    assert (await alice.delete(f"{URL}/{first['id']}")).status_code == 404
    assert (await alice.get(f"{URL}/{first['id']}")).status_code == 404
    assert (await alice.get(f"{URL}/{second['id']}")).status_code == 200
    again = await alice.post(URL, json={"input": "Hi", "previous_response_id": second["id"]})
    assert again.json()["error"]["code"] == "previous_response_not_found"


async def test_input_items_are_listed_in_pages(alice: httpx.AsyncClient) -> None:
    items: list[dict[str, Any]] = [
        USER,
        {"role": "assistant", "content": "Hello"},
        {"type": "function_call", "call_id": "a", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "0"},
        {"id": "msg_mine", "role": "user", "content": [{"type": "input_text", "text": "Bye"}]},
    ]
    made = await created(alice, items)
    url = f"{URL}/{made['id']}/input_items"
    page = (await alice.get(url)).json()
    openai_responses.ResponseItemList.model_validate(page)
    kinds = [item["type"] for item in page["data"]]
    assert kinds == ["message", "function_call_output", "function_call", "message", "message"]
    assert (page["first_id"], page["has_more"]) == ("msg_mine", False)
    assert page["data"][-1]["content"] == [{"type": "input_text", "text": "Hi"}]
    ids = [item["id"] for item in page["data"]][::-1]
    first = (await alice.get(url, params={"order": "asc", "limit": 2})).json()
    assert ([item["id"] for item in first["data"]], first["has_more"]) == (ids[:2], True)
    rest = (await alice.get(url, params={"order": "asc", "after": first["last_id"]})).json()
    assert ([item["id"] for item in rest["data"]], rest["has_more"]) == (ids[2:], False)
    assert (await alice.get(url, params={"after": "msg_unknown"})).status_code == 404
    assert (await alice.get(url, params={"after": ids[0]})).json()["first_id"] is None


async def test_each_key_sees_only_its_own_responses(
    clients: tuple[httpx.AsyncClient, httpx.AsyncClient],
    calls_with: Callable[[str, str], list[tuple[str, str]]],
) -> None:
    """Every route with a response's id is called; a new route is one more call."""
    alice, bob = clients
    made = await created(alice)
    for method, path in calls_with("response_id", made["id"]):
        reply = await bob.request(method, path)
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_found"), path
    reply = await bob.post(URL, json={"input": "Hi", "previous_response_id": made["id"]})
    assert reply.json()["error"]["code"] == "previous_response_not_found"
    reference = [{"type": "item_reference", "id": made["output"][0]["id"]}]
    assert (await bob.post(URL, json={"input": reference})).status_code == 400
    assert (await alice.get(f"{URL}/{made['id']}")).json() == made


async def test_an_id_is_stored_once(alice: httpx.AsyncClient) -> None:
    made = await created(alice, request_id="mine")
    again = await alice.post(URL, json={"input": "Hi", "request_id": "mine"})
    assert (again.status_code, again.json()["error"]["param"]) == (400, "request_id")
    assert (await alice.get(f"{URL}/resp_mine")).json() == made


async def test_a_conversation_is_bounded_like_a_body(
    engine: FakeService, store: ResponseStore, make_client: Any
) -> None:
    config = CONFIG.model_copy(update={"max_body_bytes": 3000, "api_key": ()})
    state = ServerState(config, models=ModelRegistry([engine]), responses=store)  # type: ignore[list-item]
    async with make_client(state) as client:
        first = await created(client, "x" * 800)
        second = await created(client, "x" * 800, previous_response_id=first["id"])
        reply = await client.post(URL, json={"input": "Hi", "previous_response_id": second["id"]})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "previous_response_id")
        assert "max_body_bytes" in reply.json()["error"]["message"]
        references = [{"type": "item_reference", "id": made["output"][0]["id"]} for made in (first, second)]
        reply = await client.post(URL, json={"input": references})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "input")
        assert "max_body_bytes" in reply.json()["error"]["message"]
        assert (await client.post(URL, json={"input": references[:1]})).status_code == 200


# --- bounds of the store ---


def response(id: str, n_bytes: int, previous: str | None = None) -> StoredResponse:
    """Return a response of a number of bytes, with its input."""
    body = {"id": id, "status": "completed", "previous_response_id": previous, "output": [], "text": ""}
    n_rest = n_bytes - len(json.dumps(body, separators=(",", ":"))) - len("[]")
    return StoredResponse({**body, "text": "x" * n_rest}, [], is_open=False)


async def ids_in(store: ResponseStore, owner: str = "a") -> list[str]:
    return [id for id in "abcdef" if await store.get(owner, id) is not None]


async def test_the_least_recently_used_responses_are_deleted(tmp_path: Path) -> None:
    with closing(ResponseStore(tmp_path / "r.db", 1000)) as store:
        for id in "abc":
            await store.add("a", response(id, 300))
        await store.add("other", response("a", 900))
        await store.add("a", response("d", 300, previous="a"))
        assert await ids_in(store) == ["a", "c", "d"], "the chain of d counts as used"
        await store.add("a", response("e", 700))
        assert await ids_in(store) == ["d", "e"]
        with pytest.raises(RejectedError, match=r"1001 bytes.*store: false") as caught:
            await store.add("a", response("f", 1001))
        assert caught.value.param == "store"
        assert await ids_in(store) == ["d", "e"], "a rejected response deletes nothing"
        assert await ids_in(store, "other") == ["a"]


async def test_the_number_of_responses_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_store, "RESPONSES_PER_OWNER_MAX", 2)
    with closing(ResponseStore(tmp_path / "r.db", 1 << 20)) as store:
        for id in "abc":
            await store.add("a", response(id, 300))
        assert await ids_in(store) == ["b", "c"]


async def test_responses_outlive_the_server(tmp_path: Path) -> None:
    for _ in range(2):
        with closing(ResponseStore(tmp_path / "r.db", 1 << 20)) as store:
            if await store.get("a", "a") is None:
                await store.add("a", response("a", 300))
    with closing(ResponseStore(tmp_path / "r.db", 1 << 20)) as store:
        assert await store.get("a", "a") == response("a", 300)


def test_an_unusable_response_store_is_rejected_at_start(tmp_path: Path) -> None:
    with pytest.raises(RejectedError, match="cannot be used as a response store") as caught:
        ResponseStore(tmp_path, 1)
    assert caught.value.param == "response_store"


async def test_a_full_disk_is_a_507(alice: httpx.AsyncClient, store: ResponseStore) -> None:
    store._file.writer.run_blocking(lambda db: db.execute("PRAGMA max_page_count = 1").fetchall())
    for stream in (False, True):
        reply = await alice.post(URL, json={"input": "x" * 100_000, "stream": stream})
        if not stream:
            assert (reply.status_code, reply.json()["error"]["code"]) == (507, "storage_full")
        else:
            error = named_events(reply.content)[-1]["response"]["error"]
            assert error["code"] == "server_error"
            assert "storage is full" in error["message"]
