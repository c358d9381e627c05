"""The pydantic schemas of request bodies of Ollama's API, with a bound for each list and object.

As `request_schemas`, a tokenizer worker imports this module by its name. Source of the fields: Ollama's
docs/api.md and the request types of its Python client.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict

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
