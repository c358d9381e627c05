"""POST /v1/completions: text in, text out, `n` choices for each prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from llaisys.errors import RejectedError
from llaisys.server.answer import Answer, Json
from llaisys.server.answers import Completion, one_or_stream
from llaisys.server.bodies import CompletionRequest
from llaisys.server.body import BodyRoute
from llaisys.server.book import Entry
from llaisys.server.checks import text_of
from llaisys.server.errors import error_answers, to_json
from llaisys.server.estimate import check_size
from llaisys.server.head import Head
from llaisys.server.keys import engine_id
from llaisys.server.logprobs import CompletionLogprobs, prompt_logprobs
from llaisys.server.pieces import JsonList, Part
from llaisys.server.protocol import (
    COMPLETION_NEUTRAL,
    AnswerOptions,
    answer_options,
    engine_options,
    sampling_params,
)
from llaisys.server.response_format import grammar_of, with_grammar
from llaisys.server.state import engine_of, served_name, state_of
from llaisys.server.trace import client_id_of, note_asked
from llaisys.server.usage import Usage
from llaisys.server.whole import CHOICE_BYTES, WholeCompletion, between
from llaisys.service import AsyncLLM
from llaisys.types import CompletionOutput, Logprob, RequestOutput, SamplingParams

MAX_TOKENS_DEFAULT = 16
PROMPTS_MAX = 128
# Tokens of an echoed prompt, with their logprobs, in one chunk: 64 KiB of JSON at most, as a rule.
ECHO_TOKENS = 64

Prompt: TypeAlias = str | list[int]

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/completions", responses={**error_answers(404, 499), **one_or_stream(Completion)})
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Generates the choices of each prompt, answers as a stream or as one object."""
    engine, headers = engine_of(request, body, COMPLETION_NEUTRAL)
    model = served_name(engine, body.model)
    params = sampling_params(body, engine.default_sampling_params, max_tokens=MAX_TOKENS_DEFAULT)
    client_id = client_id_of(request)
    params = await with_grammar(engine, params, grammar_of(body), client_id)
    note_asked(request, model, params)
    options = answer_options(body, params)
    head = Head.new("cmpl", model, body.request_id)
    add_special = body.add_special_tokens is not False
    sharing = state_of(request).config.prefix_cache_sharing
    told = {**engine_options(body, client_id, sharing), "add_special_tokens": add_special}
    prompts = prompts_of(body.prompt)
    if body.session_id and len(prompts) > 1:
        raise RejectedError(
            f"session_id goes with one prompt, not with {len(prompts)}: send a request for each",
            param="session_id",
        )
    shown: list[list[int]] = []  # prompts that the answer shows
    if options.echo or options.prompt_logprobs:
        shown = [await engine.prompt_ids(each, params, add_special_tokens=add_special) for each in prompts]
    n_tokens = [len(ids) for ids in shown] or [0] * len(prompts)
    check_size(state_of(request).response_bytes.n_most, n_tokens, params, options, is_chat=False)
    echoes = []
    if options.echo:
        pairs = zip(prompts, shown, strict=True)
        echoes = [await _echo(engine, prompt, ids, params) for prompt, ids in pairs]
    shape = CompletionShape(head, options, echoes)
    names = [engine_id(client_id, f"{head.id}-{index}") for index in range(len(prompts))]
    submitted = zip(shown or prompts, names, strict=True)
    streams = [engine.generate(prompt, params, name, **told) for prompt, name in submitted]
    entry = Entry(head.id, client_id, engine, names, params.n)
    answer = Answer(request, streams, shape, headers).listed(entry)
    return answer.as_stream() if body.stream else answer


