"""A connection: uvicorn's, with an end to its patience between two requests."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol


class PatientConnection(H11Protocol):
    """Closes a connection whose next request's head, or whose refused body's rest, takes too long.

    uvicorn bounds the silence behind an answer (5 s), not what comes a byte at a time. A request that is
    being answered has bounds of its own (`BodyGate`). Use `connection_class`.
    """

    patience_s: float
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """asyncio."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """asyncio."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """uvicorn."""
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio."""
        super().connection_lost(exc)
        self._stop()

    def _watch(self) -> None:
        is_between = self.cycle is None or self.cycle.response_complete
        if not is_between or self.transport.is_closing():
            self._stop()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.patience_s, self.transport.close)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def connection_class(seconds: float) -> type[PatientConnection]:
    """The class for a server, with this patience."""
    return type("Connection", (PatientConnection,), {"patience_s": seconds})
