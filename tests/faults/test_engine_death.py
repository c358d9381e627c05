"""The core fails with eight open streams: each ends exactly once, and a new engine works."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

import faulty
import serving as server_process
from golden import FOLDER, load_golden
from llaisys.async_llm import AsyncLLM
from llaisys.config import Config
from llaisys.engine import process
from llaisys.engine.client import InprocClient
from llaisys.errors import EngineDeadError
from llaisys.sampling_params import RequestOutputKind, SamplingParams
from serving import NO_SPECULATION, long_model, serving
from sse import events
from waiting import until

TESTS = Path(faulty.__file__).parent
# Passes are counted from the start of an engine, which would first measure decodes for speculation.
SETTINGS: dict[str, Any] = {
    "model": str(FOLDER),
    "dtype": "float32",
    "num_kv_cells": 4096,
    "speculative_config": None,
}
# The points at which a panic ends the core, and the pass at which it comes.
LOST = ["kv.change", "kv.prepare", "kv.commit"]
NTH = 5


def boot(order: Path) -> str:
    return f"import sys; sys.path.insert(0, {str(TESTS)!r}); import faulty; faulty.install({str(order)!r});"


async def answer(service: AsyncLLM, name: str) -> list[int]:
    params = SamplingParams(
        temperature=0.0, max_tokens=24, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    prompt = load_golden().prompts[0]
    return [i async for d in service.generate(prompt, params, name) for i in d.outputs[0].token_ids]


def child_of(service: AsyncLLM) -> psutil.Process:
    """Return the engine process of a service; servers of other tests are children of this process, too."""
    assert isinstance(service._client, process.ProcessClient)
    assert isinstance(service._client._connection, process._EngineProcess)
    return psutil.Process(service._client._connection.pid)


async def all_end(service: AsyncLLM) -> list[str]:
    """Return how each of eight streams ends."""
    ends = await asyncio.gather(*(answer(service, f"{i}") for i in range(8)), return_exceptions=True)
    assert [type(end) for end in ends] == [EngineDeadError] * 8
    assert service._collectors == {}
    return [str(end) for end in ends]


@pytest.mark.parametrize("point", LOST)
async def test_in_this_process_all_streams_end_and_a_new_engine_is_correct(
    core: ModuleType, point: str
) -> None:
    service = await AsyncLLM.start(Config(**SETTINGS))
    assert isinstance(service._client, InprocClient)
    core.set_fault("decode.begin", "pause")
    ending = asyncio.create_task(all_end(service))
    client = service._client
    await until(lambda: len(client._open) == 8)
    core.set_fault(point, "panic", NTH)
    core.set_fault("decode.begin", "off")
    assert all(point in end for end in await ending)
    assert service.stats().finished == {"error": 8}
    assert not service.is_alive()
    with pytest.raises(EngineDeadError, match=point):
        await answer(service, "late")
    await service.close()
    service = await AsyncLLM.start(Config(**SETTINGS))
    assert await answer(service, "next") == load_golden().greedy[0]
    await service.close()


@pytest.mark.parametrize("point", LOST)
async def test_an_engine_process_is_restarted(
    point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = tmp_path / "order"
    # On a busy machine the first request may run alone. It has 24 steps, but ends before a fifth change.
    nth = 1 if point == "kv.change" else NTH
    order.write_text(f"{point} panic {nth}", "utf-8")
    head, tail = process._BOOT.split("; from", 1)
    monkeypatch.setattr(process, "_BOOT", f"{head}; {boot(order)} from{tail}")
    service = await AsyncLLM.start(Config(**SETTINGS, engine_process=True))
    first = child_of(service)
    # A request that arrives after the death is refused, also with an EngineDeadError.
    assert any(point in end for end in await all_end(service))
    first.wait()
    await until(service.is_alive)
    second = child_of(service)
    assert second != first
    assert await answer(service, "next") == load_golden().greedy[0]
    await service.close()
    assert not second.is_running()


@pytest.mark.parametrize("fault", ["kv.commit panic 20", "seq.release leak 1"])
def test_a_server_ends_its_streams_and_exits_with_70_by_itself(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A panic during the completion, or a leak detected at its end: nothing restarts an engine of
    this process, so the service manager has to restart the server."""
    order = tmp_path / "order"
    order.write_text(fault, "utf-8")
    code = f"{boot(order)} from llaisys.cli.main import main; sys.exit(main())"
    monkeypatch.setattr(server_process, "COMMAND", (sys.executable, "-c", code))
    ask = {"prompt": "Hello", "max_tokens": 30, "ignore_eos": True}
    flags = ("--num-kv-cells", "8192", "--dtype", "float32", *NO_SPECULATION)
    with serving(tmp_path, str(long_model(tmp_path)), *flags) as server:
        with server.http.stream("POST", "/v1/completions", json={**ask, "stream": True}) as stream:
            *_, error, done = events(b"".join(stream.iter_raw()))
        assert (error["error"]["code"], done) == ("engine_dead", "[DONE]")
        assert server.process.wait(timeout=server_process.END_S) == 70
