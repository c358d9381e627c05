"""OutputHandler: passes engine outputs from the client's thread to the event loop, in bounded chunks.

vLLM's counterpart is the `output_handler` task of its AsyncLLM.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from llaisys.engine.engine_output import EngineOutput
from llaisys.output_collector import COLLECTOR_BYTES_MAX
from llaisys.outputs import RequestId

# Bounds of one chunk. The readers that it wakes take about 5 ms, or the event loop would answer nothing else
# for as long as all streams take. Its bytes must not fill a collector.
READERS_PER_CHUNK, OUTPUTS_PER_CHUNK, BYTES_PER_CHUNK = 32, 256, COLLECTOR_BYTES_MAX // 4
# Outputs of one request, each with the arrival time of its step.
_Queue: TypeAlias = deque[tuple[float, EngineOutput]]


class OutputHandler:
    """Processes the outputs of each request in order. Call `deliver` on the client's thread; the rest runs on
    the event loop.

    Readers run between two chunks, so steps that arrive faster than they are processed do not fill the
    collector of a healthy reader. A chunk has the outputs of some requests from all steps that have arrived,
    which each reader receives as one delta; this lets a late event loop catch up. The queues are bounded by
    the tokens of the open requests.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        process: Callable[[EngineOutput, float], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Initialize empty queues.

        `process` receives an output and the arrival time of its step, and returns the number of bytes that it
        queued for a reader. Its exceptions go to the event loop's exception handler.
        """
        self._loop = loop
        self._process = process
        self._clock = clock
        self._steps: deque[tuple[float, list[EngineOutput]]] = deque()
        # The longest without its turn first.
        self._queues: dict[RequestId, _Queue] = {}
        self._woken = False
        self._is_behind = False

    def deliver(self, outputs: list[EngineOutput]) -> None:
        """Queue the outputs of one step.

        One wake serves all steps until the event loop runs: a blocked loop finds one call and one byte in its
        wake-up socket, not thousands.
        """
        self._steps.append((self._clock(), outputs))
        if self._woken:
            return
        self._woken = True
        try:
            self._loop.call_soon_threadsafe(self._on_wake)
        except RuntimeError:  # the event loop is closed, so nothing reads the outputs
            self._steps.clear()

    def _on_wake(self) -> None:
        self._woken = False  # reset before reading the steps, so that a later step wakes the loop again
        if not self._is_behind:
            self._process_chunk()

    def _process_chunk(self) -> None:
        self._is_behind = False
        while self._steps:
            arrived_s, outputs = self._steps.popleft()
            for output in outputs:
                self._queues.setdefault(output.request_id, deque()).append((arrived_s, output))
        n_readers = n_outputs = n_bytes = 0

        def has_room() -> bool:
            return n_outputs < OUTPUTS_PER_CHUNK and n_bytes < BYTES_PER_CHUNK

        try:
            while self._queues and n_readers < READERS_PER_CHUNK and has_room():
                request_id = next(iter(self._queues))
                queue = self._queues.pop(request_id)
                n_readers += 1
                try:
                    while queue and has_room():
                        arrived_s, output = queue.popleft()
                        n_outputs += 1
                        n_bytes += self._process(output, arrived_s)
                finally:
                    if queue:  # after those that have not had their turn
                        self._queues[request_id] = queue
        finally:
            if self._queues:  # the chunk is full, or an output could not be processed
                self._is_behind = True
                self._loop.call_soon(self._process_chunk)
