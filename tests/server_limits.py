"""Limits of the server: `tests/unit/test_limits_table.py` checks their rows of docs/reference/limits.md."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from llaisys.config import load_config
from llaisys.engine.lora import LoraManager
from llaisys.errors import ExhaustedError, LlaisysError, RejectedError
from llaisys.lora_request import LoRARequest
from llaisys.server.http_errors import TABLE, to_api_error
from llaisys.server.response_body import ResponseBytes
from llaisys.server.responses.store import ResponseStore, StoredResponse
from llaisys.server.webui.chat_store import ChatStore


def max_chat_bytes_per_key() -> None:
    """One chat fits, and one more is refused."""
    config = load_config({"max_chat_bytes_per_key": 10})
    with (
        TemporaryDirectory() as folder,
        closing(ChatStore(Path(folder, "chats.db"), config.max_chat_bytes_per_key)) as store,
    ):
        assert asyncio.run(store.put("", "fits", 0, {"a": 1234})) == 1
        with pytest.raises(RejectedError) as caught:
            asyncio.run(store.put("", "more", 0, {}))
    assert (to_api_error(caught.value, "").status_code, caught.value.param) == (400, "chat")


def max_stored_response_bytes_per_key() -> None:
    """The oldest response is deleted, and a single larger one is refused."""
    config = load_config({"max_stored_response_bytes_per_key": 300})
    body = {"previous_response_id": None, "output": []}

    async def use(store: ResponseStore) -> None:
        for id in ("first", "second"):
            await store.add("", StoredResponse({**body, "id": id, "text": "x" * 100}, [], is_open=False))
        assert await store.get("", "first") is None
        assert await store.get("", "second") is not None
        with pytest.raises(RejectedError) as caught:
            await store.add("", StoredResponse({**body, "id": "large", "text": "x" * 300}, [], is_open=False))
        assert (to_api_error(caught.value, "").status_code, caught.value.param) == (400, "store")

    with (
        TemporaryDirectory() as folder,
        closing(ResponseStore(Path(folder, "r.db"), config.max_stored_response_bytes_per_key)) as store,
    ):
        asyncio.run(use(store))


def response_statuses(*sizes: int, **settings: Any) -> list[int]:
    """Return the statuses of concurrent responses of these sizes in bytes."""
    config, found = load_config(settings), []
    counts = ResponseBytes(config.max_response_bytes, config.max_response_bytes_in_flight)
    for n_bytes in sizes:
        try:
            counts.add(n_bytes, 0)
            found.append(200)
        except LlaisysError as e:
            found.append(TABLE[type(e)].status)
    return found


def max_response_bytes() -> None:
    """`test_size_estimate.py` has the responses that are rejected before they run."""
    assert response_statuses(3, 4, max_response_bytes=3) == [200, 400]


def max_response_bytes_in_flight() -> None:
    assert response_statuses(3, 3, 1, max_response_bytes_in_flight=6) == [200, 200, 429]


class _Slots:
    """A core that loads any adapter."""

    def load_lora(self, path: str) -> tuple[int, str]:
        return int(path), path

    def unload_lora(self, slot: int) -> None:
        """Do nothing."""


def max_loras() -> None:
    """Two adapters are loaded, and one more is refused while both are in use."""
    config = load_config({"enable_lora": True, "max_loras": 2})
    manager = LoraManager(_Slots(), config.max_loras)
    for number in (1, 2):
        manager.load(LoRARequest(f"{number}", number, f"{number}")).n_open = 1
    with pytest.raises(ExhaustedError) as caught:
        manager.load(LoRARequest("3", 3, "3"))
    assert TABLE[type(caught.value)].status == 429
    with pytest.raises(RejectedError, match="max_loras"):
        load_config({"max_loras": 0})
