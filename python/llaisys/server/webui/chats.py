"""/v1/chats: stores the web UI's chats on the server, with `--chat-store FILE`; without it the list is empty.

A chat is a JSON object whose content only the web UI interprets. Each key sees only its own chats.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from pydantic import BeforeValidator
from starlette.requests import Request
from starlette.responses import Response

from llaisys.server.access_log import client_id_of
from llaisys.server.http_errors import ApiError, error_responses, to_json
from llaisys.server.protocol import BodyRoute
from llaisys.server.request_schemas import REVISION_MAX, ChatWrite
from llaisys.server.response_schemas import ChatChanges, ChatWritten, StoredChat
from llaisys.server.state import state_of
from llaisys.server.webui.chat_store import CHANGES_PER_PAGE, ChatStore, Conflict

ChatId = Annotated[str, Path(pattern=r"^[\w-]{1,64}$")]


def _digits(value: Any) -> Any:
    """Raise ValueError for numbers that are not plain digits, such as `+1.0` and ` 1`, which pydantic
    accepts."""
    if isinstance(value, str) and not (value.isascii() and value.isdigit()):
        raise ValueError("must be digits")
    return value


Revision = Annotated[int, BeforeValidator(_digits), Query(ge=0, le=REVISION_MAX)]

router = APIRouter(prefix="/v1/chats", route_class=BodyRoute)


@router.get("", response_model=ChatChanges)
async def list_changes(request: Request, since: Revision = 0) -> dict[str, Any]:
    """List the changes after a revision, oldest first. While `has_more`, request again from the last
    revision.

    `store` identifies the file; revisions of different files are unrelated. It is null without a store.
    """
    store = state_of(request).chats
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


@router.get("/{chat_id}", response_model=StoredChat, responses=error_responses(404))
async def read_chat(request: Request, chat_id: ChatId) -> Response:
    """Return a chat, unchanged as it was written."""
    found = await _store(request).get(client_id_of(request), chat_id)
    if found is None:
        raise ApiError(404, "There is no such chat.", code="not_found", param="id")
    revision, chat = found
    head = to_json({"id": chat_id, "revision": revision})
    body = head[:-1] + b',"chat":' + chat.encode("utf-8") + b"}"
    return Response(body, media_type="application/json")


@router.put("/{chat_id}", response_model=ChatWritten, responses=error_responses(404, 409, 507))
async def write_chat(request: Request, chat_id: ChatId, body: ChatWrite) -> dict[str, Any]:
    """Write a chat; 409 if it has changed since `base`, 400 over `max_chat_bytes_per_key`, 507 on a full
    disk."""
    store = _store(request)
    return _written(chat_id, await store.put(client_id_of(request), chat_id, body.base, body.chat))


@router.delete("/{chat_id}", response_model=ChatWritten, responses=error_responses(404, 409, 507))
async def delete_chat(request: Request, chat_id: ChatId, base: Revision) -> dict[str, Any]:
    """Delete a chat; 409 if it has changed since `base`."""
    return _written(chat_id, await _store(request).delete(client_id_of(request), chat_id, base))


def _written(chat_id: str, done: int | Conflict) -> dict[str, Any]:
    if isinstance(done, Conflict):
        message = f"The chat is at revision {done.revision}; read it and write again with this base."
        raise ApiError(409, message, code="conflict", param="base")
    return {"id": chat_id, "revision": done}


def _store(request: Request) -> ChatStore:
    store = state_of(request).chats
    if store is None:
        message = "This server has no chat store; set one with `llaisys serve --chat-store FILE`."
        raise ApiError(404, message, code="not_found")
    return store
