"""Probes: is the process there, is the engine well, are requests welcome. They only read flags."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse

from llaisys.config import package_version
from llaisys.server.answers import ProbeAnswer, VersionAnswer
from llaisys.server.state import state_of

router = APIRouter()
UNAVAILABLE: dict[int | str, dict[str, Any]] = {503: {"model": ProbeAnswer}}


@router.head("/livez", include_in_schema=False)
@router.get("/livez", response_model=ProbeAnswer, responses=UNAVAILABLE)
async def livez() -> JSONResponse:
    """200 as long as the event loop turns."""
    return _probe(True)


@router.head("/health", include_in_schema=False)
@router.get("/health", response_model=ProbeAnswer, responses=UNAVAILABLE)
async def health(request: Request) -> JSONResponse:
    """503 once the engine is dead; 200 while loading and draining."""
    return _probe(state_of(request).is_healthy())


@router.head("/ready", include_in_schema=False)
@router.get("/ready", response_model=ProbeAnswer, responses=UNAVAILABLE)
async def ready(request: Request) -> JSONResponse:
    """503 while loading, draining or dead."""
    return _probe(state_of(request).is_ready())


@router.get("/version", response_model=VersionAnswer)
async def show_version() -> JSONResponse:
    """The version of the installed package."""
    return JSONResponse({"version": package_version()})


def _probe(ok: bool) -> JSONResponse:
    return JSONResponse({"status": "ok" if ok else "unavailable"}, status_code=200 if ok else 503)
