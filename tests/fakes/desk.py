"""An engine on the fake core with calls of its sessions."""

from __future__ import annotations

from concurrent.futures import wait
from typing import Any

from fakes.engines import Engine
from llaisys.engine.sessions.manager import SessionRequest
from llaisys.errors import RejectedError
from llaisys.session_info import SessionInfo


class Desk(Engine):
    """An engine with calls of its sessions."""

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
        while not (answers := handler.pop_replies()):
            wait([transfer.work for transfer in handler._transfers], 30)
            handler.continue_transfer()
            self.engine.check()
        (answer,) = answers
        if answer.error is not None:
            raise answer.error
        return answer.sessions

    def call(self, *what: Any, **more: Any) -> SessionInfo:
        self.begin(*what, **more)
        (session,) = self.end()
        return session

    def refused(self, *what: Any, **more: Any) -> str:
        """Return the message of a call that is refused at once, while others are in progress."""
        self.begin(*what, **more)
        (answer,) = self.engine.session_requests.pop_replies()
        assert isinstance(answer.error, RejectedError)
        return str(answer.error)

    def now(self, *what: Any) -> None:
        """Make a call that ends at once, while others are in progress."""
        self.begin(*what)
        (answer,) = self.engine.session_requests.pop_replies()
        assert answer.error is None

    def run(self, name: str, prompt: list[int], **changes: Any) -> int:
        """Run a request alone to its end; return the number of rows that the core computed for it."""
        before = self.context.n_rows
        self.submit(name, prompt=prompt, **changes)
        self.finish()
        return self.context.n_rows - before

    def flood(self) -> None:
        """Run requests of other clients that use every available cell."""
        for i in range(8):
            self.run(f"flood {i} {self.engine.stats().num_submitted}", [100 + i] * 50)
