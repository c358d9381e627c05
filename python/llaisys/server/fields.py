"""The fields of requests that are known: without effect, or accepted only with a neutral value.

There are four kinds of fields; null always means absent:

- supported: typed in `request_schemas.py`.
- without effect: `NO_EFFECT`.
- known but not supported: `NEUTRAL`, accepted with null or a neutral value, otherwise a 400 that names it.
- unknown: accepted and named in the header `x-llaisys-ignored-fields`; a 400 with `--strict-fields`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pydantic import BaseModel

from llaisys.errors import UnsupportedError
from llaisys.server.http_errors import ApiError
from llaisys.server.request_schemas import Body

IGNORED_NAMES_MAX = 64

# Hints and metadata of OpenAI's platform, which do not change a response.
NO_EFFECT = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "stream_options.include_obfuscation",
        "client_metadata",
        # As in vLLM with a fast tokenizer, special tokens never have spaces between them.
        "spaces_between_special_tokens",
    }
)

# Unsupported fields of OpenAI's or vLLM's API -> values without effect (null is always accepted).
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "guided_whitespace_pattern": (),
    "structural_tag": (),
    "logits_processors": ([],),
    "return_prompt_text": (False,),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    "repetition_detection": (),
    "thinking_token_budget": (),
    "stream_interval": (1,),
}

CHAT_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **NEUTRAL,
    "best_of": (1,),
    "moderation": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "include_reasoning": (True,),
    "verbosity": ("medium",),
    "documents": ([],),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
}

COMPLETION_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **NEUTRAL,
    "suffix": ("",),
    "prompt_embeds": (),
}

MESSAGES_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "container": (),
    "mcp_servers": ([],),
    "output_format": (),
}

EMBEDDING_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "chat_template": (),
    "embed_dtype": ("float32",),
    "endianness": ("little", "native"),
    "use_activation": (True,),
    "session_id": ("",),
}

SCORE_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "use_activation": (True,),
    "activation": (True,),
    "softmax": (True,),
    "session_id": ("",),
}

RERANK_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **SCORE_NEUTRAL,
    "max_chunks_per_doc": (),
    "max_tokens_per_doc": (),
    "rank_fields": (["text"],),
    "relevant_spans": (False,),
    "return_embeddings": (False,),
}

TOKENS_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "chat_template": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
}


def ignored_fields(
    request: BaseModel,
    neutral: Mapping[str, tuple[Any, ...]],
    strict: bool,
    no_effect: Collection[str] = NO_EFFECT,
) -> list[str]:
    """Return the names of unknown fields, up to 64. A field of an object has the name `object.field`.

    Raises UnsupportedError for an unsupported field whose value has an effect, and ApiError for an unknown
    field if `strict`.
    """
    extra = dict(request.model_extra or {})
    for field in type(request).model_fields:
        inner = getattr(request, field)
        if isinstance(inner, Body):
            extra |= {f"{field}.{name}": value for name, value in (inner.model_extra or {}).items()}
    unknown = []
    for name, value in extra.items():
        if name in neutral:
            if value is not None and value not in neutral[name]:
                raise UnsupportedError(_unsupported_text(name, neutral[name]), param=name)
        elif name not in no_effect:
            unknown.append(name)
    names = [_printable(name) for name in unknown[:IGNORED_NAMES_MAX]]
    if names and strict:
        raise ApiError(400, f"Unknown field: {names[0]}.", code="unknown_parameter", param=names[0])
    return names


def _unsupported_text(name: str, neutral: tuple[Any, ...]) -> str:
    allowed = f"; leave it out or send {neutral[0]!r}" if neutral else "; leave it out"
    return f"{name} is not supported by this server{allowed}"


def _printable(name: str) -> str:
    """Return a client's field name in a form that is safe in a header and a log line."""
    safe = "".join(c if c.isascii() and (c.isalnum() or c in "_-.") else "?" for c in name[:64])
    return safe or "?"
