"""Tells the timeline what each request's time goes to, step by step.

A step's time passes after its plan, so what a plan does is noted at its beginning; an end is dated at the
beginning of the step that made it. A step in which everybody who runs is served costs one comparison.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llaisys.engine.plan import Plan
from llaisys.engine.request import Request, WaitingForRemoteKvs
from llaisys.engine.timeline import N_NAMES_MAX, Timeline
from llaisys.story import Key, Kind, Story
from llaisys.types import CHOICES_MAX, RequestId


def key_of(request: Request) -> Key:
    """A request's name in the timeline: its id, for later choices with the index."""
    return _key(request.request_id, request.index)


def _key(request_id: RequestId, index: int) -> Key:
    return (request_id, index) if index else request_id


class Chronicle:
    """Owned by one engine, of whose open requests it is told."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        # Gave their first token in the last step: they decode from now on.
        self._begun: list[Request] = []
        self._all_served = True

    def arrive(self, request: Request, before: Sequence[Request]) -> None:
        """A request was taken, and waits behind those before it; the nearest are named."""
        key, now_s = key_of(request), request.source.arrival_s
        self.timeline.arrive(key, now_s, map(key_of, before[-N_NAMES_MAX:]))
        if isinstance(request.state, WaitingForRemoteKvs):
            self.timeline.note(key, now_s, Kind.REMOTE_KV)

    def begin_decoding(self, request: Request) -> None:
        """A request has its first token since it was admitted."""
        self._begun.append(request)

    def plan(self, made: Plan, requests: Mapping[int, Request], n_running: int, now_s: float) -> None:
        """What this step's time goes to. `requests`: the open ones; `n_running`: those that run after the
        plan.
        """
        timeline = self.timeline
        for request in self._begun:
            timeline.note(key_of(request), now_s, Kind.DECODE)
        self._begun.clear()
        served = [*made.decode, *(chunk.ordinal for chunk in made.chunks)]
        first = [key_of(requests[i]) for i in served[:N_NAMES_MAX] if i in requests]
        for ordinal in made.preempt:
            timeline.note(key_of(requests[ordinal]), now_s, Kind.PREEMPTED, first)
        largest = max(made.chunks, key=lambda chunk: chunk.n_tokens, default=None)
        by = None if largest is None or largest.ordinal not in requests else key_of(requests[largest.ordinal])
        if len(served) < n_running:
            self._note_all(made, requests, first, now_s)
        elif not self._all_served:
            for ordinal in made.decode:
                timeline.note(key_of(requests[ordinal]), now_s, Kind.DECODE)
        self._all_served = len(served) >= n_running
        for chunk in made.chunks:
            if chunk.ordinal in requests:
                timeline.note(key_of(requests[chunk.ordinal]), now_s, Kind.OWN_CHUNK)
        for ordinal in made.short:
            timeline.note(key_of(requests[ordinal]), now_s, Kind.KV_WAIT)
        timeline.share_steps(now_s, by)

    def end(self, request: Request, now_s: float) -> None:
        """A choice is over."""
        self.timeline.end(key_of(request), now_s)

    def stories(self, request_id: RequestId, now_s: float) -> dict[int, Story]:
        """The stories of a request's choices, by index."""
        told = {i: self.timeline.story(_key(request_id, i), now_s) for i in range(CHOICES_MAX)}
        return {index: story for index, story in told.items() if story is not None}

    def _note_all(
        self, made: Plan, requests: Mapping[int, Request], first: Sequence[Key], now_s: float
    ) -> None:
        """Some who run have no part in the step: they wait for those who do."""
        decoding, computing = set(made.decode), {chunk.ordinal for chunk in made.chunks}
        for ordinal, request in requests.items():
            if ordinal in decoding:
                self.timeline.note(key_of(request), now_s, Kind.DECODE)
            elif request.num_computed and ordinal not in computing:
                self.timeline.note(key_of(request), now_s, Kind.QUEUED, first)
