"""POST /v1/completions: text in, text out, one choice for each prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from llaisys.errors import RejectedError
from llaisys.server.answer import Answer, Json
from llaisys.server.checks import text_of
from llaisys.server.head import Head
from llaisys.server.logprobs import CompletionLogprobs
from llaisys.server.protocol import (
    COMPLETION_NEUTRAL,
    CompletionRequest,
    UsageOptions,
    ignored_fields,
    sampling_params,
    usage_options,
)
from llaisys.server.response_format import grammar_of, with_grammar
from llaisys.server.state import served_name, state_of
from llaisys.server.trace import client_id_of, ignored_headers
from llaisys.server.usage import Usage
from llaisys.types import RequestOutput

MAX_TOKENS_DEFAULT = 16
PROMPTS_MAX = 128

Prompt: TypeAlias = str | list[int]

router = APIRouter()


@router.post("/v1/completions")
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Generates one choice for each prompt, answers as a stream or as one object."""
    state = state_of(request)
    engine = state.serving(body.model)
    model = served_name(engine, body.model)
    headers = ignored_headers(request, ignored_fields(body, COMPLETION_NEUTRAL, state.config.strict_fields))
    options = usage_options(body)
    params = sampling_params(body, engine.default_sampling_params, max_tokens=MAX_TOKENS_DEFAULT)
    params = await with_grammar(engine, params, grammar_of(body))
    shape = CompletionShape(Head.new("cmpl", model), options, params.logprobs)
    streams = [
        engine.generate(prompt, params, f"{shape.head.id}-{index}", client_id=client_id_of(request))
        for index, prompt in enumerate(prompts_of(body.prompt))
    ]
    answer = Answer(request, streams, shape, headers)
    return answer.as_stream() if body.stream else answer


def prompts_of(prompt: str | list[Any]) -> list[Prompt]:
    """The four forms of `prompt`: text, token ids, a list of texts, a list of lists of token ids.

    Raises RejectedError naming the entry. Ids are checked against the vocabulary by the engine.
    """
    if isinstance(prompt, str):
        return [text_of("prompt", prompt)]
    if not prompt:
        raise RejectedError("prompt is empty", param="prompt")
    if _is_ids(prompt):
        return [prompt]
    if len(prompt) > PROMPTS_MAX:
        raise RejectedError(f"prompt has {len(prompt)} entries, at most {PROMPTS_MAX}", param="prompt")
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


class CompletionShape:
    """`text_completion` chunks, and the object of the same name that they add up to.

    `n_top`: best candidates a token if logprobs were asked for, else None.
    """

    def __init__(self, head: Head, options: UsageOptions, n_top: int | None) -> None:
        self.head = head
        self.usage = Usage()
        self._options = options
        self._n_top = n_top
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def opening(self) -> list[Json]:
        """Nothing: there is no role to name."""
        return []

    def chunks(self, index: int, delta: RequestOutput) -> list[Json]:
        """One chunk of text; the last one of a choice carries its finish reason."""
        answer = delta.outputs[0]
        logprobs = None
        if self._n_top is not None and answer.logprobs:
            writer = self._logprobs.setdefault(index, CompletionLogprobs(self._n_top))
            logprobs = writer.delta(answer.token_ids, answer.logprobs)
        if not (answer.text or logprobs or answer.finish_reason):
            return []
        choice = {
            "index": index,
            "text": answer.text,
            "logprobs": logprobs,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        chunk = {**self.head.of("text_completion"), "choices": [choice]}
        if self._options.in_every_chunk:
            chunk["usage"] = self.usage.body()
        elif self._options.at_end:
            chunk["usage"] = None
        return [chunk]

    def closing(self) -> list[Json]:
        """The usage chunk, which has no choices, if it was asked for."""
        if not self._options.at_end:
            return []
        return [{**self.head.of("text_completion"), "choices": [], "usage": self.usage.body()}]

    def whole(self, chunks: Iterable[Json]) -> Json:
        """The collected answer, choices in the order of their prompts."""
        parts: dict[int, list[Json]] = {}
        for choice in (chunk["choices"][0] for chunk in chunks):
            parts.setdefault(choice["index"], []).append(choice)
        choices = [_choice(parts[index]) for index in sorted(parts)]
        return {**self.head.of("text_completion"), "choices": choices, "usage": self.usage.body()}


def _choice(parts: Sequence[Json]) -> Json:
    """The parts of one choice as one: texts and lists of logprobs concatenated, the end from the last."""
    logprobs: Json | None = None
    for part in parts:
        if part["logprobs"] is not None:
            logprobs = logprobs or {name: [] for name in part["logprobs"]}
            for name, values in part["logprobs"].items():
                logprobs[name] += values
    return {**parts[-1], "text": "".join(part["text"] for part in parts), "logprobs": logprobs}
