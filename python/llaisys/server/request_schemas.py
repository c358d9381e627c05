"""The pydantic schemas of request bodies: strict types, with a bound for each list and object.

A tokenizer worker imports this module by its name to validate large bodies. So this module imports no other
module of the server.
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from llaisys.body import VALUES_MAX
from llaisys.sampling_params import ALLOWED_IDS_MAX, BAD_WORDS_MAX, STOP_IDS_MAX, STOP_STRINGS_MAX, TOKENS_MAX
from llaisys.session_info import SESSION_NAME_PATTERN

# Maximum fields of one object, including unknown ones.
FIELDS_MAX = 1024
MESSAGES_MAX = 2048
TOOLS_MAX = 128
LOGIT_BIAS_MAX = 300
# The bias that OpenAI documents for a token that must not be sampled.
FORBIDS = -100
# All choices of a grammar together may have up to 64 KiB.
CHOICES_MAX = 1 << 14
CACHE_SALT_CHARS_MAX = 256
REVISION_MAX = 2**53 - 1


def _check_length(value: Any, most: int) -> Any:
    if isinstance(value, list | dict) and len(value) > most:
        raise PydanticCustomError(
            "too_long", "has {length} entries, at most {most}", {"length": len(value), "most": most}
        )
    return value


@dataclass(frozen=True, slots=True)
class MaxEntries:
    """Bounds a list or an object to `n` entries, counted before validation.

    A list is validated up to its first invalid entry.
    """

    n: int

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Apply the bound (pydantic's protocol for metadata)."""
        inner: Any = handler(source)
        inner["max_length"] = self.n
        if inner["type"] == "list":
            inner["fail_fast"] = True
        return core_schema.no_info_before_validator_function(self._check, inner)

    def _check(self, value: Any) -> Any:
        return _check_length(value, self.n)


def _bias_object(value: Any) -> Any:
    """Return the object for llama.cpp's list of [token id, bias]; other values stay. False is -100."""
    if not isinstance(value, list) or len(value) > LOGIT_BIAS_MAX:
        return value
    for pair in value:
        is_pair = isinstance(pair, list) and len(pair) == 2 and type(pair[0]) is int
        if not is_pair or not (type(pair[1]) in (int, float) or pair[1] is False):
            raise PydanticCustomError(
                "logit_bias",
                "has the entry {entry}, expected [token id, number or false]",
                {"entry": reprlib.repr(pair)},
            )
    return {str(token): FORBIDS if bias is False else bias for token, bias in value}


_PAIR = {
    "type": "array",
    "prefixItems": [{"type": "integer"}, {"anyOf": [{"type": "number"}, {"const": False}]}],
    "minItems": 2,
    "maxItems": 2,
}
LogitBias = Annotated[
    dict[str, float],
    MaxEntries(LOGIT_BIAS_MAX),
    BeforeValidator(_bias_object),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "additionalProperties": {"type": "number"},
                    "maxProperties": LOGIT_BIAS_MAX,
                },
                {"type": "array", "items": _PAIR, "maxItems": LOGIT_BIAS_MAX},
            ]
        }
    ),
]
Object = Annotated[dict[str, Any], MaxEntries(FIELDS_MAX)]
Messages = Annotated[list[Object], MaxEntries(MESSAGES_MAX)]
Tools = Annotated[list[Object], MaxEntries(TOOLS_MAX)]


