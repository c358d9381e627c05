"""The shapes of the answers, for the served OpenAPI document.

The handlers build their answers themselves; schemathesis holds these against what goes over the wire
(tests/e2e/test_openapi.py). A field without a default is always there.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from llaisys.server.errors import ErrorDetail

StopReason = str | int | None


class _Shape(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class PromptTokensDetails(_Shape):
    """`cached_tokens`: of the prompt's tokens those that were not computed anew."""

    cached_tokens: int


class UsageAnswer(_Shape):
    """Tokens of all prompts and choices of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TokenCandidate(_Shape):
    """`bytes` is null where the token is a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TokenCandidate):
    """A token of the answer, and the best in its place."""

    top_logprobs: list[TokenCandidate]


class ChatLogprobs(_Shape):
    """One entry a token."""

    content: list[TokenLogprob]


class PromptLogprob(_Shape):
    """A candidate for a place in the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str | None


# For each token of the prompt: token id -> candidate; null for the first.
PromptLogprobs = list[dict[str, PromptLogprob] | None] | None


class FunctionCall(_Shape):
    """`arguments`: JSON, as text."""

    name: str
    arguments: str


class ToolCall(_Shape):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(_Shape):
    """`content` is null where there is only reasoning or calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str = ""
    reasoning_content: str = ""
    tool_calls: list[ToolCall] = []


class ChatChoice(_Shape):
    """One answer. `token_ids`: with `return_token_ids`."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: StopReason
    token_ids: list[int] = []


class ChatCompletion(_Shape):
    """The answer of a chat. Its last two fields: with `prompt_logprobs` and `return_token_ids`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[ChatChoice]
    usage: UsageAnswer
    prompt_logprobs: PromptLogprobs = None
    prompt_token_ids: list[int] = []


class CompletionLogprobsAnswer(_Shape):
    """Lists of one length; an echoed prompt's first token has null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(_Shape):
    """The choice `i` of the prompt `p` has the index `p * n + i`."""

    index: int
    text: str
    logprobs: CompletionLogprobsAnswer | None
    finish_reason: Literal["stop", "length"]
    stop_reason: StopReason
    token_ids: list[int] = []
    prompt_token_ids: list[int] = []
    prompt_logprobs: PromptLogprobs = None


class Completion(_Shape):
    """The choices of all prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[CompletionChoice]
    usage: UsageAnswer


class EmbeddingUsage(_Shape):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class Embedding(_Shape):
    """A vector of length 1: numbers, or base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(_Shape):
    """The embeddings in the order of the inputs."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class ModelCard(_Shape):
    """A name that requests may use. `root`: the first name of the same model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int
    permission: list[Any]


class ModelList(_Shape):
    """Every served name."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokens(_Shape):
    """Token ids of a prompt. `token_strs`: with `return_token_strs`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(_Shape):
    """The text of token ids."""

    prompt: str


class ChatChange(_Shape):
    """A chat of the page that was written or deleted."""

    id: str
    revision: int
    deleted: bool


class ChatChanges(_Shape):
    """Changes, oldest first. `store` null: the server keeps no chats."""

    object: Literal["list"]
    store: str | None
    data: list[ChatChange]
    has_more: bool


class StoredChat(_Shape):
    """A chat of the page, as it was written."""

    id: str
    revision: int
    chat: dict[str, Any]


class ChatWritten(_Shape):
    """The chat's revision from now on."""

    id: str
    revision: int


class ProbeAnswer(_Shape):
    """A probe's 200."""

    status: Literal["ok"]


class UnavailableAnswer(_Shape):
    """A probe's 503; `error` says why: `model_loading`, `shutting_down` or `engine_dead`."""

    status: Literal["unavailable"]
    error: ErrorDetail


class VersionAnswer(_Shape):
    """The version of the installed package."""

    version: str


def one_or_stream(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """A 200 that is one object, or with `stream` server-sent events."""
    frame = {
        "type": "object",
        "description": "each event: `data` is a chunk as JSON, and `[DONE]` in the last one",
        "properties": {"data": {"type": "string"}},
        "required": ["data"],
    }
    return {200: {"model": model, "content": {"text/event-stream": {"schema": frame}}}}


def text_of_type(media_type: str) -> dict[int | str, dict[str, Any]]:
    """A 200 that is text of this type."""
    return {200: {"content": {media_type: {"schema": {"type": "string"}}}}}
