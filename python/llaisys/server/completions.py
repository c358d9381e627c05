"""POST /v1/completions: text in, text out, `n` choices for each prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from llaisys.errors import RejectedError
from llaisys.server.answer import Answer, Json
from llaisys.server.answers import Completion, one_or_stream
from llaisys.server.body import BodyRoute
from llaisys.server.book import Entry
from llaisys.server.checks import text_of
from llaisys.server.errors import error_answers
from llaisys.server.head import Head
from llaisys.server.logprobs import CompletionLogprobs, prompt_logprobs
from llaisys.server.protocol import (
    COMPLETION_NEUTRAL,
    AnswerOptions,
    CompletionRequest,
    answer_options,
    engine_options,
    sampling_params,
)
from llaisys.server.response_format import grammar_of, with_grammar
from llaisys.server.state import engine_of, served_name
from llaisys.server.trace import client_id_of, note_asked
from llaisys.server.usage import Usage
from llaisys.service import AsyncLLM
from llaisys.types import CompletionOutput, Logprob, RequestOutput, SamplingParams

MAX_TOKENS_DEFAULT = 16
PROMPTS_MAX = 128

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
    told = {**engine_options(body, client_id), "add_special_tokens": add_special}
    prompts, echoes = prompts_of(body.prompt), []
    if body.session_id and len(prompts) > 1:
        raise RejectedError(
            f"session_id goes with one prompt, not with {len(prompts)}: send a request for each",
            param="session_id",
        )
    for index, prompt in enumerate(prompts if body.echo else ()):
        prompts[index] = ids = await engine.prompt_ids(prompt, params, add_special_tokens=add_special)
        echoes.append(await _echo(engine, prompt, ids, params))
    shape = CompletionShape(head, options, echoes)
    names = [f"{head.id}-{index}" for index in range(len(prompts))]
    streams = [
        engine.generate(prompt, params, name, **told) for prompt, name in zip(prompts, names, strict=True)
    ]
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
    """JSON's true and false are no ids, though Python counts them as integers."""
    return all(type(value) is int and 0 <= value < 2**31 for value in values)


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
        self._prompt_logprobs: dict[int, list[dict[int, Logprob] | None]] = {}

    def opening(self) -> list[Json]:
        """Nothing: there is no role to name."""
        return []

    def chunks(self, index: int, delta: RequestOutput) -> list[Json]:
        """One chunk of text for each choice with news; the last one of a choice carries its finish reason."""
        if delta.prompt_logprobs is not None:  # they come with the prompt's first answer token, once
            self._prompt_logprobs[index] = delta.prompt_logprobs
        made = [self._of_choice(index, delta.prompt_token_ids, answer) for answer in delta.outputs]
        return [self._chunk(choice) for choice in made if choice is not None]

    def _of_choice(self, prompt: int, prompt_ids: list[int], answer: CompletionOutput) -> Json | None:
        options, index = self._options, prompt * self._options.n + answer.index
        writer = CompletionLogprobs(options.n_top or 0, ids_as_tokens=options.ids_as_tokens)
        kept = self._choices.setdefault(index, _Choice(writer))
        is_first, kept.is_open = not kept.is_open, True
        text, parts = answer.text, []
        if is_first and self._echoes:
            echo = self._echoes[prompt]
            text = echo.text + text
            if options.n_top is not None:
                given = self._prompt_logprobs[prompt]
                parts.append(kept.logprobs.delta(prompt_ids, given, echo.first_token))
        if options.n_top is not None and answer.logprobs:
            parts.append(kept.logprobs.delta(answer.token_ids, answer.logprobs))
        ids: Json = {}
        if options.token_ids:
            ids = {"token_ids": answer.token_ids, **({"prompt_token_ids": prompt_ids} if is_first else {})}
        if not (text or parts or answer.finish_reason or ids):
            return None
        return {
            "index": index,
            "text": text,
            "logprobs": _joined(parts),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
            **ids,
        }

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

    def whole(self, chunks: Iterable[Json]) -> Json:
        """The collected answer, choices in the order of their prompts."""
        parts: dict[int, list[Json]] = {}
        for choice in (chunk["choices"][0] for chunk in chunks):
            parts.setdefault(choice["index"], []).append(choice)
        choices = [self._whole_choice(parts[index]) for index in sorted(parts)]
        return {**self.head.of("text_completion"), "choices": choices, "usage": self.usage.body()}

    def _whole_choice(self, parts: Sequence[Json]) -> Json:
        """The parts of one choice as one: texts, ids and logprobs concatenated, the end from the last."""
        logprobs = _joined([part["logprobs"] for part in parts if part["logprobs"] is not None])
        choice = {**parts[-1], "text": "".join(part["text"] for part in parts), "logprobs": logprobs}
        if self._options.token_ids:
            choice["token_ids"] = [id for part in parts for id in part["token_ids"]]
            choice["prompt_token_ids"] = parts[0]["prompt_token_ids"]
        if self._options.prompt_logprobs:
            of_prompt = self._prompt_logprobs.get(choice["index"] // self._options.n)
            choice["prompt_logprobs"] = None if of_prompt is None else prompt_logprobs(of_prompt)
        return choice


def _joined(parts: Sequence[Json]) -> Json | None:
    """Logprobs objects as one; None if there are none."""
    if not parts:
        return None
    return {name: [value for part in parts for value in part[name]] for name in parts[0]}
