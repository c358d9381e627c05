"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages, a view of a chat."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from llaisys.output_parts import Content, OutputPart, Reasoning
from llaisys.outputs import CompletionOutput, RequestOutput
from llaisys.server.access_log import request_id_of
from llaisys.server.chat import Chat, prepare_chat, prompt_of
from llaisys.server.completion_builder import Usage
from llaisys.server.fields import MESSAGES_NEUTRAL
from llaisys.server.http_errors import (
    ANTHROPIC_OVERLOADED,
    COMMON_STATUSES,
    AnthropicErrorAnswer,
    ApiError,
    anthropic_error,
    error_responses,
    to_json,
)
from llaisys.server.messages.input import chat_request, messages_field_names
from llaisys.server.messages.schemas import CountTokensRequest, MessageAnswer, MessagesRequest, TokenCount
from llaisys.server.protocol import BodyRoute, engine_of
from llaisys.server.request_schemas import ChatCompletionRequest
from llaisys.server.response_body import Json, Part, join_parts
from llaisys.server.response_schemas import one_or_stream
from llaisys.server.state import state_of
from llaisys.server.stream_writer import StreamFormat, named_frame
from llaisys.server.tools import checked_tools

# Context that coding agents need at least: their system prompt and tools precede the conversation.
AGENT_CONTEXT_TOKENS = 32_768
# Bytes of a block in a response, without its text.
BLOCK_BYTES = 128
MESSAGE_EVENTS = StreamFormat(
    "text/event-stream; charset=utf-8",
    named_frame,
    ping=b'event: ping\ndata: {"type":"ping"}\n\n',
    terminator=b"",
)
# Block type -> its field with text, and the type of the deltas of that field.
_TEXTS = {"text": ("text", "text_delta"), "thinking": ("thinking", "thinking_delta")}

log = logging.getLogger("llaisys.server")
router = APIRouter(
    route_class=BodyRoute,
    responses=error_responses(*COMMON_STATUSES, 404, ANTHROPIC_OVERLOADED, model=AnthropicErrorAnswer),
)


@router.post(
    "/v1/messages",
    responses={**error_responses(499, model=AnthropicErrorAnswer), **one_or_stream(MessageAnswer)},
)
async def create_message(body: MessagesRequest, request: Request) -> Response:
    """Generate a message, as a stream or as one object."""
    engine, headers = engine_of(request, body, MESSAGES_NEUTRAL)
    if body.tools and engine.max_model_len < AGENT_CONTEXT_TOKENS:
        _warn_small_context(engine.model_names[0], engine.max_model_len)
    with messages_field_names():
        chat = await prepare_chat(request, engine, _chat_request(body, request), "msg_")
    shown = (body.thinking or {}).get("display") != "omitted"
    builder = MessageBuilder(chat.within_context(), n_wanted=body.max_tokens, shows_thinking=shown)
    return builder.chat.response(request, builder, {"request-id": request_id_of(request), **headers})


@router.post("/v1/messages/count_tokens", response_model=TokenCount)
async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
    """Return the number of tokens of the prompt of a message."""
    engine, headers = engine_of(request, body, MESSAGES_NEUTRAL)
    with messages_field_names():
        chat = _chat_request(body, request)
        tools = None if chat.tool_choice == "none" else checked_tools(chat.tools)
        prompt = await prompt_of(chat, chat.messages, engine, tools)
    headers = {"request-id": request_id_of(request), **headers}
    return Response(to_json({"input_tokens": len(prompt)}), media_type="application/json", headers=headers)


@cache
def _warn_small_context(model: str, n_tokens: int) -> None:
    """Log, once for each model, that its context is small for an agent."""
    log.warning(
        "%s has a context of %d tokens; coding agents need at least %d, better twice that (--max-model-len)",
        model,
        n_tokens,
        AGENT_CONTEXT_TOKENS,
    )


def _chat_request(body: CountTokensRequest, request: Request) -> ChatCompletionRequest:
    return chat_request(body, drops_attribution=state_of(request).config.drop_attribution_line)


class _BlockEvents:
    """Turns the parts of a message into events of its content blocks.

    Each block has one start, deltas of its type only, and one stop; at most one block is open.
    """

    def __init__(self, *, shows_thinking: bool) -> None:
        self._shows_thinking = shows_thinking
        self._open = ""  # type of the open block
        self._index = -1  # of the last block

    def add(self, part: OutputPart) -> list[Json]:
        """Return the events of a part."""
        match part:
            case Content(text):
                return [*self._text_block("text"), self._text_delta("text", text)]
            case Reasoning(text):
                opened = self._text_block("thinking")
                return [*opened, self._text_delta("thinking", text)] if self._shows_thinking else opened
        block = {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex[:24]}", "name": part.name, "input": {}}
        arguments = {"type": "input_json_delta", "partial_json": part.arguments}
        return [*self.end(), self._start(block), self._delta(arguments), *self.end()]

    def end(self) -> list[Json]:
        """Return the events that end the open block, if any."""
        if not self._open:
            return []
        kind, self._open = self._open, ""
        signature = [self._delta({"type": "signature_delta", "signature": ""})] if kind == "thinking" else []
        return [*signature, {"type": "content_block_stop", "index": self._index}]

    def _text_block(self, kind: str) -> list[Json]:
        """Return the events that open a block of this type, unless it is open."""
        if self._open == kind:
            return []
        block = {"type": kind, _TEXTS[kind][0]: "", **({"signature": ""} if kind == "thinking" else {})}
        return [*self.end(), self._start(block)]

    def _start(self, block: Json) -> Json:
        self._open = block["type"]
        self._index += 1
        return {"type": "content_block_start", "index": self._index, "content_block": block}

    def _text_delta(self, kind: str, text: str) -> Json:
        field, delta = _TEXTS[kind]
        return self._delta({"type": delta, field: text})

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


