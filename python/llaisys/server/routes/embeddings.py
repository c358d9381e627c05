"""POST /v1/embeddings: computes one vector for each text or list of token ids."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, cast

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from llaisys.async_llm import AsyncLLM
from llaisys.errors import RejectedError, UnsupportedError
from llaisys.outputs import RequestOutput
from llaisys.sampling_params import SamplingParams
from llaisys.server.access_log import client_id_of
from llaisys.server.chat import prompt_of
from llaisys.server.completion_builder import CompletionMeta, Usage, check_embeddings_size
from llaisys.server.fields import EMBEDDING_NEUTRAL
from llaisys.server.http_errors import ApiError, error_responses, to_json
from llaisys.server.protocol import BodyRoute, engine_id, engine_of, engine_options, field_names, served_name
from llaisys.server.request_schemas import EmbeddingRequest
from llaisys.server.response_body import Json, Part, join_parts
from llaisys.server.response_schemas import EmbeddingList
from llaisys.server.routes.completions import Prompt, prompts_of
from llaisys.server.state import state_of
from llaisys.server.stream_writer import DATA_EVENTS
from llaisys.server.streaming import CompletionResponse

INPUTS_MAX = 2048
# Maximum inputs of one HTTP request in the engine at a time, so that one request does not fill the queue.
CONCURRENT_INPUTS_MAX = 32

# The engine's name of an input -> the field of this route.
_NAMES = {"prompt": "input"}

router = APIRouter(route_class=BodyRoute)


@router.post("/embeddings", include_in_schema=False)
@router.post("/v1/embeddings", response_model=EmbeddingList, responses=error_responses(404))
async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """Compute the embedding of each input, as numbers or as base64 of little-endian float32."""
    engine, headers = engine_of(request, body, EMBEDDING_NEUTRAL)
    builder = EmbeddingListBuilder(
        served_name(engine, body.model), as_base64=_is_base64(body.encoding_format)
    )
    return embedding_response(request, engine, body, await _inputs_of(body, engine), builder, headers)


def embedding_response(
    request: Request,
    engine: AsyncLLM,
    body: EmbeddingRequest,
    inputs: Sequence[Prompt],
    builder: EmbeddingListBuilder,
    headers: Mapping[str, str],
) -> Response:
    """Return the response that computes the embedding of each input and writes them with `builder`.

    `body`: has the options; its `input` is not read. Raises RejectedError or UnsupportedError naming a field
    of it.
    """
    _check_dimensions(body.dimensions, engine.model_info.d_model)
    side = {} if body.truncation_side is None else {"truncation_side": body.truncation_side}
    params = SamplingParams(truncate_prompt_tokens=body.truncate_prompt_tokens, **cast("Any", side))
    client_id = client_id_of(request)
    engine_kwargs = {
        **engine_options(body, client_id, engine, state_of(request).config.prefix_cache_sharing),
        "add_special_tokens": body.add_special_tokens is not False,
        "pooling": engine.pooling,
        "normalize": engine.normalizes if body.normalize is None else body.normalize,
    }
    bytes_max, d_model = state_of(request).response_bytes.bytes_max, engine.model_info.d_model
    check_embeddings_size(bytes_max, len(inputs), d_model, as_base64=builder.as_base64)
    meta = CompletionMeta.new("embd-", builder.model, body.request_id)
    semaphore = asyncio.Semaphore(min(CONCURRENT_INPUTS_MAX, engine.config.max_num_seqs))
    streams = [
        pooled_delta(
            semaphore,
            engine.generate(each, params, engine_id(client_id, f"{meta.id}-{index}"), **engine_kwargs),
        )
        for index, each in enumerate(inputs)
    ]
    return CompletionResponse(request, streams, builder, headers)


async def _inputs_of(body: EmbeddingRequest, engine: AsyncLLM) -> list[Prompt]:
    """Return the inputs, or the rendered chat as the only one. A chat has no generation prompt by default."""
    if (body.input is None) == (body.messages is None):
        raise RejectedError("send either input or messages", param="input")
    if body.messages is None:
        with field_names(_NAMES):
            return prompts_of(body.input or [], INPUTS_MAX)
    chat = body.model_copy(update={"add_generation_prompt": bool(body.add_generation_prompt)})
    return [await prompt_of(chat, body.messages, engine, tools=None)]


async def pooled_delta(
    semaphore: asyncio.Semaphore, stream: AsyncIterator[RequestOutput], param: str = "input"
) -> AsyncIterator[RequestOutput]:
    """Yield the single delta of an input, after acquiring the semaphore; `stream` has not begun.

    `param`: the field of the input, for errors.
    """
    async with semaphore:
        try:
            with field_names({"prompt": param}):
                async with aclosing(cast("Any", stream)) as deltas:
                    async for delta in deltas:
                        yield delta
        except RejectedError as e:
            if e.param != "request_id":
                raise
            # The message has the engine's id of the request.
            raise RejectedError("this request_id is in use", param="request_id") from e


def _is_base64(encoding_format: str | None) -> bool:
    if encoding_format not in (None, "float", "base64"):
        raise RejectedError(
            f"encoding_format is {encoding_format[:40]!r}, allowed are float and base64",
            param="encoding_format",
        )
    return encoding_format == "base64"


def _check_dimensions(wanted: int | None, d_model: int) -> None:
    """Raise UnsupportedError unless the dimensions are the model's; models do not state if truncation
    works."""
    if wanted is not None and wanted != d_model:
        raise UnsupportedError(
            f"dimensions is {wanted}, supported is only {d_model}, the size of the model", param="dimensions"
        )


class EmbeddingListBuilder:
    """Builds OpenAI's list of `embedding` objects.

    Each object is serialized when it arrives, so that a long list does not block the event loop.
    """

    stream_format = DATA_EVENTS

    def __init__(self, model: str, *, as_base64: bool) -> None:
        self.model = model
        self.usage = Usage()
        self.finish_reasons: set[str] = set()
        self.as_base64 = as_base64
        self.data: dict[int, bytes] = {}

    def opening(self) -> list[Json]:
        """Return no chunks."""
        return []

    def chunks(self, index: int, delta: RequestOutput) -> list[Json]:
        """Return one `embedding` object."""
        vector = delta.embedding or b""
        if self.as_base64:
            value: Any = base64.b64encode(vector).decode("ascii")
        else:
            value = struct.unpack(f"<{len(vector) // 4}f", vector)
        return [{"index": index, "json": to_json(self.item(index, value))}]

    def item(self, index: int, value: Any) -> Any:
        """Return the object of one input. `value`: its numbers, or their text in base64."""
        return {"object": "embedding", "index": index, "embedding": value}

    def closing(self) -> list[Json]:
        """Return no chunks."""
        return []

    def error_chunks(self, error: ApiError) -> list[Json]:
        """Return OpenAI's error object."""
        return [error.body()]

    def collect(self, chunk: Json) -> int:
        """Add an object to the list; return by how many bytes it has grown."""
        self.data[chunk["index"]] = chunk["json"]
        return len(chunk["json"])

    def parts(self) -> list[Part]:
        """Return the list, in the order of the inputs."""
        data = join_parts([[self.data[index]] for index in sorted(self.data)])
        usage = {"prompt_tokens": self.usage.prompt_tokens, "total_tokens": self.usage.prompt_tokens}
        rest = to_json({"model": self.model, "usage": usage})
        return [b'{"object":"list","data":[', *data, b"],", rest[1:]]
