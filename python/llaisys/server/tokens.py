"""POST /tokenize and /detokenize, in vLLM's shapes: what a prompt or a chat becomes, and ids as text."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import ConfigDict
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from llaisys.errors import RejectedError
from llaisys.server.answers import Text, Tokens
from llaisys.server.body import BodyRoute
from llaisys.server.chat import prompt_of
from llaisys.server.checks import text_of
from llaisys.server.errors import error_answers
from llaisys.server.protocol import TOKENS_NEUTRAL, ChatCompletionRequest, OpenRequest
from llaisys.server.state import engine_of
from llaisys.server.tools import shown_tools

router = APIRouter(route_class=BodyRoute)


class TokenizeRequest(OpenRequest):
    """POST /tokenize: a `prompt` or a chat's `messages`; the other fields but two belong to a chat."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"prompt": "Gravity is"}]})

    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class DetokenizeRequest(OpenRequest):
    """POST /detokenize."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"tokens": [1, 2, 3]}]})

    tokens: list[int]


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
        chat = ChatCompletionRequest(**body.model_dump(exclude={"prompt", "return_token_strs"}))
        ids = await prompt_of(chat, engine, shown_tools(body.tools))
    strs = await engine.token_strs(ids) if body.return_token_strs else None
    answer = {"count": len(ids), "max_model_len": engine.max_model_len, "tokens": ids, "token_strs": strs}
    return JSONResponse(answer, headers=headers)


@router.post("/detokenize", response_model=Text, responses=error_answers(404))
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of token ids, special tokens written out."""
    engine, headers = engine_of(request, body, TOKENS_NEUTRAL)
    vocab_size = engine.model_info.vocab_size
    for id in body.tokens:
        if not 0 <= id < vocab_size:
            raise RejectedError(
                f"tokens holds token id {id}, allowed are 0 to {vocab_size - 1}", param="tokens"
            )
    return JSONResponse({"prompt": await engine.decode(body.tokens)}, headers=headers)
