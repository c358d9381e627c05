"""The schemas of request bodies: strict types, with a bound for each list and object.

A tokenizer worker validates large bodies and imports this module by its name, so it imports nothing else of
the server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    StringConstraints,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from llaisys.body import VALUES_MAX
from llaisys.sampling_params import ALLOWED_IDS_MAX, BAD_WORDS_MAX, STOP_IDS_MAX, STOP_STRINGS_MAX, TOKENS_MAX
from llaisys.session_info import SESSION_NAME_PATTERN

# Fields of one object, unknown ones included.
FIELDS_MAX = 1024
MESSAGES_MAX = 2048
TOOLS_MAX = 128
LOGIT_BIAS_MAX = 300
# All choices of a grammar together have up to 64 KiB.
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
class Most:
    """Bounds a list or an object to `n` entries. They are counted before any is validated, and a list is
    validated up to the first wrong one."""

    n: int

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Apply the bound, as pydantic documents it for metadata."""
        inner: Any = handler(source)
        inner["max_length"] = self.n
        if inner["type"] == "list":
            inner["fail_fast"] = True
        return core_schema.no_info_before_validator_function(self._check, inner)

    def _check(self, value: Any) -> Any:
        return _check_length(value, self.n)


Object = Annotated[dict[str, Any], Most(FIELDS_MAX)]
Messages = Annotated[list[Object], Most(MESSAGES_MAX)]
Tools = Annotated[list[Object], Most(TOOLS_MAX)]


class Body(BaseModel):
    """An object of at most FIELDS_MAX fields, which are counted first."""

    model_config = ConfigDict(strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _bounded(cls, value: Any) -> Any:
        return _check_length(value, FIELDS_MAX) if isinstance(value, dict) else value

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Add the bound to the schema."""
        made = handler(schema)
        handler.resolve_ref_schema(made)["maxProperties"] = FIELDS_MAX
        return made


class StreamOptions(Body):
    """`stream_options`: usage in a last chunk of its own, or in every chunk."""

    model_config = ConfigDict(extra="allow")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class OpenRequest(Body):
    """A body whose unknown fields are checked by `ignored_fields`."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None


class GenerationRequest(OpenRequest):
    """The fields that both endpoints share. Ranges are checked once, by SamplingParams."""

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
    logit_bias: Annotated[dict[str, float], Most(LOGIT_BIAS_MAX)] | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Most(STOP_STRINGS_MAX)] | None = None
    stop_token_ids: Annotated[list[int], Most(STOP_IDS_MAX)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    response_format: Object | None = None
    structured_outputs: Object | None = None
    guided_json: str | Object | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Most(CHOICES_MAX)] | None = None
    guided_grammar: str | None = None
    n: int | None = None
    allowed_token_ids: Annotated[list[int], Most(ALLOWED_IDS_MAX)] | None = None
    bad_words: Annotated[list[str], Most(BAD_WORDS_MAX)] | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
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
    tools: Tools | None = None
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool | None = None


class CompletionRequest(GenerationRequest):
    """POST /v1/completions. `prompt`: text, token ids, or a list of either."""

    model_config = ConfigDict(json_schema_extra={"examples": [EXAMPLE_COMPLETION]})

    prompt: str | Annotated[list[Any], Most(VALUES_MAX)]
    logprobs: int | None = None
    best_of: int | None = None


class EmbeddingRequest(OpenRequest):
    """POST /v1/embeddings. `input`: text, token ids, or a list of either."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"input": ["Gravity", "Levity"]}]})

    input: str | Annotated[list[Any], Most(VALUES_MAX)]
    encoding_format: str | None = None
    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None


class TokenizeRequest(OpenRequest):
    """POST /tokenize: a `prompt` or a chat's `messages`; the other fields but two belong to a chat."""

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

    tokens: Annotated[list[int], Most(VALUES_MAX)]


class ChatWrite(Body):
    """PUT /v1/chats/{id}. `base`: the revision that the chat was read at; 0 makes a new one."""

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
    """POST /v1/sessions/{id}/fork. `n_tokens`: how many of its first tokens the new one has; null: all."""

    session_id: SessionName
    n_tokens: NumTokens | None = None


class SessionTrim(_SessionBody):
    """POST /v1/sessions/{id}/trim. `n_tokens`: how many of its first tokens stay."""

    n_tokens: NumTokens


class SessionSave(_SessionBody):
    """POST /v1/sessions/{id}/save. `file`: a plain name in the key's folder of `--session-store`."""

    file: SessionName


class SessionRestore(_SessionBody):
    """POST /v1/sessions/{id}/restore. `cache_salt`: of the requests that share the restored prefix."""

    file: SessionName
    cache_salt: Annotated[str, StringConstraints(max_length=CACHE_SALT_CHARS_MAX)] = ""
