"""POST /v1/chat/completions: renders a conversation and generates its choices."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from llaisys.output_parts import Content, OutputPart, Reasoning
from llaisys.outputs import CompletionOutput, RequestOutput
from llaisys.server.chat import Chat, prepare_chat
from llaisys.server.completion_builder import (
    ECHO_TOKENS,
    ChunkBuilder,
    Usage,
    chat_logprobs,
    prompt_logprobs,
)
from llaisys.server.fields import CHAT_NEUTRAL
from llaisys.server.http_errors import ApiError, error_responses, to_json
from llaisys.server.logprobs import tokens_per_chunk
from llaisys.server.protocol import BodyRoute, engine_of
from llaisys.server.request_schemas import ChatCompletionRequest
from llaisys.server.response_body import (
    CHOICE_BYTES,
    VLLM_NULLS,
    ChatChoiceBuilder,
    Json,
    JsonList,
    Part,
    join_parts,
    list_field,
)
from llaisys.server.response_schemas import ChatCompletion, one_or_stream
from llaisys.server.stream_writer import DATA_EVENTS
from llaisys.server.tools import ChoiceParser

router = APIRouter(route_class=BodyRoute)


@router.post("/chat/completions", include_in_schema=False)
@router.post("/v1/chat/completions", responses={**error_responses(404, 499), **one_or_stream(ChatCompletion)})
async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
    """Render the conversation and generate its choices, as a stream or as one object."""
    engine, headers = engine_of(request, body, CHAT_NEUTRAL)
    chat = await prepare_chat(request, engine, body, "chatcmpl-")
    builder = ChatCompletionBuilder(
        chat,
        last_assistant_text(body.messages) if body.echo else "",
        has_prediction=body.prediction is not None,
    )
    return chat.response(request, builder, headers)


def last_assistant_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text that `echo` puts before a completion: the content of a final assistant message."""
    last = messages[-1] if messages else {}
    content = last.get("content") if last.get("role") == "assistant" else None
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


class _Choice:
    """One choice of a chat: the parser of its text, and its tool calls so far."""

    def __init__(self, parser: ChoiceParser) -> None:
        self.parser = parser
        self._n_calls = 0

    def deltas(self, part: OutputPart) -> list[Json]:
        """Return the `delta` of each chunk of a part: two for a tool call, as OpenAI's clients expect."""
        match part:
            case Content(text):
                return [{"content": text}]
            case Reasoning(text):
                return [{"reasoning": text, "reasoning_content": text}]
        index = self._n_calls
        self._n_calls += 1
        begin = {
            "index": index,
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": part.name, "arguments": ""},
        }
        more = {"index": index, "function": {"arguments": part.arguments}}
        return [{"tool_calls": [begin]}, {"tool_calls": [more]}]


class ChatCompletionBuilder:
    """Builds `chat.completion.chunk` objects, or one `chat.completion` from them.

    `echo`: the text at the beginning of every choice. `has_prediction`: the usage counts the tokens of a
    prediction.
    """

    stream_format = DATA_EVENTS

    def __init__(self, chat: Chat, echo: str = "", *, has_prediction: bool = False) -> None:
        self.meta = chat.meta
        self.usage = Usage(has_prediction=has_prediction)
        self.usage.set_prompt_tokens(0, len(chat.prompt))
        self.finish_reasons: set[str] = set()
        self._chunk_builder = ChunkBuilder(chat.meta, "chat.completion.chunk", self.usage, chat.options)
        self._options = chat.options
        self._prompt = chat.prompt
        self._choices = defaultdict[int, _Choice](lambda: _Choice(chat.new_parser()))
        self._echo = echo
        # The choices of an unstreamed response.
        self._collected: dict[int, ChatChoiceBuilder] = {}
        self._prompt_ids = JsonList()
        self._prompt_logprobs = JsonList()

    def opening(self) -> list[Json]:
        """Return the chunks with the role of each choice, then those that echo text, if requested."""
        choices = range(self._options.n)
        chunks = [self._chunk(index, {"role": "assistant", "content": ""}) for index in choices]
        if self._options.token_ids:
            chunks[0]["prompt_token_ids"] = self._prompt
        if self._echo:
            chunks += [self._chunk(index, {"content": self._echo}) for index in choices]
        return chunks

    def chunks(self, index: int, delta: RequestOutput) -> Iterator[Json]:  # noqa: ARG002 -- a chat has one prompt
        """Yield the prompt's logprobs, if requested, then for each changed choice the chunks of its deltas
        and one with its finish reason."""
        given = delta.prompt_logprobs or ()
        step = tokens_per_chunk(given, ECHO_TOKENS)
        for at in range(0, len(given), step):
            yield {"prompt_logprobs": prompt_logprobs(given[at : at + step])}
        for output in delta.outputs:
            yield from self._choice_chunks(output)

    def closing(self) -> list[Json]:
        """Return the usage chunk, which has no choices, if requested."""
        return self._chunk_builder.closing()

    def error_chunks(self, error: ApiError) -> list[Json]:
        """Return OpenAI's error object."""
        return [error.body()]

    def collect(self, chunk: Json) -> int:
        """Add a chunk to the object; return by how many bytes it has grown."""
        if "prompt_logprobs" in chunk:
            return self._prompt_logprobs.extend(chunk["prompt_logprobs"])
        (choice,) = chunk["choices"]
        index, n_bytes = choice["index"], 0
        if index not in self._collected:
            self._collected[index] = ChatChoiceBuilder(index)
            n_bytes += CHOICE_BYTES
        if "prompt_token_ids" in chunk:
            n_bytes += self._prompt_ids.extend(chunk["prompt_token_ids"])
        return n_bytes + self._collected[index].add(choice)

    def parts(self) -> list[Part]:
        """Return the object, its choices in order."""
        options = self._options
        made = [self._collected[index] for index in sorted(self._collected)]
        choices = [choice.parts(has_logprobs=options.n_top is not None) for choice in made]
        begin, usage = to_json(self.meta.fields("chat.completion"))[:-1], to_json(self.usage.body())
        out: list[Part] = [begin, b',"choices":[', *join_parts(choices), b'],"usage":', usage]
        out += list_field("prompt_logprobs", self._prompt_logprobs if options.prompt_logprobs else None)
        out += list_field("prompt_token_ids", self._prompt_ids if options.token_ids else None)
        return [*out, b",", to_json({**VLLM_NULLS, "metrics": self._chunk_builder.metrics()})[1:]]

    def _choice_chunks(self, output: CompletionOutput) -> list[Json]:
        options, index = self._options, output.index
        fields: Json = {}
        if options.n_top is not None and output.logprobs:
            fields["logprobs"] = chat_logprobs(
                output.token_ids, output.logprobs, options.n_top, ids_as_tokens=options.ids_as_tokens
            )
        if options.token_ids and output.token_ids:
            fields["token_ids"] = output.token_ids
        choice = self._choices[index]
        parts = choice.parser.push(output.text, output.finish_reason)
        deltas = [delta for part in parts for delta in choice.deltas(part)]
        if fields and not deltas:
            deltas = [{"content": ""}]
        out = [self._chunk(index, delta, **({} if i else fields)) for i, delta in enumerate(deltas)]
        if output.finish_reason is not None:
            finish_reason = choice.parser.finish_reason(output.finish_reason)
            self.finish_reasons.add(finish_reason)
            ends = {"finish_reason": finish_reason, "stop_reason": output.stop_reason}
            out.append(self._chunk(index, {}, **ends))
        return out

    def _chunk(self, index: int, delta: Json, **fields: Any) -> Json:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
            **fields,
        }
        return self._chunk_builder.chunk(choice)
