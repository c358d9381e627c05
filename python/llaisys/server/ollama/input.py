"""Translates requests of Ollama's API to a `ChatCompletionRequest`.

Names and defaults are those of Ollama's docs/api.md and docs/modelfile.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llaisys.errors import RejectedError, UnsupportedError
from llaisys.server.ollama.schemas import OllamaChatRequest, OllamaGenerateRequest, OllamaOptions
from llaisys.server.request_schemas import ChatCompletionRequest
from llaisys.server.response_body import Json

# Fields of Ollama's API that do not change a response. Settings of the server decide the context size, how a
# model is loaded, and when it is unloaded.
NO_EFFECT = frozenset(
    {
        "keep_alive",
        "truncate",
        "shift",
        "options.num_ctx",
        "options.num_keep",
        "options.num_batch",
        "options.num_gpu",
        "options.main_gpu",
        "options.num_thread",
        "options.numa",
        "options.low_vram",
        "options.f16_kv",
        "options.logits_all",
        "options.use_mmap",
        "options.use_mlock",
        "options.penalize_newline",
        # They need `mirostat`.
        "options.mirostat_eta",
        "options.mirostat_tau",
    }
)

# Unsupported fields -> values without effect (null is always accepted).
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "template": ("",),
    "context": ([],),
    "images": ([],),
    "options.mirostat": (0,),
    "options.tfs_z": (1,),
    "options.vocab_only": (False,),
    "options.embedding_only": (False,),
}

# Fields of a chat request -> those of Ollama, for errors.
FIELD_NAMES: Mapping[str, str] = {
    "max_tokens": "options.num_predict",
    "temperature": "options.temperature",
    "top_k": "options.top_k",
    "top_p": "options.top_p",
    "min_p": "options.min_p",
    "typical_p": "options.typical_p",
    "repetition_penalty": "options.repeat_penalty",
    "presence_penalty": "options.presence_penalty",
    "frequency_penalty": "options.frequency_penalty",
    "seed": "options.seed",
    "stop": "options.stop",
    "response_format": "format",
}

THINK_LEVELS = ("low", "medium", "high")


def chat_of(body: OllamaChatRequest | OllamaGenerateRequest) -> ChatCompletionRequest:
    """Return the chat request of a body. Its types were validated with the body's.

    Raises RejectedError or UnsupportedError naming the field of the body.
    """
    values = {
        "model": body.model,
        "messages": _messages_of(body),
        "stream": body.stream is not False,
        "response_format": _response_format(body.format),
        "logprobs": body.logprobs,
        "top_logprobs": body.top_logprobs,
        "chat_template_kwargs": _template_kwargs(body.think),
        **_sampling(body.options or OllamaOptions()),
    }
    if isinstance(body, OllamaChatRequest):
        values["tools"] = body.tools
    return ChatCompletionRequest.model_construct(**values)


def _messages_of(body: OllamaChatRequest | OllamaGenerateRequest) -> list[Json]:
    if isinstance(body, OllamaChatRequest):
        return [_message(f"messages[{i}]", message) for i, message in enumerate(body.messages or [])]
    system = [{"role": "system", "content": body.system}] if body.system else []
    return [*system, {"role": "user", "content": body.prompt or ""}]


def _message(where: str, message: Mapping[str, Any]) -> Json:
    """Return a message with OpenAI's field names. Arguments of tool calls stay objects, as in templates."""
    if message.get("images"):
        raise UnsupportedError(
            f"{where}.images: this model takes no images; leave them out", param=f"{where}.images"
        )
    renamed = {"thinking": "reasoning_content", "tool_name": "name"}
    return {renamed.get(name, name): value for name, value in message.items() if name != "images"}


def _response_format(format: str | Json | None) -> Json | None:
    if format is None or format == "":
        return None
    if format == "json":
        return {"type": "json_object"}
    if isinstance(format, str):
        raise UnsupportedError(
            f"format is {format[:40]!r}, supported are 'json' and a JSON schema", param="format"
        )
    return {"type": "json_schema", "json_schema": {"schema": format}}


def _template_kwargs(think: bool | str | None) -> Json:
    """Return the variables by which chat templates switch reasoning on or off, and set its effort."""
    if think is None:
        return {}
    if isinstance(think, bool):
        return {"enable_thinking": think}
    if think not in THINK_LEVELS:
        raise RejectedError(
            f"think is {think[:40]!r}, allowed are true, false, {', '.join(THINK_LEVELS)}", param="think"
        )
    return {"enable_thinking": True, "reasoning_effort": think}


def _sampling(options: OllamaOptions) -> Json:
    """Return the sampling fields of a chat request.

    `num_predict` -1 and -2 mean no limit, `seed` -1 a random seed. Penalties apply to the whole context, so
    `repeat_last_n` is refused if it would limit a penalty; -1 means the whole context.
    """
    n_predict = options.num_predict
    has_penalty = (options.repeat_penalty or 1) != 1 or options.presence_penalty or options.frequency_penalty
    if has_penalty and options.repeat_last_n not in (None, -1):
        raise UnsupportedError(
            f"options.repeat_last_n is {options.repeat_last_n}, supported is only -1: penalties apply to the "
            "whole context",
            param="options.repeat_last_n",
        )
    return {
        "max_tokens": None if n_predict in (-1, -2) else n_predict,
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "min_p": options.min_p,
        "typical_p": options.typical_p,
        "repetition_penalty": options.repeat_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
        "seed": None if options.seed == -1 else options.seed,
        "stop": options.stop,
    }
