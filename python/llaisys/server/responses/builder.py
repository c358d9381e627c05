"""ResponseBuilder: builds the events of a response stream, and the response, from the deltas of a chat."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from llaisys.output_parts import Content, OutputPart, Reasoning, ReasoningState, ToolCall
from llaisys.outputs import CompletionOutput, FinishReason, RequestOutput
from llaisys.server.chat import Chat
from llaisys.server.completion_builder import Usage, chat_logprobs
from llaisys.server.http_errors import ApiError, to_json
from llaisys.server.response_body import CHOICE_BYTES, Json, Part
from llaisys.server.responses.input import encrypted
from llaisys.server.stream_writer import DATA_EVENTS, StreamFormat, named_frame

# Server-sent events with names. A stream ends with an event that has the whole response.
NAMED_EVENTS = StreamFormat(DATA_EVENTS.content_type, named_frame, ping=DATA_EVENTS.ping, terminator=b"")
CANCELLED = "cancelled"


class ReasoningTokens:
    """Counts the tokens up to the end of the reasoning, its tags included.

    A token counts if the reasoning had not ended before it. A delta in which it ends usually has one token;
    the tokens of a larger one are divided by the lengths of their texts.
    """

    def __init__(self) -> None:
        self.n = 0
        self._n_undecided = 0

    def add(
        self,
        n_tokens: int,
        text: str,
        parts: Sequence[OutputPart],
        states: tuple[ReasoningState, ReasoningState],
    ) -> None:
        """Count a delta. `states`: before and after its text was parsed into `parts`."""
        before, after = states
        if before == "over":
            return
        n_tokens += self._n_undecided
        self._n_undecided = 0
        if after == "undecided":
            self._n_undecided = n_tokens
        elif after == "inside" or (before == "inside" and n_tokens == 1):
            self.n += n_tokens
        elif before == "inside" or any(isinstance(part, Reasoning) for part in parts):
            n_content = sum(len(part.text) for part in parts if isinstance(part, Content))
            self.n += n_tokens - round(n_tokens * n_content / max(1, len(text)))


@dataclass(slots=True)
class _OpenItem:
    """The output item that is being written."""

    type: Literal["message", "reasoning"]
    id: str
    index: int
    texts: list[str] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)


class ResponseBuilder:
    """Builds the events of a stream, or one response.

    - `fields`: the fields of the response that repeat the request.
    - `summarizes`: report reasoning as its summary, not as its content. `encrypts`: report it also as
      `encrypted_content`.
    - `is_background`: the response is queued until its first token.
    """

    stream_format = NAMED_EVENTS

    def __init__(
        self,
        chat: Chat,
        fields: Json,
        *,
        summarizes: bool = False,
        encrypts: bool = False,
        is_background: bool = False,
    ) -> None:
        self.meta = chat.meta
        self.usage = Usage()
        self.usage.set_prompt_tokens(0, len(chat.prompt))
        self.finish_reasons: set[str] = set()
        self._fields = fields
        self._n_top = chat.options.n_top
        self._has_metrics = chat.options.metrics
        self._parser = chat.new_parser()
        self._reasoning_tokens = ReasoningTokens()
        self._summarizes = summarizes
        self._encrypts = encrypts
        self._n_events = 0
        self._output: list[Json] = []
        self._item: _OpenItem | None = None
        # Of tokens whose text the parser has not returned yet; the last `_n_new` are of the current delta.
        self._logprobs: list[Json] = []
        self._n_new = 0
        self._status = "queued" if is_background else "in_progress"
        self._error: Json | None = None
        self._completed_at: int | None = None

    def opening(self) -> list[Json]:
        """Return the events before the first token."""
        return [self._lifecycle("response.created"), self._lifecycle(f"response.{self._status}")]

    def chunks(self, index: int, delta: RequestOutput) -> list[Json]:  # noqa: ARG002 -- one prompt, one choice
        """Return the events of a delta."""
        return [event for output in delta.outputs for event in self._output_events(output)]

    def closing(self) -> list[Json]:
        """Return the last event, which has the whole response."""
        return [self._lifecycle(f"response.{self._status}")]

    def error_chunks(self, error: ApiError) -> list[Json]:
        """Return `response.failed` with the output so far, and with the error unless the response was
        canceled."""
        self._completed_at = None
        if error.code == CANCELLED:
            self._status = CANCELLED
        else:
            self._status = "failed"
            self._error = {"code": error_code(error), "message": error.message}
        return [self._lifecycle("response.failed")]

    def collect(self, chunk: Json) -> int:
        """Return by how many bytes an event makes the response grow."""
        if chunk["type"].endswith(".delta"):
            return len(to_json(chunk["delta"])) + len(to_json(chunk.get("logprobs", "")))
        return CHOICE_BYTES if chunk["type"] == "response.output_item.added" else 0

    def parts(self) -> list[Part]:
        """Return the response as JSON."""
        return [to_json(self.response())]

    def response(self) -> Json:
        """Return the response as it is now."""
        is_incomplete = self._status == "incomplete"
        is_over = is_incomplete or self._status == "completed"
        return {
            "id": self.meta.id,
            "object": "response",
            "created_at": self.meta.created_s,
            "completed_at": self._completed_at,
            "status": self._status,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_incomplete else None,
            "model": self.meta.model,
            "output": list(self._output),
            "usage": None if self._status in ("queued", "in_progress") else self._usage(),
            **({"metrics": self.usage.metrics()} if self._has_metrics and is_over else {}),
            **self._fields,
        }

    def _usage(self) -> Json:
        usage = self.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens.n},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def _output_events(self, output: CompletionOutput) -> Iterator[Json]:
        if self._status == "queued":
            self._status = "in_progress"
            yield self._lifecycle("response.in_progress")
        if self._n_top is not None and output.logprobs:
            made = chat_logprobs(output.token_ids, output.logprobs, self._n_top)
            self._logprobs += [_with_bytes(entry) for entry in made["content"]]
            self._n_new = len(made["content"])
        before = self._parser.reasoning_state
        parts = self._parser.push(output.text, output.finish_reason)
        states = before, self._parser.reasoning_state
        self._reasoning_tokens.add(len(output.token_ids), output.text, parts, states)
        for part in parts:
            yield from self._part_events(part)
        if output.finish_reason is not None:
            self.finish_reasons.add(self._parser.finish_reason(output.finish_reason))
            yield from self._finish(is_cut=output.finish_reason == FinishReason.LENGTH.value)

    def _part_events(self, part: OutputPart) -> Iterator[Json]:
        match part:
            case Content(text):
                yield from self._opened("message")
                yield self._text_delta(text)
            case Reasoning(text):
                yield from self._opened("reasoning")
                self._logprobs.clear()
                yield self._reasoning_delta(text)
            case ToolCall():
                self._logprobs.clear()
                yield from self._closed("completed")
                yield from self._call_events(part)

    def _finish(self, *, is_cut: bool) -> Iterator[Json]:
        """Close the last item. A response without any output has an empty message."""
        if not self._output and self._item is None:
            yield from self._opened("message")
        yield from self._closed("incomplete" if is_cut else "completed")
        self._status = "incomplete" if is_cut else "completed"
        self._completed_at = None if is_cut else int(time.time())

    def _opened(self, type: Literal["message", "reasoning"]) -> Iterator[Json]:
        """Open an item of this type, unless it is open, after closing another one."""
        if self._item is not None and self._item.type == type:
            return
        yield from self._closed("completed")
        item = _OpenItem(
            type, f"{'msg' if type == 'message' else 'rs'}_{uuid.uuid4().hex}", len(self._output)
        )
        self._item = item
        body: Json = {"id": item.id, "type": type, "status": "in_progress"}
        body |= {"role": "assistant", "content": []} if type == "message" else {"summary": [], "content": []}
        yield self._event("response.output_item.added", output_index=item.index, item=body)
        yield self._part_event("added", _part_of(item, "", [], self._summarizes))

    def _closed(self, status: str) -> Iterator[Json]:
        """Close the open item, if any."""
        item = self._item
        if item is None:
            return
        text = "".join(item.texts)
        part = _part_of(item, text, item.logprobs, self._summarizes)
        if item.type == "message":
            item.logprobs += self._logprobs  # of tokens without text, such as the end of the sequence
            self._logprobs = []
            yield self._of_part("response.output_text.done", text=text, logprobs=item.logprobs)
        else:
            del self._logprobs[: -self._n_new]  # of the tag that ends the reasoning
            yield self._of_part(f"response.{self._reasoning_kind}.done", text=text)
        yield self._part_event("done", part)
        yield self._done(self._item_body(item, part, status))

    def _item_body(self, item: _OpenItem, part: Json, status: str) -> Json:
        body: Json = {"id": item.id, "type": item.type, "status": status}
        if item.type == "message":
            return {**body, "role": "assistant", "content": [part]}
        if self._encrypts:
            body["encrypted_content"] = encrypted(part["text"])
        return {
            **body,
            "summary": [part] if self._summarizes else [],
            "content": [] if self._summarizes else [part],
        }

    def _done(self, body: Json) -> Json:
        self._item = None
        self._output.append(body)
        return self._event("response.output_item.done", output_index=len(self._output) - 1, item=body)

    def _text_delta(self, text: str) -> Json:
        assert self._item is not None
        logprobs, self._logprobs = self._logprobs, []
        self._item.texts.append(text)
        self._item.logprobs += logprobs
        return self._of_part("response.output_text.delta", delta=text, logprobs=logprobs)

    def _reasoning_delta(self, text: str) -> Json:
        assert self._item is not None
        self._item.texts.append(text)
        return self._of_part(f"response.{self._reasoning_kind}.delta", delta=text)

    @property
    def _reasoning_kind(self) -> str:
        return "reasoning_summary_text" if self._summarizes else "reasoning_text"

    def _call_events(self, call: ToolCall) -> Iterator[Json]:
        body: Json = {
            "id": f"fc_{uuid.uuid4().hex}",
            "type": "function_call",
            "status": "in_progress",
            "call_id": f"call_{uuid.uuid4().hex[:24]}",
            "name": call.name,
            "arguments": "",
        }
        of_item = {"item_id": body["id"], "output_index": len(self._output)}
        yield self._event("response.output_item.added", output_index=len(self._output), item=body)
        yield self._event("response.function_call_arguments.delta", **of_item, delta=call.arguments)
        yield self._event(
            "response.function_call_arguments.done", **of_item, name=call.name, arguments=call.arguments
        )
        yield self._done({**body, "status": "completed", "arguments": call.arguments})

    def _part_event(self, verb: str, part: Json) -> Json:
        is_summary = part["type"] == "summary_text"
        kind = "reasoning_summary_part" if is_summary else "content_part"
        return self._of_part(f"response.{kind}.{verb}", part=part)

    def _of_part(self, type: str, **fields: Any) -> Json:
        """Return an event of the only part of the open item."""
        item = self._item
        assert item is not None
        index = "summary_index" if item.type == "reasoning" and self._summarizes else "content_index"
        return self._event(type, item_id=item.id, output_index=item.index, **{index: 0}, **fields)

    def _lifecycle(self, type: str) -> Json:
        return self._event(type, response=self.response())

    def _event(self, type: str, **fields: Any) -> Json:
        number = self._n_events
        self._n_events += 1
        return {"type": type, "sequence_number": number, **fields}


def _part_of(item: _OpenItem, text: str, logprobs: Iterable[Json], summarizes: bool) -> Json:
    if item.type == "reasoning":
        return {"type": "summary_text" if summarizes else "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _with_bytes(entry: Json) -> Json:
    """Return a logprob whose `bytes` is a list, as clients require: empty for a part of a character."""
    made = {**entry, "bytes": entry["bytes"] or []}
    if "top_logprobs" in entry:
        made["top_logprobs"] = [_with_bytes(candidate) for candidate in entry["top_logprobs"]]
    return made


def error_code(error: ApiError) -> str:
    """Return OpenAI's code for the error of a response, which clients know."""
    if error.code == "context_length_exceeded":
        return error.code
    if error.status_code == 429:
        return "rate_limit_exceeded"
    return "invalid_prompt" if error.status_code == 400 else "server_error"
