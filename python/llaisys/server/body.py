"""Bodies of requests: small ones are read here, large ones in a process that can be killed."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from llaisys.body import Flaw, parse_body
from llaisys.errors import LlaisysError
from llaisys.server.errors import ApiError, to_api_error
from llaisys.server.state import state_of

# Up to here reading takes 1 ms (10 ms of the worst there is), and the way to a process 0.2 ms and a thread.
INLINE_BYTES_MAX = 64 << 10
# Of a name that the client chose an error shows so much.
NAME_CHARS_MAX = 64

# Fields of several types: what they may be, in place of pydantic's complaint of the first type tried.
UNIONS = {
    "stop": "must be a string or a list of strings",
    "prompt": "must be a string, a list of strings, a list of token ids or a list of such lists",
    "input": "must be a string, a list of strings, a list of token ids or a list of such lists",
    "guided_json": "must be a JSON schema, an object or its text",
    "tool_choice": "must be a string or an object",
}


class BodyRequest(Request):
    """A request whose `json` is bounded, and read and validated off the event loop if it is large.

    FastAPI validates once more what it gets, which costs the loop 35 ms for the largest body that is right
    (a million token ids), and stops at the first thing that is wrong.
    """

    model: str | None = None

    async def json(self) -> Any:
        """Raises json.JSONDecodeError, or ApiError for a body that is no JSON text, exceeds a bound, or is
        large and invalid."""
        if not hasattr(self, "_json"):
            raw = await self.body()
            try:
                flaw = None
                if len(raw) <= INLINE_BYTES_MAX:
                    self._json = parse_body(raw)
                else:
                    self._json, flaw = await state_of(self).registry().read_body(raw, self.model)
            except LlaisysError as e:
                raise to_api_error(e, self.state.request_id) from e
            except json.JSONDecodeError:
                raise
            except (ValueError, RecursionError):
                raise ApiError(400, "The request cannot be read.", code="invalid_request") from None
            if flaw is not None:
                raise field_error(flaw)
        return self._json


class BodyRoute(APIRoute):
    """A route that reads a JSON body: every POST, PUT and PATCH is of this class (a test looks)."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """As FastAPI documents it for a request class of one's own."""
        handle = super().get_route_handler()
        body: Any = None if self.body_field is None else self.body_field.field_info.annotation
        model = None if body is None else f"{body.__module__}:{body.__qualname__}"

        async def handle_body(request: Request) -> Response:
            wrapped = BodyRequest(request.scope, request.receive)
            wrapped.model = model
            return await handle(wrapped)

        return handle_body


def field_error(flaw: Flaw) -> ApiError:
    """What is wrong with a field, its place written as `messages[0].role`."""
    path, kind, message = flaw
    if not path and kind != "too_long":
        return ApiError(400, "The body must be a JSON object, sent as application/json.", code="invalid_body")
    if path and str(path[0]) in UNIONS:  # behind it pydantic names the types it tried
        path = path[:1]
        if kind not in ("missing", "too_long"):
            message = UNIONS[str(path[0])]
            return ApiError(400, f"{path[0]} {message}", code="invalid_type", param=str(path[0]))
    named = (f"[{part}]" if isinstance(part, int) else f".{part[:NAME_CHARS_MAX]}" for part in path)
    param = "".join(named)[1:] or None
    if kind == "too_long":
        return ApiError(400, f"{param or 'The body'} {message}", code="invalid_value", param=param)
    code = "missing_required_parameter" if kind == "missing" else "invalid_type"
    return ApiError(400, f"{param}: {message}", code=code, param=param)
