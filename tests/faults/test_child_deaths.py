"""An engine process that dies at each point of its life.

The start fails with the reason, or each open request ends exactly once and the next child serves requests.
"""

from __future__ import annotations

import asyncio
import queue
import shutil
import socket
from pathlib import Path

import psutil
import pytest

from children import engine_processes
from dying_child import EXIT_CODE
from engine_client import SETTINGS, Client, sizing
from golden import FOLDER, load_golden
from llaisys.async_llm import AsyncLLM
from llaisys.config import Config
from llaisys.engine import process
from llaisys.errors import EngineDeadError
from llaisys.sampling_params import SamplingParams
from serving import END_S
from waiting import until

REAL = process._BOOT


def dies(monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    """Make later children die at this point."""
    boot = f"import sys; sys.path[:] = {{}}; from dying_child import main; main({{}}, {point!r})"
    monkeypatch.setattr(process, "_BOOT", boot)


def child_of(client: Client) -> psutil.Process:
    assert isinstance(client.client._connection, process._EngineProcess)
    return psutil.Process(client.client._connection.pid)


def until_lost(client: Client) -> str:
    """Wait until the engine is not restarted again; return the reason."""
    client.client._thread.join(END_S)
    assert client.client.is_lost
    return str(client.client.error)


@pytest.mark.parametrize(
    ("point", "says"),
    [
        ("at once", f"ended with exit code {EXIT_CODE}; the last lines of its log:\ndying at once"),
        (
            "during load",
            f"ended with exit code {EXIT_CODE}; the last lines of its log:\ndying during load",
        ),
        ("during load, killed", "was killed by SIGKILL"),
    ],
)
def test_a_start_fails_with_the_exit_code_and_the_last_lines(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], point: str, says: str
) -> None:
    dies(monkeypatch, point)
    with pytest.raises(EngineDeadError) as caught:
        Client()
    assert str(caught.value) == f"the engine process {says}"
    if "killed" not in point:
        assert f"dying {point}\n" in capfd.readouterr().err, "its stderr is passed on, too"


@pytest.mark.parametrize(
    ("point", "says"),
    [
        ("after its last word", "its last word"),
        ("never, after its last word", "its last word"),
        ("with its socket closed", "closed its socket and did not end"),
        ("with messages queued", "was killed by SIGKILL"),
    ],
)
def test_a_request_ends_once_and_the_next_child_serves(
    monkeypatch: pytest.MonkeyPatch, point: str, says: str
) -> None:
    monkeypatch.setattr(process, "END_S", 0.2)
    dies(monkeypatch, point)
    client = Client()
    child = child_of(client)
    monkeypatch.setattr(process, "_BOOT", REAL)
    names = ["open"]
    if point == "with messages queued":
        connection = client.client._connection
        assert isinstance(connection, process._EngineProcess)
        connection._channel._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        names = [f"{i}" for i in range(20)]
    for name in names:
        client.submit(name)
    if point == "with messages queued":
        assert connection._channel.num_queued_bytes > 0
        child.kill()
    ends = [client.outputs.get(timeout=END_S) for _ in names]
    assert sorted(end.request_id for end in ends) == sorted(names)
    for end in ends:
        assert isinstance(end.error, EngineDeadError)
        assert says in str(end.error)
        assert end.last
    client.back()
    assert not child.is_running()
    assert client.outputs.empty()
    client.client.close()


def test_a_child_that_dies_in_each_load_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client()
    dies(monkeypatch, "during load")
    client.submit_to_a_stopped_child("open").kill()
    assert "SIGKILL" in str(client.end_of("open").error)
    assert "restarted 3 times, which is the limit" in until_lost(client)
    assert client.outputs.empty()
    with pytest.raises(EngineDeadError, match="which is the limit"):
        client.submit("late")
    client.client.close()


def test_a_model_that_cannot_be_loaded_again_is_given_up(tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDER, tmp_path / "model")
    client = Client(sizing(folder))
    shutil.rmtree(folder)
    client.submit_to_a_stopped_child("open").kill()
    assert "SIGKILL" in str(client.end_of("open").error)
    assert "could not be loaded after a restart" in until_lost(client)
    client.client.close()


def test_a_close_while_a_child_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that never replies is killed after END_S, one that is still loading at once."""
    monkeypatch.setattr(process, "END_S", 0.2)
    dies(monkeypatch, "with messages queued")
    client = Client()
    child = child_of(client)
    client.submit("open")
    client.client.close()
    assert not child.is_running()
    assert "shutting down" in str(client.outputs.get_nowait().error)
    with pytest.raises(queue.Empty):
        client.outputs.get_nowait()


async def test_a_child_that_dies_during_the_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    service = await AsyncLLM.start(Config(**SETTINGS, engine_process=True))
    assert isinstance(service._client, process.ProcessClient)
    assert isinstance(service._client._connection, process._EngineProcess)
    child = psutil.Process(service._client._connection.pid)
    child.suspend()
    ends: list[BaseException] = []

    async def stream(name: str) -> None:
        try:
            async for _ in service.generate(load_golden().prompts[0], SamplingParams(), name):
                pass
        except EngineDeadError as error:
            ends.append(error)

    streams = asyncio.gather(*(stream(f"{i}") for i in range(8)))
    client = service._client
    await until(lambda: len(client._open) == 8)
    closing = asyncio.create_task(service.close(drain_s=END_S))
    await asyncio.sleep(0)
    dies(monkeypatch, "never")  # a child that does not load must not delay the end
    child.kill()
    await streams
    await closing
    assert len(ends) == 8
    assert all("SIGKILL" in str(end) for end in ends)
    assert not child.is_running()
    assert not any("dying_child" in " ".join(each.cmdline()) for each in engine_processes())
