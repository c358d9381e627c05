"""An engine on the fake core with helpers for session requests."""

from __future__ import annotations

from concurrent.futures import wait
from typing import Any

from fakes.engines import Engine
from llaisys.engine.sessions.manager import SessionRequest
from llaisys.errors import RejectedError
from llaisys.session_info import SessionInfo


class SessionRunner(Engine):
    """An engine whose session requests and requests are run one by one."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(**{"max_num_batched_tokens": 64, **changes})

    def begin(
        self, kind: Any, name: str = "", other: str = "", n_tokens: int | None = None, **more: Any
    ) -> None:
        call = SessionRequest(kind=kind, name=name, other=other, n_tokens=n_tokens, **more)
        self.engine.session_requests.handle(call)

    def end(self) -> list[SessionInfo]:
        """Return the sessions of the reply, or raise its error. A transfer may take several steps."""
        handler = self.engine.session_requests
        while not (replies := handler.pop_replies()):
            wait([transfer.work for transfer in handler._transfers], 30)
            handler.continue_transfer()
            self.engine.check()
        (reply,) = replies
        if reply.error is not None:
            raise reply.error
        return reply.sessions

    def call(self, *what: Any, **more: Any) -> SessionInfo:
        """Execute a session request whose reply is one session."""
        self.begin(*what, **more)
        (session,) = self.end()
        return session

    def rejection(self, *what: Any, **more: Any) -> str:
        """Return the message of a session request that is rejected at once, while others are in progress."""
        self.begin(*what, **more)
        (reply,) = self.engine.session_requests.pop_replies()
        assert isinstance(reply.error, RejectedError)
        return str(reply.error)

    def call_at_once(self, *what: Any) -> None:
        """Execute a session request that ends at once, while others are in progress."""
        self.begin(*what)
        (reply,) = self.engine.session_requests.pop_replies()
        assert reply.error is None

    def run(self, name: str, prompt: list[int], **changes: Any) -> int:
        """Run a request alone to its end; return the number of rows that the core computed for it."""
        before = self.context.n_rows
        self.submit(name, prompt=prompt, **changes)
        self.finish()
        return self.context.n_rows - before

    def flood(self) -> None:
        """Run other requests until they have used every available cell."""
        for i in range(8):
            self.run(f"flood {i} {self.engine.stats().num_submitted}", [100 + i] * 50)
