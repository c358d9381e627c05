"""Change half of schemathesis's valid bodies into ones that the server accepts.

A schema does not say which model is served or which fields go together, so nearly all random bodies that
match it are rejected. Bodies that do not match their schema stay unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from zlib import crc32

import schemathesis
from pydantic import BaseModel, ValidationError

from llaisys.server.messages.schemas import CountTokensRequest, MessagesRequest
from llaisys.server.ollama.schemas import OllamaChatRequest, OllamaEmbedRequest, OllamaGenerateRequest
from llaisys.server.request_schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
)
from llaisys.server.responses.schemas import ResponsesRequest

MODELS: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/rerank": RerankRequest,
    "/v2/rerank": RerankRequest,
    "/score": ScoreRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/api/chat": OllamaChatRequest,
    "/api/generate": OllamaGenerateRequest,
    "/api/embed": OllamaEmbedRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
}


def text(value: Any) -> str:
    return value if isinstance(value, str) else "Hi"


def up_to(limit: int) -> Callable[[Any], Any]:
    return lambda value: value if isinstance(value, bool) else int(value) % (limit + 1)


# The fields that stay, and how their values change. null stays null; other known fields are removed.
SERVABLE: dict[str, Callable[[Any], Any]] = {
    "model": lambda _: "tiny",
    "messages": lambda value: (
        [{"role": "user", "content": text(each.get("content"))} for each in value]
        or [{"role": "user", "content": "Hi"}]
    ),
    "prompt": text,
    "input": text,
    "query": text,
    "documents": lambda _: ["Hi"],
    "text_1": text,
    "text_2": text,
    "tokens": lambda value: [each % 500 for each in value],
    "stream": bool,
    "n": lambda value: value % 3 + 1,
    "max_tokens": lambda value: value % 3 + 1,
    "max_output_tokens": lambda value: value % 3 + 1,
    "store": bool,
    "background": bool,
    "temperature": up_to(2),
    "seed": up_to(2**31),
    "logprobs": up_to(3),
    "return_token_ids": bool,
    "return_token_strs": bool,
    "skip_special_tokens": bool,
    "ignore_eos": bool,
    "add_special_tokens": bool,
    "presence_penalty": up_to(2),
    "top_k": up_to(40),
    "response_format": lambda _: {"type": "text"},
    "encoding_format": lambda _: "base64",
    "cache_salt": lambda value: "salt" if value else "",
}


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Return the body to send; schemathesis calls this for every body."""
    model = MODELS.get(context.operation.path)
    if model is None or not isinstance(body, dict) or crc32(repr(body).encode("utf-8", "replace")) % 2:
        return body
    try:
        model(**body)
    except ValidationError:
        return body
    known = {
        name: None if body[name] is None else change(body[name])
        for name, change in SERVABLE.items()
        if name in body and name in model.model_fields
    }
    if model is TokenizeRequest and known.get("prompt") is not None:
        known.pop("messages", None)
    return {**known, **{name: value for name, value in body.items() if name not in model.model_fields}}
