"""The chat store with disk failures, locks of other processes, and at its limits."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from llaisys.config import Config
from llaisys.errors import RejectedError, StorageBusyError
from llaisys.server import sqlite_file
from llaisys.server.state import ServerState
from llaisys.server.webui.chat_store import MIGRATIONS, Change, ChatStore, Conflict

BYTES_MAX = 2**20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "chats.db"


@pytest.fixture
def store(path: Path) -> Iterator[ChatStore]:
    with closing(ChatStore(path, BYTES_MAX)) as made:
        yield made


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Simulate another process that has begun to write."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield


def _make_unavailable(path: Path, is_replaced: bool) -> None:
    path.rename(path.with_name("elsewhere.db"))
    if is_replaced:
        path.write_bytes(b"")


def put(client: httpx.AsyncClient, base: int = 0, text: str = "x") -> Any:
    return client.put("/v1/chats/one", json={"base": base, "chat": {"text": text}})


async def test_a_full_disk_is_a_507_without_side_effects(
    chats: httpx.AsyncClient, store: ChatStore, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The page limit of SQLite fails like a full disk."""
    assert (await put(chats)).status_code == 200
    n_pages = store._file.writer.run_blocking(lambda db: db.execute("PRAGMA page_count").fetchone()[0])
    store._file.writer.run_blocking(lambda db: db.execute(f"PRAGMA max_page_count = {n_pages}").fetchall())
    for rejected in (
        await put(chats, 1, "x" * 100_000),
        await chats.put("/v1/chats/two", json={"base": 0, "chat": {"text": "x" * 100_000}}),
    ):
        assert (rejected.status_code, rejected.json()["error"]["code"]) == (507, "storage_full")
        assert rejected.headers["x-should-retry"] == "false"
        assert str(path) not in rejected.text, "an error shows no server path"
    assert caplog.messages.count(f"the chat store {path}: database or disk is full") == 2
    assert await store.changes("", 0) == [Change("one", 1, False)]
    assert (await chats.get("/v1/chats/one")).json()["chat"] == {"text": "x"}
    store._file.writer.run_blocking(lambda db: db.execute("PRAGMA max_page_count = 100000").fetchall())
    assert (await put(chats, 1, "x" * 100_000)).json() == {"id": "one", "revision": 2}


@pytest.mark.parametrize("is_replaced", [False, True])
async def test_a_missing_file_is_an_error_not_an_empty_store(
    chats: httpx.AsyncClient, path: Path, caplog: pytest.LogCaptureFixture, is_replaced: bool
) -> None:
    assert (await put(chats)).status_code == 200
    _make_unavailable(path, is_replaced)
    for rejected in (await put(chats, 1), await chats.get("/v1/chats/one"), await chats.get("/v1/chats")):
        assert (rejected.status_code, rejected.json()["error"]["code"]) == (500, "storage_error")
        assert str(path) not in rejected.text
    assert sum(str(path) in message for message in caplog.messages) == 3


async def test_a_lock_of_another_process_is_a_503_for_writers_only(
    chats: httpx.AsyncClient, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(chats)
    monkeypatch.setattr(sqlite_file, "WAIT_S", 0.05)
    with locked(path):
        for rejected in await asyncio.gather(*(put(chats, 1) for _ in range(5))):
            assert (rejected.status_code, rejected.json()["error"]["code"]) == (503, "storage_busy")
            assert int(rejected.headers["retry-after"]) >= 1
        monkeypatch.setattr(sqlite_file, "WAIT_S", 600.0)
        waiting = asyncio.ensure_future(put(chats, 1))
        assert (await chats.get("/v1/chats/one")).status_code == 200
        assert (await chats.get("/v1/chats")).status_code == 200
        assert not waiting.done()
    assert (await waiting).json() == {"id": "one", "revision": 2}


async def test_waiting_calls_are_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_file, "CALLS_MAX", 3)
    monkeypatch.setattr(sqlite_file, "WAIT_S", 600.0)
    with closing(ChatStore(path, BYTES_MAX)) as store:
        with locked(path):
            waiting = [asyncio.ensure_future(store.put("", f"c{i}", 0, {})) for i in range(3)]
            await asyncio.sleep(0)  # each call has begun
            with pytest.raises(StorageBusyError, match="3 calls wait"):
                await store.put("", "c3", 0, {})
            assert await store.changes("", 0) == []
        assert await asyncio.gather(*waiting) == [1, 2, 3]
        assert await store.put("", "c3", 0, {}) == 4