def prompts_of(prompt: str | list[Any], n_max: int = PROMPTS_MAX) -> list[Prompt]:
    """The four forms of `prompt`: text, token ids, a list of texts, a list of lists of token ids.

    Raises RejectedError naming the entry. Ids are checked against the vocabulary by the engine.
    """
    if isinstance(prompt, str):
        return [text_of("prompt", prompt)]
    if not prompt:
        raise RejectedError("prompt is empty", param="prompt")
    if _is_ids(prompt):
        return [prompt]
    if len(prompt) > n_max:
        raise RejectedError(f"prompt has {len(prompt)} entries, at most {n_max}", param="prompt")
    return [_checked(f"prompt[{i}]", entry) for i, entry in enumerate(prompt)]


def _checked(where: str, entry: Any) -> Prompt:
    if isinstance(entry, list) and entry and _is_ids(entry):
        return entry
    if isinstance(entry, str):
        return text_of(where, entry)
    raise RejectedError(f"{where} must be a text or a list of token ids that is not empty", param=where)


def _is_ids(values: list[Any]) -> bool:
    """JSON's true and false are no ids, though Python counts them as integers. A million take 40 ms."""
    return set(map(type, values)) == {int} and min(values) >= 0 and max(values) < 2**31


@dataclass(frozen=True, slots=True)
class Echo:
    """What an echoed prompt looks like: all of it, and its first token, which has no logprob."""

    text: str
    first_token: str


async def _echo(engine: AsyncLLM, prompt: Prompt, ids: list[int], params: SamplingParams) -> Echo:
    """The echo of a prompt whose `ids` are used: a text that is not cut as it came, else the tokens' text."""
    if isinstance(prompt, str) and params.truncate_prompt_tokens is None:
        text = prompt
    else:
        text = await engine.decode(ids, skip_special_tokens=params.skip_special_tokens)
    return Echo(text, await engine.decode(ids[:1]))


@dataclass(slots=True)
class _Choice:
    """What is kept of one choice between its deltas."""

    logprobs: CompletionLogprobs
    is_open: bool = field(default=False)


