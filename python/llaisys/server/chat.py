"""Chat: a chat request that is checked and rendered, ready to generate.

Every chat protocol is a view of it. A route translates its body to a `ChatCompletionRequest`, calls
`prepare_chat`, and writes the output with its own builder. Templates, tools, reasoning, grammars, limits and
admission are therefore the same for all protocols.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request

from llaisys.async_llm import AsyncLLM
from llaisys.errors import RejectedError
from llaisys.output_parts import ReasoningFormat
from llaisys.outputs import RequestOutput
from llaisys.sampling_params import SamplingParams
from llaisys.server.access_log import client_id_of, note_request
from llaisys.server.completion_builder import CompletionBuilder, CompletionMeta, check_response_size
from llaisys.server.logprobs import resolve_logprobs
from llaisys.server.protocol import (
    ResponseOptions,
    engine_id,
    engine_options,
    response_options,
    sampling_params,
    served_name,
)
from llaisys.server.request_schemas import ChatCompletionRequest, EmbeddingRequest, Messages, TokenizeRequest
from llaisys.server.response_body import Json
from llaisys.server.state import RequestEntry, state_of
from llaisys.server.streaming import CompletionResponse
from llaisys.server.tools import ChoiceParser, ToolUse, tool_use, with_compiled_grammar

# Efforts that OpenAI's API has.
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
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


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat request that is checked and rendered. `prompt`: its token ids."""

    meta: CompletionMeta
    engine: AsyncLLM
    params: SamplingParams
    prompt: list[int]
    options: ResponseOptions
    client_id: str
    _tools: ToolUse
    _reasoning: ReasoningFormat | None
    _engine_kwargs: Mapping[str, Any]

    def new_parser(self) -> ChoiceParser:
        """Return a parser for the text of one choice."""
        parser = self.engine.output_formats.parser(self.params, self._tools.schemas, self._reasoning)
        return ChoiceParser(parser, only_first=self._tools.only_first)

    def within_context(self) -> Chat:
        """Return the chat with `max_tokens` lowered to what the context leaves after the prompt.

        A prompt that leaves nothing is unchanged, so that the engine rejects it.
        """
        n_left = self.engine.max_model_len - len(self.prompt)
        if self.params.max_tokens is None or not 0 < n_left < self.params.max_tokens:
            return self
        return replace(self, params=replace(self.params, max_tokens=n_left))

    def generate(self) -> AsyncIterator[RequestOutput]:
        """Submit the request; return its deltas. Closing the iterator cancels the request."""
        return self.engine.generate(self.prompt, self.params, self._engine_id, **self._engine_kwargs)

    def response(
        self,
        request: Request,
        builder: CompletionBuilder,
        headers: Mapping[str, str],
        deltas: AsyncIterator[RequestOutput] | None = None,
    ) -> CompletionResponse:
        """Return the response that generates the chat and writes it with `builder`.

        `deltas`: those of `generate`, if the protocol does more with them than write them.
        """
        entry = RequestEntry(self.meta.id, self.client_id, self.engine, [self._engine_id], self.params.n)
        streams = [self.generate() if deltas is None else deltas]
        response = CompletionResponse(request, streams, builder, headers).registered(entry)
        return response.as_stream() if self.options.stream else response

    @property
    def _engine_id(self) -> str:
        return engine_id(self.client_id, self.meta.id)


