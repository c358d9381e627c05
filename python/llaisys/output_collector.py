"""RequestOutputCollector: the undelivered output of one stream, merged and bounded in bytes, for one reader.

The name and the role are those of vLLM's `RequestOutputCollector`. Call it on the event loop only.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

import msgspec

from llaisys.errors import LlaisysError
from llaisys.output_processor import append_delta
from llaisys.outputs import RequestOutput

# Part of the 256 KiB that a slow reader may occupy. The rest is the transport's buffer (writers wait above
# 64 KiB) and one small frame (`server/streaming.py`).
COLLECTOR_BYTES_MAX = 176 * 1024
# In a response, a logprobs entry has names, a number, and its token as text and as a list of bytes.
_LOGPROB_BYTES = 80
_LOGPROB_BYTES_PER_BYTE = 8
_ID_BYTES = 8
# Maximum number of reader lags that are kept; the oldest are dropped.
N_LAGS_MAX = 256
_encoder = msgspec.json.Encoder()


class RequestOutputCollector:
    """Has at most one undelivered delta. Later deltas are merged into it, so no reader changes a completion.

    A delta that the reader has received counts toward the bound until the next `get`, because it is still
    being sent to a client. The reader lags from the arrival of an output outside `get` until its next `get`:
    it is busy, or its own client reads slowly.

    `merges`: False for a request whose logprobs have their own bound (`engine.limits.LOGPROBS_MAX`). Its
    deltas are delivered one by one, because converting a long delta would block the event loop.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, merges: bool = True) -> None:
        self._clock = clock
        self._merges = merges
        self._reader: asyncio.Future[None] | None = None  # of a reader that waits in `get`
        self._late_since_s: float | None = None
        self._lags: deque[tuple[float, float]] = deque(maxlen=N_LAGS_MAX)
        self._deltas: deque[RequestOutput] = deque()
        self._n_bytes = 0
        self._n_bytes_in_delivery = 0
        self._error: LlaisysError | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the undelivered output."""
        return self._n_bytes

    def put(self, delta: RequestOutput) -> bool:
        """Merge a delta in place. Return False, without any change, if it exceeds the bound."""
        n_bytes = self._n_bytes + _size(delta)
        if not (self._merges and self._deltas):
            self._deltas.append(delta)
        elif self._n_bytes_in_delivery + n_bytes > COLLECTOR_BYTES_MAX:
            return False
        else:
            append_delta(self._deltas[0], delta)
        self._n_bytes = n_bytes
        self._on_output()
        return True

    def fail(self, error: LlaisysError) -> None:
        """End the stream: the reader receives the undelivered delta, then the error."""
        self._error = error
        self._on_output()

    async def get(self) -> RequestOutput:
        """Wait for output and return it as one delta. Raises the error of `fail`."""
        self._lags.extend(self._lag())
        self._late_since_s = None
        self._n_bytes_in_delivery = 0
        if not self._deltas and self._error is None:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        self._n_bytes_in_delivery = self._n_bytes
        if self._deltas:
            delta = self._deltas.popleft()
            if not self._deltas:
                self._n_bytes = 0
            return delta
        assert self._error is not None, "the collector was woken without an output"
        raise self._error

    def lags(self) -> list[tuple[float, float]]:
        """Return the (start, end) of each reader lag, in seconds of the clock; an open one ends now."""
        return [*self._lags, *self._lag()]

    def _on_output(self) -> None:
        if self._reader is not None:
            if not self._reader.done():  # a second output may arrive before the reader runs
                self._reader.set_result(None)
        elif self._late_since_s is None:
            self._late_since_s = self._clock()

    def _lag(self) -> list[tuple[float, float]]:
        return [] if self._late_since_s is None else [(self._late_since_s, self._clock())]


def _size(delta: RequestOutput) -> int:
    """Return an upper bound of a delta's bytes in a response.

    Prompt logprobs are in one delta only and are not counted, because they have their own bound
    (`engine.limits.PROMPT_LOGPROBS_MAX`).
    """
    n_bytes = 0
    for completion in delta.outputs:
        n_bytes += len(_encoder.encode(completion.text)) - 2  # merged texts share their quotes
        n_bytes += _ID_BYTES * len(completion.token_ids)
        for entry in completion.logprobs or ():
            names = [(each.decoded_token or "").encode("utf-8", "replace") for each in entry.values()]
            # The sampled token comes first and is written twice: as itself and among the best.
            n_bytes += sum(
                _LOGPROB_BYTES + _LOGPROB_BYTES_PER_BYTE * len(name) for name in (names[0], *names)
            )
    return n_bytes
