"""The chat store: revisions, conflicts, owners and file versions. Disk failures: `test_chat_storage.py`."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from llaisys.config import Config
from llaisys.errors import RejectedError
from llaisys.server.middleware.auth import Keyring
from llaisys.server.state import ServerState
from llaisys.server.webui import chat_store
from llaisys.server.webui.chat_store import MIGRATIONS, Change, ChatStore, Conflict


def opened(path: Path, bytes_max: int = 2**20) -> ChatStore:
    return ChatStore(path, bytes_max)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChatStore]:
    made = opened(tmp_path / "chats.db")
    yield made
    made.close()


async def test_a_chat_is_written_and_read_back(chats: httpx.AsyncClient, store: ChatStore) -> None:
    chat = {"title": "天 😀", "messages": [1, {"a": None}]}
    written = await chats.put("/v1/chats/one", json={"base": 0, "chat": chat})
    assert written.json() == {"id": "one", "revision": 1}
    read = await chats.get("/v1/chats/one")
    assert read.json() == {"id": "one", "revision": 1, "chat": chat}
    listed = (await chats.get("/v1/chats")).json()
    assert listed == {
        "object": "list",
        "store": store.name,
        "data": [{"id": "one", "revision": 1, "deleted": False}],
        "has_more": False,
    }


async def test_a_lone_surrogate_is_kept(chats: httpx.AsyncClient) -> None:
    raw = rb'{"base":0,"chat":{"text":"\ud800"}}'
    headers = {"content-type": "application/json"}
    assert (await chats.put("/v1/chats/one", content=raw, headers=headers)).status_code == 200
    read = await chats.get("/v1/chats/one")
    assert rb'"text":"\ud800"' in read.content


async def test_a_write_on_an_old_revision_is_a_conflict(chats: httpx.AsyncClient) -> None:
    for title in ("first", "second"):
        base = 0 if title == "first" else 1
        await chats.put("/v1/chats/one", json={"base": base, "chat": {"title": title}})
    for response in (
        await chats.put("/v1/chats/one", json={"base": 1, "chat": {"title": "late"}}),
        await chats.put("/v1/chats/one", json={"base": 0, "chat": {"title": "late"}}),
        await chats.delete("/v1/chats/one", params={"base": 1}),
    ):
        assert response.status_code == 409
        assert response.json()["error"]["code"] == "conflict"
        assert "revision 2" in response.json()["error"]["message"]
    assert (await chats.get("/v1/chats/one")).json()["chat"] == {"title": "second"}


async def test_a_deleted_chat_leaves_a_tombstone(chats: httpx.AsyncClient) -> None:
    await chats.put("/v1/chats/one", json={"base": 0, "chat": {}})
    deleted = await chats.delete("/v1/chats/one", params={"base": 1})
    assert deleted.json() == {"id": "one", "revision": 2}
    assert (await chats.get("/v1/chats/one")).status_code == 404
    listed = (await chats.get("/v1/chats", params={"since": 1})).json()["data"]
    assert listed == [{"id": "one", "revision": 2, "deleted": True}]
    again = await chats.put("/v1/chats/one", json={"base": 2, "chat": {"title": "back"}})
    assert again.json()["revision"] == 3


@pytest.mark.parametrize(
    ("method", "path", "sent"),
    [
        ("PUT", "/v1/chats/one", {"json": {"base": 0}}),
        ("PUT", "/v1/chats/one", {"json": {"base": -1, "chat": {}}}),
        ("PUT", "/v1/chats/one", {"json": {"base": 0, "chat": "text"}}),
        ("PUT", "/v1/chats/one", {"content": b"{", "headers": {"content-type": "application/json"}}),
        ("PUT", "/v1/chats/a.b", {"json": {"base": 0, "chat": {}}}),
        ("PUT", "/v1/chats/" + "x" * 65, {"json": {"base": 0, "chat": {}}}),
        ("DELETE", "/v1/chats/one", {}),
        ("GET", "/v1/chats", {"params": {"since": "x"}}),
        ("GET", "/v1/chats", {"params": {"since": 2**64}}),
    ],
)
async def test_invalid_chats_are_a_400(
    chats: httpx.AsyncClient, method: str, path: str, sent: dict[str, Any]
) -> None:
    response = await chats.request(method, path, **sent)
    assert response.status_code == 400
    assert response.json()["error"]["message"]


async def test_without_a_chat_store_the_routes_are_not_found(client: httpx.AsyncClient) -> None:
    listed = await client.get("/v1/chats")
    assert listed.json() == {"object": "list", "store": None, "data": [], "has_more": False}
    for response in (
        await client.get("/v1/chats/one"),
        await client.put("/v1/chats/one", json={"base": 0, "chat": {}}),
        await client.delete("/v1/chats/one", params={"base": 0}),
    ):
        assert response.status_code == 404
        assert "--chat-store" in response.json()["error"]["message"]


async def test_each_key_has_its_own_chats(
    store: ChatStore,
    make_client: Callable[..., httpx.AsyncClient],
    state: ServerState,
    calls_with: Callable[[str, str], list[tuple[str, str]]],
) -> None:
    """Every route with a chat's id is called; a new route is one more call."""
    config = Config(api_key=("a", "b"))
    locked = ServerState(config, keys=Keyring.of(config), models=state.models, chats=store)
    async with make_client(locked) as client:
        mine, theirs = ({"authorization": f"Bearer {key}"} for key in "ab")
        assert (await client.get("/v1/chats")).status_code == 401
        rejected = await client.put("/v1/chats/one", json={"base": 0, "chat": {}})
        assert rejected.status_code == 401
        await client.put("/v1/chats/one", json={"base": 0, "chat": {"of": "a"}}, headers=mine)
        assert (await client.get("/v1/chats/one", headers=theirs)).status_code == 404
        assert (await client.get("/v1/chats", headers=theirs)).json()["data"] == []
        for method, path in calls_with("chat_id", "one"):
            for base in (0, 1):
                body = {"base": base, "chat": {"of": "b"}} if method == "PUT" else None
                reply = await client.request(method, path, json=body, params={"base": base}, headers=theirs)
                assert '"a"' not in reply.text
        assert (await client.get("/v1/chats/one", headers=mine)).json()["chat"] == {"of": "a"}


