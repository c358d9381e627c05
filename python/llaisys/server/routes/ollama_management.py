"""POST /api/pull and DELETE /api/delete: the model caches over HTTP, with `--allow-model-management`.

A pulled model is in the cache, as after `llaisys pull`; a server serves the models that it was started with.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator
from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from llaisys import hub
from llaisys.errors import RejectedError
from llaisys.server.access_log import client_id_of
from llaisys.server.http_errors import (
    ApiError,
    OllamaErrorAnswer,
    error_responses,
    model_not_found,
    ollama_error,
    to_json,
)
from llaisys.server.ollama.schemas import (
    OllamaDeleteRequest,
    OllamaPullRequest,
    OllamaStatus,
    object_or_lines,
)
from llaisys.server.protocol import OllamaRoute, text_of
from llaisys.server.routes.ollama import NDJSON, OLLAMA_ERRORS, TAG
from llaisys.server.state import ServerState, state_of

# Seconds between two lines of a stream while a model is downloaded.
STATUS_INTERVAL_S = 5.0
MANAGEMENT_ERRORS = error_responses(409, 502, model=OllamaErrorAnswer)

log = logging.getLogger("llaisys.server")
router = APIRouter(route_class=OllamaRoute)


@router.post("/api/pull", responses={**OLLAMA_ERRORS, **MANAGEMENT_ERRORS, **object_or_lines(OllamaStatus)})
async def pull(body: OllamaPullRequest, request: Request) -> Response:
    """Download a model into its cache, by default as a stream of status lines; one download at a time."""
    state = _managed(request)
    name = _name_of(body)
    if state.pull is not None and not state.pull.done():
        raise ApiError(409, "Another model is being pulled; try again later.", code="conflict")
    if not hub.is_pullable(name):
        raise model_not_found(name)
    log.info("pulling %s for the key %r", name, client_id_of(request))
    # It continues if the client disconnects, as Ollama's does. The end of the event loop cancels it.
    state.pull = asyncio.ensure_future(_pull(name))
    if body.stream is not False:
        return StreamingResponse(_status_lines(state.pull, name), media_type=NDJSON.content_type)
    error = await asyncio.shield(state.pull)
    if error is not None:
        raise _pull_failed(error)
    return Response(to_json({"status": "success"}), media_type="application/json")


@router.delete("/api/delete", responses={**OLLAMA_ERRORS, **MANAGEMENT_ERRORS})
async def delete(body: OllamaDeleteRequest, request: Request) -> Response:
    """Delete a model from its cache, unless this server serves it."""
    state = _managed(request)
    name = _name_of(body)
    if await asyncio.to_thread(_is_served, state, name):
        raise ApiError(
            409, f"The model `{name[:100]}` is served by this server; stop it first.", code="conflict"
        )
    try:
        path, n_bytes = await asyncio.to_thread(hub.remove_model, name)
    except RejectedError as e:
        raise ApiError(404, str(e), code="model_not_found", param="model") from e
    log.info("deleted %s (%d bytes) for the key %r", path, n_bytes, client_id_of(request))
    return Response()


def _managed(request: Request) -> ServerState:
    """Return the server's state. Raises ApiError (403) unless clients may manage models."""
    state = state_of(request)
    if not state.config.allow_model_management or not state.keys:
        raise ApiError(
            403,
            "This server lets no client manage its models; start it with --allow-model-management and an API "
            "key.",
            code="model_management_disabled",
        )
    return state


def _name_of(body: OllamaPullRequest | OllamaDeleteRequest) -> str:
    """Return the model's name, without Ollama's tag `:latest`."""
    name = text_of("model", body.model or body.name or "")
    if not name:
        raise RejectedError("model is missing", param="model")
    return name.removesuffix(TAG)


async def _pull(name: str) -> str | None:
    """Run `llaisys pull` in a process, which a canceled download ends; return its error, if any."""
    command = (sys.executable, "-m", "llaisys", "pull", "--quiet", "--", name)
    process = await asyncio.create_subprocess_exec(
        *command, stdin=DEVNULL, stdout=DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    try:
        _, stderr = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode == 0:
        return None
    lines = stderr.decode(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("llaisys pull: ") if lines else "no reason given"


async def _status_lines(work: asyncio.Future[str | None], name: str) -> AsyncIterator[bytes]:
    """Yield a line at once and every STATUS_INTERVAL_S seconds, then one with the outcome."""
    while not work.done():
        yield NDJSON.frame({"status": f"pulling {name}"})
        await asyncio.wait({work}, timeout=STATUS_INTERVAL_S)
    error = work.result()
    yield NDJSON.frame({"status": "success"} if error is None else ollama_error(_pull_failed(error)))


def _pull_failed(reason: str) -> ApiError:
    """Return 502: a model could not be downloaded, or its files are not supported."""
    return ApiError(502, f"The model was not pulled: {reason}", code="pull_failed", param="model")


def _is_served(state: ServerState, name: str) -> bool:
    """Return True if a file of the cached model `name` is one that this server has loaded or may load."""
    cached = [path.resolve() for path in hub.cached_paths(name)]
    served = [Path(service.model_info.path).resolve() for service in state.registry().services]
    return any(
        path == each or path in each.parents or each in path.parents for path in cached for each in served
    )
