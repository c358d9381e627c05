"""CompletionBuilder: the protocol and shared parts of builders of completion objects.

These are ids and times, usage, log probabilities and size estimates.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from llaisys.errors import RejectedError
from llaisys.outputs import Logprob, RequestOutput, RequestStateStats
from llaisys.sampling_params import SamplingParams
from llaisys.server.access_log import REQUEST_ID_MAX, clean_request_id
from llaisys.server.http_errors import ApiError
from llaisys.server.protocol import ResponseOptions
from llaisys.server.response_body import Json, Part
from llaisys.server.stream_writer import StreamFormat

# vLLM's value for the logprob of an impossible token, because JSON has no infinity.
LOGPROB_MIN = -9999.0
# Tokens of an echoed prompt with logprobs in one chunk, usually up to 64 KiB of JSON.
ECHO_TOKENS = 64

# The size of a response is estimated before its request is admitted. The estimate includes what is certain:
# the prompt's part, and tokens that the request requires (`min_tokens`, with `ignore_eos` also `max_tokens`).
# All other tokens are counted during generation (`ResponseBytes`), because most responses end long before
# their bound. The constants are bytes of JSON for a token of 4 characters and a logprob of 18 digits.
TEXT_BYTES = 4
ID_BYTES = 6
# `" the":-12.345678329467773,`; and the name, logprob and offset of each token.
CANDIDATE_BYTES, TOKEN_BYTES = 27, 35
# `{"token":" the","logprob":-12.345678329467773,"bytes":[32,116,104,101]},`
CHAT_CANDIDATE_BYTES, CHAT_TOKEN_BYTES = 72, 19
# `"12345":{"logprob":-12.345678329467773,"rank":12345,"decoded_token":" the"},`
PROMPT_CANDIDATE_BYTES = 77
FLOAT_BYTES, BASE64_FLOAT_BYTES = 21, 16 / 3

# The fields of vLLM's `metrics`.
METRICS = (
    "time_to_first_token_ms",
    "generation_time_ms",
    "queue_time_ms",
    "mean_itl_ms",
    "tokens_per_second",
)


class CompletionBuilder(Protocol):
    """Builds the response of an endpoint from the deltas of a generation: chunks of a stream, or one object.

    - `stream_format`: how the chunks of a stream become bytes.
    - `usage`: updated by CompletionResponse; a builder only reads it.
    - `finish_reasons`: of all choices that have ended, for the log.
    """

    stream_format: StreamFormat
    usage: Usage
    finish_reasons: set[str]

    def opening(self) -> Iterable[Json]:
        """Return the chunks before the first token. A stream reads them when it begins."""

    def chunks(self, index: int, delta: RequestOutput) -> Iterable[Json]:
        """Yield the chunks of one delta of the prompt `index`, including finish reasons. Lazy; no chunk is
        large."""

    def closing(self) -> list[Json]:
        """Return the chunks after the last token of all choices."""

    def error_chunks(self, error: ApiError) -> list[Json]:
        """Return the last chunks of a stream that has begun and that an error ends."""

    def collect(self, chunk: Json) -> int:
        """Add a chunk to the object of an unstreamed response; return by how many bytes it has grown."""

    def parts(self) -> list[Part]:
        """Return the object of an unstreamed response, as JSON in pieces of any size."""


@dataclass(frozen=True, slots=True)
class CompletionMeta:
    """The first fields of every object of one response. `created_s`: Unix time."""

    id: str
    model: str
    created_s: int
    system_fingerprint: str

    @staticmethod
    def new(
        prefix: str, model: str, request_id: str | None = None, system_fingerprint: str = ""
    ) -> CompletionMeta:
        """Return metadata with the id `<prefix><hex>`, or `<prefix><request_id>` if the client sent one.

        Raises RejectedError for a `request_id` that is not safe in logs and URLs.
        """
        if request_id and (len(request_id) > REQUEST_ID_MAX or clean_request_id(request_id) != request_id):
            raise RejectedError(
                f"request_id must have 1 to {REQUEST_ID_MAX} letters, digits, '-', '_' or '.'",
                param="request_id",
            )
        id = f"{prefix}{request_id or uuid.uuid4().hex}"
        return CompletionMeta(id, model, int(time.time()), system_fingerprint)

    def fields(self, kind: str) -> dict[str, Any]:
        """Return the first fields of an object of this kind."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


