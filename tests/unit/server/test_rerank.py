"""POST /v1/rerank, /v2/rerank and /score on a scripted engine: forms, fields, order and rejections."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import numpy as np
import pytest

from fakes.service import Call, FakeService, pair_score
from llaisys.config import Config
from llaisys.errors import ContextLengthError, RejectedError, UnsupportedError
from llaisys.server.fields import NO_EFFECT, RERANK_NEUTRAL, SCORE_NEUTRAL
from llaisys.server.request_schemas import RerankRequest, ScoreRequest
from llaisys.server.routes.embeddings import CONCURRENT_INPUTS_MAX, INPUTS_MAX

RERANK, SCORE = "/v1/rerank", "/score"
DOCUMENTS = ["three", "one", "two", "one"]
BODY: dict[str, Any] = {"query": "q", "documents": DOCUMENTS}
JSON = {"content-type": "application/json"}
# The fields of Cohere's clients (`rerank` of `Client` and `ClientV2`), of Jina's and of vLLM's API.
CLIENTS = {
    *("model", "query", "documents", "top_n", "return_documents", "max_tokens_per_doc", "priority"),
    *("rank_fields", "max_chunks_per_doc", "return_embeddings", "truncate_prompt_tokens", "use_activation"),
    *("mm_processor_kwargs", "softmax", "activation", "request_id", "user"),
}


@pytest.fixture
def reranker(engine: FakeService) -> FakeService:
    engine.scores_pairs = True
    return engine


def wanted(documents: list[str] = DOCUMENTS, query: str = "q") -> list[tuple[int, float]]:
    scores = [pair_score(query, each) for each in documents]
    return sorted(enumerate(scores), key=lambda each: -each[1])


async def test_documents_are_sorted_by_their_score(client: httpx.AsyncClient, reranker: FakeService) -> None:
    response = await client.post(RERANK, json={**BODY, "model": "alias/of-tiny"})
    assert response.status_code == 200, response.text
    body = response.json()
    assert [(each["index"], each["relevance_score"]) for each in body["results"]] == wanted()
    assert [each["document"] for each in body["results"]] == [{"text": DOCUMENTS[i]} for i, _ in wanted()]
    n_tokens = sum(len(f"q|{each}") for each in DOCUMENTS)
    assert body["usage"] == {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    assert body["meta"] == {"tokens": {"input_tokens": n_tokens, "output_tokens": 0}}
    assert (body["model"], body["id"][:7]) == ("alias/of-tiny", "rerank-")
    assert {call.options["pooling"] for call in reranker.calls} == {"score"}


@pytest.mark.usefixtures("reranker")
@pytest.mark.parametrize(
    ("path", "more", "has_documents"),
    [
        (RERANK, {}, True),
        ("/rerank", {}, True),
        ("/v2/rerank", {}, False),
        ("/v2/rerank", {"return_documents": True}, True),
        (RERANK, {"return_documents": False}, False),
    ],
)
async def test_documents_are_repeated_if_requested(
    client: httpx.AsyncClient, path: str, more: dict[str, Any], has_documents: bool
) -> None:
    response = await client.post(path, json={**BODY, **more})
    assert response.status_code == 200, response.text
    assert ["document" in each for each in response.json()["results"]] == [has_documents] * len(DOCUMENTS)


@pytest.mark.usefixtures("reranker")
@pytest.mark.parametrize(("top_n", "n"), [(1, 1), (3, 3), (99, 4), (0, 4), (None, 4)])
async def test_top_n(client: httpx.AsyncClient, top_n: int | None, n: int) -> None:
    results = (await client.post(RERANK, json={**BODY, "top_n": top_n})).json()["results"]
    assert [each["index"] for each in results] == [index for index, _ in wanted()][:n]


@pytest.mark.usefixtures("reranker")
async def test_a_document_may_be_an_object(client: httpx.AsyncClient) -> None:
    objects = [{"text": each, "title": "ignored"} for each in DOCUMENTS]
    assert (await client.post(RERANK, json={**BODY, "documents": objects})).json()["results"] == (
        await client.post(RERANK, json=BODY)
    ).json()["results"]


async def test_a_model_of_embeddings_compares_by_cosine(
    client: httpx.AsyncClient, engine: FakeService
) -> None:
    engine.unit_vectors = True
    documents = ["ab", "ba", "zz"]
    response = await client.post(RERANK, json={"query": "ab", "documents": documents})
    assert response.status_code == 200, response.text
    vectors = [np.array(list(each.encode()), np.float64) for each in documents]
    want = [float(v @ vectors[0] / np.linalg.norm(v) / np.linalg.norm(vectors[0])) for v in vectors]
    got = {each["index"]: each["relevance_score"] for each in response.json()["results"]}
    assert [got[i] for i in range(3)] == pytest.approx(want, abs=1e-6)
    assert [call.prompt for call in engine.calls] == ["ab", *documents]
    assert {(call.options["pooling"], call.options["normalize"]) for call in engine.calls} == {("last", True)}
    instructed = await client.post(RERANK, json={**BODY, "instruction": "Find it"})
    assert (instructed.status_code, instructed.json()["error"]["param"]) == (400, "instruction")


@pytest.mark.parametrize("sides", [("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")])
@pytest.mark.parametrize(
    ("left", "right", "pairs"),
    [
        ("q", "a", [("q", "a")]),
        ("q", ["a", {"text": "b"}], [("q", "a"), ("q", "b")]),
        (["q"], ["a", "b"], [("q", "a"), ("q", "b")]),
        (["q", "r"], ["a", "b"], [("q", "a"), ("r", "b")]),
    ],
)
@pytest.mark.usefixtures("reranker")
async def test_scores_of_pairs(
    client: httpx.AsyncClient, sides: tuple[str, str], left: Any, right: Any, pairs: list[tuple[str, str]]
) -> None:
    for path in (SCORE, "/v1/score"):
        response = await client.post(path, json={sides[0]: left, sides[1]: right})
        assert response.status_code == 200, response.text
        body = response.json()
        assert body["data"] == [
            {"object": "score", "index": i, "score": pair_score(*pair)} for i, pair in enumerate(pairs)
        ]
        n_tokens = sum(len("|".join(pair)) for pair in pairs)
        assert body["usage"] == {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
        assert (body["object"], body["model"], body["id"][:6]) == ("list", "tiny", "score-")


async def test_a_long_list_keeps_its_order_and_bounds_its_open_requests(
    client: httpx.AsyncClient, reranker: FakeService
) -> None:
    documents = [f"{i}" for i in range(INPUTS_MAX)]
    response = await client.post(SCORE, json={"text_1": "q", "text_2": documents})
    assert [each["score"] for each in response.json()["data"]] == [pair_score("q", d) for d in documents]
    assert reranker.n_open_most == CONCURRENT_INPUTS_MAX
    reranker.n_open_most, reranker.config = 0, Config(max_num_seqs=3)
    await client.post(SCORE, json={"text_1": "q", "text_2": documents[:20]})
    assert reranker.n_open_most == 3


SERVED: Mapping[str, tuple[Any, Callable[[Call], Any], Any]] = {
    "model": ("alias/of-tiny", lambda call: call.options["pair"], ("q", "three")),
    "instruction": ("Find it", lambda call: call.options["instruction"], "Find it"),
    "truncate_prompt_tokens": (3, lambda call: call.prompt, list(b"q|t")),
    "priority": (-3, lambda call: call.options["priority"], -3),
    "cache_salt": ("mine", lambda call: call.options["cache_salt"], "mine"),
}
# The other tests use them.
OF_FORMS = {"query", "documents", "top_n", "return_documents", "request_id"}
OF_SIDES = {"text_1", "text_2", "queries", "documents", "data_1", "data_2", "request_id"}


def test_every_known_field_is_in_one_table() -> None:
    served = set(RerankRequest.model_fields)
    assert not CLIENTS - served - set(RERANK_NEUTRAL) - NO_EFFECT
    assert not served & set(RERANK_NEUTRAL)
    assert set(SERVED) | OF_FORMS == served
    assert set(SERVED) | OF_SIDES == set(ScoreRequest.model_fields)


@pytest.mark.parametrize("field", SERVED)
async def test_a_supported_field_takes_effect(
    client: httpx.AsyncClient, reranker: FakeService, field: str
) -> None:
    value, shows, want = SERVED[field]
    for path, body in ((RERANK, BODY), (SCORE, {"text_1": "q", "text_2": DOCUMENTS})):
        reranker.calls.clear()
        assert (await client.post(path, json={**body, field: value})).status_code == 200
        assert shows(reranker.calls[0]) == want
        assert (await client.post(path, json={**body, field: None})).status_code == 200


async def test_a_request_id_names_the_engines_requests(
    client: httpx.AsyncClient, reranker: FakeService
) -> None:
    assert (await client.post(RERANK, json={**BODY, "request_id": "my-1"})).json()["id"] == "rerank-my-1"
    assert [call.request_id for call in reranker.calls] == [f"rerank-my-1-{i}" for i in range(4)]


@pytest.mark.usefixtures("reranker")
@pytest.mark.parametrize("field", RERANK_NEUTRAL)
async def test_an_unsupported_field_is_rejected(client: httpx.AsyncClient, field: str) -> None:
    for path, body, neutral in (
        (RERANK, BODY, RERANK_NEUTRAL),
        (SCORE, {"text_1": "q", "text_2": "a"}, SCORE_NEUTRAL),
    ):
        if field in neutral:
            for value in (None, *neutral[field]):
                assert (await client.post(path, json={**body, field: value})).status_code == 200
            response = await client.post(path, json={**body, field: {"asks": "for something"}})
            assert (response.status_code, response.json()["error"]["param"]) == (400, field)


@pytest.mark.usefixtures("reranker")
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (RERANK, {"documents": ["a"]}, "query"),
        (RERANK, {"query": "q"}, "documents"),
        (RERANK, {"query": "q", "documents": []}, "documents"),
        (RERANK, {"query": "q", "documents": "a"}, "documents"),
        (RERANK, {"query": "q", "documents": ["a", 7]}, "documents"),
        (RERANK, {"query": "q", "documents": ["a", "\ud800"]}, "documents[1]"),
        (RERANK, {"query": "q", "documents": ["a", {"title": "x"}]}, "documents[1]"),
        (RERANK, {"query": "q", "documents": [{"text": 7}]}, "documents[0].text"),
        (RERANK, {"query": "q", "documents": [{"image": "data:"}]}, "documents[0].image"),
        (RERANK, {"query": "q", "documents": ["a"] * (INPUTS_MAX + 1)}, "documents"),
        (RERANK, {"query": "\ud800", "documents": ["a"]}, "query"),
        (RERANK, {**BODY, "top_n": -1}, "top_n"),
        (RERANK, {**BODY, "top_n": "1"}, "top_n"),
        (RERANK, {**BODY, "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        (RERANK, {**BODY, "instruction": "\ud800"}, "instruction"),
        (RERANK, {**BODY, "priority": 2**31}, "priority"),
        (RERANK, {**BODY, "request_id": "a b"}, "request_id"),
        (SCORE, {}, "text_1"),
        (SCORE, {"text_1": "q"}, "text_2"),
        (SCORE, {"text_1": "q", "text_2": "a", "data_1": "q"}, "data_1"),
        (SCORE, {"text_1": ["q", "r"], "text_2": ["a"]}, "text_1"),
        (SCORE, {"text_1": "q", "text_2": []}, "text_2"),
        (SCORE, {"text_1": 7, "text_2": "a"}, "text_1"),
    ],
)
async def test_an_invalid_value_is_rejected_by_name(
    client: httpx.AsyncClient, engine: FakeService, path: str, body: dict[str, Any], param: str
) -> None:
    response = await client.post(path, content=json.dumps(body), headers=JSON)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert not engine.calls


async def test_an_engine_rejection_names_the_documents(
    client: httpx.AsyncClient, reranker: FakeService
) -> None:
    reranker.embedding_error = ContextLengthError("the prompt has 9 tokens, the context is 8", param="prompt")
    error = (await client.post(RERANK, json=BODY)).json()["error"]
    assert error["message"] == "the documents has 9 tokens, the context is 8"
    assert (error["param"], error["code"]) == ("documents", "context_length_exceeded")
    reranker.embedding_error = RejectedError("request id 'x' is in use", param="request_id")
    assert (await client.post(SCORE, json={"text_1": "q", "text_2": "a"})).json()["error"][
        "param"
    ] == "request_id"
    assert all(call.ended for call in reranker.calls)


async def test_a_model_that_pools_otherwise_is_rejected(
    client: httpx.AsyncClient, engine: FakeService
) -> None:
    engine.embedding_error = UnsupportedError("tiny pools embeddings with Dense")
    response = await client.post(RERANK, json=BODY)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "unsupported_value")
    assert not engine.calls


async def test_documents_that_exceed_the_response_are_rejected(
    make_client: Callable[..., httpx.AsyncClient], state: Any, reranker: FakeService
) -> None:
    state.response_bytes.bytes_max = 100
    async with make_client(state) as client:
        body = {"query": "q", "documents": ["a" * 101]}
        response = await client.post(RERANK, json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "documents")
        assert "return_documents" in response.json()["error"]["message"]
        assert not reranker.calls
        assert (await client.post("/v2/rerank", json=body)).status_code == 200


async def test_a_client_that_is_gone_cancels_every_request(
    make_client: Callable[..., httpx.AsyncClient], state: Any, reranker: FakeService
) -> None:
    reranker.pair_gate = asyncio.Event()
    async with make_client(state) as client:
        open_one = asyncio.ensure_future(client.post(RERANK, json=BODY))
        await reranker.until_calls(len(DOCUMENTS))
        open_one.cancel()
        await asyncio.gather(open_one, return_exceptions=True)
    assert [call.ended for call in reranker.calls] == [True] * len(DOCUMENTS)


async def test_unknown_fields_and_models(client: httpx.AsyncClient) -> None:
    response = await client.post(SCORE, json={"text_1": "q", "text_2": "a", "color": 1})
    assert response.headers["x-llaisys-ignored-fields"] == "color"
    for path, body in ((RERANK, BODY), (SCORE, {"text_1": "q", "text_2": "a"})):
        assert (await client.post(path, json={**body, "model": "other"})).status_code == 404
