"""One id and one log line for each HTTP request. Pure ASGI, the outermost layer.

The line names method, path, status, time and what the handler noted; never a body, a key or a header.
"""

from __future__ import annotations

import logging
import time
import uuid
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llaisys.server.errors import send_error, to_api_error
from llaisys.server.metrics import Metrics

REQUEST_ID_MAX = 64

log = logging.getLogger("llaisys.server")


class RequestTrace:
    """Gives each request its id (the client's `x-request-id`, cleaned, or a new one), sends it back, and
    turns what nobody caught into a 500 that names it."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = clean_request_id(Headers(scope=scope).get("x-request-id")) or uuid.uuid4().hex
        notes: dict[str, Any] = {}
        scope.setdefault("state", {}).update(request_id=request_id, notes=notes)
        started_s, status, is_whole = time.monotonic(), 0, False

        async def marked(message: Message) -> None:
            nonlocal status, is_whole
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, marked)
        except Exception as e:
            log.exception("request %s failed", request_id)
            if not status:
                await send_error(marked, to_api_error(e, request_id))
            elif not is_whole:
                raise  # the server closes the connection, so that the client sees that the answer is cut
        finally:
            _log_end(scope, status, time.monotonic() - started_s)
            self._metrics.answered(*_route(scope), status)


def _log_end(scope: Scope, status: int, seconds: float) -> None:
    level = logging.DEBUG if scope["method"] in ("GET", "HEAD") and status < 400 else logging.INFO
    notes = " ".join(f"{name}={value}" for name, value in scope["state"]["notes"].items())
    path = scope["path"][:200].encode("ascii", "backslashreplace").decode()
    log.log(
        level,
        "%s %r status=%d seconds=%.3f request_id=%s %s",
        scope["method"],
        path,
        status,
        seconds,
        scope["state"]["request_id"],
        notes,
    )


def _route(scope: Scope) -> tuple[str, str]:
    """(path, method) as metric labels: a route's own path or `other`: clients cannot make new series."""
    method = scope["method"] if scope["method"] in ("GET", "HEAD", "POST", "OPTIONS") else "other"
    return getattr(scope.get("route"), "path", "other"), method


def clean_request_id(value: str | None) -> str:
    """A client's label as it may appear in logs and headers: at most 64 letters, digits, `-`, `_`, `.`."""
    return "".join(c for c in (value or "") if c.isascii() and (c.isalnum() or c in "-_."))[:REQUEST_ID_MAX]


def request_id_of(request: Request) -> str:
    """The id that RequestTrace gave to this request."""
    value: str = request.state.request_id
    return value


def note(request: Request, **values: Any) -> None:
    """Adds to the request's one log line: counts and outcomes, never text."""
    request.state.notes.update(values)


def notes_of(request: Request) -> dict[str, Any]:
    """What was noted so far."""
    noted: dict[str, Any] = request.state.notes
    return noted


def client_id_of(request: Request) -> str:
    """Whom fairness is counted for: the request's key, as KeyGate names it; empty without keys."""
    value: str = getattr(request.state, "client_id", "")
    return value


def ignored_headers(request: Request, names: list[str]) -> dict[str, str]:
    """The header that names ignored fields, noted in the log line too; nothing if there are none."""
    if not names:
        return {}
    note(request, ignored=",".join(names))
    return {"x-llaisys-ignored-fields": ",".join(names)}
