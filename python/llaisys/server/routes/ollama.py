"""POST /api/chat and /api/generate: Ollama's API, a view of a chat request."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from llaisys.async_llm import AsyncLLM
from llaisys.errors import EngineDeadError, RejectedError, UnsupportedError
from llaisys.output_parts import Content, OutputPart, Reasoning
from llaisys.outputs import RequestOutput
from llaisys.server.access_log import ignored_headers
from llaisys.server.chat import Chat, prepare_chat
from llaisys.server.completion_builder import Usage, chat_logprobs
from llaisys.server.fields import ignored_fields
from llaisys.server.http_errors import (
    COMMON_STATUSES,
    ApiError,
    OllamaErrorAnswer,
    error_responses,
    model_not_found,
    ollama_error,
    to_json,
)
from llaisys.server.ollama.input import FIELD_NAMES, NEUTRAL, NO_EFFECT, chat_of
from llaisys.server.ollama.schemas import (
    OllamaChatAnswer,
    OllamaChatRequest,
    OllamaGenerateAnswer,
    OllamaGenerateRequest,
    object_or_lines,
)
from llaisys.server.protocol import OllamaRoute, field_names
from llaisys.server.request_schemas import OpenRequest
from llaisys.server.response_body import Json, JsonList, JsonText, Part
from llaisys.server.state import ServerState, state_of
from llaisys.server.stream_writer import StreamFormat

TAG = ":latest"
OLLAMA_ERRORS = error_responses(*COMMON_STATUSES, 404, model=OllamaErrorAnswer)
GENERATION_ERRORS = {**OLLAMA_ERRORS, **error_responses(499, model=OllamaErrorAnswer)}
NDJSON = StreamFormat("application/x-ndjson", lambda chunk: to_json(chunk) + b"\n", ping=b"", terminator=b"")

router = APIRouter(route_class=OllamaRoute)


def find_model(state: ServerState, name: str | None) -> tuple[AsyncLLM, str]:
    """Return the model with a name, and the name; both with and without Ollama's tag `:latest`.

    Raises ApiError: 404 for an unknown name, 503 if the model cannot serve.
    """
    names = state.registry().names
    given = name or names[0]
    known = next((each for each in (given, given.removesuffix(TAG)) if each in names), None)
    if known is None:
        raise model_not_found(given)
    return state.serving(known), given


def untagged(engine: AsyncLLM, name: str) -> str:
    """Return the name of a LoRA adapter without Ollama's tag; any other name is unchanged."""
    bare = name.removesuffix(TAG)
    return name if engine.loras.find(bare) is None else bare


@router.post("/api/chat", responses={**GENERATION_ERRORS, **object_or_lines(OllamaChatAnswer)})
async def chat(body: OllamaChatRequest, request: Request) -> Response:
    """Generate the next message of a chat, by default as a stream of JSON lines.

    Without messages nothing is generated: Ollama's way to load a model before its first request.
    """
    engine, name, headers = model_of(request, body)
    if not body.messages:
        return await _loaded(engine, name, {"message": {"role": "assistant", "content": ""}}, headers)
    return await _generated(request, engine, name, body, headers)


@router.post("/api/generate", responses={**GENERATION_ERRORS, **object_or_lines(OllamaGenerateAnswer)})
async def generate(body: OllamaGenerateRequest, request: Request) -> Response:
    """Generate the completion of a prompt: the answer to a user message, or with `raw` of the text itself."""
    engine, name, headers = model_of(request, body)
    if not body.prompt:
        return await _loaded(engine, name, {"response": ""}, headers)
    return await _generated(request, engine, name, body, headers)


def model_of(request: Request, body: OpenRequest) -> tuple[AsyncLLM, str, dict[str, str]]:
    """Return the model, its name for the response, and the headers that name ignored fields."""
    state = state_of(request)
    engine, name = find_model(state, body.model)
    names = ignored_fields(body, NEUTRAL, state.config.strict_fields, NO_EFFECT)
    return engine, name, ignored_headers(request, names)


async def _generated(
    request: Request,
    engine: AsyncLLM,
    name: str,
    body: OllamaChatRequest | OllamaGenerateRequest,
    headers: Mapping[str, str],
) -> Response:
    """Return the response that generates a message or a completion."""
    if body.think and not engine.output_formats.has_reasoning:
        raise UnsupportedError(
            f"think: the chat template of {name} shows no reasoning; leave it out, or set --reasoning-parser",
            param="think",
        )
    is_chat = isinstance(body, OllamaChatRequest)
    raw = body.prompt if isinstance(body, OllamaGenerateRequest) and body.raw else None
    with field_names(FIELD_NAMES):
        chat_body = chat_of(body)
        chat_body.model = untagged(engine, name)
        chat = await prepare_chat(request, engine, chat_body, "ollama-", raw_prompt=raw)
    builder = OllamaBuilder(chat, name, request.state.started_s, is_chat=is_chat)
    return chat.response(request, builder, headers)


