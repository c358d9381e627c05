"""The conversation before a response: stored responses by `previous_response_id`, and items by reference."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence

from starlette.requests import Request

from llaisys.errors import RejectedError
from llaisys.server.access_log import client_id_of
from llaisys.server.http_errors import ApiError
from llaisys.server.response_body import Json
from llaisys.server.responses.input import NamedItem, input_items
from llaisys.server.responses.schemas import ResponsesRequest
from llaisys.server.responses.store import ResponseStore
from llaisys.server.state import state_of

HOW_TO_STORE = "a server with --response-store FILE"
ID_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


def store_of(request: Request) -> ResponseStore:
    """Return the store. Raises ApiError (404) without one."""
    store = state_of(request).responses
    if store is None:
        raise ApiError(404, f"Stored responses need {HOW_TO_STORE}.", code="not_found")
    return store


async def previous_items(body: ResponsesRequest, request: Request) -> list[NamedItem]:
    """Return the input and output items of the previous responses, oldest first.

    Raises RejectedError or ApiError naming `previous_response_id`.
    """
    name, id, state = "previous_response_id", body.previous_response_id, state_of(request)
    if id is None:
        return []
    if state.responses is None:
        raise RejectedError(
            f"{name} needs {HOW_TO_STORE}; without it, send the whole conversation as input", param=name
        )
    chain = await state.responses.chain(client_id_of(request), id, state.config.max_body_bytes)
    if chain is None:
        message = f"{name} names a response that is not stored, or one of its previous responses is not."
        raise ApiError(400, message, code="previous_response_not_found", param=name)
    status = chain[-1].body["status"]
    if status not in ("completed", "incomplete"):
        raise RejectedError(f"{name} names a response with the status {status}", param=name)
    return [(name, item) for each in chain for item in (*each.input, *each.body["output"])]


async def own_items(body: ResponsesRequest, request: Request) -> list[Json]:
    """Return the items of `input`, with the stored items that it refers to.

    Raises RejectedError naming a reference to an item that is not stored.
    """
    items = input_items(body)
    references = {str(item.get("id")) for item in items if item.get("type") == "item_reference"}
    if not references:
        return items
    store, bytes_max = state_of(request).responses, state_of(request).config.max_body_bytes
    found = {} if store is None else await store.items(client_id_of(request), sorted(references), bytes_max)
    return [
        _referenced(f"input[{i}]", str(item.get("id")), found)
        if item.get("type") == "item_reference"
        else item
        for i, item in enumerate(items)
    ]


def _referenced(where: str, id: str, found: Mapping[str, Json]) -> Json:
    if id not in found:
        raise RejectedError(
            f"{where} refers to an item that is not stored, which needs {HOW_TO_STORE} and a response with "
            "store: true; send the item itself",
            param=where,
        )
    return found[id]


def items_to_store(items: Sequence[Json]) -> list[Json]:
    """Return input items as they are listed: with ids, and with content as parts."""
    return [_item_to_store(item) for item in items]


def _item_to_store(item: Json) -> Json:
    kind = item.get("type", "message")
    given = item.get("id")
    id = given if isinstance(given, str) and given else f"{ID_PREFIXES[kind]}_{uuid.uuid4().hex}"
    made = {**item, "id": id, "type": kind, "status": "completed"}
    if kind == "message" and isinstance(item.get("content"), str):
        text = item["content"]
        is_output = item.get("role") == "assistant"
        part: Json = {"type": "output_text" if is_output else "input_text", "text": text}
        made["content"] = [{**part, "annotations": []} if is_output else part]
    return made
