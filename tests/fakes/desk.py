"""An engine on the fake core whose sessions are asked, too."""

from __future__ import annotations

from concurrent.futures import wait
from typing import Any

from fakes.engines import Engine
from llaisys.engine.sessions.manager import SessionRequest
from llaisys.errors import RejectedError
from llaisys.session_info import SessionInfo


class Desk(Engine):
    """An engine whose sessions are asked, too."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(**{"max_num_batched_tokens": 64, **changes})

    def begin(
        self, kind: Any, name: str = "", other: str = "", n_tokens: int | None = None, **more: Any
    ) -> None:
        call = SessionRequest(kind=kind, name=name, other=other, n_tokens=n_tokens, **more)
        self.engine.session_requests.handle(call)

    def end(self) -> list[SessionInfo]:
        """The answer, which may take turns."""
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
        """Of a call that is refused at once, while others are under way."""
        self.begin(*what, **more)
        (answer,) = self.engine.session_requests.pop_replies()
        assert isinstance(answer.error, RejectedError)
        return str(answer.error)

    def now(self, *what: Any) -> None:
        """A call that is answered at once, while others are under way."""
        self.begin(*what)
        (answer,) = self.engine.session_requests.pop_replies()
        assert answer.error is None

    def run(self, name: str, prompt: list[int], **changes: Any) -> int:
        """Rows that the core computed for a request that runs alone to its end."""
        before = self.context.n_rows
        self.submit(name, prompt=prompt, **changes)
        self.finish()
        return self.context.n_rows - before

    def flood(self) -> None:
        """Requests of others, enough to use every cell that can be had."""
        for i in range(8):
            self.run(f"flood {i} {self.engine.stats().num_submitted}", [100 + i] * 50)
