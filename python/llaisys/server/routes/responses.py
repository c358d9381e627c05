"""POST /v1/responses: OpenAI's Responses protocol."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import cast

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from llaisys.errors import ContextLengthError
from llaisys.outputs import RequestOutput
from llaisys.server.access_log import ignored_headers
from llaisys.server.chat import Chat
from llaisys.server.http_errors import error_responses
from llaisys.server.protocol import BodyRoute, ignored_fields
from llaisys.server.response_body import Json
from llaisys.server.response_schemas import one_or_stream
from llaisys.server.responses.builder import ResponseBuilder
from llaisys.server.responses.input import (
    ENCRYPTED_REASONING,
    RESPONSES_NEUTRAL,
    Translation,
    input_items,
    translate,
)
from llaisys.server.responses.schemas import ResponseAnswer, ResponsesRequest
from llaisys.server.responses.truncation import prepare_truncated
from llaisys.server.state import state_of

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/responses", responses={**error_responses(404, 499), **one_or_stream(ResponseAnswer)})
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """Generate a response to the input, as a stream of events or as one object."""
    state = state_of(request)
    engine = state.serving(body.model)
    ignored = ignored_fields(body, RESPONSES_NEUTRAL, state.config.strict_fields)
    items = [(f"input[{i}]", item) for i, item in enumerate(input_items(body))]
    translation = translate(body, items)
    with translation.field_names():
        chat = await prepare_truncated(request, engine, translation, "resp_")
    headers = ignored_headers(request, ignored + translation.ignored)
    builder = ResponseBuilder(
        chat,
        fields_of(body, translation, chat),
        summarizes=translation.reasoning["summary"] is not None,
        encrypts=ENCRYPTED_REASONING in (body.include or ()),
    )
    return chat.response(request, builder, headers, _deltas(chat, translation)).collected()


def fields_of(body: ResponsesRequest, translation: Translation, chat: Chat) -> Json:
    """Return the fields of a response that repeat the request, with the values that applied."""
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": translation.reasoning,
        "store": False,
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
        async with aclosing(cast("AsyncGenerator[RequestOutput, None]", chat.generate())) as deltas:
            try:
                async for delta in deltas:
                    yield delta
            except ContextLengthError:
                if chat.options.stream:
                    yield RequestOutput(chat.meta.id, None, chat.prompt, [], finished=False)
                raise
