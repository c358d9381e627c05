"""Which answers are being given and were given lately, and whose they are. Event loop only."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from llaisys.errors import RejectedError
from llaisys.server.errors import ApiError
from llaisys.service import AsyncLLM
from llaisys.types import RequestId

N_ENDED_MAX = 1024


@dataclass(slots=True)
class Entry:
    """One answer.

    - `id`: its name over HTTP, the client's own: others may have the same. `client_id`: of the key that asked
      for it.
    - `request_ids`: the engine's requests behind it, one for each prompt, of `n` choices each.
    - `cancel`: ends it; None once it has ended. `opened_s`: of `time.monotonic`.
    """

    id: str
    client_id: str
    engine: AsyncLLM
    request_ids: Sequence[RequestId]
    n: int
    cancel: Callable[[], None] | None = None
    opened_s: float = field(default_factory=time.monotonic)


class RequestBook:
    """Invariant: all open answers are in it, and the newest `N_ENDED_MAX` ended ones; the ids of one client
    are unique."""

    def __init__(self) -> None:
        # By client and id.
        self._entries: OrderedDict[tuple[str, str], Entry] = OrderedDict()
        self._ended: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._by_request: dict[RequestId, Entry] = {}

    @contextmanager
    def open(self, entry: Entry, cancel: Callable[[], None]) -> Iterator[None]:
        """The answer is being given. Raises RejectedError for an id of another open one of its client."""
        key = (entry.client_id, entry.id)
        old = self._entries.get(key)
        if old is not None and old.cancel is not None:
            raise RejectedError(f"request id {entry.id!r} is in use", param="request_id")
        if old is not None:
            self._forget(old)
        entry.cancel = cancel
        self._entries[key] = entry
        self._by_request |= dict.fromkeys(entry.request_ids, entry)
        try:
            yield
        finally:
            entry.cancel = None
            self._ended[key] = None
            if len(self._ended) > N_ENDED_MAX:
                self._forget(self._entries[next(iter(self._ended))])

    def find(self, id: str, client_id: str) -> Entry:
        """The client's answer of this id. One of somebody else is as unknown as one that never was: 404."""
        entry = self._entries.get((client_id, id))
        if entry is None:
            raise ApiError(404, "There is no such request.", code="not_found", param="request_id")
        return entry

    def name(self, request_id: RequestId, client_id: str) -> str:
        """What a client is told of a request that was in its way: the answer's id if it is its own."""
        entry = self._by_request.get(request_id)
        return entry.id if entry is not None and entry.client_id == client_id else "other"

    def _forget(self, entry: Entry) -> None:
        key = (entry.client_id, entry.id)
        del self._entries[key], self._ended[key]
        for request_id in entry.request_ids:
            if self._by_request.get(request_id) is entry:
                del self._by_request[request_id]
