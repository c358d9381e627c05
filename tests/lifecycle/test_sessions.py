"""Sessions with the real core through the public API.

A restored session gives the same bits as before its save, and a damaged file is rejected.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from children import engine_processes
from golden import FOLDER
from llaisys.async_llm import AsyncLLM
from llaisys.config import Config
from llaisys.engine.client import CALLS_MAX
from llaisys.engine.sessions.file import SessionWriter
from llaisys.engine.sessions.manager import SessionRequest
from llaisys.errors import EngineDeadError, ExhaustedError, RejectedError, UnsupportedError
from llaisys.sampling_params import RequestOutputKind, SamplingParams
from llaisys.session_info import SessionInfo
from waiting import DEADLINE_S

PROMPT = [(7 * i + 3) % 500 for i in range(90)]
SETTINGS: dict[str, Any] = {
    "model": str(FOLDER),
    "dtype": "float32",
    "num_kv_cells": 512,
    "num_threads": 1,
}
ANSWER = SamplingParams(
    temperature=0.8, seed=11, max_tokens=20, ignore_eos=True, logprobs=3, output_kind=RequestOutputKind.DELTA
)


@asynccontextmanager
async def started(store: Path | None = None, **settings: Any) -> AsyncIterator[AsyncLLM]:
    service = await AsyncLLM.start(Config(**{**SETTINGS, "session_store": store, **settings}))
    try:
        yield service
    finally:
        await service.close()


async def completion(
    service: AsyncLLM, name: str, prompt: list[int], **more: Any
) -> tuple[list[int], Any, int]:
    """Return ids, logprobs (compared bit for bit) and the number of cached tokens."""
    ids: list[int] = []
    logprobs: list[Any] = []
    cached = 0
    async for delta in service.generate(prompt, ANSWER, name, **more):
        ids += delta.outputs[0].token_ids
        logprobs += delta.outputs[0].logprobs or []
        cached = max(cached, delta.num_cached_tokens)
    return ids, logprobs, cached


def the_file(store: Path) -> Path:
    (file,) = store.glob("*/*.kv")
    return file


async def test_the_second_turn_computes_only_what_is_new() -> None:
    async with started() as service:
        ids, _, _ = await completion(service, "a", PROMPT, session_id="chat")
        assert await service.sessions.list() == [SessionInfo("chat", 109, 109, 109)]
        for i in range(12):
            await completion(service, f"flood {i}", [i + 1] * 60)
        turn = [*PROMPT, *ids, 5, 6, 7]
        warm = await completion(service, "b", turn, session_id="chat")
        assert warm[2] == 109
        assert service._client is not None
        before = service._client.stats()
        fork = await service.sessions.fork("chat", "branch", 50)
        assert (fork.num_tokens, fork.num_pinned_tokens) == (50, 50)
        after = service._client.stats()
        assert (after.num_sessions, after.kv_cells_free) == (2, before.kv_cells_free)
        assert (await service.sessions.trim("branch", 9)).num_tokens == 9
        assert (await service.sessions.delete("branch")).name == "branch"
    async with started(enable_prefix_caching=False) as service:
        assert warm[:2] == (await completion(service, "b", turn))[:2]


@pytest.mark.parametrize("engine_process", [False, True])
async def test_a_restored_session_continues_with_the_same_bits(tmp_path: Path, engine_process: bool) -> None:
    async with started(tmp_path, engine_process=engine_process) as service:
        ids, _, _ = await completion(service, "a", PROMPT, session_id="chat", client_id="me")
        saved = await service.sessions.save("chat", "file", client_id="me")
        assert saved == SessionInfo("chat", 109, 109, 109)
        turn = [*PROMPT, *ids, 5, 6, 7]
        want = await completion(service, "b", turn, session_id="chat", client_id="me")
        with pytest.raises(RejectedError, match="no saved session 'file'"):
            await service.sessions.restore("file", "chat", client_id="you")
        with pytest.raises(RejectedError, match="no session 'other'"):
            await service.sessions.delete("other", client_id="me")
    async with started(tmp_path, engine_process=engine_process, num_kv_streams=2) as service:
        restoring = asyncio.create_task(service.sessions.restore("file", "again", client_id="me"))
        await asyncio.sleep(0)
        got = await completion(service, "b", turn, session_id="again", client_id="me")
        assert (await restoring).num_tokens == 109
        assert got == want
        assert got[2] == 109, "the request waited for the restore"


async def test_no_damaged_or_foreign_file_is_restored_and_nothing_leaks(tmp_path: Path) -> None:
    async with started(tmp_path) as service:
        await completion(service, "a", PROMPT, session_id="chat")
        await service.sessions.save("chat", "file")
    file = the_file(tmp_path)
    raw = file.read_bytes()
    assert len(raw) > 10_000
    seed = 17
    chance = random.Random(seed)
    async with started(tmp_path) as service:
        assert service._client is not None
        for i in range(40):
            damaged = bytearray(raw)
            if i % 2:
                damaged[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
            else:
                del damaged[chance.randrange(len(raw)) :]
            file.write_bytes(damaged)
            with pytest.raises((RejectedError, UnsupportedError), match="saved session 'file'"):
                await service.sessions.restore("file", "chat")
        await completion(service, "b", [3], client_id="x")
        assert await service.sessions.list() == []
        stats = service._client.stats()
        assert (stats.kv_cells_used, stats.kv_cells_free) == (0, 512 - 20), "those of the request"
        file.write_bytes(raw)
        assert (await service.sessions.restore("file", "chat")).num_cached_tokens == 109
    async with started(tmp_path, dtype="bfloat16") as service:
        with pytest.raises(RejectedError, match="another model"):
            await service.sessions.restore("file", "chat")


async def test_a_session_request_in_progress_ends_with_its_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, begun = threading.Event(), threading.Event()

    def slow(_: SessionWriter) -> None:
        begun.set()
        assert gate.wait(DEADLINE_S)

    monkeypatch.setattr(SessionWriter, "open", slow)
    async with started(tmp_path) as service:
        await completion(service, "a", PROMPT, session_id="chat")
        saving = asyncio.create_task(service.sessions.save("chat", "file"))
        assert await asyncio.to_thread(begun.wait, DEADLINE_S)
        assert (await completion(service, "b", PROMPT))[2] == 89, "other requests run meanwhile"
        assert service._client is not None
        closing = asyncio.create_task(asyncio.to_thread(service._client.close))
        with pytest.raises(EngineDeadError, match="shutting down"):
            await saving
        gate.set()
        await closing


async def test_a_session_request_in_progress_ends_with_its_process() -> None:
    async with started(engine_process=True) as service:
        await service.sessions.create("a")
        (child,) = engine_processes()
        child.suspend()
        listing = asyncio.create_task(service.sessions.list())
        await asyncio.sleep(0)
        child.kill()
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await listing


@pytest.mark.parametrize("engine_process", [False, True])
async def test_session_requests_end_with_their_engine_and_are_bounded(
    tmp_path: Path, engine_process: bool
) -> None:
    async with started(tmp_path, engine_process=engine_process) as service:
        await service.sessions.create("a")
        n_many = 3 * CALLS_MAX
        results = await asyncio.gather(
            *(service.sessions.list() for _ in range(n_many)), return_exceptions=True
        )
        rejected = [result for result in results if isinstance(result, BaseException)]
        assert all(isinstance(error, ExhaustedError) for error in rejected)
        assert len(rejected) < n_many
        assert [SessionInfo("a", 0, 0, 0)] in results
        assert service._client is not None
        service._client.close()
        with pytest.raises(EngineDeadError):
            await service.sessions.list()
    with pytest.raises(EngineDeadError, match="shutting down"):
        await service.sessions.list()


async def test_an_idle_model_is_not_unloaded_during_a_session_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with started(idle_unload_s=1000.0) as service:
        client, timers = service._client, []
        assert client is not None
        assert service._engine._idle is not None, "nothing is open, so the idle time runs"
        call = client.call_session

        def watched(what: SessionRequest) -> Any:
            timers.append(service._engine._idle)
            return call(what)

        monkeypatch.setattr(client, "call_session", watched)
        await service.sessions.create("a")
        assert timers == [None]
        assert service._engine._idle is not None
