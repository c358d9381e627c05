"""The application: layers, routes and error answers. HTTP only; the engine is behind `ServerState`."""

from __future__ import annotations

from functools import cache, partial

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp

from llaisys.body import first_flaw
from llaisys.config import package_version
from llaisys.errors import LlaisysError
from llaisys.server import (
    chat,
    chats,
    completions,
    embeddings,
    health,
    metrics,
    models,
    openapi,
    page,
    requests,
    sessions,
    tokens,
)
from llaisys.server.auth import KeyGate
from llaisys.server.body import field_error
from llaisys.server.errors import ApiError, error_answers, to_json
from llaisys.server.gate import PROBES, HostGate, HostRule
from llaisys.server.limits import BodyGate, BodyLimits, QueueGate
from llaisys.server.rates import RateGate
from llaisys.server.state import ServerState, state_of
from llaisys.server.trace import RequestTrace, note, request_id_of

METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE")
EXPOSED_HEADERS = (
    "x-request-id",
    "x-llaisys-ignored-fields",
    "retry-after",
    "x-ratelimit-limit-requests",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-reset-requests",
)


def create_app(state: ServerState, port: int) -> ASGIApp:
    """The whole server as one ASGI application, bound to `port`.

    From the outside in: one id and log line, Host and Origin, CORS (if origins are listed), the key, its
    rate, the body's size, the queue, then the routes. None is a BaseHTTPMiddleware, which would hide a
    client's going away.
    """
    routes = _routes(state)
    config = state.config
    app: ASGIApp = BodyGate(QueueGate(routes, state), BodyLimits.of(config), state.keys.n_clients)
    app = RateGate(app, config.max_concurrent_requests_per_key, config.max_requests_per_minute_per_key)
    app = KeyGate(app, state.keys, PROBES | {"/"} | set(routes.state.page))
    if state.config.allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=state.config.allowed_origins,
            allow_methods=METHODS,
            allow_headers=("*",),
            expose_headers=EXPOSED_HEADERS,
        )
    app = HostGate(app, HostRule.of(state.config, port), state.config.allowed_origins)
    return RequestTrace(app, state.metrics, state.spans)


def create_handlers(state: ServerState) -> ASGIApp:
    """The routes for a caller in this process: nobody is kept out."""
    return RequestTrace(_routes(state), state.metrics)


def _routes(state: ServerState) -> FastAPI:
    app = FastAPI(
        title="LLAISYS",
        version=package_version(),
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        responses=error_answers(*openapi.COMMON_STATUSES),
    )
    app.state.server = state
    document = cache(partial(openapi.openapi_of, app, PROBES, has_keys=bool(state.keys)))
    app.openapi = document  # type: ignore[method-assign]  # as FastAPI documents it
    app.state.chats = state.chats
    app.state.page = page.load_page()
    api = (chat, chats, completions, embeddings, models, tokens, sessions, requests)
    for module in (*api, health, metrics, openapi, page):
        app.include_router(module.router)
    app.add_exception_handler(RequestValidationError, _on_invalid_body)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(LlaisysError, _on_error)
    app.add_exception_handler(Exception, _on_error)
    return app


async def _on_error(request: Request, error: Exception) -> Response:
    """Any error of ours as OpenAI's object; noted and counted."""
    state = state_of(request)
    answer = state.wire_error(error, request_id_of(request))
    note(request, end_reason=answer.code)
    state.metrics.refused(answer.code)
    return Response(
        to_json(answer.body()),
        answer.status_code,
        headers=dict(answer.headers or {}),
        media_type="application/json",
    )


async def _on_http_error(request: Request, error: Exception) -> Response:
    """The framework's own refusals (404, 405, an unreadable body) in our words."""
    if isinstance(error, ApiError) or not isinstance(error, HTTPException):
        return await _on_error(request, error)
    message, code = {
        404: ("There is nothing at this path.", "not_found"),
        405: ("This path does not take this method.", "method_not_allowed"),
    }.get(error.status_code, ("The request cannot be read.", "invalid_request"))
    answer = ApiError(error.status_code, message, code=code)
    if error.status_code == 405:
        answer.with_headers({"allow": ", ".join(_methods_of(request))})
    return await _on_error(request, answer)


def _methods_of(request: Request) -> list[str]:
    """What the path takes. The framework itself names only the methods of its first route."""
    routes, scope = request.app.routes, request.scope
    taken = {
        method: any(route.matches({**scope, "method": method})[0] is Match.FULL for route in routes)
        for method in METHODS
    }
    return [method for method in METHODS if taken[method]]


async def _on_invalid_body(request: Request, error: Exception) -> Response:
    """400 naming the first field that is wrong. The input is never echoed."""
    assert isinstance(error, RequestValidationError)
    errors = error.errors()
    if errors[0]["type"] == "json_invalid":
        answer = ApiError(
            400, f"The body is not valid JSON, at byte {errors[0]['loc'][-1]}.", code="invalid_json"
        )
    else:
        path, kind, message = first_flaw(errors)
        answer = field_error((path[1:], kind, message))
    return await _on_error(request, answer)
