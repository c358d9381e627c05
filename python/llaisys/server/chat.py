"""POST /v1/chat/completions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from llaisys.server.answer import Answer, Json
from llaisys.server.head import Head
from llaisys.server.logprobs import chat_logprobs
from llaisys.server.messages import generation_prompt, template_kwargs, template_messages
from llaisys.server.protocol import (
    CHAT_NEUTRAL,
    ChatCompletionRequest,
    UsageOptions,
    ignored_fields,
    sampling_params,
    usage_options,
)
from llaisys.server.response_format import with_grammar
from llaisys.server.state import served_name, state_of
from llaisys.server.tools import AnswerParts, message_of, tool_use
from llaisys.server.trace import client_id_of, ignored_headers
from llaisys.server.usage import Usage
from llaisys.types import RequestOutput

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
    """Renders the conversation, generates one choice, answers as a stream or as one object."""
    state = state_of(request)
    engine = state.serving(body.model)
    model = served_name(engine, body.model)
    headers = ignored_headers(request, ignored_fields(body, CHAT_NEUTRAL, state.config.strict_fields))
    options = usage_options(body)
    params = sampling_params(body, engine.default_sampling_params, max_tokens=None)
    tools = tool_use(body, engine)
    params = await with_grammar(engine, params, tools.grammar)
    add, continue_final = generation_prompt(body.add_generation_prompt, body.continue_final_message)
    prompt = await engine.chat_prompt(
        template_messages(body.messages),
        add_generation_prompt=add,
        continue_final_message=continue_final,
        tools=tools.shown,
        template_kwargs=template_kwargs(body.chat_template_kwargs),
    )

    def parts() -> AnswerParts:
        return AnswerParts(engine.answer_parser(params, tools.names), only_first=tools.only_first)

    shape = ChatShape(Head.new("chatcmpl", model), options, params.logprobs, parts)
    shape.usage.prompt(0, len(prompt))
    stream = engine.generate(prompt, params, shape.head.id, client_id=client_id_of(request))
    answer = Answer(request, [stream], shape, headers)
    return answer.as_stream() if body.stream else answer


class ChatShape:
    """`chat.completion.chunk` objects of one answer, and the `chat.completion` that they add up to.

    `n_top`: best candidates a token if logprobs were asked for, else None. `parts`: makes what divides the
    text of one choice.
    """

    def __init__(
        self, head: Head, options: UsageOptions, n_top: int | None, parts: Callable[[], AnswerParts]
    ) -> None:
        self.head = head
        self.usage = Usage()
        self._options = options
        self._n_top = n_top
        self._parts = defaultdict[int, AnswerParts](parts)

    def opening(self) -> list[Json]:
        """The chunk that names the role."""
        return [self._chunk(0, {"role": "assistant", "content": ""})]

    def chunks(self, index: int, delta: RequestOutput) -> list[Json]:
        """Chunks of content, reasoning and calls as they come, then one with the finish reason."""
        answer = delta.outputs[0]
        logprobs = None
        if self._n_top is not None and answer.logprobs:
            logprobs = chat_logprobs(answer.token_ids, answer.logprobs, self._n_top)
        parts = self._parts[index]
        deltas = parts.deltas(answer.text, ended=answer.finish_reason is not None)
        if logprobs and not deltas:
            deltas = [{"content": ""}]
        out = [self._chunk(index, delta, logprobs=None if i else logprobs) for i, delta in enumerate(deltas)]
        if answer.finish_reason is not None:
            reason = parts.finish_reason(answer.finish_reason)
            out.append(self._chunk(index, {}, finish_reason=reason, stop_reason=answer.stop_reason))
        return out

    def closing(self) -> list[Json]:
        """The usage chunk, which has no choices, if it was asked for."""
        if not self._options.at_end:
            return []
        return [{**self.head.of("chat.completion.chunk"), "choices": [], "usage": self.usage.body()}]

    def whole(self, chunks: Iterable[Json]) -> Json:
        """The collected answer."""
        deltas, content, last = [], [], {}
        for choice in (chunk["choices"][0] for chunk in chunks):
            deltas.append(choice["delta"])
            content += (choice["logprobs"] or {}).get("content", [])
            last = choice
        choice = {
            "index": 0,
            "message": message_of(deltas),
            "logprobs": None if self._n_top is None else {"content": content},
            "finish_reason": last["finish_reason"],
            "stop_reason": last["stop_reason"],
        }
        return {**self.head.of("chat.completion"), "choices": [choice], "usage": self.usage.body()}

    def _chunk(self, index: int, delta: Json, **fields: Any) -> Json:
        """One chunk. `usage` is null in it if it comes at the end, and filled in if asked for everywhere."""
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
            **fields,
        }
        chunk = {**self.head.of("chat.completion.chunk"), "choices": [choice]}
        if self._options.in_every_chunk:
            chunk["usage"] = self.usage.body()
        elif self._options.at_end:
            chunk["usage"] = None
        return chunk
