"""What an answer must look like, as a request says it: OpenAI's `response_format`, vLLM's fields.

Each field asks for a grammar or for nothing; two that ask are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llaisys.errors import LlaisysError, RejectedError, UnsupportedError
from llaisys.server.bodies import GenerationRequest
from llaisys.service import AsyncLLM
from llaisys.types import SamplingParams, StructuredOutputsParams

# vLLM's older names -> the field of `structured_outputs` that they became.
GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_STRUCTURED = frozenset({"json", "regex", "choice", "grammar", "json_object"})


@dataclass(frozen=True, slots=True)
class Asked:
    """A grammar, and the field of the request that asked for it."""

    spec: StructuredOutputsParams
    field: str


def grammar_of(body: GenerationRequest) -> Asked | None:
    """The grammar that the request asks for. Raises RejectedError or UnsupportedError naming the field."""
    asked = [
        *_of_response_format(body.response_format),
        *_of_structured_outputs(body.structured_outputs),
        *(
            _asked({field: value}, name)
            for name, field in GUIDED.items()
            if (value := getattr(body, name)) is not None
        ),
    ]
    if len(asked) > 1:
        raise RejectedError(f"{asked[0].field} and {asked[1].field} exclude each other", param=asked[1].field)
    return asked[0] if asked else None


async def with_grammar(
    engine: AsyncLLM, params: SamplingParams, asked: Asked | None, client_id: str
) -> SamplingParams:
    """The parameters with the grammar, which is known to compile. Raises RejectedError naming the field."""
    if asked is None:
        return params
    try:
        await engine.compile_grammar(asked.spec, client_id)
        return params.with_grammar(asked.spec)
    except LlaisysError as e:
        raise named(e, asked.field) from e


def _of_response_format(format: Mapping[str, Any] | None) -> list[Asked]:
    if format is None:
        return []
    match format.get("type"):
        case "text":
            return []
        case "json_object":
            return [_asked({"json_object": True}, "response_format")]
        case "json_schema":
            return [_of_json_schema(format.get("json_schema"))]
        case kind:
            raise UnsupportedError(
                f"response_format.type is {str(kind)[:40]!r}, supported: text, json_object, json_schema",
                param="response_format.type",
            )


def _of_json_schema(given: Any) -> Asked:
    """`{"name", "schema", "strict", "description"}`; a schema is always kept, strict or not."""
    where = "response_format.json_schema"
    if not isinstance(given, Mapping):
        raise RejectedError(f"{where} is missing", param=where)
    schema = given.get("schema")
    if not isinstance(schema, Mapping):
        raise RejectedError(f"{where}.schema must be an object", param=f"{where}.schema")
    return _asked({"json": schema}, f"{where}.schema")


def _of_structured_outputs(given: Mapping[str, Any] | None) -> list[Asked]:
    if given is None:
        return []
    for name, value in given.items():
        if name not in _STRUCTURED and value not in (None, False):
            where = f"structured_outputs.{name[:40]}"
            raise UnsupportedError(f"{where} is not supported by this server; leave it out", param=where)
    return [
        _asked({name: value for name, value in given.items() if name in _STRUCTURED}, "structured_outputs")
    ]


def _asked(values: Mapping[str, Any], field: str) -> Asked:
    try:
        return Asked(StructuredOutputsParams(**values), field)
    except RejectedError as e:
        raise named(e, field) from e


def named(error: LlaisysError, field: str) -> LlaisysError:
    """The same error in the words of the request. `structured_outputs` has our own names already."""
    param = error.param or ""
    if not param.startswith("structured_outputs") or field == "structured_outputs":
        return error
    return type(error)(str(error).replace(param, field, 1), param=field)
