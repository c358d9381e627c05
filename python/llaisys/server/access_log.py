"""AccessLogMiddleware: gives each HTTP request an id, a JSON log line and, if configured, a span.

The line has method, path, status, times and the values noted by handlers; never a body, a key or a header.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from datetime import datetime, timezone
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llaisys.sampling_params import SamplingParams
from llaisys.server.http_errors import send_error, to_api_error
from llaisys.server.metrics import Metrics
from llaisys.server.tracing import RequestTracer

REQUEST_ID_MAX = 64
PATH_MAX = 200
CLIENT_GONE = 499  # as in nginx: the client disconnected before a status was sent

log = logging.getLogger("llaisys.server")
# Its messages are JSON objects; `lifecycle` logs them without a prefix.
request_log = logging.getLogger("llaisys.request")


class AccessLogMiddleware:
    """Outside of all checks, so that every response has a line. Pure ASGI.

    Gives each request an id (the client's `x-request-id`, cleaned, or a new one), which the response repeats
    if `sends_id`, and turns an uncaught exception into a 500 that names it.
    """

    def __init__(
        self, app: ASGIApp, metrics: Metrics, tracer: RequestTracer | None = None, *, sends_id: bool = True
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._tracer = tracer
        self._sends_id = sends_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = clean_request_id(Headers(scope=scope).get("x-request-id")) or uuid.uuid4().hex
        notes: dict[str, Any] = {}
        started_s, status, is_whole = time.monotonic(), 0, False
        scope.setdefault("state", {}).update(request_id=request_id, notes=notes, started_s=started_s)

        async def send_with_id(message: Message) -> None:
            nonlocal status, is_whole
            if message["type"] == "http.response.start":
                status = message["status"]
                if self._sends_id:
                    MutableHeaders(scope=message)["x-request-id"] = request_id
            is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as e:
            log.exception("request %s failed", request_id)
            notes["end_reason"] = "internal_error"
            if not status:
                await send_error(send_with_id, scope, to_api_error(e, request_id))
            elif not is_whole:
                raise  # uvicorn then closes the connection, so that the client sees an incomplete response
        finally:
            seconds = time.monotonic() - started_s
            fields = _fields(scope, status or CLIENT_GONE, seconds)
            _write_line(fields)
            if self._tracer is not None and "model" in notes:
                self._tracer.record(Headers(scope=scope), fields)
            self._metrics.count_response(*_route(scope), fields["status"], seconds)


def _fields(scope: Scope, status: int, seconds: float) -> dict[str, Any]:
    """Return the fields of a request's log line. `key`: the name of its key, from AuthMiddleware."""
    state = scope["state"]
    return {
        "request_id": state["request_id"],
        "key": state.get("client_id", ""),
        "method": scope["method"][:16],
        "path": scope["path"][:PATH_MAX],
        "status": status,
        "seconds": round(seconds, 6),
        **state["notes"],
    }


def _write_line(fields: dict[str, Any]) -> None:
    """Write the line, at level DEBUG for successful reads, because probes arrive every few seconds."""
    is_quiet = fields["method"] in ("GET", "HEAD") and fields["status"] < 400
    stamp = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    request_log.log(logging.DEBUG if is_quiet else logging.INFO, "%s", json.dumps({"time": stamp, **fields}))


def _route(scope: Scope) -> tuple[str, str]:
    """Return (path, method) as metric labels: a route's path or `other`, so that clients cannot create
    series."""
    method = scope["method"] if scope["method"] in ("GET", "HEAD", "POST", "OPTIONS") else "other"
    return getattr(scope.get("route"), "path", "other"), method


def clean_request_id(value: str | None) -> str:
    """Return up to 64 letters, digits, `-`, `_` and `.` of a client's id, which are safe in logs and
    headers."""
    return "".join(c for c in (value or "") if c.isascii() and (c.isalnum() or c in "-_."))[:REQUEST_ID_MAX]


def request_id_of(request: Request) -> str:
    """Return the id that AccessLogMiddleware assigned."""
    value: str = request.state.request_id
    return value


def note(request: Request, **values: Any) -> None:
    """Add fields to the request's log line: counts, times and reasons, never text."""
    request.state.notes.update(values)


def note_request(request: Request, model: str, params: SamplingParams) -> None:
    """Note the sampling parameters of a generation. Only such requests have a span."""
    note(
        request,
        model=model,
        n=params.n,
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
    )


def note_first_token(request: Request, queued_s: float) -> None:
    """Note the time until now, when the first token has arrived, and the time in the queue."""
    first_token_s = round(time.monotonic() - request.state.started_s, 6)
    note(request, queued_s=round(queued_s, 6), first_token_s=first_token_s)


def notes_of(request: Request) -> dict[str, Any]:
    """Return the fields noted so far."""
    noted: dict[str, Any] = request.state.notes
    return noted


def client_id_of(request: Request) -> str:
    """Return the client: the name of the request's key, from AuthMiddleware; empty without keys."""
    value: str = getattr(request.state, "client_id", "")
    return value


def ignored_headers(request: Request, names: list[str]) -> dict[str, str]:
    """Note the ignored fields, and return the response header that names them, if any."""
    if not names:
        return {}
    note(request, ignored=",".join(names))
    return {"x-llaisys-ignored-fields": ",".join(names)}