async def _loaded(engine: AsyncLLM, name: str, empty: Json, headers: Mapping[str, str]) -> Response:
    """Load the model, if it is not loaded; return the response to a request that generates nothing."""
    try:
        await engine.load()
    except (RejectedError, UnsupportedError) as e:  # of the server's settings: the request is valid
        raise EngineDeadError(f"the model cannot be loaded: {e}") from e
    body = {"model": name, "created_at": _now(), **empty, "done": True, "done_reason": "load"}
    return Response(to_json(body), headers=dict(headers), media_type="application/json")


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="microseconds").replace("+00:00", "Z")


class OllamaBuilder:
    """Builds Ollama's objects: one for each delta and a last one with counts and durations, or one with all.

    `name`: the model's name as the client sent it. `started_s`: `time.monotonic` seconds. `is_chat`: the text
    is in `message`; otherwise it is in `response`.
    """

    stream_format = NDJSON

    def __init__(self, chat: Chat, name: str, started_s: float, *, is_chat: bool) -> None:
        self.usage = Usage()
        self.usage.set_prompt_tokens(0, len(chat.prompt))
        self.finish_reasons: set[str] = set()
        self._name = name
        self._n_top = chat.options.n_top
        self._parser = chat.new_parser()
        self._is_chat = is_chat
        self._started_s = started_s
        self._first_token_s = started_s
        self._queued_s = 0.0
        self._done_reason = ""
        # The parts of an unstreamed response.
        self._text = JsonText()
        self._thinking = JsonText()
        self._calls: list[Json] = []
        self._logprobs = JsonList()

    def opening(self) -> list[Json]:
        """Return no objects."""
        return []

    def chunks(self, index: int, delta: RequestOutput) -> Iterator[Json]:  # noqa: ARG002 -- there is one prompt
        """Yield an object for each part of the delta."""
        for output in delta.outputs:  # there is one choice
            if self._first_token_s == self._started_s and output.token_ids:
                self._first_token_s, self._queued_s = time.monotonic(), delta.queued_s
            fields: Json = {}
            if self._n_top is not None and output.logprobs:
                fields["logprobs"] = chat_logprobs(output.token_ids, output.logprobs, self._n_top)["content"]
            parts = self._parser.push(output.text, output.finish_reason)
            for part in parts or ([Content("")] if fields else []):
                yield {**self._head(part), "done": False, **fields}
                fields = {}
            if output.finish_reason is not None:
                self._done_reason = output.finish_reason
                self.finish_reasons.add(self._parser.finish_reason(output.finish_reason))

    def closing(self) -> list[Json]:
        """Return the last object, which has the reason, the counts and the durations."""
        return [{**self._head(Content("")), **self._end()}]

    def error_chunks(self, error: ApiError) -> list[Json]:
        """Return Ollama's error object."""
        return [ollama_error(error)]

    def collect(self, chunk: Json) -> int:
        """Add an object to the only one of an unstreamed response; return by how many bytes it has grown."""
        made = chunk.get("message", chunk)
        n_bytes = self._text.add(made["content" if self._is_chat else "response"])
        n_bytes += self._thinking.add(made.get("thinking", ""))
        for call in made.get("tool_calls", ()):
            self._calls.append(call)
            n_bytes += len(to_json(call))
        return n_bytes + self._logprobs.extend(chunk.get("logprobs", ()))

    def parts(self) -> list[Part]:
        """Return the object with the whole text."""
        head = to_json({"model": self._name, "created_at": _now()})[:-1]
        text = b',"message":{"role":"assistant","content":"' if self._is_chat else b',"response":"'
        out: list[Part] = [head, text, self._text.data, b'"']
        if self._thinking.data:
            out += [b',"thinking":"', self._thinking.data, b'"']
        if self._calls:
            out += [b',"tool_calls":', to_json(self._calls)]
        if self._is_chat:
            out.append(b"}")
        if self._n_top is not None:
            out += [b',"logprobs":[', self._logprobs.data, b"]"]
        return [*out, b",", to_json(self._end())[1:]]

    def _head(self, part: OutputPart) -> Json:
        """Return the first fields of an object, with a part of the output."""
        match part:
            case Content(text):
                made: Json = {"content": text}
            case Reasoning(text):
                made = {"content": "", "thinking": text}
            case call:
                function = {"name": call.name, "arguments": json.loads(call.arguments)}
                made = {"content": "", "tool_calls": [{"function": function}]}
        if self._is_chat:
            made = {"message": {"role": "assistant", **made}}
        else:
            made = {"response": made.pop("content"), **made}
        return {"model": self._name, "created_at": _now(), **made}

    def _end(self) -> Json:
        """Return the fields of the last object. Durations are nanoseconds; the model was loaded before."""
        now_s = time.monotonic()
        prompt_s = self._first_token_s - self._started_s - self._queued_s
        return {
            "done": True,
            "done_reason": self._done_reason,
            "total_duration": to_ns(now_s - self._started_s),
            "load_duration": 0,
            "prompt_eval_count": self.usage.prompt_tokens,
            "prompt_eval_duration": to_ns(prompt_s),
            "eval_count": self.usage.completion_tokens,
            "eval_duration": to_ns(now_s - self._first_token_s),
        }


def to_ns(seconds: float) -> int:
    """Return whole nanoseconds, at least 0."""
    return max(0, round(seconds * 1e9))
