"""/v1/sessions: conversations whose KV is kept under a name. Each key has its own, of each model.

Requests use one by `session_id`. What a session is: `llaisys.engine.sessions`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel
from starlette.requests import Request

from llaisys.errors import NotFoundError
from llaisys.server.bodies import SessionCreate, SessionFork, SessionRestore, SessionSave, SessionTrim
from llaisys.server.body import BodyRoute
from llaisys.server.checks import text_of
from llaisys.server.errors import error_answers
from llaisys.server.keys import cache_salt
from llaisys.server.state import state_of
from llaisys.server.trace import client_id_of
from llaisys.sessions import SessionDoor
from llaisys.types import SESSION_NAME_PATTERN, SessionInfo

SessionName = Annotated[str, Path(pattern=SESSION_NAME_PATTERN)]
Model = Annotated[str | None, Query(description="a served model; by default the first")]

router = APIRouter(
    prefix="/v1/sessions",
    route_class=BodyRoute,
    responses=error_answers(404),
)


class Session(BaseModel):
    """A session as it is now.

    - `num_tokens`: whose K and V were computed. `num_cached_tokens`: those that a request finds cached.
    - `num_pinned_tokens`: those that are kept for it. `is_restoring`: requests that name it wait.
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
    """It is gone; files of it stay."""

    id: str
    object: Literal["session.deleted"] = "session.deleted"
    deleted: Literal[True] = True


@router.get("")
async def list_sessions(request: Request, model: Model = None) -> SessionList:
    """All sessions of the key."""
    infos = await _door(request, model).list(client_id=client_id_of(request))
    return SessionList(data=[_shown(info) for info in infos])


@router.post("")
async def create_session(request: Request, body: SessionCreate, model: Model = None) -> Session:
    """An empty session. A request that names a new one makes it, too."""
    door = _door(request, model)
    return _shown(await door.create(body.session_id, client_id=client_id_of(request)))


@router.get("/{session_id}")
async def show_session(request: Request, session_id: SessionName, model: Model = None) -> Session:
    """One session."""
    infos = await _door(request, model).list(client_id=client_id_of(request))
    for info in infos:
        if info.name == session_id:
            return _shown(info)
    raise NotFoundError(f"there is no session {session_id!r}", param="session_id")


@router.delete("/{session_id}")
async def delete_session(request: Request, session_id: SessionName, model: Model = None) -> SessionDeleted:
    """Its cells can be evicted from now on."""
    info = await _door(request, model).delete(session_id, client_id=client_id_of(request))
    return SessionDeleted(id=info.name)


@router.post("/{session_id}/fork")
async def fork_session(
    request: Request, session_id: SessionName, body: SessionFork, model: Model = None
) -> Session:
    """The new session; nothing is copied."""
    door = _door(request, model)
    client_id = client_id_of(request)
    return _shown(await door.fork(session_id, body.session_id, body.n_tokens, client_id=client_id))


@router.post("/{session_id}/trim")
async def trim_session(
    request: Request, session_id: SessionName, body: SessionTrim, model: Model = None
) -> Session:
    """The session, shorter."""
    door = _door(request, model)
    return _shown(await door.trim(session_id, body.n_tokens, client_id=client_id_of(request)))


@router.post("/{session_id}/save", responses=error_answers(507))
async def save_session(
    request: Request, session_id: SessionName, body: SessionSave, model: Model = None
) -> Session:
    """Answers when the file is on the disk; one of the same name is replaced.

    400 without `--session-store`, 507 where its disk is full.
    """
    door = _door(request, model)
    return _shown(await door.save(session_id, body.file, client_id=client_id_of(request)))


@router.post("/{session_id}/restore")
async def restore_session(
    request: Request, session_id: SessionName, body: SessionRestore, model: Model = None
) -> Session:
    """Makes the new session of a saved one.

    400 without `--session-store`, or for a file that is damaged or of another model.
    """
    door = _door(request, model)
    client_id = client_id_of(request)
    sharing = state_of(request).config.prefix_cache_sharing
    salt = cache_salt(client_id, text_of("cache_salt", body.cache_salt), sharing)
    return _shown(await door.restore(body.file, session_id, client_id=client_id, cache_salt=salt))


def _door(request: Request, model: str | None) -> SessionDoor:
    return state_of(request).serving(model).sessions


def _shown(info: SessionInfo) -> Session:
    return Session(
        id=info.name,
        num_tokens=info.num_tokens,
        num_cached_tokens=info.num_cached_tokens,
        num_pinned_tokens=info.num_pinned_tokens,
        is_restoring=info.is_restoring,
    )