async def test_changes_are_paginated(store: ChatStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_store, "CHANGES_PER_PAGE", 2)
    for i in range(5):
        await store.put("", f"c{i}", 0, {})
    await store.put("", "c0", 1, {"changed": True})
    assert await store.changes("", 0) == [Change("c1", 2, False), Change("c2", 3, False)]
    assert await store.changes("", 3) == [Change("c3", 4, False), Change("c4", 5, False)]
    assert await store.changes("", 5) == [Change("c0", 6, False)]


async def test_concurrent_writers_never_lose_a_write(store: ChatStore) -> None:
    """Of 20 writers on one revision exactly one succeeds; the others get the current revision."""
    done = await asyncio.gather(*(store.put("", "one", 0, {"writer": i}) for i in range(20)))
    assert sorted(map(str, done)) == sorted(["1"] + [str(Conflict(1))] * 19)


async def test_the_number_of_chats_is_bounded(store: ChatStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_store, "CHATS_PER_OWNER_MAX", 2)
    for i in range(2):
        await store.put("a", f"c{i}", 0, {})
    with pytest.raises(RejectedError, match="has 2 chats"):
        await store.put("a", "c2", 0, {})
    assert await store.put("a", "c1", 2, {}) == 3
    assert await store.put("b", "c2", 0, {}) == 4


async def test_a_store_file_persists_and_has_an_application_id(tmp_path: Path) -> None:
    first = opened(tmp_path / "chats.db")
    await first.put("", "one", 0, {"kept": True})
    first.close()
    second = opened(tmp_path / "chats.db")
    assert await second.get("", "one") == (1, '{"kept":true}')
    assert second.name == first.name
    second.close()
    other = opened(tmp_path / "other.db")
    assert other.name != first.name
    other.close()


def test_files_of_other_kinds_are_rejected(tmp_path: Path) -> None:
    newer = tmp_path / "newer.db"
    with sqlite3.connect(newer) as db:
        db.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    with pytest.raises(RejectedError, match=f"version {len(MIGRATIONS) + 1}"):
        opened(newer)
    text = tmp_path / "text.db"
    text.write_text("not a database, but long enough to look like something " * 20, "utf-8")
    with pytest.raises(RejectedError, match="cannot be used as a chat store"):
        opened(text)
    with pytest.raises(RejectedError, match="cannot be used as a chat store"):
        opened(tmp_path / "no" / "such" / "folder.db")


async def test_a_failed_migration_leaves_the_file_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "chats.db"
    opened(path).close()
    broken = (*MIGRATIONS, "ALTER TABLE chats ADD COLUMN more TEXT; SELECT nonsense;")
    monkeypatch.setattr(chat_store, "MIGRATIONS", broken)
    with pytest.raises(RejectedError):
        opened(path)
    monkeypatch.setattr(chat_store, "MIGRATIONS", MIGRATIONS)
    again = opened(path)
    assert await again.put("", "one", 0, {}) == 1
    again.close()


@pytest.mark.parametrize("since", ["+0.0", " 1", "1.0", "x", "-1", ""])
async def test_a_revision_must_be_digits(client: httpx.AsyncClient, since: str) -> None:
    response = await client.get("/v1/chats", params={"since": since})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "since")
