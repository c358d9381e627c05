"""The pydantic schemas of POST /v1/responses.

As `request_schemas`, a tokenizer worker imports this module by its name. So it imports no other module of the
server.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, StringConstraints

from llaisys.sampling_params import STOP_IDS_MAX, STOP_STRINGS_MAX
from llaisys.server.request_schemas import MESSAGES_MAX, LogitBias, MaxEntries, Object, OpenRequest, Tools

INCLUDES_MAX = 32
# OpenAI's bounds of `metadata`.
METADATA_MAX = 16
MetadataName = Annotated[str, StringConstraints(max_length=64)]
MetadataText = Annotated[str, StringConstraints(max_length=512)]

EXAMPLE: dict[str, Any] = {"input": "What is gravity?", "max_output_tokens": 4}


class ResponsesRequest(OpenRequest):
    """POST /v1/responses: OpenAI's fields, then those that are the same in chat completions."""

    model_config = ConfigDict(json_schema_extra={"examples": [EXAMPLE]})

    input: str | Annotated[list[Object], MaxEntries(MESSAGES_MAX)] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: Annotated[list[str], MaxEntries(INCLUDES_MAX)] | None = None
    reasoning: Object | None = None
    text: Object | None = None
    tools: Tools | None = None
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool | None = None
    truncation: str | None = None
    metadata: Annotated[dict[MetadataName, MetadataText], MaxEntries(METADATA_MAX)] | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: LogitBias | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], MaxEntries(STOP_STRINGS_MAX)] | None = None
    stop_token_ids: Annotated[list[int], MaxEntries(STOP_IDS_MAX)] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Object | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    session_id: str | None = None


class _Schema(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class InputTokensDetails(_Schema):
    """`cached_tokens`: input tokens that came from the prefix cache. `cache_write_tokens` is always 0."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(_Schema):
    """`reasoning_tokens`: output tokens up to the end of the reasoning."""

    reasoning_tokens: int


class ResponseUsage(_Schema):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(_Schema):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(_Schema):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseAnswer(_Schema):
    """A response. `output`: items of the types `message`, `reasoning` and `function_call`.

    `metrics`: those of a completion (`RequestMetrics`), with `--enable-per-request-metrics`.
    """

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: ResponseStatus
    background: bool
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    metrics: dict[str, float | None] = {}


class ResponseDeleted(_Schema):
    """A response that was deleted."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(_Schema):
    """A page of a response's input items."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