class _CollectedBlock:
    """A content block of an unstreamed message, from its events."""

    def __init__(self, block: Mapping[str, Any]) -> None:
        self._block = dict(block)
        self._data = bytearray()

    def add(self, delta: Mapping[str, Any]) -> int:
        """Add a delta; return by how many bytes the response has grown."""
        before = len(self._data)
        match delta["type"]:
            case "input_json_delta":
                self._data += delta["partial_json"].encode("utf-8", "backslashreplace")
            case "text_delta" | "thinking_delta" as kind:
                self._data += to_json(delta[kind.removesuffix("_delta")])[1:-1]
        return len(self._data) - before

    def parts(self) -> list[Part]:
        """Return the object."""
        block = self._block
        if block["type"] == "tool_use":
            block.pop("input", None)
            return [to_json(block)[:-1], b',"input":', self._data, b"}"]
        field, _ = _TEXTS[block["type"]]
        block.pop(field, None)
        return [to_json(block)[:-1], f',"{field}":"'.encode(), self._data, b'"}']


class MessageBuilder:
    """Builds the events of a message, or one `message` from them.

    `n_wanted`: `max_tokens` of the request; the chat may have less. `shows_thinking`: thinking blocks have
    their text.
    """

    stream_format = MESSAGE_EVENTS

    def __init__(self, chat: Chat, *, n_wanted: int, shows_thinking: bool) -> None:
        self.chat = chat
        self.usage = Usage()
        self.usage.set_prompt_tokens(0, len(chat.prompt))
        self.finish_reasons: set[str] = set()
        self._is_shortened = chat.params.max_tokens != n_wanted
        self._parser = chat.new_parser()
        self._events = _BlockEvents(shows_thinking=shows_thinking)
        self._stop: Json = {"stop_reason": None, "stop_sequence": None}
        self._collected: list[_CollectedBlock] = []

    def opening(self) -> Iterator[Json]:
        """Yield the start of the message. Lazy: the first delta says how much of the prompt was cached."""
        yield {
            "type": "message_start",
            "message": {**self._head(), "content": [], **self._stop, "usage": self._usage()},
        }

    def chunks(self, index: int, delta: RequestOutput) -> Iterator[Json]:  # noqa: ARG002 -- a chat has one prompt
        """Yield the events of the content blocks of a delta."""
        for output in delta.outputs:
            for part in self._parser.push(output.text, output.finish_reason):
                yield from self._events.add(part)
            if output.finish_reason is not None:
                self._note_stop(output, output.finish_reason)
                yield from self._events.end()

    def closing(self) -> list[Json]:
        """Return the events with the stop reason and the usage."""
        delta = {"type": "message_delta", "delta": self._stop, "usage": self._usage()}
        return [delta, {"type": "message_stop"}]

    def error_chunks(self, error: ApiError) -> list[Json]:
        """Return Anthropic's error event."""
        return [anthropic_error(error)]

    def collect(self, chunk: Json) -> int:
        """Add an event to the object; return by how many bytes it has grown."""
        match chunk["type"]:
            case "content_block_start":
                self._collected.append(_CollectedBlock(chunk["content_block"]))
                return BLOCK_BYTES
            case "content_block_delta":
                return self._collected[-1].add(chunk["delta"])
        return 0

    def parts(self) -> list[Part]:
        """Return the object."""
        content = join_parts([block.parts() for block in self._collected])
        ends = {**self._stop, "usage": self._usage()}
        return [to_json(self._head())[:-1], b',"content":[', *content, b"],", to_json(ends)[1:]]

    def _head(self) -> Json:
        meta = self.chat.meta
        return {"id": meta.id, "type": "message", "role": "assistant", "model": meta.model}

    def _usage(self) -> Json:
        cached = self.usage.cached_tokens
        return {
            "input_tokens": self.usage.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self.usage.completion_tokens,
        }

    def _note_stop(self, output: CompletionOutput, finish_reason: str) -> None:
        match self._parser.finish_reason(finish_reason):
            case "length":
                reason = "model_context_window_exceeded" if self._is_shortened else "max_tokens"
            case _ if isinstance(output.stop_reason, str):
                reason = "stop_sequence"
                self._stop["stop_sequence"] = output.stop_reason
            case "tool_calls":
                reason = "tool_use"
            case _:
                reason = "end_turn"
        self._stop["stop_reason"] = reason
        self.finish_reasons.add(reason)