class Usage:
    """The `usage` object: tokens of all prompts and completions of one HTTP request.

    Tokens of a cached prefix count as prompt tokens and as `cached_tokens`. `has_prediction`: report how many
    tokens of the prediction became output.
    """

    def __init__(self, *, has_prediction: bool = False) -> None:
        self._has_prediction = has_prediction
        # Accepted and rejected tokens of the prediction, by prompt and choice.
        self._predicted: dict[tuple[int, int], tuple[int, int]] = {}
        self._prompt_tokens: dict[int, int] = {}
        self._cached_tokens: dict[int, int] = {}
        self._stats: RequestStateStats | None = None
        self.completion_tokens = 0

    def set_prompt_tokens(self, index: int, n_tokens: int) -> None:
        """Set the length of a prompt before its first delta."""
        self._prompt_tokens[index] = n_tokens

    def add(self, index: int, delta: RequestOutput) -> None:
        """Count one delta."""
        self._prompt_tokens[index] = len(delta.prompt_token_ids)
        # Only the first delta of a prompt has this number.
        self._cached_tokens[index] = self._cached_tokens.get(index, 0) or delta.num_cached_tokens
        self.completion_tokens += sum(len(output.token_ids) for output in delta.outputs)
        self._stats = delta.metrics
        if self._has_prediction:
            for output in delta.outputs:
                new = (output.num_accepted_prediction_tokens, output.num_rejected_prediction_tokens)
                key = index, output.index
                self._predicted[key] = max(self._predicted.get(key, new), new, key=sum)

    @property
    def prompt_tokens(self) -> int:
        """Return the tokens of all prompts."""
        return sum(self._prompt_tokens.values())

    @property
    def cached_tokens(self) -> int:
        """Return the prompt tokens that came from the prefix cache."""
        return sum(self._cached_tokens.values())

    def metrics(self) -> Json:
        """Return vLLM's `metrics` of the only choice of the only prompt; all are null without a token."""
        stats = self._stats
        if stats is None or not stats.num_generation_tokens:
            return dict.fromkeys(METRICS)
        n_tokens = stats.num_generation_tokens
        decode_s, inference_s = (
            stats.last_token_ts - each for each in (stats.first_token_ts, stats.scheduled_ts)
        )
        values = (
            1e3 * (stats.first_token_ts - stats.scheduled_ts),
            1e3 * decode_s,
            1e3 * (stats.scheduled_ts - stats.queued_ts),
            1e3 * decode_s / (n_tokens - 1) if n_tokens > 1 else None,
            n_tokens / inference_s if inference_s > 0 else None,
        )
        return dict(zip(METRICS, values, strict=True))

    def body(self) -> dict[str, Any]:
        """Return OpenAI's object."""
        body: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self._has_prediction:
            accepted, rejected = (sum(each) for each in zip((0, 0), *self._predicted.values(), strict=True))
            body["completion_tokens_details"] = {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": rejected,
            }
        return body


def chat_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[Mapping[int, Logprob]],
    n_top: int,
    *,
    ids_as_tokens: bool = False,
) -> dict[str, Any]:
    """Return `{"content": [...]}`: one entry for each token, with its `n_top` best candidates."""

    def entry(token_id: int, candidate: Logprob) -> dict[str, Any]:
        # `bytes` is null for a part of a character, because its text U+FFFD does not have the token's bytes.
        token = _name(token_id, candidate, ids_as_tokens=ids_as_tokens)
        raw = None if "\ufffd" in token else list(token.encode())
        return {"token": token, "logprob": _finite(candidate.logprob), "bytes": raw}

    return {
        "content": [
            {
                **entry(token_id, candidates[token_id]),
                "top_logprobs": [entry(*best) for best in _best(candidates, n_top)],
            }
            for token_id, candidates in zip(token_ids, logprobs, strict=True)
        ]
    }


def prompt_logprobs(logprobs: Sequence[Mapping[int, Logprob] | None]) -> list[dict[str, Any] | None]:
    """Return prompt logprobs in vLLM's format: null for the first token, then one map per token.

    A map is token id -> `{"logprob", "rank", "decoded_token"}`.
    """
    return [
        None
        if candidates is None
        else {
            str(token_id): {
                "logprob": _finite(candidate.logprob),
                "rank": candidate.rank,
                "decoded_token": candidate.decoded_token,
            }
            for token_id, candidate in candidates.items()
        }
        for candidates in logprobs
    ]


@dataclass(frozen=True, slots=True)
class ChunkBuilder:
    """Builds the chunk objects of a stream. `kind`: their `object`, such as `chat.completion.chunk`."""

    meta: CompletionMeta
    kind: str
    usage: Usage
    options: ResponseOptions

    def chunk(self, choice: Json) -> Json:
        """Return the chunk of one choice.

        `usage` is null if it is sent at the end, and set if it is sent in every chunk.
        """
        chunk = {**self.meta.fields(self.kind), "choices": [choice]}
        if self.options.usage.in_every_chunk:
            chunk["usage"] = self.usage.body()
        elif self.options.usage.at_end:
            chunk["usage"] = None
        return chunk

    def closing(self) -> list[Json]:
        """Return the usage chunk, which has no choices, if requested, with the metrics if there are any."""
        if not self.options.usage.at_end:
            return []
        chunk = {**self.meta.fields(self.kind), "choices": [], "usage": self.usage.body()}
        return [{**chunk, "metrics": metrics} if (metrics := self.metrics()) else chunk]

    def metrics(self) -> Json | None:
        """Return the times of the request if the server reports them and it has one choice."""
        return self.usage.metrics() if self.options.metrics else None


