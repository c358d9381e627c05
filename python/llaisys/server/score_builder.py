"""Builds the responses of /v1/rerank and /score from the scores of pairs, or from embeddings."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llaisys.outputs import RequestOutput
from llaisys.server.completion_builder import CompletionMeta, Usage
from llaisys.server.http_errors import ApiError, to_json
from llaisys.server.response_body import Json, Part
from llaisys.server.stream_writer import DATA_EVENTS

# Upper bound on the bytes of a score with its index and names.
SCORE_BYTES = 96


@dataclass(frozen=True, slots=True)
class Pairs:
    """The texts to score: each of `queries`, one or as many as `documents`, with its document.

    - `by_embedding`: the engine's requests are all queries, then all documents; otherwise one for each pair.
    """

    queries: Sequence[str]
    documents: Sequence[str]
    by_embedding: bool

    def query_index(self, index: int) -> int:
        """Return the index of the query of a document."""
        return index if len(self.queries) > 1 else 0


class ScoreBuilder(ABC):
    """Collects the outputs of the engine's requests, and builds one object at the end."""

    stream_format = DATA_EVENTS

    def __init__(self, meta: CompletionMeta, pairs: Pairs) -> None:
        self.meta, self.pairs = meta, pairs
        self.usage = Usage()
        self.finish_reasons: set[str] = set()
        self._outputs: dict[int, Any] = {}

    def opening(self) -> list[Json]:
        """Return no chunks."""
        return []

    def chunks(self, index: int, delta: RequestOutput) -> list[Json]:
        """Return the score or the vector of one request."""
        value = delta.score if delta.embedding is None else np.frombuffer(delta.embedding, "<f4")
        return [{"index": index, "value": value}]

    def closing(self) -> list[Json]:
        """Return no chunks."""
        return []

    def error_chunks(self, error: ApiError) -> list[Json]:
        """Return OpenAI's error object."""
        return [error.body()]

    def collect(self, chunk: Json) -> int:
        """Keep a score or a vector; return how many bytes it takes, in the response or until then."""
        value = self._outputs[chunk["index"]] = chunk["value"]
        return SCORE_BYTES + (value.nbytes if isinstance(value, np.ndarray) else 0)

    def scores(self) -> list[float]:
        """Return the score of each document.

        Of two vectors with L2 norm 1, it is their product in float64, exactly rounded.
        """
        if not self.pairs.by_embedding:
            return [self._outputs[index] for index in range(len(self.pairs.documents))]
        n_queries = len(self.pairs.queries)
        scores = []
        for index in range(len(self.pairs.documents)):
            left = self._outputs[self.pairs.query_index(index)].astype(np.float64)
            product = math.fsum(left * self._outputs[n_queries + index].astype(np.float64))
            scores.append(min(1.0, max(-1.0, product)))
        return scores

    def token_counts(self) -> dict[str, int]:
        """Return the `usage` object."""
        return {"prompt_tokens": self.usage.prompt_tokens, "total_tokens": self.usage.prompt_tokens}

    @abstractmethod
    def parts(self) -> list[Part]:
        """Return the object."""


class ScoreListBuilder(ScoreBuilder):
    """Builds vLLM's list of scores, in the order of the pairs."""

    def parts(self) -> list[Part]:
        """Return the object."""
        data = [
            {"object": "score", "index": index, "score": score} for index, score in enumerate(self.scores())
        ]
        meta = self.meta
        head = {"id": meta.id, "object": "list", "created": meta.created_s, "model": meta.model}
        return [to_json({**head, "data": data, "usage": self.token_counts()})]


class RerankBuilder(ScoreBuilder):
    """Builds the list of Jina, Cohere and vLLM: the best `top_n` documents, the most relevant first."""

    def __init__(
        self, meta: CompletionMeta, pairs: Pairs, *, top_n: int | None, returns_documents: bool
    ) -> None:
        super().__init__(meta, pairs)
        self._top_n = top_n
        self._returns_documents = returns_documents

    def parts(self) -> list[Part]:
        """Return the object. Documents of equal scores keep their order."""
        scores = self.scores()
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: self._top_n]
        results = []
        for index in best:
            result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
            if self._returns_documents:
                result["document"] = {"text": self.pairs.documents[index]}
            results.append(result)
        tokens = {"input_tokens": self.usage.prompt_tokens, "output_tokens": 0}
        body = {
            "id": self.meta.id,
            "model": self.meta.model,
            "results": results,
            "usage": self.token_counts(),
            "meta": {"tokens": tokens},
        }
        return [to_json(body)]
