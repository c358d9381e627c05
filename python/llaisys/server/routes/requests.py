"""GET /v1/requests, POST /v1/requests/{id}/cancel and GET /v1/requests/{id}/timeline, for requests of the
caller's key."""

from __future__ import annotations

import math
import time
from itertools import islice
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel
from starlette.requests import Request

from llaisys.server.access_log import client_id_of
from llaisys.server.http_errors import error_responses
from llaisys.server.state import RequestEntry, ServerState, state_of
from llaisys.timeline import Span, SpanKind, Timeline

RequestName = Annotated[
    str, Path(description="the `id` of a completion: `chatcmpl-...`, `cmpl-...`, `resp_...`")
]

router = APIRouter(prefix="/v1/requests", responses=error_responses(404))


class RequestState(BaseModel):
    """The result of a cancellation: `cancelled` if the request was open, `ended` if it had ended before."""

    id: str
    object: Literal["request"] = "request"
    status: Literal["cancelled", "ended"]


class TimelineSpan(BaseModel):
    """A span of time, in seconds since the arrival. `by`: ids of the requests that caused it; `other` stands
    for a request of another key, or one that is no longer known."""

    kind: SpanKind
    start_s: float
    end_s: float
    by: list[str]


class ChoiceTimeline(BaseModel):
    """The timeline of one choice, from its arrival (Unix time) to its end, or until now.

    The spans have no gaps; `seconds` has their sums by kind.
    """

    index: int
    arrived_at: float
    is_over: bool
    total_s: float
    seconds: dict[SpanKind, float]
    num_draft_tokens: int
    num_accepted_tokens: int
    spans: list[TimelineSpan]


class RequestTimeline(BaseModel):
    """The timelines of a request's choices, without those that are not known yet or no longer known."""

    id: str
    object: Literal["request.timeline"] = "request.timeline"
    choices: list[ChoiceTimeline]


class RequestList(BaseModel):
    """The timelines of several requests. `now`: Unix time, by the clock of their times."""

    object: Literal["list"] = "list"
    now: float
    data: list[RequestTimeline]


@router.get("")
async def list_requests(
    request: Request,
    last_s: Annotated[float, Query(ge=0, le=3600, description="seconds before now that are reported")] = 60,
    limit: Annotated[int, Query(ge=1, le=64, description="requests to report")] = 32,
) -> RequestList:
    """Return the timelines of the newest requests that are open or ended in the last `last_s` seconds."""
    state, client_id = state_of(request), client_id_of(request)
    since_s = time.monotonic() - last_s
    newest = [*islice(state.requests.newest(client_id), limit)]
    found = [await _request_timeline(state, entry, since_s) for entry in newest]
    return RequestList(now=time.time(), data=[each for each in found if each.choices])


@router.post("/{request_id}/cancel")
async def cancel_request(request: Request, request_id: RequestName) -> RequestState:
    """Cancel a request. Its stream ends with an error frame `cancelled`; without a stream it ends with
    499."""
    entry = state_of(request).requests.find(request_id, client_id_of(request))
    if entry.cancel is None:
        return RequestState(id=entry.id, status="ended")
    entry.cancel()
    return RequestState(id=entry.id, status="cancelled")


@router.get("/{request_id}/timeline")
async def show_timeline(request: Request, request_id: RequestName) -> RequestTimeline:
    """Return what the time of a request was spent on.

    Examples are the queue, prefill chunks of other requests, preemption, waiting for KV cells or for a
    restored session, and a slow reader. The newest 1,024 ended requests are known.
    """
    state, client_id = state_of(request), client_id_of(request)
    return await _request_timeline(state, state.requests.find(request_id, client_id))


async def _request_timeline(
    state: ServerState, entry: RequestEntry, since_s: float = -math.inf
) -> RequestTimeline:
    """Return the timelines of an entry's choices, except those that ended before `since_s` (monotonic)."""

    def span(each: Span, timeline: Timeline) -> TimelineSpan:
        keys = [key if isinstance(key, str) else key[0] for key in each.by]
        names = dict.fromkeys(state.requests.name(key, entry.client_id) for key in keys)
        start_s, end_s = each.start_s - timeline.arrival_s, each.end_s - timeline.arrival_s
        return TimelineSpan(kind=each.kind, start_s=start_s, end_s=end_s, by=[*names])

    return RequestTimeline(
        id=entry.id,
        choices=[
            ChoiceTimeline(
                index=index,
                arrived_at=time.time() - (time.monotonic() - timeline.arrival_s),
                is_over=timeline.is_over,
                total_s=timeline.end_s - timeline.arrival_s,
                seconds=timeline.seconds,
                num_draft_tokens=timeline.num_draft_tokens,
                num_accepted_tokens=timeline.num_accepted_tokens,
                spans=[span(each, timeline) for each in timeline.spans],
            )
            for index, timeline in (await _timelines(entry)).items()
            if timeline.end_s >= since_s
        ],
    )


async def _timelines(entry: RequestEntry) -> dict[int, Timeline]:
    """Return timelines by choice index, without those of an earlier request with the same id."""
    timelines = {}
    for prompt, request_id in enumerate(entry.request_ids):
        for index, timeline in (await entry.engine.timeline(request_id, client_id=entry.client_id)).items():
            if index < entry.n and timeline.arrival_s >= entry.opened_s:
                timelines[prompt * entry.n + index] = timeline
    return timelines
