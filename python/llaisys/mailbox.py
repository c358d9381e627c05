"""One stream's undelivered news: bounded in bytes, coalescing, one reader. Event loop only."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable

from llaisys.errors import LlaisysError
from llaisys.output import append
from llaisys.types import RequestOutput

# Of the 256 KiB that a slow reader may make us hold; the others are the transport's, which lets a writer wait
# above 64 KiB, and at most one small frame more (`server/sse.py`).
MAILBOX_BYTES_MAX = 176 * 1024
# On the wire an entry of logprobs is names, a number, and its token as a text and as a list of bytes.
_LOGPROB_BYTES = 80
_LOGPROB_BYTES_A_BYTE = 8
_ID_BYTES = 8
# Of its lags so many are kept, the newest.
N_LAGS_MAX = 256


class Mailbox:
    """Holds at most one delta; a late one is joined to it, so the sum does not depend on the reader.

    What the reader took counts as held until it comes for more: until then it is on its way to a client.

    A reader lags from the moment when something comes and it is not in `take` until it is there again: it
    does something else, or its own client does not take what it was sent.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._is_read = False
        self._late_since_s: float | None = None
        self._lags: deque[tuple[float, float]] = deque(maxlen=N_LAGS_MAX)
        self._held: RequestOutput | None = None
        self._n_bytes = 0
        self._n_taken = 0
        self._error: LlaisysError | None = None
        self._news = asyncio.Event()

    @property
    def num_bytes(self) -> int:
        """Bytes that wait for the reader."""
        return self._n_bytes

    def put(self, delta: RequestOutput) -> bool:
        """Adds a delta, in place; never waits. False, and nothing is added, where the bound would break."""
        n_bytes = self._n_bytes + _size(delta)
        if self._held is None:
            self._held = delta
        elif self._n_taken + n_bytes > MAILBOX_BYTES_MAX:
            return False
        else:
            append(self._held, delta)
        self._n_bytes = n_bytes
        self._came()
        return True

    def fail(self, error: LlaisysError) -> None:
        """Ends the stream: the reader gets what is held, then the error."""
        self._error = error
        self._came()

    async def take(self) -> RequestOutput:
        """All that is held, as one delta; waits for some. Raises the error of `fail`."""
        self._lags.extend(self._lag())
        self._late_since_s, self._is_read = None, True
        self._n_taken = 0
        try:
            await self._news.wait()
        finally:
            self._is_read = False
        self._news.clear()
        held, self._held = self._held, None
        self._n_taken, self._n_bytes = self._n_bytes, 0
        if held is not None:
            if self._error is not None:
                self._news.set()
            return held
        if self._error is None:
            raise AssertionError("woken without news")
        raise self._error

    def lags(self) -> list[tuple[float, float]]:
        """From when till when the reader lagged, until now if it does; of the clock."""
        return [*self._lags, *self._lag()]

    def _came(self) -> None:
        self._news.set()
        if not self._is_read and self._late_since_s is None:
            self._late_since_s = self._clock()

    def _lag(self) -> list[tuple[float, float]]:
        return [] if self._late_since_s is None else [(self._late_since_s, self._clock())]


def _size(delta: RequestOutput) -> int:
    """Bytes that a delta takes in an answer, at most. A prompt's logprobs come once and are not counted: they
    have their own bound (`engine.limits.PROMPT_LOGPROBS_MAX`)."""
    n_bytes = 0
    for answer in delta.outputs:
        quoted = json.dumps(answer.text, ensure_ascii=False)
        n_bytes += len(quoted.encode("utf-8", "backslashreplace")) - 2  # texts that are joined share quotes
        n_bytes += _ID_BYTES * len(answer.token_ids)
        for entry in answer.logprobs or ():
            names = [(each.decoded_token or "").encode("utf-8", "replace") for each in entry.values()]
            # The token that stands there comes first, and is told twice: as itself and among the best.
            n_bytes += sum(_LOGPROB_BYTES + _LOGPROB_BYTES_A_BYTE * len(name) for name in (names[0], *names))
    return n_bytes
