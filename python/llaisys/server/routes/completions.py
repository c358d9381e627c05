"""POST /v1/completions: generates `n` choices for each prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from llaisys.async_llm import AsyncLLM
from llaisys.errors import RejectedError
from llaisys.outputs import CompletionOutput, Logprob, RequestOutput
from llaisys.sampling_params import SamplingParams
from llaisys.server.access_log import client_id_of, note_request
from llaisys.server.completion_builder import (
    ECHO_TOKENS,
    ChunkBuilder,
    CompletionLogprobs,
    CompletionMeta,
    Usage,
    check_response_size,
    prompt_logprobs,
)
from llaisys.server.fields import COMPLETION_NEUTRAL
from llaisys.server.http_errors import ApiError, error_responses, to_json
from llaisys.server.logprobs import resolve_logprobs, tokens_per_chunk
from llaisys.server.protocol import (
    BodyRoute,
    ResponseOptions,
    engine_id,
    engine_of,
    engine_options,
    response_options,
    sampling_params,
    served_name,
    text_of,
)
from llaisys.server.request_schemas import CompletionRequest
from llaisys.server.response_body import (
    CHOICE_BYTES,
    VLLM_NULLS,
    Json,
    JsonList,
    Part,
    TextChoiceBuilder,
    join_parts,
)
from llaisys.server.response_schemas import Completion, one_or_stream
from llaisys.server.state import RequestEntry, state_of
from llaisys.server.stream_writer import DATA_EVENTS
from llaisys.server.streaming import CompletionResponse
from llaisys.server.tools import grammar_of, with_compiled_grammar

MAX_TOKENS_DEFAULT = 16
PROMPTS_MAX = 128

Prompt: TypeAlias = str | list[int]

router = APIRouter(route_class=BodyRoute)


@router.post("/completions", include_in_schema=False)
@router.post("/v1/completions", responses={**error_responses(404, 499), **one_or_stream(Completion)})
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Generate the choices of each prompt, as a stream or as one object."""
    engine, headers = engine_of(request, body, COMPLETION_NEUTRAL)
    resolve_logprobs(body, engine)
    model = served_name(engine, body.model)
    params = sampling_params(body, engine.default_sampling_params, max_tokens=MAX_TOKENS_DEFAULT)
    client_id = client_id_of(request)
    params = await with_compiled_grammar(engine, params, grammar_of(body), client_id)
    note_request(request, model, params)
    meta = CompletionMeta.new("cmpl-", model, body.request_id, engine.system_fingerprint)
    add_special = body.add_special_tokens is not False
    sharing = state_of(request).config.prefix_cache_sharing
    engine_kwargs = {**engine_options(body, client_id, engine, sharing), "add_special_tokens": add_special}
    prompts = prompts_of(body.prompt)
    options = response_options(body, params, state_of(request).config, len(prompts))
    if body.session_id and len(prompts) > 1:
        raise RejectedError(
            f"session_id needs a single prompt, not {len(prompts)}: send one request per prompt",
            param="session_id",
        )
    shown_ids: list[list[int]] = []  # ids of prompts that the response repeats
    if options.echo or options.prompt_logprobs:
        shown_ids = [
            await engine.prompt_ids(each, params, add_special_tokens=add_special) for each in prompts
        ]
    n_tokens = [len(ids) for ids in shown_ids] or [0] * len(prompts)
    check_response_size(state_of(request).response_bytes.bytes_max, n_tokens, params, options, is_chat=False)
    echoes = []
    if options.echo:
        pairs = zip(prompts, shown_ids, strict=True)
        echoes = [await _echo(engine, prompt, ids, params) for prompt, ids in pairs]
    builder = TextCompletionBuilder(meta, options, echoes)
    names = [engine_id(client_id, f"{meta.id}-{index}") for index in range(len(prompts))]
    submitted = zip(shown_ids or prompts, names, strict=True)
    streams = [engine.generate(prompt, params, name, **engine_kwargs) for prompt, name in submitted]
    entry = RequestEntry(meta.id, client_id, engine, names, params.n)
    response = CompletionResponse(request, streams, builder, headers).registered(entry)
    return response.as_stream() if body.stream else response


