"""/v1/chats: the page's history on the server, with `--chat-store FILE`; without it there is nothing to list.

A chat is a JSON object that the page understands and the server does not. Each key sees its own chats only.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from pydantic import BeforeValidator
from starlette.requests import Request
from starlette.responses import Response

from llaisys.server.answers import ChatChanges, ChatWritten, StoredChat
from llaisys.server.bodies import REVISION_MAX, ChatWrite
from llaisys.server.body import BodyRoute
from llaisys.server.chat_store import CHANGES_PER_PAGE, ChatStore, Conflict
from llaisys.server.errors import ApiError, error_answers, to_json
from llaisys.server.trace import client_id_of

ChatId = Annotated[str, Path(pattern=r"^[\w-]{1,64}$")]


def _digits(value: Any) -> Any:
    """Refuses what pydantic would take for a number beside digits: `+1.0`, ` 1`."""
    if isinstance(value, str) and not (value.isascii() and value.isdigit()):
        raise ValueError("must be digits")
    return value


Revision = Annotated[int, BeforeValidator(_digits), Query(ge=0, le=REVISION_MAX)]

router = APIRouter(prefix="/v1/chats", route_class=BodyRoute)


@router.get("", response_model=ChatChanges)
async def list_changes(request: Request, since: Revision = 0) -> dict[str, Any]:
    """What changed after a revision, oldest first; ask again from the last one while `has_more`.

    `store` names the file: if it is another one than before, revisions begin anew; null: there is none.
    """
    store: ChatStore | None = request.app.state.chats
    if store is None:
        return {"object": "list", "store": None, "data": [], "has_more": False}
    changes = await store.changes(client_id_of(request), since)
    data = [{"id": c.id, "revision": c.revision, "deleted": c.deleted} for c in changes]
    return {
        "object": "list",
        "store": store.name,
        "data": data,
        "has_more": len(changes) == CHANGES_PER_PAGE,
    }


@router.get("/{chat_id}", response_model=StoredChat, responses=error_answers(404))
async def read_chat(request: Request, chat_id: ChatId) -> Response:
    """A chat as it was written."""
    found = await _store(request).get(client_id_of(request), chat_id)
    if found is None:
        raise ApiError(404, "There is no such chat.", code="not_found", param="id")
    revision, chat = found
    head = to_json({"id": chat_id, "revision": revision})
    body = head[:-1] + b',"chat":' + chat.encode("utf-8") + b"}"
    return Response(body, media_type="application/json")


@router.put("/{chat_id}", response_model=ChatWritten, responses=error_answers(404, 409, 507))
async def write_chat(request: Request, chat_id: ChatId, body: ChatWrite) -> dict[str, Any]:
    """Write a chat; 409 if it changed since `base`, 400 over `max_chat_bytes_per_key`, 507 on a full disk."""
    store = _store(request)
    return _written(chat_id, await store.put(client_id_of(request), chat_id, body.base, body.chat))


@router.delete("/{chat_id}", response_model=ChatWritten, responses=error_answers(404, 409, 507))
async def delete_chat(request: Request, chat_id: ChatId, base: Revision) -> dict[str, Any]:
    """Deletes a chat; 409 if it changed since `base`."""
    return _written(chat_id, await _store(request).delete(client_id_of(request), chat_id, base))


def _written(chat_id: str, done: int | Conflict) -> dict[str, Any]:
    if isinstance(done, Conflict):
        message = f"The chat is at revision {done.revision}; read it and write again from there."
        raise ApiError(409, message, code="conflict", param="base")
    return {"id": chat_id, "revision": done}


def _store(request: Request) -> ChatStore:
    store: ChatStore | None = request.app.state.chats
    if store is None:
        message = "This server keeps no chats; `llaisys serve --chat-store FILE` does."
        raise ApiError(404, message, code="not_found")
    return store
