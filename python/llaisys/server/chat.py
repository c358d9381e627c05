"""POST /v1/chat/completions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from llaisys.server.answer import Answer, Json
from llaisys.server.answers import ChatCompletion, one_or_stream
from llaisys.server.bodies import ChatCompletionRequest, Messages, TokenizeRequest
from llaisys.server.body import BodyRoute
from llaisys.server.book import Entry
from llaisys.server.completions import ECHO_TOKENS
from llaisys.server.errors import error_answers, to_json
from llaisys.server.estimate import check_size
from llaisys.server.head import Head
from llaisys.server.keys import engine_id
from llaisys.server.logprobs import chat_logprobs, prompt_logprobs
from llaisys.server.messages import generation_prompt, last_answer, template_kwargs, template_messages
from llaisys.server.pieces import JsonList, Part
from llaisys.server.protocol import (
    CHAT_NEUTRAL,
    AnswerOptions,
    answer_options,
    engine_options,
    sampling_params,
)
from llaisys.server.response_format import with_grammar
from llaisys.server.state import engine_of, served_name, state_of
from llaisys.server.tools import AnswerParts, tool_use
from llaisys.server.trace import client_id_of, note_asked
from llaisys.server.usage import Usage
from llaisys.server.whole import CHOICE_BYTES, WholeChat, between
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
    told = engine_options(body, client_id, state_of(request).config.prefix_cache_sharing)
    n_most = engine.most_prompt_tokens(params)
    prompt = await engine.prompt_ids(
        await prompt_of(body, body.messages, engine, tools.shown, n_most), params
    )

    check_size(state_of(request).response_bytes.n_most, [len(prompt)], params, options, is_chat=True)

    def parts() -> AnswerParts:
        return AnswerParts(engine.answer_parser(params, tools.names), only_first=tools.only_first)

    shape = ChatShape(head, options, prompt, parts, last_answer(body.messages) if body.echo else "")
    name = engine_id(client_id, head.id)
    stream = engine.generate(prompt, params, name, **told)
    entry = Entry(head.id, client_id, engine, [name], params.n)
    answer = Answer(request, [stream], shape, headers).listed(entry)
    return answer.as_stream() if body.stream else answer


async def prompt_of(
    body: ChatCompletionRequest | TokenizeRequest,
    messages: Messages,
    engine: AsyncLLM,
    tools: list[Json] | None,
    n_most: int | None = None,
) -> list[int]:
    """The token ids of a chat that shows these tools, by the model's template; `messages` are the body's.

    Raises ContextLengthError for one that must have more than `n_most`.
    """
    add, continue_final = generation_prompt(body.add_generation_prompt, body.continue_final_message)
    return await engine.chat_prompt(
        template_messages(messages),
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
        # Of a whole answer.
        self._whole: dict[int, WholeChat] = {}
        self._prompt_ids = JsonList()
        self._prompt_logprobs = JsonList()

    def opening(self) -> list[Json]:
        """The chunks that name the role of each choice, and echo what was asked for."""
        choices = range(self._options.n)
        chunks = [self._chunk(index, {"role": "assistant", "content": ""}) for index in choices]
        if self._options.token_ids:
            chunks[0]["prompt_token_ids"] = self._prompt
        if self._echo:
            chunks += [self._chunk(index, {"content": self._echo}) for index in choices]
        return chunks

    def chunks(self, index: int, delta: RequestOutput) -> Iterator[Json]:  # noqa: ARG002 -- a chat has one prompt
        """For each choice with news chunks of its parts, then one with its finish reason. A whole answer has
        chunks of the prompt's logprobs, too."""
        given = delta.prompt_logprobs or ()
        for at in range(0, len(given), ECHO_TOKENS):
            yield {"prompt_logprobs": prompt_logprobs(given[at : at + ECHO_TOKENS])}
        for answer in delta.outputs:
            yield from self._of_choice(answer)

    def closing(self) -> list[Json]:
        """The usage chunk, which has no choices, if it was asked for."""
        if not self._options.usage.at_end:
            return []
        return [{**self.head.of("chat.completion.chunk"), "choices": [], "usage": self.usage.body()}]

    def collect(self, chunk: Json) -> int:
        """Adds a chunk to the whole answer; returns the bytes that it has grown by."""
        if "prompt_logprobs" in chunk:
            return self._prompt_logprobs.extend(chunk["prompt_logprobs"])
        (choice,) = chunk["choices"]
        index, n_bytes = choice["index"], 0
        if index not in self._whole:
            self._whole[index] = WholeChat(index)
            n_bytes += CHOICE_BYTES
        if "prompt_token_ids" in chunk:
            n_bytes += self._prompt_ids.extend(chunk["prompt_token_ids"])
        return n_bytes + self._whole[index].add(choice)

    def parts(self) -> list[Part]:
        """The collected answer, its choices in order."""
        options = self._options
        made = [self._whole[index] for index in sorted(self._whole)]
        choices = [choice.parts(has_logprobs=options.n_top is not None) for choice in made]
        begin, usage = to_json(self.head.of("chat.completion"))[:-1], to_json(self.usage.body())
        out: list[Part] = [begin, b',"choices":[', *between(choices), b'],"usage":', usage]
        if options.prompt_logprobs:
            out += [b',"prompt_logprobs":[', self._prompt_logprobs.data, b"]"]
        if options.token_ids:
            out += [b',"prompt_token_ids":[', self._prompt_ids.data, b"]"]
        return [*out, b"}"]

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
        deltas = parts.deltas(answer.text, answer.finish_reason)
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
