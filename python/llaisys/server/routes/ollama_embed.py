"""POST /api/embed and /api/embeddings: Ollama's API, a view of an embedding request."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from llaisys.async_llm import AsyncLLM
from llaisys.sampling_params import SamplingParams
from llaisys.server.http_errors import to_json
from llaisys.server.ollama.schemas import (
    OllamaEmbedAnswer,
    OllamaEmbeddingsAnswer,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
)
from llaisys.server.protocol import OllamaRoute, field_names, text_of
from llaisys.server.request_schemas import EmbeddingRequest
from llaisys.server.response_body import Part, join_parts
from llaisys.server.routes.completions import prompts_of
from llaisys.server.routes.embeddings import INPUTS_MAX, EmbeddingListBuilder, embedding_response
from llaisys.server.routes.ollama import OLLAMA_ERRORS, model_of, to_ns, untagged

router = APIRouter(route_class=OllamaRoute)


@router.post("/api/embed", response_model=OllamaEmbedAnswer, responses=OLLAMA_ERRORS)
async def embed(body: OllamaEmbedRequest, request: Request) -> Response:
    """Compute the embedding of each input."""
    engine, name, headers = model_of(request, body)
    with field_names({"prompt": "input"}):
        inputs = prompts_of(body.input, INPUTS_MAX)
    options = _options(engine, name, truncates=body.truncate is not False, dimensions=body.dimensions)
    builder = OllamaEmbedBuilder(name, request.state.started_s)
    return embedding_response(request, engine, options, inputs, builder, headers)


@router.post("/api/embeddings", response_model=OllamaEmbeddingsAnswer, responses=OLLAMA_ERRORS)
async def embeddings(body: OllamaEmbeddingsRequest, request: Request) -> Response:
    """Compute the embedding of one prompt."""
    engine, name, headers = model_of(request, body)
    inputs = [text_of("prompt", body.prompt)]
    options = _options(engine, name, truncates=True)
    return embedding_response(request, engine, options, inputs, OllamaEmbeddingsBuilder(name), headers)


def _options(
    engine: AsyncLLM, name: str, *, truncates: bool, dimensions: int | None = None
) -> EmbeddingRequest:
    """Return the options of an embedding request. Ollama keeps the beginning of an input that is too long."""
    n_tokens = engine.max_prompt_tokens(SamplingParams()) or engine.max_model_len
    return EmbeddingRequest.model_construct(
        model=untagged(engine, name),
        dimensions=dimensions,
        truncate_prompt_tokens=n_tokens if truncates else None,
        truncation_side="right",
    )


class OllamaEmbedBuilder(EmbeddingListBuilder):
    """Builds the response of /api/embed: a list of vectors, and a duration in nanoseconds."""

    def __init__(self, name: str, started_s: float) -> None:
        """`name`: the model's name as the client sent it. `started_s`: `time.monotonic` seconds."""
        super().__init__(name, as_base64=False)
        self._started_s = started_s

    def item(self, index: int, value: Any) -> Any:  # noqa: ARG002 -- the position is the index
        """Return the vector."""
        return value

    def parts(self) -> list[Part]:
        """Return the object, vectors in the order of the inputs."""
        vectors = join_parts([[self.data[index]] for index in sorted(self.data)])
        end = {
            "total_duration": to_ns(time.monotonic() - self._started_s),
            "load_duration": 0,
            "prompt_eval_count": self.usage.prompt_tokens,
        }
        head = to_json({"model": self.model})[:-1]
        return [head, b',"embeddings":[', *vectors, b"],", to_json(end)[1:]]


class OllamaEmbeddingsBuilder(EmbeddingListBuilder):
    """Builds the response of /api/embeddings: one vector."""

    def __init__(self, name: str) -> None:
        """`name`: the model's name."""
        super().__init__(name, as_base64=False)

    def item(self, index: int, value: Any) -> Any:  # noqa: ARG002 -- there is one vector
        """Return the vector."""
        return value

    def parts(self) -> list[Part]:
        """Return the object."""
        return [b'{"embedding":', self.data[0], b"}"]
