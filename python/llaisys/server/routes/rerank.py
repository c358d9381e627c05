"""POST /v1/rerank, /v2/rerank and /score: how relevant documents are to a query."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from llaisys.async_llm import AsyncLLM
from llaisys.errors import RejectedError, UnsupportedError
from llaisys.outputs import RequestId, RequestOutput
from llaisys.sampling_params import SamplingParams
from llaisys.server.access_log import client_id_of
from llaisys.server.completion_builder import CompletionMeta
from llaisys.server.fields import RERANK_NEUTRAL, SCORE_NEUTRAL
from llaisys.server.http_errors import error_responses
from llaisys.server.protocol import BodyRoute, engine_id, engine_of, engine_options, served_name, text_of
from llaisys.server.request_schemas import PairRequest, RerankRequest, ScoreRequest
from llaisys.server.response_schemas import RerankList, ScoreList
from llaisys.server.routes.embeddings import CONCURRENT_INPUTS_MAX, INPUTS_MAX, pooled_delta
from llaisys.server.score_builder import Pairs, RerankBuilder, ScoreBuilder, ScoreListBuilder
from llaisys.server.state import state_of
from llaisys.server.streaming import CompletionResponse

# The names of the two sides of /score.
_SIDES = (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"))
# Keys of a document that is not a text.
_OTHER_CONTENT = ("image", "content", "multi_modal")

router = APIRouter(route_class=BodyRoute)


@router.post("/rerank", include_in_schema=False)
@router.post("/v1/rerank", response_model=RerankList, responses=error_responses(404))
async def rerank(body: RerankRequest, request: Request) -> Response:
    """Sort documents by their relevance to a query, as Jina, Cohere and vLLM do."""
    return _rerank(body, request, returns_documents=body.return_documents is not False)


@router.post("/v2/rerank", response_model=RerankList, responses=error_responses(404))
async def rerank_v2(body: RerankRequest, request: Request) -> Response:
    """Sort documents as `/v1/rerank`, by default without repeating them, as Cohere's version 2 does."""
    return _rerank(body, request, returns_documents=body.return_documents is True)


def _rerank(body: RerankRequest, request: Request, *, returns_documents: bool) -> Response:
    engine, headers = engine_of(request, body, RERANK_NEUTRAL)
    if body.top_n is not None and body.top_n < 0:
        raise RejectedError(f"top_n is {body.top_n}, allowed are 1 and more, or 0 for all", param="top_n")
    documents = _texts("documents", body.documents)
    pairs = Pairs([text_of("query", body.query)], documents, by_embedding=not engine.scores_pairs)
    if returns_documents:
        _check_size(state_of(request).response_bytes.bytes_max, documents)
    meta = CompletionMeta.new("rerank-", served_name(engine, body.model), body.request_id)
    builder = RerankBuilder(meta, pairs, top_n=body.top_n or None, returns_documents=returns_documents)
    return _response(request, engine, body, builder, headers, ("query", "documents"))


@router.post("/v1/score", include_in_schema=False)
@router.post("/score", response_model=ScoreList, responses=error_responses(404))
async def score(body: ScoreRequest, request: Request) -> Response:
    """Score pairs of texts, in vLLM's format."""
    engine, headers = engine_of(request, body, SCORE_NEUTRAL)
    names, left, right = _sides(body)
    if len(left) not in (1, len(right)):
        raise RejectedError(
            f"{len(left)} texts of {names[0]} cannot be paired with {len(right)} of {names[1]}: "
            "send 1 and 1, 1 and n, or n and n",
            param=names[0],
        )
    meta = CompletionMeta.new("score-", served_name(engine, body.model), body.request_id)
    builder = ScoreListBuilder(meta, Pairs(left, right, by_embedding=not engine.scores_pairs))
    return _response(request, engine, body, builder, headers, names)


