"""POST /v1/chat/completions: renders a conversation and generates its choices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from llaisys.async_llm import AsyncLLM
from llaisys.errors import RejectedError
from llaisys.outputs import CompletionOutput, RequestOutput
from llaisys.server.access_log import client_id_of, note_request
from llaisys.server.completion_builder import (
    ECHO_TOKENS,
    ChunkBuilder,
    CompletionMeta,
    Usage,
    chat_logprobs,
    check_response_size,
    prompt_logprobs,
)
from llaisys.server.http_errors import error_responses, to_json
from llaisys.server.logprobs import tokens_per_chunk
from llaisys.server.protocol import (
    CHAT_NEUTRAL,
    BodyRoute,
    ResponseOptions,
    engine_id,
    engine_of,
    engine_options,
    response_options,
    sampling_params,
    served_name,
)
from llaisys.server.request_schemas import ChatCompletionRequest, Messages, TokenizeRequest
from llaisys.server.response_body import CHOICE_BYTES, ChatChoiceBuilder, Json, JsonList, Part, join_parts
from llaisys.server.response_schemas import ChatCompletion, one_or_stream
from llaisys.server.state import RequestEntry, state_of
from llaisys.server.streaming import CompletionResponse
from llaisys.server.tools import ChoiceDeltas, tool_use, with_compiled_grammar

RESERVED_KWARGS = frozenset(
    {
        "self",
        "chat_template",
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
    }
)


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with the field names of templates: `reasoning` becomes `reasoning_content`."""
    return [_with_reasoning(message) for message in messages]


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    rest = {name: value for name, value in message.items() if name not in ("reasoning", "reasoning_content")}
    return {**rest, "reasoning_content": reasoning} if isinstance(reasoning, str) else rest


def last_assistant_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text that `echo` puts before a completion: the content of a final assistant message."""
    last = messages[-1] if messages else {}
    content = last.get("content") if last.get("role") == "assistant" else None
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def template_kwargs(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return `chat_template_kwargs` for the template. Raises RejectedError for names that the server sets."""
    for name in kwargs or {}:
        if name in RESERVED_KWARGS:
            field = f"chat_template_kwargs.{name}"
            raise RejectedError(f"{field} cannot be set by a request", param=field)
    return dict(kwargs or {})


def generation_prompt(add: bool | None, continue_final: bool | None) -> tuple[bool, bool]:
    """Return (add_generation_prompt, continue_final_message); the first defaults to the inverse of the
    second.

    Raises RejectedError if both are set.
    """
    if add and continue_final:
        raise RejectedError(
            "add_generation_prompt and continue_final_message exclude each other",
            param="add_generation_prompt",
        )
    return (not continue_final) if add is None else add, bool(continue_final)


router = APIRouter(route_class=BodyRoute)


@router.post("/v1/chat/completions", responses={**error_responses(404, 499), **one_or_stream(ChatCompletion)})
async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
    """Render the conversation and generate its choices, as a stream or as one object."""
    engine, headers = engine_of(request, body, CHAT_NEUTRAL)
    model = served_name(engine, body.model)
    params = sampling_params(body, engine.default_sampling_params, max_tokens=None)
    tools = tool_use(body, engine)
    client_id = client_id_of(request)
    params = await with_compiled_grammar(engine, params, tools.grammar, client_id)
    note_request(request, model, params)
    options = response_options(body, params)
    meta = CompletionMeta.new("chatcmpl", model, body.request_id)
    engine_kwargs = engine_options(body, client_id, state_of(request).config.prefix_cache_sharing)
    n_tokens_max = engine.max_prompt_tokens(params)
    prompt = await engine.prompt_ids(
        await prompt_of(body, body.messages, engine, tools.shown, n_tokens_max), params
    )

    check_response_size(
        state_of(request).response_bytes.bytes_max, [len(prompt)], params, options, is_chat=True
    )

    def parts() -> ChoiceDeltas:
        return ChoiceDeltas(engine.output_parser(params, tools.names), only_first=tools.only_first)

    builder = ChatCompletionBuilder(
        meta,
        options,
        prompt,
        parts,
        last_assistant_text(body.messages) if body.echo else "",
        has_prediction=body.prediction is not None,
    )
    name = engine_id(client_id, meta.id)
    stream = engine.generate(prompt, params, name, **engine_kwargs)
    entry = RequestEntry(meta.id, client_id, engine, [name], params.n)
    response = CompletionResponse(request, [stream], builder, headers).registered(entry)
    return response.as_stream() if body.stream else response


async def prompt_of(
    body: ChatCompletionRequest | TokenizeRequest,
    messages: Messages,
    engine: AsyncLLM,
    tools: list[Json] | None,
    n_tokens_max: int | None = None,
) -> list[int]:
    """Return the token ids of a chat with these tools, rendered with the model's template.

    `messages`: those of the body. Raises ContextLengthError for a text that needs more than `n_tokens_max`
    tokens.
    """
    add, continue_final = generation_prompt(body.add_generation_prompt, body.continue_final_message)
    return await engine.chat_prompt(
        template_messages(messages),
        add_generation_prompt=add,
        continue_final_message=continue_final,
        add_special_tokens=bool(body.add_special_tokens),
        tools=tools,
        template_kwargs=template_kwargs(body.chat_template_kwargs),
        n_tokens_max=n_tokens_max,
    )


class ChatCompletionBuilder:
    """Builds `chat.completion.chunk` objects, or one `chat.completion` from them.

    `parts`: returns a new ChoiceDeltas for a choice. `echo`: the text at the beginning of every choice.
    `has_prediction`: the usage counts the tokens of a prediction.
    """

    def __init__(
        self,
        meta: CompletionMeta,
        options: ResponseOptions,
        prompt: list[int],
        parts: Callable[[], ChoiceDeltas],
        echo: str = "",
        *,
        has_prediction: bool = False,
    ) -> None:
        self.meta = meta
        self.usage = Usage(has_prediction=has_prediction)
        self.usage.set_prompt_tokens(0, len(prompt))
        self._chunk_builder = ChunkBuilder(meta, "chat.completion.chunk", self.usage, options.usage)
        self._options = options
        self._prompt = prompt
        self._parts = defaultdict[int, ChoiceDeltas](parts)
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
        if options.prompt_logprobs:
            out += [b',"prompt_logprobs":[', self._prompt_logprobs.data, b"]"]
        if options.token_ids:
            out += [b',"prompt_token_ids":[', self._prompt_ids.data, b"]"]
        return [*out, b"}"]

    def _choice_chunks(self, output: CompletionOutput) -> list[Json]:
        options, index = self._options, output.index
        fields: Json = {}
        if options.n_top is not None and output.logprobs:
            fields["logprobs"] = chat_logprobs(
                output.token_ids, output.logprobs, options.n_top, ids_as_tokens=options.ids_as_tokens
            )
        if options.token_ids and output.token_ids:
            fields["token_ids"] = output.token_ids
        parts = self._parts[index]
        deltas = parts.deltas(output.text, output.finish_reason)
        if fields and not deltas:
            deltas = [{"content": ""}]
        out = [self._chunk(index, delta, **({} if i else fields)) for i, delta in enumerate(deltas)]
        if output.finish_reason is not None:
            ends = {
                "finish_reason": parts.finish_reason(output.finish_reason),
                "stop_reason": output.stop_reason,
            }
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
