"""Encoders and rerankers of a server: the openai and cohere clients, each model's routes, and refusals."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from typing import Any

import cohere
import numpy as np
import openai
import pytest
import yaml

from serving import GOLDENS, Server, serving

XLM_R = "xlm_roberta_rerank_f16"
QUERY = "what is a cache?"
DOCUMENTS = [
    "def close(self): self.file.close()",
    "A cache keeps what was computed so that it is not computed again.",
    "sorted(iterable) returns a new list",
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve BERT, an XLM-RoBERTa cross-encoder in a process of its own, and a Qwen3-Reranker."""
    folder = tmp_path_factory.mktemp("encoders")
    qwen = folder / "qwen"
    shutil.copytree(GOLDENS / "qwen3_rerank_bf16", qwen)
    config = json.loads((qwen / "config.json").read_text("utf-8"))
    (qwen / "config.json").write_text(json.dumps({**config, "classifier_from_token": ["n", "y"]}), "utf-8")
    models: list[dict[str, Any]] = [
        {"name": "bert", "model": str(GOLDENS / "bert_embed_f32")},
        {"name": "cross", "model": str(GOLDENS / XLM_R), "engine_process": True},
        {"name": "qwen", "model": str(qwen), "num_kv_cells": 2048},
    ]
    settings = {"dtype": "float32", "models": models}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings), "utf-8")
    with serving(folder, None, "--config", str(folder / "config.yaml")) as made:
        yield made


def test_embeddings_are_those_of_transformers(server: Server) -> None:
    golden = np.load(GOLDENS / "bert_embed_f32" / "golden.npz")
    texts = json.loads((GOLDENS / "bert_embed_f32" / "texts.json").read_text("utf-8"))
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY", max_retries=0) as client:
        result = client.embeddings.create(model="bert", input=texts[4:])
    for i, entry in enumerate(result.data, start=4):
        assert np.abs(np.array(entry.embedding) - golden[f"pooled_mean_{i}"]).max() < 2e-4
    assert result.usage.prompt_tokens == sum(len(golden[f"prompt_{i}"]) for i in range(4, len(texts)))


def test_the_cohere_clients_rerank(server: Server) -> None:
    scores = server.http.post("/score", json={"model": "cross", "text_1": QUERY, "text_2": DOCUMENTS}).json()
    want = {entry["index"]: entry["score"] for entry in scores["data"]}
    order = sorted(want, key=lambda index: -want[index])
    new = cohere.ClientV2(api_key="EMPTY", base_url=server.url)
    result = new.rerank(model="cross", query=QUERY, documents=DOCUMENTS, top_n=2)
    assert [(each.index, each.relevance_score) for each in result.results] == [
        (index, want[index]) for index in order[:2]
    ]
    assert result.meta is not None
    assert result.meta.tokens is not None
    assert result.meta.tokens.input_tokens == scores["usage"]["prompt_tokens"]
    old = cohere.Client(api_key="EMPTY", base_url=server.url)
    documents = old.rerank(model="cross", query=QUERY, documents=DOCUMENTS, return_documents=True).results
    assert [each.document.text if each.document else None for each in documents] == [
        DOCUMENTS[index] for index in order
    ]


def test_cross_encoder_scores_are_those_of_transformers(server: Server) -> None:
    golden = np.load(GOLDENS / XLM_R / "golden.npz")
    texts = json.loads((GOLDENS / XLM_R / "texts.json").read_text("utf-8"))
    queries, documents = zip(*texts[4:], strict=True)
    body = {"model": "cross", "queries": queries, "documents": documents}
    data = server.http.post("/v1/score", json=body).json()["data"]
    want = [float(golden[f"score_{i}"][0]) for i in range(4, len(texts))]
    assert [entry["score"] for entry in data] == pytest.approx(want, abs=1e-4)


@pytest.mark.parametrize("model", ["bert", "cross", "qwen"])
def test_each_model_ranks_with_the_same_scores_in_any_batch(server: Server, model: str) -> None:
    body = {"model": model, "query": QUERY, "documents": DOCUMENTS * 20}
    results = server.http.post("/v1/rerank", json=body).json()["results"]
    by_document: dict[str, set[float]] = {}
    for each in results:
        by_document.setdefault(each["document"]["text"], set()).add(each["relevance_score"])
    assert [len(scores) for scores in by_document.values()] == [1, 1, 1]
    alone = {"model": model, "query": QUERY, "documents": DOCUMENTS[:1]}
    (one,) = server.http.post("/rerank", json=alone).json()["results"]
    assert {one["relevance_score"]} == by_document[DOCUMENTS[0]]
    low = -1.0 if model == "bert" else 0.0
    assert all(math.isfinite(x) and low <= x <= 1.0 for x in (s for v in by_document.values() for s in v))


@pytest.mark.parametrize("model", ["bert", "cross", "qwen"])
def test_documents_are_cut_or_refused(server: Server, model: str) -> None:
    body: dict[str, Any] = {"model": model, "query": QUERY, "documents": ["a cache " * 2000]}
    refused = server.http.post("/v1/rerank", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert refused.json()["error"]["param"] == "documents"
    cut = server.http.post("/v1/rerank", json={**body, "truncate_prompt_tokens": -1})
    assert cut.status_code == 200, cut.text
    few = server.http.post("/v1/rerank", json={**body, "truncate_prompt_tokens": 1})
    if model != "bert":
        assert (few.status_code, few.json()["error"]["param"]) == (400, "truncate_prompt_tokens")


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        ("/v1/completions", {"model": "bert", "prompt": "Hi"}, "is an encoder, which generates no text"),
        ("/v1/completions", {"model": "cross", "prompt": "Hi"}, "use it for /v1/rerank and /score"),
        ("/v1/chat/completions", {"model": "bert", "messages": [{"role": "user", "content": "a"}]}, "bert"),
        ("/v1/embeddings", {"model": "cross", "input": "Hi"}, "has no embeddings"),
        (
            "/v1/rerank",
            {"model": "cross", "query": "a", "documents": ["b"], "instruction": "c"},
            "score head",
        ),
        (
            "/v1/rerank",
            {"model": "bert", "query": "a", "documents": ["b"], "instruction": "c"},
            "instruction",
        ),
    ],
)
def test_a_model_refuses_what_it_cannot_do_by_name(
    server: Server, path: str, body: dict[str, Any], names: str
) -> None:
    response = server.http.post(path, json=body)
    assert response.status_code == 400, response.text
    assert names in response.json()["error"]["message"]


def test_the_other_routes_of_an_encoder(server: Server) -> None:
    tokens = server.http.post("/tokenize", json={"model": "bert", "prompt": "hello there"}).json()["tokens"]
    text = server.http.post("/detokenize", json={"model": "bert", "tokens": tokens}).json()["prompt"]
    assert text == "[CLS] hello there [SEP]"
    truncated = server.http.post(
        "/v1/embeddings", json={"model": "bert", "input": "hello there", "truncate_prompt_tokens": 3}
    ).json()
    assert truncated["usage"]["prompt_tokens"] == 3
    assert server.http.get("/health").status_code == 200
    server.wait_idle()
