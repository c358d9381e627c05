"""The pydantic schemas of Ollama's API: request bodies, with a bound for each list and object, and responses.

As `request_schemas`, a tokenizer worker imports this module by its name. Source of the fields: Ollama's
docs/api.md and the request types of its Python client.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict

from llaisys.body import VALUES_MAX
from llaisys.sampling_params import STOP_STRINGS_MAX
from llaisys.server.request_schemas import Body, MaxEntries, Messages, Object, OpenRequest, Tools

EXAMPLE_CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is gravity?"}],
    "options": {"num_predict": 4},
    "stream": False,
}
EXAMPLE_GENERATE: dict[str, Any] = {
    "prompt": "What is gravity?",
    "options": {"num_predict": 4},
    "stream": False,
}


class OllamaOptions(Body):
    """`options`: sampling parameters, and load options without effect (`protocol.ignored_fields`)."""

    model_config = ConfigDict(extra="allow")

    num_predict: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], MaxEntries(STOP_STRINGS_MAX)] | None = None


class _OllamaGeneration(OpenRequest):
    """The fields that both generation endpoints share. `stream`: true by default."""

    stream: bool | None = None
    format: str | Object | None = None
    options: OllamaOptions | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class OllamaChatRequest(_OllamaGeneration):
    """POST /api/chat."""

    model_config = ConfigDict(json_schema_extra={"examples": [EXAMPLE_CHAT]})

    messages: Messages | None = None
    tools: Tools | None = None


class OllamaGenerateRequest(_OllamaGeneration):
    """POST /api/generate. `raw`: the prompt is not rendered with the chat template."""

    model_config = ConfigDict(json_schema_extra={"examples": [EXAMPLE_GENERATE]})

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None


class OllamaEmbedRequest(OpenRequest):
    """POST /api/embed. `truncate`: cut too long inputs (the default) instead of rejecting them."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"input": ["Gravity", "Levity"]}]})

    input: str | Annotated[list[str], MaxEntries(VALUES_MAX)]
    truncate: bool | None = None
    dimensions: int | None = None


class OllamaEmbeddingsRequest(OpenRequest):
    """POST /api/embeddings, which /api/embed has replaced."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"prompt": "Gravity"}]})

    prompt: str


class OllamaShowRequest(OpenRequest):
    """POST /api/show. `name`: the older name of `model`."""

    model_config = ConfigDict(json_schema_extra={"examples": [{}]})

    name: str | None = None
    verbose: bool | None = None


class OllamaPullRequest(OpenRequest):
    """POST /api/pull. `stream`: true by default. `name`: the older name of `model`."""

    name: str | None = None
    stream: bool | None = None


class OllamaDeleteRequest(OpenRequest):
    """DELETE /api/delete. `name`: the older name of `model`."""

    name: str | None = None


class _Generated(BaseModel):
    """The common fields. Those after `done` are in the last object. Durations are nanoseconds."""

    model: str
    created_at: str
    logprobs: list[dict[str, Any]] = []
    done: bool
    done_reason: Literal["stop", "length", "load"] | None = None
    total_duration: int = 0
    load_duration: int = 0
    prompt_eval_count: int = 0
    prompt_eval_duration: int = 0
    eval_count: int = 0
    eval_duration: int = 0


class OllamaMessage(BaseModel):
    """A message, or a piece of one. `thinking` and `tool_calls` are absent if there are none."""

    role: Literal["assistant"]
    content: str
    thinking: str = ""
    tool_calls: list[dict[str, Any]] = []


class OllamaChatAnswer(_Generated):
    """The message of /api/chat, or one line of its stream."""

    message: OllamaMessage


class OllamaGenerateAnswer(_Generated):
    """The completion of /api/generate, or one line of its stream."""

    response: str
    thinking: str = ""


class OllamaEmbedAnswer(BaseModel):
    """The vectors of /api/embed, of length 1, in the order of the inputs."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingsAnswer(BaseModel):
    """The vector of /api/embeddings, of length 1."""

    embedding: list[float]


class OllamaStatus(BaseModel):
    """The outcome of /api/pull, or one line of its stream."""

    status: str


def object_or_lines(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Return the schema of a 200: one object, or a stream with one on each line."""
    lines = {"type": "string", "description": f"lines of JSON: each is a {model.__name__} or an error"}
    return {200: {"model": model, "content": {"application/x-ndjson": {"schema": lines}}}}