class CompletionLogprobs:
    """`{"tokens", "token_logprobs", "top_logprobs", "text_offset"}` of one choice, delta by delta.

    `text_offset` counts the characters of all previous tokens, including those of an echoed prompt.
    """

    def __init__(self, *, ids_as_tokens: bool = False) -> None:
        self._ids_as_tokens = ids_as_tokens
        self._offset = 0

    def delta(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[Mapping[int, Logprob] | None],
        n_top: int,
        first: str = "",
    ) -> dict[str, Any]:
        """Return the object of one delta. The lists of all deltas concatenated are the whole object.

        `n_top`: number of best candidates of each token, to which its own is added. `first`: the text of a
        prompt's first token, which has no logprobs.
        """
        out: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, candidates in zip(token_ids, logprobs, strict=True):
            if candidates is None:
                text = first
                token = _name(token_id, Logprob(0.0, None, first), ids_as_tokens=self._ids_as_tokens)
                logprob = top = None
            else:
                chosen = candidates[token_id]
                text = chosen.decoded_token or ""
                token = _name(token_id, chosen, ids_as_tokens=self._ids_as_tokens)
                logprob = _finite(chosen.logprob)
                best = [*_best(candidates, n_top), (token_id, chosen)]
                top = {
                    _name(*each, ids_as_tokens=self._ids_as_tokens): _finite(each[1].logprob) for each in best
                }
            out["tokens"].append(token)
            out["token_logprobs"].append(logprob)
            out["top_logprobs"].append(top)
            out["text_offset"].append(self._offset)
            self._offset += len(text)
        return out


def _best(candidates: Mapping[int, Logprob], n_top: int) -> list[tuple[int, Logprob]]:
    """Return the `n_top` best candidates, best first. The sampled token may not be among them."""
    return sorted(candidates.items(), key=lambda item: -item[1].logprob)[:n_top]


def _name(token_id: int, candidate: Logprob, *, ids_as_tokens: bool) -> str:
    """Return the token's text, or its id in vLLM's format."""
    return f"token_id:{token_id}" if ids_as_tokens else candidate.decoded_token or ""


def _finite(logprob: float) -> float:
    return max(logprob, LOGPROB_MIN)


def check_response_size(
    bytes_max: int,
    n_tokens: Sequence[int],
    params: SamplingParams,
    options: ResponseOptions,
    *,
    is_chat: bool,
) -> None:
    """Raise RejectedError if a response would have more than `bytes_max` bytes.

    `n_tokens`: tokens of each prompt; 0 for a prompt that the response does not repeat. For a stream, only
    the prompt's part counts, because it is sent at once.
    """
    n_top = options.n_top
    if n_top is None:
        each = 0
    elif is_chat:
        each = CHAT_TOKEN_BYTES + CHAT_CANDIDATE_BYTES * (n_top + 1)
    else:
        each = TOKEN_BYTES + CANDIDATE_BYTES * (n_top + 1)
    ids = ID_BYTES if options.token_ids else 0
    echoed = TEXT_BYTES + (0 if is_chat else each) if options.echo else 0
    scored = PROMPT_CANDIDATE_BYTES * ((params.prompt_logprobs or 0) + 1) if options.prompt_logprobs else 0
    n_copies = 1 if is_chat else params.n  # each choice of a completion repeats them
    n_bytes = sum(n_tokens) * (params.n * echoed + n_copies * (scored + ids))
    if not options.stream:
        n_certain = (params.max_tokens or 0) if params.ignore_eos else params.min_tokens
        n_bytes += n_certain * params.n * len(n_tokens) * (TEXT_BYTES + each + ids)
    if n_bytes > bytes_max:
        of_prompt = params.prompt_logprobs if options.prompt_logprobs else None
        given = {"n": params.n, "logprobs": n_top, "prompt_logprobs": of_prompt}
        shown = ", ".join(f"{name} {value}" for name, value in given.items() if value is not None)
        raise RejectedError(
            f"the response would have about {n_bytes} bytes ({len(n_tokens)} prompts, {sum(n_tokens)} tokens"
            f", {shown}), max_response_bytes allows {bytes_max}: send fewer prompts in one request, "
            "or request fewer choices, tokens or logprobs",
            param="n" if n_top is None and not scored else "prompt_logprobs" if scored else "logprobs",
        )


def check_embeddings_size(bytes_max: int, n_inputs: int, d_model: int, *, as_base64: bool) -> None:
    """Raise RejectedError if a list of embeddings would have more than `bytes_max` bytes."""
    n_bytes = int(n_inputs * d_model * (BASE64_FLOAT_BYTES if as_base64 else FLOAT_BYTES))
    if n_bytes > bytes_max:
        raise RejectedError(
            f"the response would have about {n_bytes} bytes ({n_inputs} vectors of {d_model} numbers), "
            f"max_response_bytes allows {bytes_max}: send fewer inputs in one request"
            + ("" if as_base64 else ", or encoding_format base64"),
            param="input",
        )
