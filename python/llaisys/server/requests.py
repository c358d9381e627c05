"""POST /v1/requests/{id}/cancel and GET /v1/requests/{id}/timeline, of the key's own answers."""

from __future__ import annotations

import time
from typing import Annotated, Literal

from fastapi import APIRouter, Path
from pydantic import BaseModel
from starlette.requests import Request

from llaisys.server.book import Entry
from llaisys.server.errors import error_answers
from llaisys.server.state import state_of
from llaisys.server.trace import client_id_of
from llaisys.story import Kind, Span, Story

RequestName = Annotated[str, Path(description="the `id` of an answer: `chatcmpl-...`, `cmpl-...`")]

router = APIRouter(prefix="/v1/requests", responses=error_answers(404))


class RequestState(BaseModel):
    """What a cancel found: the answer was being given and ends now, or it had ended."""

    id: str
    object: Literal["request"] = "request"
    status: Literal["cancelled", "ended"]


class TimelineSpan(BaseModel):
    """Where a time went, in seconds since the arrival. `by`: the ids of the requests that it went to; `other`
    is one of another key, or of long ago."""

    kind: Kind
    start_s: float
    end_s: float
    by: list[str]


class ChoiceTimeline(BaseModel):
    """One choice, from its arrival (Unix time) to its end, or until now.

    The spans follow on each other without a gap; `seconds` sums them up by kind.
    """

    index: int
    arrived_at: float
    is_over: bool
    total_s: float
    seconds: dict[Kind, float]
    spans: list[TimelineSpan]


class RequestTimeline(BaseModel):
    """Choices that the engine has not seen yet, or knows no more, are left out."""

    id: str
    object: Literal["request.timeline"] = "request.timeline"
    choices: list[ChoiceTimeline]


@router.post("/{request_id}/cancel")
async def cancel_request(request: Request, request_id: RequestName) -> RequestState:
    """Ends an answer: its stream with an error frame `cancelled`, one that is no stream with 499."""
    entry = state_of(request).requests.find(request_id, client_id_of(request))
    if entry.cancel is None:
        return RequestState(id=entry.id, status="ended")
    entry.cancel()
    return RequestState(id=entry.id, status="cancelled")


@router.get("/{request_id}/timeline")
async def show_timeline(request: Request, request_id: RequestName) -> RequestTimeline:
    """Where the time of an answer went: queued behind whom, whose chunk, preempted, short of cells, a session
    that was being restored, a slow reader. The newest 1,024 ended ones are known."""
    state, client_id = state_of(request), client_id_of(request)
    entry = state.requests.find(request_id, client_id)

    def span(each: Span, story: Story) -> TimelineSpan:
        keys = [key if isinstance(key, str) else key[0] for key in each.by]
        names = dict.fromkeys(state.requests.name(key, client_id) for key in keys)
        start_s, end_s = each.start_s - story.arrival_s, each.end_s - story.arrival_s
        return TimelineSpan(kind=each.kind, start_s=start_s, end_s=end_s, by=[*names])

    return RequestTimeline(
        id=entry.id,
        choices=[
            ChoiceTimeline(
                index=index,
                arrived_at=time.time() - (time.monotonic() - story.arrival_s),
                is_over=story.is_over,
                total_s=story.end_s - story.arrival_s,
                seconds=story.seconds,
                spans=[span(each, story) for each in story.spans],
            )
            for index, story in (await _stories(entry)).items()
        ],
    )


async def _stories(entry: Entry) -> dict[int, Story]:
    """By the index of the choice in the answer; without what an earlier request of the same id left."""
    stories = {}
    for prompt, request_id in enumerate(entry.request_ids):
        for index, story in (await entry.engine.timeline(request_id, client_id=entry.client_id)).items():
            if index < entry.n and story.arrival_s >= entry.opened_s:
                stories[prompt * entry.n + index] = story
    return stories