class CompletionShape:
    """`text_completion` chunks, and the object of the same name that they add up to.

    The choice `i` of the prompt `p` has the index `p * n + i`. `echoes`: one a prompt, if asked for.
    """

    def __init__(self, head: Head, options: AnswerOptions, echoes: Sequence[Echo] = ()) -> None:
        self.head = head
        self.usage = Usage()
        self._options = options
        self._echoes = echoes
        self._choices: dict[int, _Choice] = {}
        # By prompt, until each of its choices has echoed them.
        self._echoed: dict[int, Sequence[Mapping[int, Logprob] | None]] = {}
        # Of a whole answer: choices, and by prompt what all choices of it have.
        self._whole: dict[int, WholeCompletion] = {}
        self._prompt_ids: dict[int, JsonList] = {}
        self._prompt_logprobs: dict[int, JsonList] = {}

    def opening(self) -> list[Json]:
        """Nothing: there is no role to name."""
        return []

    def chunks(self, index: int, delta: RequestOutput) -> Iterator[Json]:
        """One chunk of text for each choice with news; the last one of a choice carries its finish reason.

        An echoed prompt with logprobs comes first, in chunks of ECHO_TOKENS. A whole answer has chunks of the
        prompt's logprobs, too.
        """
        given = delta.prompt_logprobs
        if given is not None:  # they come with the prompt's first answer token, once
            if self._echoes and self._options.n_top is not None:
                self._echoed[index] = given
            if self._options.prompt_logprobs:
                for at in range(0, len(given), ECHO_TOKENS):
                    yield {"prompt": index, "prompt_logprobs": prompt_logprobs(given[at : at + ECHO_TOKENS])}
        for answer in delta.outputs:
            for choice in self._of_choice(index, delta.prompt_token_ids, answer):
                yield self._chunk(choice)

    def _of_choice(self, prompt: int, prompt_ids: list[int], answer: CompletionOutput) -> Iterator[Json]:
        options, index = self._options, prompt * self._options.n + answer.index
        writer = CompletionLogprobs(options.n_top or 0, ids_as_tokens=options.ids_as_tokens)
        kept = self._choices.setdefault(index, _Choice(writer))
        is_first, kept.is_open = not kept.is_open, True
        blank: Json = {
            "index": index,
            "text": "",
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
        }
        own: Json = {}
        first: Json = {}
        if options.token_ids:
            blank["token_ids"], own = [], {"token_ids": answer.token_ids}
            first = {"prompt_token_ids": prompt_ids} if is_first else {}
        for echo in self._echo(prompt, prompt_ids, kept.logprobs) if is_first else ():
            yield {**blank, **echo, **first}
            first = {}
        logprobs = None
        if options.n_top is not None and answer.logprobs:
            logprobs = kept.logprobs.delta(answer.token_ids, answer.logprobs)
        if answer.text or logprobs or answer.finish_reason or own:
            ends = {"finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason}
            yield {**blank, "text": answer.text, "logprobs": logprobs, **ends, **own, **first}

    def _echo(self, prompt: int, ids: list[int], logprobs: CompletionLogprobs) -> Iterator[Json]:
        """The text of an echoed prompt, if that was asked for, and its logprobs in pieces."""
        if not self._echoes:
            return
        echo = self._echoes[prompt]
        if self._options.n_top is None:
            yield {"text": echo.text}
            return
        given = self._echoed[prompt]
        for at in range(0, len(ids), ECHO_TOKENS):
            until = at + ECHO_TOKENS
            made = logprobs.delta(ids[at:until], given[at:until], echo.first_token)
            yield {"text": "" if at else echo.text, "logprobs": made}
        first = prompt * self._options.n
        if all(index in self._choices for index in range(first, first + self._options.n)):
            del self._echoed[prompt]

    def _chunk(self, choice: Json) -> Json:
        chunk = {**self.head.of("text_completion"), "choices": [choice]}
        if self._options.usage.in_every_chunk:
            chunk["usage"] = self.usage.body()
        elif self._options.usage.at_end:
            chunk["usage"] = None
        return chunk

    def closing(self) -> list[Json]:
        """The usage chunk, which has no choices, if it was asked for."""
        if not self._options.usage.at_end:
            return []
        return [{**self.head.of("text_completion"), "choices": [], "usage": self.usage.body()}]

    def collect(self, chunk: Json) -> int:
        """Adds a chunk to the whole answer; returns the bytes that it has grown by."""
        if "prompt" in chunk:  # each choice of the prompt shows them
            made = self._prompt_logprobs.setdefault(chunk["prompt"], JsonList())
            return made.extend(chunk["prompt_logprobs"]) * self._options.n
        (choice,) = chunk["choices"]
        index, n_bytes = choice["index"], 0
        if index not in self._whole:
            self._whole[index] = WholeCompletion(index)
            n_bytes += CHOICE_BYTES
        if "prompt_token_ids" in choice:
            made = self._prompt_ids.setdefault(index // self._options.n, JsonList())
            n_bytes += len(made.data) or made.extend(choice["prompt_token_ids"])
        return n_bytes + self._whole[index].add(choice)

    def parts(self) -> list[Part]:
        """The collected answer, choices in the order of their prompts."""
        choices = [self._whole[index].parts(self._of_prompt(index)) for index in sorted(self._whole)]
        begin, end = to_json(self.head.of("text_completion"))[:-1], to_json({"usage": self.usage.body()})[1:]
        return [begin, b',"choices":[', *between(choices), b"],", end]

    def _of_prompt(self, index: int) -> dict[str, JsonList | None]:
        """The lists that a choice shows of its prompt."""
        prompt, more = index // self._options.n, {}
        if self._options.token_ids:
            more["prompt_token_ids"] = self._prompt_ids.get(prompt)
        if self._options.prompt_logprobs:
            more["prompt_logprobs"] = self._prompt_logprobs.get(prompt)
        return more
