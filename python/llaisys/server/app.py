"""create_app: builds the ASGI application.

It has middleware, routes, error responses and the OpenAPI document.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache, partial
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.constants import REF_TEMPLATE
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp

from llaisys.body import first_invalid_field
from llaisys.config import package_version
from llaisys.errors import LlaisysError
from llaisys.server import metrics
from llaisys.server.access_log import AccessLogMiddleware, note, request_id_of
from llaisys.server.http_errors import (
    COMMON_STATUSES,
    ERROR_MODELS,
    ApiError,
    error_response,
    error_responses,
    to_json,
)
from llaisys.server.middleware.auth import AuthMiddleware
from llaisys.server.middleware.body_limits import BodyLimitMiddleware, BodyLimits
from llaisys.server.middleware.hosts import PROBES, HostMiddleware, HostRule
from llaisys.server.middleware.rate_limits import QueueLimitMiddleware, RateLimitMiddleware
from llaisys.server.protocol import field_error
from llaisys.server.routes import (
    chat,
    completions,
    embeddings,
    health,
    loras,
    messages,
    models,
    ollama,
    ollama_embed,
    ollama_management,
    ollama_models,
    requests,
    rerank,
    responses,
    sessions,
    tokenize,
)
from llaisys.server.state import ServerState, state_of
from llaisys.server.webui import chats, static

NOT_OURS = ("HTTPValidationError", "ValidationError")
# The two headers that a key may be sent in.
KEY_SCHEMES = {
    "key": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE")
EXPOSED_HEADERS = (
    "x-request-id",
    "x-llaisys-ignored-fields",
    "retry-after",
    "x-ratelimit-limit-requests",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-reset-requests",
)

router = APIRouter()


@router.get("/openapi.json", include_in_schema=False)
def show_openapi(request: Request) -> Response:
    """Return the OpenAPI document. Not `async`, so that building it (0.1 s, once) runs on a thread."""
    return Response(to_json(request.app.openapi()), media_type="application/json")


def openapi_of(
    app: FastAPI, open_paths: Collection[str], *, has_keys: bool, root_path: str = ""
) -> dict[str, Any]:
    """Build the OpenAPI document: without FastAPI's 422, which is a 400 here, and with the security scheme.

    `open_paths`: paths that need no key. `root_path`: the path of the server behind a proxy.
    """
    servers = [{"url": root_path}] if root_path else None
    document = get_openapi(title=app.title, version=app.version, routes=app.routes, servers=servers)
    common = {str(status): response for status, response in error_responses(*COMMON_STATUSES).items()}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            operation["responses"] = {**common, **operation["responses"]}
            if has_keys:
                operation["security"] = [] if path in open_paths else [{name: []} for name in KEY_SCHEMES]
    schemas = document["components"]["schemas"]
    for name in NOT_OURS:
        schemas.pop(name, None)
    _, errors = models_json_schema(
        [(model, "serialization") for model in ERROR_MODELS], ref_template=REF_TEMPLATE
    )
    schemas.update(errors["$defs"])
    if has_keys:
        document["components"]["securitySchemes"] = KEY_SCHEMES
    return document


def create_app(state: ServerState, port: int) -> ASGIApp:
    """Return the server as one ASGI application, bound to `port`.

    From the outside in: access log, Host and Origin, CORS (if origins are listed), API key, rate limits, body
    limits, queue limit, routes. None is a BaseHTTPMiddleware, which would hide a client's disconnection.
    """
    routes = create_routes(state)
    config = state.config
    app: ASGIApp = BodyLimitMiddleware(
        QueueLimitMiddleware(routes, state), BodyLimits.of(config), state.keys.n_clients
    )
    app = RateLimitMiddleware(
        app, config.max_concurrent_requests_per_key, config.max_requests_per_minute_per_key
    )
    app = AuthMiddleware(app, state.keys, PROBES | {"/"} | set(routes.state.webui))
    if config.allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=config.allowed_origins,
            allow_methods=METHODS,
            allow_headers=("*",),
            expose_headers=EXPOSED_HEADERS,
        )
    app = HostMiddleware(app, HostRule.of(config, port), config.allowed_origins)
    return AccessLogMiddleware(app, state.metrics, state.tracer, sends_id=config.enable_request_id_headers)


def create_handlers(state: ServerState) -> ASGIApp:
    """Return the routes for a caller in this process, without access checks and limits."""
    return AccessLogMiddleware(create_routes(state), state.metrics)


def create_routes(state: ServerState) -> FastAPI:
    """Return the routes as a FastAPI application, which also has the OpenAPI document."""
    app = FastAPI(
        title="LLAISYS",
        version=package_version(),
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.state.server = state
    document = cache(
        partial(openapi_of, app, PROBES, has_keys=bool(state.keys), root_path=state.config.root_path)
    )
    app.openapi = document  # type: ignore[method-assign]  # as FastAPI documents it
    app.state.webui = static.load_webui()
    api = (
        *(chat, completions, responses, messages, embeddings, rerank, tokenize, models, requests, sessions),
        *(chats, loras),
        *(ollama, ollama_embed, ollama_models, ollama_management),
    )
    for each in (*(module.router for module in (*api, health, metrics)), router, static.router):
        # Not `include_router`, which would build each route again during the first requests.
        app.router.routes.extend(each.routes)
    app.add_exception_handler(RequestValidationError, _on_invalid_body)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(LlaisysError, _on_error)
    app.add_exception_handler(Exception, _on_error)
    return app


async def _on_error(request: Request, error: Exception) -> Response:
    """Respond with the error object of the route's protocol; note and count the error."""
    state = state_of(request)
    api_error = state.wire_error(error, request_id_of(request))
    note(request, end_reason=api_error.code)
    state.metrics.count_error(api_error.code)
    status, headers, raw = error_response(api_error, request.url.path)
    return Response(raw, status, headers=headers)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Respond to the framework's errors (404, 405, an unreadable body) with an error object."""
    if isinstance(error, ApiError) or not isinstance(error, HTTPException):
        return await _on_error(request, error)
    message, code = {
        404: ("There is nothing at this path.", "not_found"),
        405: ("This path does not support this method.", "method_not_allowed"),
    }.get(error.status_code, ("The request cannot be read.", "invalid_request"))
    api_error = ApiError(error.status_code, message, code=code)
    if error.status_code == 405:
        api_error.with_headers({"allow": ", ".join(_methods_of(request))})
    return await _on_error(request, api_error)


def _methods_of(request: Request) -> list[str]:
    """Return all methods of a path. The framework names only those of its first route."""
    routes, scope = request.app.routes, request.scope
    return [
        method
        for method in METHODS
        if any(route.matches({**scope, "method": method})[0] is Match.FULL for route in routes)
    ]


async def _on_invalid_body(request: Request, error: Exception) -> Response:
    """Respond 400 naming the first invalid field, never with the input."""
    assert isinstance(error, RequestValidationError)
    errors = error.errors()
    if errors[0]["type"] == "json_invalid":
        api_error = ApiError(
            400, f"The body is not valid JSON, at byte {errors[0]['loc'][-1]}.", code="invalid_json"
        )
    else:
        path, kind, message = first_invalid_field(errors)
        api_error = field_error((path[1:], kind, message))
    return await _on_error(request, api_error)