def _response(
    request: Request,
    engine: AsyncLLM,
    body: PairRequest,
    builder: ScoreBuilder,
    headers: Mapping[str, str],
    names: tuple[str, str],
) -> Response:
    """Return the response that runs the engine's requests and builds an object of the scores.

    `names`: the fields of both sides, for errors.
    """
    pairs, client_id = builder.pairs, client_id_of(request)
    options = engine_options(body, client_id, engine, state_of(request).config.prefix_cache_sharing)
    semaphore = asyncio.Semaphore(min(CONCURRENT_INPUTS_MAX, engine.config.max_num_seqs))
    streams: list[AsyncIterator[RequestOutput]]
    if pairs.by_embedding:
        if body.instruction is not None:
            raise UnsupportedError(
                "instruction is only for rerankers with a prompt; this model compares embeddings",
                param="instruction",
            )
        params = SamplingParams(truncate_prompt_tokens=body.truncate_prompt_tokens)
        options |= {"pooling": engine.pooling, "normalize": True}
        texts = [(names[0], text) for text in pairs.queries] + [(names[1], text) for text in pairs.documents]
        streams = [
            pooled_delta(
                semaphore,
                engine.generate(text, params, engine_id(client_id, f"{builder.meta.id}-{index}"), **options),
                name,
            )
            for index, (name, text) in enumerate(texts)
        ]
    else:
        SamplingParams(truncate_prompt_tokens=body.truncate_prompt_tokens)  # checks the field
        if body.instruction is not None:
            text_of("instruction", body.instruction)
        streams = [
            pooled_delta(
                semaphore,
                _scored(
                    engine,
                    (pairs.queries[pairs.query_index(index)], document),
                    body,
                    engine_id(client_id, f"{builder.meta.id}-{index}"),
                    options,
                ),
                names[1],
            )
            for index, document in enumerate(pairs.documents)
        ]
    return CompletionResponse(request, streams, builder, headers)


async def _scored(
    engine: AsyncLLM,
    pair: tuple[str, str],
    body: PairRequest,
    request_id: RequestId,
    options: Mapping[str, Any],
) -> AsyncIterator[RequestOutput]:
    """Tokenize a pair, and yield the only output of its request."""
    query, document = pair
    prompt = await engine.pair_prompt(
        query, document, instruction=body.instruction, truncate_prompt_tokens=body.truncate_prompt_tokens
    )
    async for delta in engine.generate(
        prompt.ids,
        SamplingParams(),
        request_id,
        **options,
        pooling="score",
        normalize=engine.normalizes,
        second_segment=prompt.second_segment,
    ):
        yield delta


def _texts(param: str, given: Sequence[str | dict[str, Any]]) -> list[str]:
    """Return the texts of documents. Raises RejectedError or UnsupportedError naming the document."""
    if not given:
        raise RejectedError(f"{param} is empty", param=param)
    if len(given) > INPUTS_MAX:
        raise RejectedError(f"{param} has {len(given)} entries, allowed are up to {INPUTS_MAX}", param=param)
    return [_text(f"{param}[{i}]", each) for i, each in enumerate(given)]


def _text(param: str, given: str | dict[str, Any]) -> str:
    if isinstance(given, str):
        return text_of(param, given)
    for key in _OTHER_CONTENT:
        if given.get(key) is not None:
            raise UnsupportedError(f"{param}.{key} is not supported: send a text", param=f"{param}.{key}")
    if "text" not in given:
        raise RejectedError(f"{param} must be a text, or an object with a text", param=param)
    return text_of(f"{param}.text", given["text"])


def _sides(body: ScoreRequest) -> tuple[tuple[str, str], list[str], list[str]]:
    """Return the names and the texts of both sides. Raises RejectedError unless exactly one pair is sent."""
    sent = [names for names in _SIDES if any(getattr(body, name) is not None for name in names)]
    if len(sent) != 1:
        raise RejectedError(
            "send exactly one of text_1 with text_2, queries with documents, data_1 with data_2",
            param=sent[1][0] if sent else "text_1",
        )
    names = sent[0]
    sides = []
    for name in names:
        given = getattr(body, name)
        if given is None:
            raise RejectedError(f"{name} is missing", param=name)
        sides.append(_texts(name, [given] if isinstance(given, str) else given))
    return names, sides[0], sides[1]


def _check_size(bytes_max: int, documents: Sequence[str]) -> None:
    """Raise RejectedError if the documents alone are more than a response may have."""
    n_bytes = sum(map(len, documents))
    if n_bytes > bytes_max:
        raise RejectedError(
            f"the documents have {n_bytes} characters, max_response_bytes allows {bytes_max}: set "
            "return_documents to false",
            param="documents",
        )
