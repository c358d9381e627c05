"""POST /v1/embeddings: texts or token ids in, one vector of length 1 for each out."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, cast

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from llaisys.errors import RejectedError, UnsupportedError
from llaisys.server.answer import Answer, Json
from llaisys.server.answers import EmbeddingList
from llaisys.server.bodies import EmbeddingRequest
from llaisys.server.body import BodyRoute
from llaisys.server.completions import Prompt, prompts_of
from llaisys.server.errors import error_answers, to_json
from llaisys.server.estimate import check_embeddings_size
from llaisys.server.head import Head
from llaisys.server.keys import engine_id
from llaisys.server.pieces import Part
from llaisys.server.protocol import EMBEDDING_NEUTRAL, engine_options
from llaisys.server.state import engine_of, served_name, state_of
from llaisys.server.trace import client_id_of
from llaisys.server.usage import Usage
from llaisys.server.whole import between
from llaisys.service import AsyncLLM
from llaisys.types import RequestOutput, SamplingParams

INPUTS_MAX = 2048
# Inputs of one HTTP request that are in the engine at the same time: it must not fill the queue alone.
INPUTS_AT_ONCE = 32

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/embeddings", response_model=EmbeddingList, responses=error_answers(404))
async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """The embedding of each input, in their order, as numbers or as base64 of little-endian float32."""
    engine, headers = engine_of(request, body, EMBEDDING_NEUTRAL)
    shape = EmbeddingShape(served_name(engine, body.model), as_base64=_is_base64(body.encoding_format))
    _check_dimensions(body.dimensions, engine.model_info.d_model)
    params = SamplingParams(truncate_prompt_tokens=body.truncate_prompt_tokens)
    client_id = client_id_of(request)
    told = {
        **engine_options(body, client_id, state_of(request).config.prefix_cache_sharing),
        "add_special_tokens": body.add_special_tokens is not False,
        "pooling": engine.pooling,
    }
    inputs = _inputs_of(body.input)
    n_most, d_model = state_of(request).response_bytes.n_most, engine.model_info.d_model
    check_embeddings_size(n_most, len(inputs), d_model, as_base64=shape.as_base64)
    head = Head.new("embd", shape.model, body.request_id)
    gate = asyncio.Semaphore(min(INPUTS_AT_ONCE, engine.config.max_num_seqs))
    streams = [
        _embed(engine, gate, (each, params, engine_id(client_id, f"{head.id}-{index}")), told)
        for index, each in enumerate(inputs)
    ]
    return Answer(request, streams, shape, headers)


async def _embed(
    engine: AsyncLLM, gate: asyncio.Semaphore, asked: tuple[Prompt, SamplingParams, str], told: dict[str, Any]
) -> AsyncIterator[RequestOutput]:
    """One input's stream of one delta, begun when the gate lets it in."""
    async with gate:
        stream = cast("Any", engine.generate(*asked, **told))
        try:
            async with aclosing(stream) as deltas:
                async for delta in deltas:
                    yield delta
        except RejectedError as e:
            raise _of_input(e) from e


def _inputs_of(given: str | list[Any]) -> list[Prompt]:
    """The four forms of `input`. Raises RejectedError naming the entry."""
    try:
        return prompts_of(given, INPUTS_MAX)
    except RejectedError as e:
        raise _of_input(e) from e


def _of_input(error: RejectedError) -> RejectedError:
    """What is wrong with a prompt, in this endpoint's word for it."""
    if error.param == "request_id":  # the text has the engine's name of the request
        return RejectedError("an open request has this request_id", param="request_id")
    if error.param is None or not error.param.startswith("prompt"):
        return error
    return type(error)(str(error).replace("prompt", "input", 1), param="input" + error.param[len("prompt") :])


def _is_base64(encoding_format: str | None) -> bool:
    if encoding_format not in (None, "float", "base64"):
        raise RejectedError(
            f"encoding_format is {encoding_format[:40]!r}, allowed are float and base64",
            param="encoding_format",
        )
    return encoding_format == "base64"


def _check_dimensions(wanted: int | None, d_model: int) -> None:
    """A vector cannot be cut: no model tells us that it was trained for that."""
    if wanted is not None and wanted != d_model:
        raise UnsupportedError(
            f"dimensions is {wanted}: only {d_model}, the model's own, is served", param="dimensions"
        )


class EmbeddingShape:
    """OpenAI's list of `embedding` objects. Each is made JSON when it arrives, so that a long list does not
    hold the event loop up at its end."""

    def __init__(self, model: str, *, as_base64: bool) -> None:
        self.model = model
        self.usage = Usage()
        self.as_base64 = as_base64
        self._data: dict[int, bytes] = {}

    def opening(self) -> list[Json]:
        """Nothing comes before the first vector."""
        return []

    def chunks(self, index: int, delta: RequestOutput) -> list[Json]:
        """One object."""
        vector = delta.embedding or b""
        if self.as_base64:
            value: Any = base64.b64encode(vector).decode("ascii")
        else:
            value = struct.unpack(f"<{len(vector) // 4}f", vector)
        return [
            {"index": index, "json": to_json({"object": "embedding", "index": index, "embedding": value})}
        ]

    def closing(self) -> list[Json]:
        """Nothing comes after the last."""
        return []

    def collect(self, chunk: Json) -> int:
        """Adds an object to the list; returns the bytes that it has grown by."""
        self._data[chunk["index"]] = chunk["json"]
        return len(chunk["json"])

    def parts(self) -> list[Part]:
        """The list, in the order of the inputs."""
        data = between([[self._data[index]] for index in sorted(self._data)])
        usage = {"prompt_tokens": self.usage.prompt_tokens, "total_tokens": self.usage.prompt_tokens}
        rest = to_json({"model": self.model, "usage": usage})
        return [b'{"object":"list","data":[', *data, b"],", rest[1:]]