def prompts_of(prompt: str | list[Any], n_max: int = PROMPTS_MAX) -> list[Prompt]:
    """Return the prompts of any form of `prompt`: text, token ids, a list of texts, a list of lists of token
    ids.

    Raises RejectedError naming the entry. The engine checks ids against the vocabulary.
    """
    if isinstance(prompt, str):
        return [text_of("prompt", prompt)]
    if not prompt:
        raise RejectedError("prompt is empty", param="prompt")
    if _is_ids(prompt):
        return [prompt]
    if len(prompt) > n_max:
        raise RejectedError(f"prompt has {len(prompt)} entries, allowed are up to {n_max}", param="prompt")
    if len(set(map(type, prompt)) & {str, list}) > 1:
        raise RejectedError("prompt has texts and lists of token ids: send one kind", param="prompt")
    return [_checked(f"prompt[{i}]", entry) for i, entry in enumerate(prompt)]


def _checked(param: str, entry: Any) -> Prompt:
    if isinstance(entry, list) and entry and _is_ids(entry):
        return entry
    if isinstance(entry, str):
        return text_of(param, entry)
    raise RejectedError(f"{param} must be a string or a non-empty list of token ids", param=param)


def _is_ids(values: list[Any]) -> bool:
    """Return True for a list of integers, without JSON's true and false. A million take 40 ms."""
    return set(map(type, values)) == {int} and min(values) >= 0 and max(values) < 2**31


@dataclass(frozen=True, slots=True)
class Echo:
    """The text of an echoed prompt, and the text of its first token, which has no logprob."""

    text: str
    first_token: str


async def _echo(engine: AsyncLLM, prompt: Prompt, ids: list[int], params: SamplingParams) -> Echo:
    """Return the echo of a prompt: its text if it was sent as text and not truncated, otherwise that of its
    ids."""
    if isinstance(prompt, str) and params.truncate_prompt_tokens is None:
        text = prompt
    else:
        text = await engine.decode(ids, skip_special_tokens=params.skip_special_tokens)
    return Echo(text, await engine.decode(ids[:1]))


