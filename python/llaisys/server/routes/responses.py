"""/v1/responses: OpenAI's Responses protocol. Each key sees only its own stored responses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query
from starlette.requests import Request
from starlette.responses import Response

from llaisys.errors import ContextLengthError, RejectedError
from llaisys.outputs import RequestOutput
from llaisys.server.access_log import client_id_of, ignored_headers
from llaisys.server.chat import Chat
from llaisys.server.fields import ignored_fields
from llaisys.server.http_errors import ApiError, error_responses, to_json
from llaisys.server.protocol import BodyRoute
from llaisys.server.request_schemas import REVISION_MAX
from llaisys.server.response_body import Json
from llaisys.server.response_schemas import one_or_stream
from llaisys.server.responses.background import BackgroundRun
from llaisys.server.responses.builder import ResponseBuilder
from llaisys.server.responses.event_stream import EventStream
from llaisys.server.responses.history import (
    HOW_TO_STORE,
    items_to_store,
    own_items,
    previous_items,
    store_of,
)
from llaisys.server.responses.input import (
    ENCRYPTED_REASONING,
    RESPONSES_NEUTRAL,
    Translation,
    translate,
)
from llaisys.server.responses.record import ResponseRecord
from llaisys.server.responses.schemas import InputItems, ResponseAnswer, ResponseDeleted, ResponsesRequest
from llaisys.server.responses.store import ResponseStore, StoredResponse
from llaisys.server.responses.truncation import prepare_truncated
from llaisys.server.state import ServerState, state_of
from llaisys.server.streaming import closing_deltas

ResponseId = Annotated[str, Path(pattern=r"^resp_[\w.-]{1,64}$")]
PAGE_ENDS = ("first_id", "last_id")

router = APIRouter(route_class=BodyRoute)


@router.post("/responses", include_in_schema=False)
@router.post("/v1/responses", responses={**error_responses(404, 499, 507), **one_or_stream(ResponseAnswer)})
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """Generate a response to the input, as a stream of events or as one object."""
    state = state_of(request)
    engine = state.serving(body.model)
    ignored = ignored_fields(body, RESPONSES_NEUTRAL, state.config.strict_fields)
    store = _store_for(body, state)
    previous = await previous_items(body, request)
    own = await own_items(body, request)
    translation = translate(body, [*previous, *((f"input[{i}]", item) for i, item in enumerate(own))])
    with translation.field_names():
        chat = await prepare_truncated(request, engine, translation, "resp_")
    headers = ignored_headers(request, ignored + translation.ignored)
    builder = ResponseBuilder(
        chat,
        fields_of(body, translation, chat, is_stored=store is not None),
        summarizes=translation.reasoning["summary"] is not None,
        encrypts=ENCRYPTED_REASONING in (body.include or ()),
        is_background=bool(body.background),
    )
    deltas = _deltas(chat, translation)
    if store is None:
        return chat.response(request, builder, headers, deltas).collected()
    record = ResponseRecord(store, chat.client_id, builder, items_to_store(own))
    if body.background:
        return await _start(request, chat, record, record.saved_from_the_start(deltas), headers)
    return chat.response(request, builder, headers, record.saved_at_the_end(deltas)).collected()


def _store_for(body: ResponsesRequest, state: ServerState) -> ResponseStore | None:
    """Return the store of a new response; None if it is not stored. Raises RejectedError for `background`
    without a store."""
    store = None if body.store is False else state.responses
    if body.background and store is None:
        need = "store: true" if body.store is False else HOW_TO_STORE
        raise RejectedError(f"background needs {need}", param="background")
    return store


async def _start(
    request: Request,
    chat: Chat,
    record: ResponseRecord,
    deltas: AsyncIterator[RequestOutput],
    headers: dict[str, str],
) -> Response:
    """Start a background response. Return its events if the request is for a stream, or its first state."""
    runs, owner, id = state_of(request).background, chat.client_id, chat.meta.id
    runs.check(owner, id)
    response = chat.response(request, record.builder, {}, deltas).collected().as_stream()
    run = BackgroundRun(record.kept(response), record.builder.response, response.cancel)
    runs.add(owner, id, run)
    rejection = await run.begin()
    if rejection is not None:
        return rejection
    return EventStream(request, run, 0, headers) if chat.options.stream else _json(run.snapshot(), headers)


@router.get(
    "/v1/responses/{response_id}", responses={**error_responses(404), **one_or_stream(ResponseAnswer)}
)
async def read_response(
    request: Request,
    response_id: ResponseId,
    stream: bool = False,
    starting_after: Annotated[int | None, Query(ge=0, le=REVISION_MAX)] = None,
) -> Response:
    """Return a stored response, or follow the events of a background response.

    `starting_after`: the sequence number of the last event that is not wanted.
    """
    run = state_of(request).background.find(client_id_of(request), response_id)
    if not stream:
        return _json(await _current(request, response_id, run))
    if run is None:
        await _find(request, response_id)
        message = "The events of this response are not kept; read it without stream."
        raise ApiError(400, message, code="events_dropped", param="stream")
    first = 0 if starting_after is None else starting_after + 1
    run.events.check(first)
    return EventStream(request, run, first, {})


@router.delete(
    "/v1/responses/{response_id}", response_model=ResponseDeleted, responses=error_responses(404, 507)
)
async def delete_response(request: Request, response_id: ResponseId) -> Response:
    """Delete a stored response. Later responses of its conversation cannot be continued."""
    store, owner, runs = store_of(request), client_id_of(request), state_of(request).background
    run = runs.find(owner, response_id)
    if run is not None:
        await run.cancel()
        runs.remove(owner, response_id)
    if not await store.delete(owner, response_id):
        raise _not_found()
    return _json({"id": response_id, "object": "response", "deleted": True})


@router.post(
    "/v1/responses/{response_id}/cancel", response_model=ResponseAnswer, responses=error_responses(404)
)
async def cancel_response(request: Request, response_id: ResponseId) -> Response:
    """Cancel a background response; return it. One that has ended stays as it is.

    `POST /v1/requests/{id}/cancel` cancels any other response.
    """
    run = state_of(request).background.find(client_id_of(request), response_id)
    if run is not None:
        await run.cancel()
    return _json(await _current(request, response_id, run))


async def _current(request: Request, response_id: str, run: BackgroundRun | None) -> Json:
    """Return a response as it is now. One that a stopped server has not finished has failed."""
    if run is not None and not run.events.is_over:
        return run.snapshot()
    found = await _find(request, response_id)
    if not found.is_open:
        return found.body
    error = {"code": "server_error", "message": "The server stopped before the response was complete."}
    return {**found.body, "status": "failed", "error": error}


@router.get(
    "/v1/responses/{response_id}/input_items", response_model=InputItems, responses=error_responses(404)
)
async def list_input_items(
    request: Request,
    response_id: ResponseId,
    after: str = "",
    order: Literal["asc", "desc"] = "desc",
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> Response:
    """List a response's own input items, newest first, without those of previous responses.

    `after`: the id of the last item of the previous page.
    """
    items = (await _find(request, response_id)).input
    items = items if order == "asc" else items[::-1]
    start = next((i + 1 for i, item in enumerate(items) if item["id"] == after), 0) if after else 0
    if after and not start:
        raise ApiError(404, "There is no such item in the input.", code="not_found", param="after")
    page = items[start : start + limit]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else dict.fromkeys(PAGE_ENDS)
    return _json({"object": "list", "data": page, **ends, "has_more": start + limit < len(items)})


async def _find(request: Request, response_id: str) -> StoredResponse:
    """Return the client's stored response. Raises ApiError (404) for an unknown id, and for another
    client's."""
    found = await store_of(request).get(client_id_of(request), response_id)
    if found is None:
        raise _not_found()
    return found


def _not_found() -> ApiError:
    return ApiError(404, "There is no such response.", code="not_found", param="response_id")


def _json(value: Json, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(value), media_type="application/json", headers=headers)


def fields_of(body: ResponsesRequest, translation: Translation, chat: Chat, *, is_stored: bool) -> Json:
    """Return the fields of a response that repeat the request, with the values that applied."""
    return {
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": translation.reasoning,
        "store": is_stored,
        "temperature": chat.params.temperature,
        "text": translation.text,
        "tool_choice": body.tool_choice or "auto",
        "tools": translation.tools,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": chat.params.top_p,
        "truncation": body.truncation or "disabled",
    }


async def _deltas(chat: Chat, translation: Translation) -> AsyncIterator[RequestOutput]:
    """Yield the deltas of the chat; errors name the fields of the body.

    If the input is too long, a stream begins before this error, because Codex reads `context_length_exceeded`
    from an event only.
    """
    with translation.field_names():
        async with closing_deltas(chat.generate()) as deltas:
            try:
                async for delta in deltas:
                    yield delta
            except ContextLengthError:
                if chat.options.stream:
                    yield RequestOutput(chat.meta.id, None, chat.prompt, [], finished=False)
                raise
