"""Truncation of a conversation: `truncation: "auto"` drops the oldest turns of an input that is too long."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request

from llaisys.async_llm import AsyncLLM
from llaisys.errors import ContextLengthError
from llaisys.server.chat import Chat, prepare_chat
from llaisys.server.response_body import Json
from llaisys.server.responses.input import Translation


async def prepare_truncated(
    request: Request, engine: AsyncLLM, translation: Translation, id_prefix: str
) -> Chat:
    """Prepare the chat of a translation. With `truncates`, drop as few of its oldest turns as possible.

    A turn begins with a user message; the system message stays. If the last turn alone is too long, nothing
    is dropped, and the engine rejects the request. Raises the errors of `prepare_chat`.
    """
    body = translation.chat
    if not translation.truncates:
        return await prepare_chat(request, engine, body, id_prefix)
    starts = _turns(body.messages)

    async def attempt(n_dropped: int) -> Chat | ContextLengthError:
        shorter = body.model_copy(update={"messages": _without(body.messages, starts[n_dropped])})
        try:
            return await prepare_chat(request, engine, shorter, id_prefix)
        except ContextLengthError as e:
            return e

    chosen = whole = await attempt(0)
    # A binary search over the number of dropped turns, because each attempt renders the rest.
    low, high = (len(starts), 0) if _fits(engine, whole) else (1, len(starts) - 1)
    while low <= high:
        middle = (low + high) // 2
        chat = await attempt(middle)
        if _fits(engine, chat):
            chosen, high = chat, middle - 1
        else:
            low = middle + 1
    if isinstance(chosen, ContextLengthError):
        raise chosen
    return chosen


def _turns(messages: Sequence[Json]) -> list[int]:
    """Return the indexes of the messages at which a truncated conversation may begin."""
    n_system = _n_system(messages)
    later = (i for i in range(n_system + 1, len(messages)) if messages[i]["role"] == "user")
    return [n_system, *later]


def _n_system(messages: Sequence[Json]) -> int:
    return int(bool(messages) and messages[0]["role"] == "system")


def _without(messages: list[Json], start: int) -> list[Json]:
    """Return the system message and the messages from `start` on."""
    n_system = _n_system(messages)
    return [*messages[:n_system], *messages[max(start, n_system) :]]


def _fits(engine: AsyncLLM, chat: Chat | ContextLengthError) -> bool:
    """Return True for a chat whose prompt leaves space for the completion."""
    if isinstance(chat, ContextLengthError):
        return False
    n_most = engine.max_prompt_tokens(chat.params)
    space = engine.max_model_len - (chat.params.max_tokens or 1)
    return len(chat.prompt) <= (space if n_most is None else min(n_most, space))