class TextCompletionBuilder:
    """Builds `text_completion` chunks, or one object of the same name from them.

    Choice `i` of prompt `p` has the index `p * n + i`. `echoes`: one for each prompt, if requested.
    """

    stream_format = DATA_EVENTS

    def __init__(self, meta: CompletionMeta, options: ResponseOptions, echoes: Sequence[Echo] = ()) -> None:
        self.meta = meta
        self.usage = Usage()
        self.finish_reasons: set[str] = set()
        self._chunk_builder = ChunkBuilder(meta, "text_completion", self.usage, options)
        self._options = options
        self._echoes = echoes
        # Of each choice that has a delta.
        self._logprobs: dict[int, CompletionLogprobs] = {}
        # Logprobs to echo, by prompt, until each of its choices has echoed them.
        self._echoed: dict[int, Sequence[Mapping[int, Logprob] | None]] = {}
        # The choices of an unstreamed response, and by prompt the fields that its choices share.
        self._collected: dict[int, TextChoiceBuilder] = {}
        self._prompt_ids: dict[int, JsonList] = {}
        self._prompt_logprobs: dict[int, JsonList] = {}

    def opening(self) -> list[Json]:
        """Return no chunks, because completions have no role."""
        return []

    def chunks(self, index: int, delta: RequestOutput) -> Iterator[Json]:
        """Yield a chunk of text for each changed choice; the last chunk of a choice has its finish reason.

        Before them come the prompt's logprobs, if requested, and an echoed prompt with logprobs in chunks of
        ECHO_TOKENS tokens.
        """
        given = delta.prompt_logprobs
        if given is not None:  # once, with the first generated token
            if self._echoes and self._options.n_top is not None:
                self._echoed[index] = given
            if self._options.prompt_logprobs:
                step = tokens_per_chunk(given, ECHO_TOKENS)
                for at in range(0, len(given), step):
                    yield {"prompt": index, "prompt_logprobs": prompt_logprobs(given[at : at + step])}
        for output in delta.outputs:
            if output.finish_reason is not None:
                self.finish_reasons.add(output.finish_reason)
            for choice in self._choice_chunks(index, delta.prompt_token_ids, output):
                yield self._chunk_builder.chunk(choice)

    def _choice_chunks(self, prompt: int, prompt_ids: list[int], output: CompletionOutput) -> Iterator[Json]:
        options, index = self._options, prompt * self._options.n + output.index
        is_first = index not in self._logprobs
        if is_first:
            self._logprobs[index] = CompletionLogprobs(ids_as_tokens=options.ids_as_tokens)
        writer = self._logprobs[index]
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
            blank["token_ids"], own = [], {"token_ids": output.token_ids}
            first = {"prompt_token_ids": prompt_ids} if is_first else {}
        for echo in self._echo(prompt, prompt_ids, writer) if is_first else ():
            yield {**blank, **echo, **first}
            first = {}
        logprobs = None
        if options.n_top is not None and output.logprobs:
            logprobs = writer.delta(output.token_ids, output.logprobs, options.n_top)
        if output.text or logprobs or output.finish_reason or own:
            ends = {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
            yield {**blank, "text": output.text, "logprobs": logprobs, **ends, **own, **first}

    def _echo(self, prompt: int, ids: list[int], logprobs: CompletionLogprobs) -> Iterator[Json]:
        """Yield the text of an echoed prompt, if requested, and its logprobs in pieces."""
        if not self._echoes:
            return
        echo = self._echoes[prompt]
        if self._options.n_top is None:
            yield {"text": echo.text}
            return
        given = self._echoed[prompt]
        step = tokens_per_chunk(given, ECHO_TOKENS)
        for at in range(0, len(ids), step):
            until = at + step
            n_top = self._options.n_echo_top
            made = logprobs.delta(ids[at:until], given[at:until], n_top, echo.first_token)
            yield {"text": "" if at else echo.text, "logprobs": made}
        first = prompt * self._options.n
        if all(index in self._logprobs for index in range(first, first + self._options.n)):
            del self._echoed[prompt]

    def closing(self) -> list[Json]:
        """Return the usage chunk, which has no choices, if requested."""
        return self._chunk_builder.closing()

    def error_chunks(self, error: ApiError) -> list[Json]:
        """Return OpenAI's error object."""
        return [error.body()]

    def collect(self, chunk: Json) -> int:
        """Add a chunk to the object; return by how many bytes it has grown."""
        if "prompt" in chunk:  # each choice of the prompt repeats them
            made = self._prompt_logprobs.setdefault(chunk["prompt"], JsonList())
            return made.extend(chunk["prompt_logprobs"]) * self._options.n
        (choice,) = chunk["choices"]
        index, n_bytes = choice["index"], 0
        if index not in self._collected:
            self._collected[index] = TextChoiceBuilder(index)
            n_bytes += CHOICE_BYTES
        if "prompt_token_ids" in choice:
            made = self._prompt_ids.setdefault(index // self._options.n, JsonList())
            n_bytes += len(made.data) or made.extend(choice["prompt_token_ids"])
        return n_bytes + self._collected[index].add(choice)

    def parts(self) -> list[Part]:
        """Return the object, choices in the order of their prompts."""
        choices = [
            self._collected[index].parts(self._prompt_fields(index)) for index in sorted(self._collected)
        ]
        begin, end = (
            to_json(self.meta.fields("text_completion"))[:-1],
            to_json({"usage": self.usage.body(), **VLLM_NULLS, "metrics": self._chunk_builder.metrics()})[1:],
        )
        return [begin, b',"choices":[', *join_parts(choices), b"],", end]

    def _prompt_fields(self, index: int) -> dict[str, JsonList | None]:
        """Return the fields of a choice that describe its prompt."""
        prompt, options = index // self._options.n, self._options
        return {
            "prompt_token_ids": self._prompt_ids.get(prompt) if options.token_ids else None,
            "prompt_logprobs": self._prompt_logprobs.get(prompt) if options.prompt_logprobs else None,
        }
