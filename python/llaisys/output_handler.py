"""OutputHandler: passes engine outputs from the client's thread to the event loop, in bounded chunks.

vLLM's counterpart is the `output_handler` task of its AsyncLLM.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator

from llaisys.engine.engine_output import EngineOutput
from llaisys.output_collector import COLLECTOR_BYTES_MAX

# Bounds of one chunk: 256 outputs take about 10 ms, and its bytes must not fill a collector.
OUTPUTS_PER_CHUNK, BYTES_PER_CHUNK = 256, COLLECTOR_BYTES_MAX // 4


class OutputHandler:
    """Processes outputs in order. Call `deliver` on the client's thread; the rest runs on the event loop.

    Readers run between two chunks, so steps that arrive faster than they are processed do not fill the
    collector of a healthy reader. A chunk may contain several steps, which a reader receives as one delta;
    this lets a late event loop catch up. The queue is bounded by the tokens of the open requests.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        process: Callable[[EngineOutput, float], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Initialize an empty queue.

        `process` receives an output and the arrival time of its step, and returns the number of bytes that it
        queued for a reader. Its exceptions go to the event loop's exception handler.
        """
        self._loop = loop
        self._process = process
        self._clock = clock
        self._steps: deque[tuple[float, Iterator[EngineOutput]]] = deque()
        self._woken = False
        self._is_behind = False

    def deliver(self, outputs: list[EngineOutput]) -> None:
        """Queue the outputs of one step.

        One wake serves all steps until the event loop runs: a blocked loop finds one call and one byte in its
        wake-up socket, not thousands.
        """
        self._steps.append((self._clock(), iter(outputs)))
        if self._woken:
            return
        self._woken = True
        try:
            self._loop.call_soon_threadsafe(self._on_wake)
        except RuntimeError:  # the event loop is closed, so nothing reads the outputs
            self._steps.clear()

    def _on_wake(self) -> None:
        self._woken = False  # reset before reading the queue, so that a later step wakes the loop again
        if not self._is_behind:
            self._process_chunk()

    def _process_chunk(self) -> None:
        self._is_behind = False
        n_outputs = n_bytes = 0
        try:
            while self._steps and n_outputs < OUTPUTS_PER_CHUNK and n_bytes < BYTES_PER_CHUNK:
                arrived_s, outputs = self._steps[0]
                output = next(outputs, None)
                if output is None:
                    self._steps.popleft()
                    continue
                n_outputs += 1
                n_bytes += self._process(output, arrived_s)
        finally:
            if self._steps:  # the chunk is full, or an output could not be processed
                self._is_behind = True
                self._loop.call_soon(self._process_chunk)
