"""POST /v1/chat/completions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from llaisys.server.answer import Answer, Json
from llaisys.server.answers import ChatCompletion, one_or_stream
from llaisys.server.body import BodyRoute
from llaisys.server.book import Entry
from llaisys.server.errors import error_answers
from llaisys.server.head import Head
from llaisys.server.logprobs import chat_logprobs, prompt_logprobs
from llaisys.server.messages import generation_prompt, last_answer, template_kwargs, template_messages
from llaisys.server.protocol import (
    CHAT_NEUTRAL,
    AnswerOptions,
    ChatCompletionRequest,
    answer_options,
    engine_options,
    sampling_params,
)
from llaisys.server.response_format import with_grammar
from llaisys.server.state import engine_of, served_name
from llaisys.server.tools import AnswerParts, message_of, tool_use
from llaisys.server.trace import client_id_of, note_asked
from llaisys.server.usage import Usage
from llaisys.service import AsyncLLM
from llaisys.types import CompletionOutput, RequestOutput

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/chat/completions", responses={**error_answers(404, 499), **one_or_stream(ChatCompletion)})
async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
    """Renders the conversation, generates its choices, answers as a stream or as one object."""
    engine, headers = engine_of(request, body, CHAT_NEUTRAL)
    model = served_name(engine, body.model)
    params = sampling_params(body, engine.default_sampling_params, max_tokens=None)
    tools = tool_use(body, engine)
    client_id = client_id_of(request)
    params = await with_grammar(engine, params, tools.grammar, client_id)
    note_asked(request, model, params)
    options = answer_options(body, params)
    head = Head.new("chatcmpl", model, body.request_id)
    told = engine_options(body, client_id)
    n_most = engine.most_prompt_tokens(params)
    prompt = await engine.prompt_ids(await prompt_of(body, engine, tools.shown, n_most), params)

    def parts() -> AnswerParts:
        return AnswerParts(engine.answer_parser(params, tools.names), only_first=tools.only_first)

    shape = ChatShape(head, options, prompt, parts, last_answer(body.messages) if body.echo else "")
    stream = engine.generate(prompt, params, head.id, **told)
    entry = Entry(head.id, client_id, engine, [head.id], params.n)
    answer = Answer(request, [stream], shape, headers).listed(entry)
    return answer.as_stream() if body.stream else answer


async def prompt_of(
    body: ChatCompletionRequest, engine: AsyncLLM, tools: list[Json] | None, n_most: int | None = None
) -> list[int]:
    """The token ids of a chat that shows these tools, by the model's template. Raises ContextLengthError for
    one that must have more than `n_most`."""
    add, continue_final = generation_prompt(body.add_generation_prompt, body.continue_final_message)
    return await engine.chat_prompt(
        template_messages(body.messages),
        add_generation_prompt=add,
        continue_final_message=continue_final,
        add_special_tokens=bool(body.add_special_tokens),
        tools=tools,
        template_kwargs=template_kwargs(body.chat_template_kwargs),
        n_most=n_most,
    )


class ChatShape:
    """`chat.completion.chunk` objects of one answer, and the `chat.completion` that they add up to.

    `parts`: makes what divides the text of one choice. `echo`: text that every choice begins with.
    """

    def __init__(
        self,
        head: Head,
        options: AnswerOptions,
        prompt: list[int],
        parts: Callable[[], AnswerParts],
        echo: str = "",
    ) -> None:
        self.head = head
        self.usage = Usage()
        self.usage.prompt(0, len(prompt))
        self._options = options
        self._prompt = prompt
        self._parts = defaultdict[int, AnswerParts](parts)
        self._echo = echo
        self._prompt_logprobs: list[Json | None] | None = None

    def opening(self) -> list[Json]:
        """The chunks that name the role of each choice, and echo what was asked for."""
        choices = range(self._options.n)
        chunks = [self._chunk(index, {"role": "assistant", "content": ""}) for index in choices]
        if self._options.token_ids:
            chunks[0]["prompt_token_ids"] = self._prompt
        if self._echo:
            chunks += [self._chunk(index, {"content": self._echo}) for index in choices]
        return chunks

    def chunks(self, index: int, delta: RequestOutput) -> list[Json]:  # noqa: ARG002 -- a chat has one prompt
        """For each choice with news chunks of its parts, then one with its finish reason."""
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = prompt_logprobs(delta.prompt_logprobs)
        return [chunk for answer in delta.outputs for chunk in self._of_choice(answer)]

    def closing(self) -> list[Json]:
        """The usage chunk, which has no choices, if it was asked for."""
        if not self._options.usage.at_end:
            return []
        return [{**self.head.of("chat.completion.chunk"), "choices": [], "usage": self.usage.body()}]

    def whole(self, chunks: Iterable[Json]) -> Json:
        """The collected answer, its choices in order."""
        parts: dict[int, list[Json]] = {}
        for choice in (chunk["choices"][0] for chunk in chunks):
            parts.setdefault(choice["index"], []).append(choice)
        body = {
            **self.head.of("chat.completion"),
            "choices": [self._whole_choice(parts[index]) for index in sorted(parts)],
            "usage": self.usage.body(),
        }
        if self._options.prompt_logprobs:
            body["prompt_logprobs"] = self._prompt_logprobs
        if self._options.token_ids:
            body["prompt_token_ids"] = self._prompt
        return body

    def _whole_choice(self, parts: Sequence[Json]) -> Json:
        content = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
        choice = {
            "index": parts[-1]["index"],
            "message": message_of(part["delta"] for part in parts),
            "logprobs": None if self._options.n_top is None else {"content": content},
            "finish_reason": parts[-1]["finish_reason"],
            "stop_reason": parts[-1]["stop_reason"],
        }
        if self._options.token_ids:
            choice["token_ids"] = [id for part in parts for id in part.get("token_ids", ())]
        return choice

    def _of_choice(self, answer: CompletionOutput) -> list[Json]:
        options, index = self._options, answer.index
        fields: Json = {}
        if options.n_top is not None and answer.logprobs:
            fields["logprobs"] = chat_logprobs(
                answer.token_ids, answer.logprobs, options.n_top, ids_as_tokens=options.ids_as_tokens
            )
        if options.token_ids and answer.token_ids:
            fields["token_ids"] = answer.token_ids
        parts = self._parts[index]
        deltas = parts.deltas(answer.text, ended=answer.finish_reason is not None)
        if fields and not deltas:
            deltas = [{"content": ""}]
        out = [self._chunk(index, delta, **({} if i else fields)) for i, delta in enumerate(deltas)]
        if answer.finish_reason is not None:
            ends = {
                "finish_reason": parts.finish_reason(answer.finish_reason),
                "stop_reason": answer.stop_reason,
            }
            out.append(self._chunk(index, {}, **ends))
        return out

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
        if self._options.usage.in_every_chunk:
            chunk["usage"] = self.usage.body()
        elif self._options.usage.at_end:
            chunk["usage"] = None
        return chunk
