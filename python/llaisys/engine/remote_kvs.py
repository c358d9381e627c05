"""RemoteKvs: the requests that wait outside the queue for K and V from disk."""

from __future__ import annotations

from collections.abc import Callable

from llaisys.engine.request import (
    Event,
    Failed,
    Request,
    Restored,
    RestoreFailed,
    WaitingForRemoteKvs,
    advance,
)
from llaisys.engine.request_queue import OpenRequests
from llaisys.engine.sessions.manager import Session, SessionManager
from llaisys.errors import LlaisysError


class RemoteKvs:
    """Makes requests wait for a session that is being restored or for blocks of the prefix cache, and queues
    them afterwards.

    `end`: ends a request with an event, and delivers its output in the next step.
    """

    def __init__(
        self, requests: OpenRequests, sessions: SessionManager, end: Callable[[Request, Event], None]
    ) -> None:
        self._requests, self._sessions, self._end = requests, sessions, end

    def begin_restore(self, session: Session) -> None:
        """Make requests that name the session wait until `end_restore`."""
        session.is_restoring = True

    def end_restore(self, session: Session, error: LlaisysError | None = None) -> None:
        """Queue the requests of a restored session. With an `error`, end them with it and delete the
        session."""
        session.is_restoring = False
        if error is not None:
            self._sessions.delete(session)
        for request in self._requests.restoring:
            state, source = request.state, request.source
            if state != WaitingForRemoteKvs(source.session_id) or session.key != (
                source.client_id,
                source.session_id,
            ):
                continue
            if error is None:
                self.end_load(request)
                continue
            for sibling in self._requests.choices(request.request_id)[:0:-1]:
                self._end(sibling, Failed(error))
            self._end(request, RestoreFailed(error))

    def end_load(self, request: Request) -> None:
        """Queue a request whose K and V are in the prefix cache, as far as they could be loaded."""
        request.state = advance(request.state, Restored())
        self._requests.unpark(request)
