"""GET /livez, /health, /ready and /version: probes of liveness and readiness, and the version."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse

from llaisys.config import package_version
from llaisys.server.http_errors import ApiError
from llaisys.server.response_schemas import ProbeAnswer, UnavailableAnswer, VersionAnswer
from llaisys.server.state import state_of

router = APIRouter()
UNAVAILABLE: dict[int | str, dict[str, Any]] = {503: {"model": UnavailableAnswer}}


@router.head("/livez", include_in_schema=False)
@router.get("/livez", response_model=ProbeAnswer)
async def livez() -> JSONResponse:
    """Return 200 while the event loop runs (liveness)."""
    return _probe(None)


@router.head("/health", include_in_schema=False)
@router.get("/health", response_model=ProbeAnswer, responses=UNAVAILABLE)
async def health(request: Request) -> JSONResponse:
    """Return 503 while loading, draining or dead, as in llama.cpp; the same as `/ready`."""
    return _probe(state_of(request).unavailable())


@router.head("/ready", include_in_schema=False)
@router.get("/ready", response_model=ProbeAnswer, responses=UNAVAILABLE)
async def ready(request: Request) -> JSONResponse:
    """Return 503 while loading, draining or dead, otherwise 200 (readiness)."""
    return _probe(state_of(request).unavailable())


@router.get("/version", response_model=VersionAnswer)
async def show_version() -> JSONResponse:
    """Return the version of the installed package."""
    return JSONResponse({"version": package_version()})


def _probe(error: ApiError | None) -> JSONResponse:
    if error is None:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": "unavailable", **error.body()}, error.status_code, error.headers)