async def prepare_chat(
    request: Request,
    engine: AsyncLLM,
    body: ChatCompletionRequest,
    id_prefix: str,
    *,
    raw_prompt: str | None = None,
) -> Chat:
    """Check a chat, compile its grammar and render its prompt.

    `id_prefix`: begins the id of the response. `raw_prompt`: used in place of the rendered messages. Raises
    RejectedError or UnsupportedError naming a field of `body`.
    """
    resolve_logprobs(body, engine)
    model = served_name(engine, body.model)
    params = sampling_params(body, engine.default_sampling_params, max_tokens=None)
    tools = tool_use(body, engine)
    client_id = client_id_of(request)
    params = await with_compiled_grammar(engine, params, tools.grammar, client_id)
    params = engine.output_formats.parsed_params(params, has_tools=bool(tools.schemas))
    note_request(request, model, params)
    state = state_of(request)
    options = response_options(body, params, state.config)
    meta = CompletionMeta.new(id_prefix, model, body.request_id, engine.system_fingerprint)
    engine_kwargs = engine_options(body, client_id, engine, state.config.prefix_cache_sharing)
    if raw_prompt is None:
        n_tokens_max = engine.max_prompt_tokens(params)
        rendered = await prompt_of(body, body.messages, engine, tools.shown, n_tokens_max)
        prompt = await engine.prompt_ids(rendered, params)
    else:
        prompt = await engine.prompt_ids(raw_prompt, params)
    check_response_size(state.response_bytes.bytes_max, [len(prompt)], params, options, is_chat=True)
    reasoning = engine.output_formats.reasoning_of(prompt)
    return Chat(meta, engine, params, prompt, options, client_id, tools, reasoning, engine_kwargs)


async def prompt_of(
    body: ChatCompletionRequest | TokenizeRequest | EmbeddingRequest,
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
    in_channels = engine.output_formats.writes_channels
    effort = body.reasoning_effort if isinstance(body, ChatCompletionRequest) else None
    return await engine.chat_prompt(
        template_messages(messages, in_channels=in_channels),
        add_generation_prompt=add,
        continue_final_message=continue_final,
        add_special_tokens=bool(body.add_special_tokens),
        tools=_described(tools) if in_channels else tools,
        template_kwargs=template_kwargs(body.chat_template_kwargs, effort),
        n_tokens_max=n_tokens_max,
    )


def _described(tools: list[Json] | None) -> list[Json] | None:
    """Return the tools with an empty description where one has none: the template of gpt-oss needs it."""
    empty = {"description": ""}
    return tools and [{**tool, "function": {**empty, **tool["function"]}} for tool in tools]


def template_messages(messages: Sequence[Mapping[str, Any]], *, in_channels: bool) -> list[dict[str, Any]]:
    """Return the messages with the field names of templates: `reasoning` becomes `reasoning_content`.

    `in_channels`: the template of gpt-oss has the reasoning before a call in `thinking`, and rejects it next
    to content.
    """
    return [_with_reasoning(message, in_channels=in_channels) for message in messages]


def _with_reasoning(message: Mapping[str, Any], *, in_channels: bool) -> dict[str, Any]:
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    rest = {name: value for name, value in message.items() if name not in ("reasoning", "reasoning_content")}
    if not isinstance(reasoning, str):
        return rest
    is_before_call = in_channels and bool(message.get("tool_calls")) and not message.get("content")
    return {**rest, "reasoning_content": reasoning} | ({"thinking": reasoning} if is_before_call else {})


def template_kwargs(kwargs: Mapping[str, Any] | None, effort: str | None = None) -> dict[str, Any]:
    """Return `chat_template_kwargs` for the template, after the variables of a reasoning effort.

    Raises RejectedError for names that the server sets.
    """
    for name in kwargs or {}:
        if name in RESERVED_KWARGS:
            field = f"chat_template_kwargs.{name}"
            raise RejectedError(f"{field} cannot be set by a request", param=field)
    return {**effort_kwargs(effort), **(kwargs or {})}


def effort_kwargs(effort: str | None) -> dict[str, Any]:
    """Return the template's variables: `reasoning_effort`, and `enable_thinking: false` for the effort
    none. Raises RejectedError for another word."""
    if effort is not None and effort not in EFFORTS:
        raise RejectedError(
            f"reasoning_effort is {effort[:40]!r}, allowed are {', '.join(EFFORTS)}", param="reasoning_effort"
        )
    made: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    return made | ({"enable_thinking": False} if effort == "none" else {})


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