class Body(BaseModel):
    """An object with at most FIELDS_MAX fields, counted before validation."""

    model_config = ConfigDict(strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _bounded(cls, value: Any) -> Any:
        return _check_length(value, FIELDS_MAX) if isinstance(value, dict) else value

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Add the bound to the JSON schema."""
        made = handler(schema)
        handler.resolve_ref_schema(made)["maxProperties"] = FIELDS_MAX
        return made


class StreamOptions(Body):
    """`stream_options`: usage in an additional last chunk, or in every chunk."""

    model_config = ConfigDict(extra="allow")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class OpenRequest(Body):
    """A body whose unknown fields `ignored_fields` checks."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None


class GenerationRequest(OpenRequest):
    """The fields that both generation endpoints share. SamplingParams checks the ranges."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
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
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    response_format: Object | None = None
    structured_outputs: Object | None = None
    guided_json: str | Object | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], MaxEntries(CHOICES_MAX)] | None = None
    guided_grammar: str | None = None
    n: int | None = None
    allowed_token_ids: Annotated[list[int], MaxEntries(ALLOWED_IDS_MAX)] | None = None
    bad_words: Annotated[list[str], MaxEntries(BAD_WORDS_MAX)] | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Annotated[list[int], MaxEntries(ALLOWED_IDS_MAX)] | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    session_id: str | None = None


EXAMPLE_CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is gravity?"}],
    "max_tokens": 4,
}
EXAMPLE_COMPLETION: dict[str, Any] = {"prompt": "Gravity is", "max_tokens": 16}


class ChatCompletionRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    model_config = ConfigDict(json_schema_extra={"examples": [EXAMPLE_CHAT]})

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Object | None = None
    reasoning_effort: str | None = None
    tools: Tools | None = None
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool | None = None
    prediction: Object | None = None


class CompletionRequest(GenerationRequest):
    """POST /v1/completions. `prompt`: text, token ids, or a list of either."""

    model_config = ConfigDict(json_schema_extra={"examples": [EXAMPLE_COMPLETION]})

    prompt: str | Annotated[list[Any], MaxEntries(VALUES_MAX)]
    logprobs: int | None = None
    best_of: int | None = None


class EmbeddingRequest(OpenRequest):
    """POST /v1/embeddings: `input`, which is text, token ids or a list of either, or a chat's `messages`.

    `add_generation_prompt`, `continue_final_message` and `chat_template_kwargs` apply to a chat only.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [{"input": ["Gravity", "Levity"]}]})

    input: str | Annotated[list[Any], MaxEntries(VALUES_MAX)] | None = None
    messages: Messages | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Object | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    add_special_tokens: bool | None = None
    normalize: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None


class PairRequest(OpenRequest):
    """The fields that /v1/rerank and /score share. `instruction`: what a reranker with a prompt looks for."""

    instruction: str | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None


Texts = str | Annotated[list[str | Object], MaxEntries(VALUES_MAX)]


class RerankRequest(PairRequest):
    """POST /v1/rerank and /v2/rerank. A document is a text, or an object with a `text`."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"query": "What falls?", "documents": ["Apples fall.", "Birds fly."]}]
        }
    )

    query: str
    documents: Annotated[list[str | Object], MaxEntries(VALUES_MAX)]
    top_n: int | None = None
    return_documents: bool | None = None


class ScoreRequest(PairRequest):
    """POST /score: one text or several on each side, under one of vLLM's pairs of names."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"text_1": "What falls?", "text_2": ["Apples fall.", "Birds fly."]}]}
    )

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None


class TokenizeRequest(OpenRequest):
    """POST /tokenize: a `prompt` or a chat's `messages`. Most other fields apply to a chat only."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"prompt": "Gravity is"}]})

    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    messages: Messages | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Object | None = None
    tools: Tools | None = None


class DetokenizeRequest(OpenRequest):
    """POST /detokenize."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"tokens": [1, 2, 3]}]})

    tokens: Annotated[list[int], MaxEntries(VALUES_MAX)]


class LoadLoraRequest(Body):
    """POST /v1/load_lora_adapter. `base_model_name`: the served model, by default the first.

    `load_inplace`: replace an adapter of the same name.
    """

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    base_model_name: str | None = None


class UnloadLoraRequest(Body):
    """POST /v1/unload_lora_adapter. `lora_int_id`: of vLLM; the name decides."""

    lora_name: str
    lora_int_id: int | None = None


class ChatWrite(Body):
    """PUT /v1/chats/{id}. `base`: the revision at which the chat was read; 0 creates a new chat."""

    base: int = Field(ge=0, le=REVISION_MAX)
    chat: Object


SessionName = Annotated[str, StringConstraints(pattern=SESSION_NAME_PATTERN)]
NumTokens = Annotated[int, Field(ge=0, le=TOKENS_MAX)]


class _SessionBody(Body):
    model_config = ConfigDict(extra="forbid")


class SessionCreate(_SessionBody):
    """POST /v1/sessions."""

    session_id: SessionName


class SessionFork(_SessionBody):
    """POST /v1/sessions/{id}/fork. `n_tokens`: number of leading tokens of the new session; null: all."""

    session_id: SessionName
    n_tokens: NumTokens | None = None


class SessionTrim(_SessionBody):
    """POST /v1/sessions/{id}/trim. `n_tokens`: number of leading tokens to keep."""

    n_tokens: NumTokens


class SessionSave(_SessionBody):
    """POST /v1/sessions/{id}/save. `file`: a file name in the key's folder of `--session-store`."""

    file: SessionName


class SessionRestore(_SessionBody):
    """POST /v1/sessions/{id}/restore. `cache_salt`: the salt of requests that share the restored prefix."""

    file: SessionName
    cache_salt: Annotated[str, StringConstraints(max_length=CACHE_SALT_CHARS_MAX)] = ""
