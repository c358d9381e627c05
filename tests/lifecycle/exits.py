"""A program with an engine that ends in the way that its first argument names. Run by `test_exit.py`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from llaisys import LLM, AsyncLLM, Config, SamplingParams
from llaisys.errors import EngineDeadError
from waiting import block_until

LONG = SamplingParams(max_tokens=60_000, temperature=0.0, ignore_eos=True)


def fork(use: Callable[[], Any], leave: Callable[[int], Any]) -> None:
    """Check that a call in a forked process raises an error, and that the process exits normally."""
    child = os.fork()
    if child == 0:
        try:
            use()
        except EngineDeadError:
            leave(0)
        leave(9)
    assert os.waitpid(child, 0)[1] == 0


def end(
    how: str, close: Callable[[], Any], use: Callable[[], Any], leave: Callable[[int], Any] = sys.exit
) -> None:
    """End the program in this way, or return so that it ends with its last line."""
    match how:
        case "sys.exit":
            sys.exit(3)
        case "exception":
            raise ValueError("on purpose")
        case "SIGINT x2":
            print("waiting", flush=True)
            signal.pause()
        case "close twice":
            close()
            close()
        case "close from another thread":
            closer = threading.Thread(target=close)
            closer.start()
            closer.join()
        case "fork":
            fork(use, leave)
        case _:
            assert how == "no close"


def blocking(how: str, work: str, settings: dict[str, Any]) -> None:
    """Run with `LLM`; if `work` is "streaming", a daemon thread reads a completion."""
    llm = LLM(**settings)
    llm.generate("Hello", SamplingParams(max_tokens=2))
    if work == "streaming":

        def completion() -> None:
            with contextlib.suppress(EngineDeadError):
                llm.generate("Hello", LONG)

        threading.Thread(target=completion, daemon=True).start()
        block_until(lambda: llm._engine.client.stats().num_running > 0)
    end(how, llm.close, lambda: llm.generate("Hello", SamplingParams(max_tokens=2)))


async def asynchronous(how: str, settings: dict[str, Any]) -> None:
    """Run with `AsyncLLM` and an open stream. `close` on another thread must not need the event loop."""
    service = await AsyncLLM.start(Config(**settings))
    stream = service.generate("Hello", LONG, "open")
    await anext(stream)
    client = service._client
    assert client is not None
    if how == "SIGINT x2":  # asyncio turns the first into a cancellation
        print("waiting", flush=True)
        await asyncio.Event().wait()
    # A forked process must not close the event loop, which shares its selector with the parent.
    end(how, client.close, lambda: client.submit(None), os._exit)  # type: ignore[arg-type]  # rejected before it is used


def main() -> None:
    """`exits.py HOW WORK MODEL thread|process`."""
    how, work, model, form = sys.argv[1:]
    settings = {"model": model, "num_kv_cells": 65536, "engine_process": form == "process"}
    if work == "async":
        asyncio.run(asynchronous(how, settings))
    else:
        blocking(how, work, settings)


if __name__ == "__main__":
    main()
