"""The pydantic schemas of responses, for the OpenAPI document.

The routes build their responses without these classes. schemathesis checks the schemas against real responses
(tests/e2e/test_openapi.py). A field without a default is always present.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from llaisys.server.http_errors import ErrorDetail

StopReason = str | int | None


class _Schema(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class PromptTokensDetails(_Schema):
    """`cached_tokens`: prompt tokens that came from the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(_Schema):
    """Tokens of the request's `prediction` that became output, and those that were verified in vain."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class UsageAnswer(_Schema):
    """Tokens of all prompts and choices of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class RequestMetrics(_Schema):
    """vLLM's times of one request; all are null without a token.

    `time_to_first_token_ms` and `tokens_per_second` count from its admission, `queue_time_ms` until then.
    `generation_time_ms` is from the first token to the last, and `mean_itl_ms` its mean per further token.
    """

    time_to_first_token_ms: float | None
    generation_time_ms: float | None
    queue_time_ms: float | None
    mean_itl_ms: float | None
    tokens_per_second: float | None


class TokenCandidate(_Schema):
    """A candidate token. `bytes` is null if the token is a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TokenCandidate):
    """A token of the completion, and the best candidates for its position."""

    top_logprobs: list[TokenCandidate]


class ChatLogprobs(_Schema):
    """One entry per token."""

    content: list[TokenLogprob]


class PromptLogprob(_Schema):
    """A candidate for a position in the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str | None


# For each token of the prompt: token id -> candidate; null for the first.
PromptLogprobs = list[dict[str, PromptLogprob] | None] | None


class FunctionCall(_Schema):
    """`arguments`: JSON as text."""

    name: str
    arguments: str


class ToolCall(_Schema):
    """A tool call."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(_Schema):
    """An assistant message. `content` is null if there is only reasoning or tool calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str = ""
    reasoning_content: str = ""
    tool_calls: list[ToolCall] = []


class ChatChoice(_Schema):
    """One choice. `token_ids` is null without `return_token_ids`."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: StopReason
    token_ids: list[int] | None


class ChatCompletion(_Schema):
    """A chat completion. `prompt_logprobs` and `prompt_token_ids` are null unless requested."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageAnswer
    prompt_logprobs: PromptLogprobs
    prompt_token_ids: list[int] | None
    service_tier: None
    kv_transfer_params: None
    metrics: RequestMetrics | None


class CompletionLogprobsAnswer(_Schema):
    """Lists of equal length; null for the first token of an echoed prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(_Schema):
    """One choice. Choice `i` of prompt `p` has the index `p * n + i`."""

    index: int
    text: str
    logprobs: CompletionLogprobsAnswer | None
    finish_reason: Literal["stop", "length"]
    stop_reason: StopReason
    token_ids: list[int] | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs


class Completion(_Schema):
    """A text completion, with the choices of all prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: UsageAnswer
    service_tier: None
    kv_transfer_params: None
    metrics: RequestMetrics | None


class EmbeddingUsage(_Schema):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class Embedding(_Schema):
    """A vector of length 1: numbers, or base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(_Schema):
    """The embeddings in the order of the inputs."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class DocumentText(_Schema):
    """A document of a rerank request."""

    text: str


class RerankResult(_Schema):
    """A document's position in the request and its score. `document`: only if requested."""

    index: int
    relevance_score: float
    document: DocumentText | None = None


class RerankTokens(_Schema):
    """Tokens in Cohere's form."""

    input_tokens: int
    output_tokens: int


class RerankMeta(_Schema):
    """Cohere's `meta`."""

    tokens: RerankTokens


class RerankList(_Schema):
    """The documents, the most relevant one first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: EmbeddingUsage
    meta: RerankMeta


class Score(_Schema):
    """The score of a pair."""

    object: Literal["score"]
    index: int
    score: float


class ScoreList(_Schema):
    """The scores in the order of the pairs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage


class ModelCard(_Schema):
    """A served model name. `root`: the first name of the same model; a LoRA adapter is its own. `parent`: the
    model of an adapter. `default_sampling_params`: the fields that the model sets for requests that omit
    them; other fields have vLLM's defaults.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    default_sampling_params: dict[str, int | float]
    permission: list[Any]


class ModelList(_Schema):
    """Every served name. `models`: empty, for Codex. `stores_responses`: the server has a response store."""

    object: Literal["list"]
    data: list[ModelCard]
    models: list[Any]
    stores_responses: bool


class Tokens(_Schema):
    """Token ids of a prompt. `token_strs` is present with `return_token_strs`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(_Schema):
    """The text of token ids."""

    prompt: str


class ChatChange(_Schema):
    """A chat of the web UI that was written or deleted."""

    id: str
    revision: int
    deleted: bool


class ChatChanges(_Schema):
    """Changes, oldest first. `store` is null if the server has no chat store."""

    object: Literal["list"]
    store: str | None
    data: list[ChatChange]
    has_more: bool


class StoredChat(_Schema):
    """A chat of the web UI, unchanged as it was written."""

    id: str
    revision: int
    chat: dict[str, Any]


class ChatWritten(_Schema):
    """The chat's new revision."""

    id: str
    revision: int


class ProbeAnswer(_Schema):
    """The 200 of a probe."""

    status: Literal["ok"]


class UnavailableAnswer(_Schema):
    """The 503 of a probe. The code of `error` is `model_loading`, `shutting_down` or `engine_dead`."""

    status: Literal["unavailable"]
    error: ErrorDetail


class VersionAnswer(_Schema):
    """The version of the installed package."""

    version: str


def one_or_stream(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Return the schema of a 200: one object, or server-sent events with `stream`."""
    frame = {
        "type": "object",
        "description": "each event: `data` is a chunk as JSON; completions end with `[DONE]`",
        "properties": {"data": {"type": "string"}},
        "required": ["data"],
    }
    return {200: {"model": model, "content": {"text/event-stream": {"schema": frame}}}}


def text_of_type(media_type: str) -> dict[int | str, dict[str, Any]]:
    """Return the schema of a 200 with text of this media type."""
    return {200: {"content": {media_type: {"schema": {"type": "string"}}}}}