async def test_chat_bytes_per_owner_are_bounded(path: Path) -> None:
    def chat(n_bytes: int) -> dict[str, str]:
        return {"t": "天" * ((n_bytes - 8) // 3)}  # stored as {"t":"..."}, three bytes for each character

    with closing(ChatStore(path, 1000)) as store:
        assert await store.put("a", "one", 0, chat(608)) == 1
        assert await store.put("a", "two", 0, chat(308)) == 2
        with pytest.raises(RejectedError, match=r"1023 bytes.* max_chat_bytes_per_key allows 1000") as caught:
            await store.put("a", "three", 0, chat(107))
        assert caught.value.param == "chat"
        with pytest.raises(RejectedError):
            await store.put("a", "two", 2, chat(608))
        assert await store.put("b", "three", 0, chat(908)) == 3, "each owner has its own limit"
    with closing(ChatStore(path, 500)) as store:  # a limit below the current use
        assert await store.put("a", "one", 1, chat(308)) == 4, "a smaller chat is accepted"
        with pytest.raises(RejectedError):
            await store.put("a", "two", 2, chat(311))
        assert await store.delete("a", "one", 4) == 5
        assert await store.put("a", "three", 0, chat(158)) == 6


async def test_one_chat_is_bounded_like_a_body(
    store: ChatStore, state: ServerState, make_client: Callable[..., httpx.AsyncClient]
) -> None:
    small = ServerState(Config(max_body_bytes=1000), models=state.models, chats=store)
    async with make_client(small) as client:
        assert (await put(client, 0, "x" * 900)).status_code == 200
        assert (await put(client, 1, "x" * 1000)).status_code == 413


async def test_chats_of_an_older_file_count(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.executescript(f"{MIGRATIONS[0]} PRAGMA user_version = 1;")
        db.execute("INSERT INTO chats VALUES ('a', 'one', 7, '{\"t\":\"\\u5929\"}')")
        db.commit()
    with closing(ChatStore(path, 30)) as store:
        assert await store.get("a", "one") == (7, '{"t":"\\u5929"}')
        with pytest.raises(RejectedError, match="31 bytes"):
            await store.put("a", "two", 0, {"t": "xxxxxxxxx"})
        assert await store.put("a", "two", 0, {"t": "xxxxxxxx"}) == 8


async def test_two_servers_with_one_file_do_not_overwrite_each_other(store: ChatStore, path: Path) -> None:
    with closing(ChatStore(path, BYTES_MAX)) as other:
        assert await store.put("", "one", 0, {"from": 1}) == 1
        assert await other.put("", "one", 0, {"from": 2}) == Conflict(1)
        assert await other.put("", "one", 1, {"from": 2}) == 2
        assert await store.get("", "one") == (2, '{"from":2}')


def test_an_unusable_chat_store_is_rejected_at_start(tmp_path: Path, path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for wrong in (tmp_path, tmp_path / "fifo", Path("/proc/chats.db"), tmp_path / "no" / "chats.db"):
        with pytest.raises(RejectedError, match=f"{wrong} cannot be used as a chat store") as caught:
            ChatStore(wrong, BYTES_MAX)
        assert caught.value.param == "chat_store"
    ChatStore(path, BYTES_MAX).close()
    with locked(path), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite_file, "WAIT_S", 0.05)
        with pytest.raises(RejectedError, match="database is locked"):
            ChatStore(path, BYTES_MAX)
