"""Bodies of requests: small ones are parsed here, large ones where that holds nobody up."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from llaisys.body import parse_body
from llaisys.errors import LlaisysError
from llaisys.server.errors import ApiError, to_api_error
from llaisys.server.state import state_of

# Up to here parsing takes 1 ms (10 ms of the worst there is), and the way to a process 0.2 ms and a thread.
INLINE_BYTES_MAX = 64 << 10


class BodyRequest(Request):
    """A request whose `json` is bounded, and off the event loop if it is large."""

    async def json(self) -> Any:
        """Raises json.JSONDecodeError, or ApiError for what is no JSON text or nested beyond the bounds."""
        if not hasattr(self, "_json"):
            raw = await self.body()
            try:
                if len(raw) <= INLINE_BYTES_MAX:
                    self._json = parse_body(raw)
                else:
                    self._json = await state_of(self).registry().parse_json(raw)
            except LlaisysError as e:
                raise to_api_error(e, self.state.request_id) from e
            except json.JSONDecodeError:
                raise
            except (ValueError, RecursionError):
                raise ApiError(400, "The request cannot be read.", code="invalid_request") from None
        return self._json


class BodyRoute(APIRoute):
    """A route that reads a JSON body: every POST, PUT and PATCH is of this class (a test looks)."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """As FastAPI documents it for a request class of one's own."""
        handle = super().get_route_handler()

        async def handle_body(request: Request) -> Response:
            return await handle(BodyRequest(request.scope, request.receive))

        return handle_body
