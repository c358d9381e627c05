"""POST /tokenize and /detokenize, in vLLM's shapes: what a prompt or a chat becomes, and ids as text."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from llaisys.errors import RejectedError
from llaisys.server.answers import Text, Tokens
from llaisys.server.bodies import DetokenizeRequest, TokenizeRequest
from llaisys.server.body import BodyRoute
from llaisys.server.chat import prompt_of
from llaisys.server.checks import text_of
from llaisys.server.errors import error_answers, to_json
from llaisys.server.pieces import JsonParts, Part, listed, quoted
from llaisys.server.protocol import TOKENS_NEUTRAL
from llaisys.server.state import engine_of, state_of
from llaisys.server.tools import shown_tools

router = APIRouter(route_class=BodyRoute)


@router.post("/tokenize", response_model=Tokens, responses=error_answers(404))
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """The token ids of a prompt as completions would take it, or of messages as a chat would."""
    engine, headers = engine_of(request, body, TOKENS_NEUTRAL)
    if (body.prompt is None) == (body.messages is None):
        raise RejectedError("give either prompt or messages", param="prompt")
    if body.prompt is not None:
        special = body.add_special_tokens is not False
        ids = await engine.encode(text_of("prompt", body.prompt), add_special_tokens=special)
    else:
        ids = await prompt_of(body, body.messages or [], engine, shown_tools(body.tools))
    head = to_json({"count": len(ids), "max_model_len": engine.max_model_len})[:-1]
    strs: list[Part] = [b"null"]
    if body.return_token_strs:
        strs = [b"[", await listed(await engine.token_strs(ids)), b"]"]
    parts = [head, b',"tokens":[', await listed(ids), b'],"token_strs":', *strs, b"}"]
    return JsonParts(parts, headers)


@router.post("/detokenize", response_model=Text, responses=error_answers(404))
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of token ids, special tokens written out."""
    engine, headers = engine_of(request, body, TOKENS_NEUTRAL)
    vocab_size = engine.model_info.vocab_size
    for id in (min(body.tokens), max(body.tokens)) if body.tokens else ():
        if not 0 <= id < vocab_size:
            raise RejectedError(
                f"tokens holds token id {id}, allowed are 0 to {vocab_size - 1}", param="tokens"
            )
    text, n_most = await engine.decode(body.tokens), state_of(request).response_bytes.n_most
    if len(text) > n_most:
        raise RejectedError(
            f"the text of these tokens has {len(text)} characters, max_response_bytes allows {n_most}",
            param="tokens",
        )
    return JsonParts([b'{"prompt":"', await quoted(text), b'"}'], headers)
