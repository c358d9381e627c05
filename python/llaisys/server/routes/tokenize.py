"""POST /tokenize and /detokenize, in vLLM's format."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from llaisys.errors import RejectedError
from llaisys.server.chat import prompt_of
from llaisys.server.fields import TOKENS_NEUTRAL
from llaisys.server.http_errors import error_responses, to_json
from llaisys.server.protocol import BodyRoute, engine_of, text_of
from llaisys.server.request_schemas import DetokenizeRequest, TokenizeRequest
from llaisys.server.response_body import JsonParts, Part, json_list, json_string
from llaisys.server.response_schemas import Text, Tokens
from llaisys.server.state import state_of
from llaisys.server.tools import checked_tools

router = APIRouter(route_class=BodyRoute)


@router.post("/tokenize", response_model=Tokens, responses=error_responses(404))
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Return the token ids of a prompt for completions, or of messages for a chat."""
    engine, headers = engine_of(request, body, TOKENS_NEUTRAL)
    if (body.prompt is None) == (body.messages is None):
        raise RejectedError("send either prompt or messages", param="prompt")
    if body.prompt is not None:
        special = body.add_special_tokens is not False
        ids = await engine.encode(text_of("prompt", body.prompt), add_special_tokens=special)
    else:
        ids = await prompt_of(body, body.messages or [], engine, checked_tools(body.tools))
    head = to_json({"count": len(ids), "max_model_len": engine.max_model_len})[:-1]
    strs: list[Part] = [b"null"]
    if body.return_token_strs:
        strs = [b"[", await json_list(await engine.token_strs(ids)), b"]"]
    parts = [head, b',"tokens":[', await json_list(ids), b'],"token_strs":', *strs, b"}"]
    return JsonParts(parts, headers)


@router.post("/detokenize", response_model=Text, responses=error_responses(404))
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """Return the text of token ids, special tokens included."""
    engine, headers = engine_of(request, body, TOKENS_NEUTRAL)
    vocab_size = engine.model_info.vocab_size
    for id in (min(body.tokens), max(body.tokens)) if body.tokens else ():
        if not 0 <= id < vocab_size:
            raise RejectedError(
                f"tokens contains token id {id}, allowed are 0 to {vocab_size - 1}", param="tokens"
            )
    text, bytes_max = await engine.decode(body.tokens), state_of(request).response_bytes.bytes_max
    if len(text) > bytes_max:
        raise RejectedError(
            f"the text of these tokens has {len(text)} characters, max_response_bytes allows {bytes_max}",
            param="tokens",
        )
    return JsonParts([b'{"prompt":"', await json_string(text), b'"}'], headers)
