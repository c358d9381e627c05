"""The served OpenAPI document: FastAPI's, less what this server never answers, and with the key rule."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.requests import Request
from starlette.responses import Response

from llaisys.server.errors import to_json

# Any request may meet these: a wrong Host or key, a foreign Origin, a body that is too slow or too large, a
# limit, a bug, a server that is loading or ending.
COMMON_STATUSES = (400, 401, 403, 408, 413, 429, 500, 503)
NOT_OURS = ("HTTPValidationError", "ValidationError")
BEARER = {"key": {"type": "http", "scheme": "bearer"}}

router = APIRouter()


@router.get("/openapi.json", include_in_schema=False)
def show_openapi(request: Request) -> Response:
    """The document. Not `async`: making it takes 0.1 s, the first time, which is a thread's."""
    return Response(to_json(request.app.openapi()), media_type="application/json")


def openapi_of(app: FastAPI, open_paths: Collection[str], *, has_keys: bool) -> dict[str, Any]:
    """The document. Bodies that are wrong are a 400 here, so FastAPI's 422 goes. `open_paths`: for these no
    key is asked, if there are any at all."""
    made = get_openapi(title=app.title, version=app.version, routes=app.routes)
    for path, operations in made["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            if has_keys:
                operation["security"] = [] if path in open_paths else [{name: [] for name in BEARER}]
    for name in NOT_OURS:
        made["components"]["schemas"].pop(name, None)
    if has_keys:
        made["components"]["securitySchemes"] = BEARER
    return made
