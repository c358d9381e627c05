"""What is told of a request's time: plain values that every room may know. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias

from llaisys.types import RequestId

# A request id, or (request id, choice).
Key: TypeAlias = RequestId | tuple[RequestId, int]


class Kind(str, Enum):
    """What time went to; `by` of a span names whom, where somebody else is the reason."""

    QUEUED = "queued"  # behind whom
    OWN_CHUNK = "own_chunk"  # its prompt was computed
    OTHER_CHUNK = "other_chunk"  # its step waited for a prompt's chunk: whose (the largest)
    DECODE = "decode"
    PREEMPTED = "preempted"  # by whom
    KV_WAIT = "kv_wait"  # cells were short
    REMOTE_KV = "remote_kv"  # a saved prefix was being restored
    SLOW_READER = "slow_reader"  # its tokens were there, and nobody took them
    FOLDED = "folded"  # the middle of a long story: `seconds` still has its kinds


@dataclass(frozen=True, slots=True)
class Span:
    """`start_s <= t < end_s` of one request went to `kind`."""

    start_s: float
    end_s: float
    kind: Kind
    by: tuple[Key, ...] = ()


@dataclass(frozen=True, slots=True)
class Story:
    """One request's time. `spans` follow on each other without a gap from `arrival_s` to `end_s`.

    `seconds`: the sum over all spans of each kind, the folded ones included. `is_over`: it has ended.
    """

    arrival_s: float
    end_s: float
    spans: tuple[Span, ...]
    seconds: dict[Kind, float]
    is_over: bool


def with_lags(story: Story, lags: Sequence[tuple[float, float]]) -> Story:
    """The story as its reader saw it. `lags`, in order and apart: from when till when tokens lay unread.

    What the engine decoded meanwhile brought the reader nothing, so that time is the slow reader's; what held
    the engine up stays as it is. A lag that outlasts the engine's part makes the story longer.
    """
    if not lags:
        return story
    spans: list[Span] = []
    for span in story.spans:
        shown = [*_divided(span, lags)] if span.kind in (Kind.DECODE, Kind.OTHER_CHUNK) else [span]
        spans += shown
    end_s = story.end_s
    if lags and lags[-1][1] > end_s:
        begin_s, end_s = max(lags[-1][0], end_s), lags[-1][1]
        if begin_s > story.end_s:  # an end is dated at the beginning of its step
            spans.append(Span(story.end_s, begin_s, Kind.DECODE))
        spans.append(Span(begin_s, end_s, Kind.SLOW_READER))
    seconds = dict(story.seconds)
    for sign, each in ((-1, story.spans), (1, spans)):
        for span in each:
            if span.kind is not Kind.FOLDED:
                seconds[span.kind] = seconds.get(span.kind, 0.0) + sign * (span.end_s - span.start_s)
    seconds = {kind: max(0.0, each) for kind, each in seconds.items()}  # sums are rounded
    return replace(story, end_s=end_s, spans=tuple(spans), seconds=seconds)


def _divided(span: Span, lags: Sequence[tuple[float, float]]) -> Iterable[Span]:
    at_s = span.start_s
    for begin_s, end_s in lags:
        begin_s, end_s = max(begin_s, at_s), min(end_s, span.end_s)
        if begin_s < end_s:
            if at_s < begin_s:
                yield replace(span, start_s=at_s, end_s=begin_s)
            yield Span(begin_s, end_s, Kind.SLOW_READER)
            at_s = end_s
    if at_s < span.end_s:
        yield replace(span, start_s=at_s)
