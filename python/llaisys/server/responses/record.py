"""ResponseRecord: stores a response while it is generated, or at its end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from llaisys.outputs import RequestOutput
from llaisys.server.response_body import Json
from llaisys.server.responses.builder import CANCELLED, ResponseBuilder
from llaisys.server.responses.store import ResponseStore, StoredResponse
from llaisys.server.streaming import closing_deltas


@dataclass(frozen=True, slots=True)
class ResponseRecord:
    """A new response in the store of its owner. `input`: its own input items."""

    store: ResponseStore
    owner: str
    builder: ResponseBuilder
    input: list[Json]

    async def saved_at_the_end(self, deltas: AsyncIterator[RequestOutput]) -> AsyncIterator[RequestOutput]:
        """Yield the deltas, then add the response, so that it is stored before its last event is sent."""
        async with closing_deltas(deltas) as open_deltas:
            async for delta in open_deltas:
                yield delta
        await self._add(is_open=False)

    async def saved_from_the_start(
        self, deltas: AsyncIterator[RequestOutput]
    ) -> AsyncIterator[RequestOutput]:
        """Add the response, and yield an empty delta, which begins its stream; then as `saved_at_the_end`."""
        await self._add(is_open=True)
        meta = self.builder.meta
        yield RequestOutput(meta.id, None, [0] * self.builder.usage.prompt_tokens, [], finished=False)
        async with closing_deltas(deltas) as open_deltas:
            async for delta in open_deltas:
                yield delta
        await self.store.finish(self.owner, self.builder.response())

    def kept(self, app: ASGIApp) -> ASGIApp:
        """Return the app that also stores a response that has failed or was canceled."""

        async def run(scope: Scope, receive: Receive, send: Send) -> None:
            await app(scope, receive, send)
            response = self.builder.response()
            if response["status"] in ("failed", CANCELLED):
                await self.store.finish(self.owner, response)

        return run

    async def _add(self, *, is_open: bool) -> None:
        await self.store.add(self.owner, StoredResponse(self.builder.response(), self.input, is_open))
