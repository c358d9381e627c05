"""One id, one JSON log line and, where it is configured, one span for each HTTP request. Pure ASGI, the
outermost layer.

The line has method, path, status, times and what the handlers noted; never a body, a key or a header.
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

from llaisys.server.errors import send_error, to_api_error
from llaisys.server.metrics import Metrics
from llaisys.server.spans import Spans
from llaisys.types import SamplingParams

REQUEST_ID_MAX = 64
PATH_MAX = 200
CLIENT_GONE = 499  # as nginx: the client left before a status was sent

log = logging.getLogger("llaisys.server")
lines = logging.getLogger("llaisys.request")  # `run.py` writes it bare, so that a line is a JSON object


class RequestTrace:
    """Gives each request its id (the client's `x-request-id`, cleaned, or a new one), sends it back, and
    turns what nobody caught into a 500 that names it."""

    def __init__(self, app: ASGIApp, metrics: Metrics, spans: Spans | None = None) -> None:
        self._app = app
        self._metrics = metrics
        self._spans = spans

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = clean_request_id(Headers(scope=scope).get("x-request-id")) or uuid.uuid4().hex
        notes: dict[str, Any] = {}
        started_s, status, is_whole = time.monotonic(), 0, False
        scope.setdefault("state", {}).update(request_id=request_id, notes=notes, started_s=started_s)

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
            notes["end_reason"] = "internal_error"
            if not status:
                await send_error(marked, to_api_error(e, request_id))
            elif not is_whole:
                raise  # the server closes the connection, so that the client sees that the answer is cut
        finally:
            seconds = time.monotonic() - started_s
            facts = _facts(scope, status or CLIENT_GONE, seconds)
            _write(facts)
            if self._spans is not None and "model" in notes:
                self._spans.record(Headers(scope=scope), facts)
            self._metrics.answered(*_route(scope), facts["status"], seconds)


def _facts(scope: Scope, status: int, seconds: float) -> dict[str, Any]:
    """What is known of a request at its end. `key`: the name of its key, as KeyGate gives it."""
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


def _write(facts: dict[str, Any]) -> None:
    """The line, at level DEBUG for what only reads and went well: probes come every few seconds."""
    is_quiet = facts["method"] in ("GET", "HEAD") and facts["status"] < 400
    stamp = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    lines.log(logging.DEBUG if is_quiet else logging.INFO, "%s", json.dumps({"time": stamp, **facts}))


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
    """Adds to the request's one log line: counts, times and reasons, never text."""
    request.state.notes.update(values)


def note_asked(request: Request, model: str, params: SamplingParams) -> None:
    """Notes what was asked of a model; such a request has a span."""
    note(
        request,
        model=model,
        n=params.n,
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
    )


def note_first_token(request: Request, queued_s: float) -> None:
    """Notes, once, that the first token is there, and how long the engine had let the request wait."""
    if "first_token_s" not in notes_of(request):
        first_token_s = round(time.monotonic() - request.state.started_s, 6)
        note(request, queued_s=round(queued_s, 6), first_token_s=first_token_s)


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
