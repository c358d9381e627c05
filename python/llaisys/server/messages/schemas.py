"""The pydantic schemas of Anthropic's Messages: requests, with a bound for each list and object, and answers.

A tokenizer worker imports this module by its name to validate large bodies. So of the server it imports only
`request_schemas`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict

from llaisys.sampling_params import STOP_STRINGS_MAX
from llaisys.server.request_schemas import MaxEntries, Messages, Object, OpenRequest, Tools

SYSTEM_BLOCKS_MAX = 1024

EXAMPLE_COUNT: dict[str, Any] = {"messages": [{"role": "user", "content": "What is gravity?"}]}
EXAMPLE_MESSAGE: dict[str, Any] = {**EXAMPLE_COUNT, "max_tokens": 4}


class CountTokensRequest(OpenRequest):
    """POST /v1/messages/count_tokens: the fields of a message that determine its prompt.

    `cache_control` and `context_management` are accepted without effect.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [EXAMPLE_COUNT]})

    messages: Messages
    system: str | Annotated[list[Object], MaxEntries(SYSTEM_BLOCKS_MAX)] | None = None
    tools: Tools | None = None
    tool_choice: Object | None = None
    thinking: Object | None = None
    output_config: Object | None = None
    chat_template_kwargs: Object | None = None
    cache_control: Object | None = None
    context_management: Object | None = None


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages. The fields after `stop_sequences` are those of chat completions."""

    model_config = ConfigDict(json_schema_extra={"examples": [EXAMPLE_MESSAGE]})

    max_tokens: int
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: Annotated[list[str], MaxEntries(STOP_STRINGS_MAX)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    session_id: str | None = None


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class TextBlock(_Answer):
    """Text of the message."""

    type: Literal["text"]
    text: str


class ThinkingBlock(_Answer):
    """Reasoning. `signature` is empty: the server accepts reasoning that it has not written."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(_Answer):
    """A tool call."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(_Answer):
    """Tokens of the prompt outside the cache, from the cache, and of the message.

    `cache_creation_input_tokens` is 0, because writing to the prefix cache is not a separate step.
    """

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageAnswer(_Answer):
    """A message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal[
        "end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"
    ]
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(_Answer):
    """The number of tokens of a prompt."""

    input_tokens: int
