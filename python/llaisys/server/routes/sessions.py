"""/v1/sessions: manages named conversations whose KV cells are kept. Sessions are per key and model.

Requests name a session by `session_id`. `llaisys.engine.sessions.manager` defines what a session is.
"""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel
from starlette.requests import Request

from llaisys.errors import NotFoundError
from llaisys.server.access_log import client_id_of
from llaisys.server.http_errors import error_responses
from llaisys.server.protocol import BodyRoute, cache_salt, text_of
from llaisys.server.request_schemas import (
    SessionCreate,
    SessionFork,
    SessionRestore,
    SessionSave,
    SessionTrim,
)
from llaisys.server.state import state_of
from llaisys.session_client import SessionClient
from llaisys.session_info import SESSION_NAME_PATTERN, SessionInfo

SessionName = Annotated[str, Path(pattern=SESSION_NAME_PATTERN)]
Model = Annotated[str | None, Query(description="a served model; by default the first")]

router = APIRouter(
    prefix="/v1/sessions",
    route_class=BodyRoute,
    responses=error_responses(404),
)


class Session(BaseModel):
    """The state of a session.

    - `num_tokens`: tokens with computed K and V. `num_cached_tokens`: those still in the prefix cache.
    - `num_pinned_tokens`: those protected from eviction. `is_restoring`: requests that name it wait.
    """

    id: str
    object: Literal["session"] = "session"
    num_tokens: int
    num_cached_tokens: int
    num_pinned_tokens: int
    is_restoring: bool


class SessionList(BaseModel):
    """The key's sessions, by name."""

    object: Literal["list"] = "list"
    data: list[Session]


class SessionDeleted(BaseModel):
    """The session is deleted; its files remain."""

    id: str
    object: Literal["session.deleted"] = "session.deleted"
    deleted: Literal[True] = True


@router.get("")
async def list_sessions(request: Request, model: Model = None) -> SessionList:
    """List the sessions of the key."""
    infos = await _client(request, model).list(client_id=client_id_of(request))
    return SessionList(data=[_session(info) for info in infos])


@router.post("")
async def create_session(request: Request, body: SessionCreate, model: Model = None) -> Session:
    """Create an empty session. A request that names a new session also creates it."""
    client = _client(request, model)
    return _session(await client.create(body.session_id, client_id=client_id_of(request)))


@router.get("/{session_id}")
async def show_session(request: Request, session_id: SessionName, model: Model = None) -> Session:
    """Show one session."""
    infos = await _client(request, model).list(client_id=client_id_of(request))
    for info in infos:
        if info.name == session_id:
            return _session(info)
    raise NotFoundError(f"there is no session {session_id!r}", param="session_id")


@router.delete("/{session_id}")
async def delete_session(request: Request, session_id: SessionName, model: Model = None) -> SessionDeleted:
    """Delete a session. Its cells become evictable."""
    info = await _client(request, model).delete(session_id, client_id=client_id_of(request))
    return SessionDeleted(id=info.name)


@router.post("/{session_id}/fork")
async def fork_session(
    request: Request, session_id: SessionName, body: SessionFork, model: Model = None
) -> Session:
    """Fork a session and return the new one. No KV is copied."""
    client = _client(request, model)
    client_id = client_id_of(request)
    return _session(await client.fork(session_id, body.session_id, body.n_tokens, client_id=client_id))


@router.post("/{session_id}/trim")
async def trim_session(
    request: Request, session_id: SessionName, body: SessionTrim, model: Model = None
) -> Session:
    """Shorten a session and return it."""
    client = _client(request, model)
    return _session(await client.trim(session_id, body.n_tokens, client_id=client_id_of(request)))


@router.post("/{session_id}/save", responses=error_responses(507))
async def save_session(
    request: Request, session_id: SessionName, body: SessionSave, model: Model = None
) -> Session:
    """Save a session, and respond when the file is on disk. Replaces a file of the same name.

    400 without `--session-store`, 507 if its disk is full.
    """
    client = _client(request, model)
    return _session(await client.save(session_id, body.file, client_id=client_id_of(request)))


@router.post("/{session_id}/restore")
async def restore_session(
    request: Request, session_id: SessionName, body: SessionRestore, model: Model = None
) -> Session:
    """Create a session from a saved one.

    400 without `--session-store`, or for a file that is damaged or from another model.
    """
    client = _client(request, model)
    client_id = client_id_of(request)
    sharing = state_of(request).config.prefix_cache_sharing
    salt = cache_salt(client_id, text_of("cache_salt", body.cache_salt), sharing)
    return _session(await client.restore(body.file, session_id, client_id=client_id, cache_salt=salt))


def _client(request: Request, model: str | None) -> SessionClient:
    return state_of(request).serving(model).sessions


def _session(info: SessionInfo) -> Session:
    return Session(
        id=info.name,
        num_tokens=info.num_tokens,
        num_cached_tokens=info.num_cached_tokens,
        num_pinned_tokens=info.num_pinned_tokens,
        is_restoring=info.is_restoring,
    )
