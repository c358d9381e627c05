"""The timeline: whatever is noted, the spans fill a request's life exactly, and each names its cause."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from llaisys.engine.timeline import N_FINISHED_MAX, N_SPANS_MAX, Timeline
from llaisys.story import Kind, Span, Story

KINDS = [kind for kind in Kind if kind is not Kind.FOLDED]


def told(timeline: Timeline, key: str, now_s: float = 0.0) -> Story:
    story = timeline.story(key, now_s)
    assert story is not None
    return story


def test_a_life_with_every_cause() -> None:
    timeline = Timeline()
    timeline.arrive("r", 10, behind=["a", "b", "c", "d"])
    timeline.note("r", 12, Kind.KV_WAIT)
    timeline.note("r", 13, Kind.OWN_CHUNK)
    timeline.note("r", 14, Kind.DECODE)
    timeline.share_steps(16, "long")
    timeline.share_steps(19, None)
    timeline.note("r", 20, Kind.PREEMPTED, by=["vip"])
    timeline.note("r", 22, Kind.DECODE)
    timeline.end("r", 25)
    story = told(timeline, "r")
    assert story.spans == (
        Span(10, 12, Kind.QUEUED, ("a", "b", "c")),
        Span(12, 13, Kind.KV_WAIT),
        Span(13, 14, Kind.OWN_CHUNK),
        Span(14, 16, Kind.DECODE),
        Span(16, 19, Kind.OTHER_CHUNK, ("long",)),
        Span(19, 20, Kind.DECODE),
        Span(20, 22, Kind.PREEMPTED, ("vip",)),
        Span(22, 25, Kind.DECODE),
    )
    assert (story.arrival_s, story.end_s, story.is_over) == (10, 25, True)
    assert story.seconds[Kind.DECODE] == 6


def test_equal_causes_are_one_span() -> None:
    timeline = Timeline()
    timeline.arrive("r", 0)
    for now_s in range(1, 50):
        timeline.note("r", now_s, Kind.OWN_CHUNK)
    timeline.end("r", 50)
    assert told(timeline, "r").spans == (Span(0, 1, Kind.QUEUED), Span(1, 50, Kind.OWN_CHUNK))


def test_a_cause_of_no_length_leaves_no_span() -> None:
    timeline = Timeline()
    timeline.arrive("r", 0)
    timeline.note("r", 1, Kind.DECODE)
    timeline.note("r", 2, Kind.PREEMPTED)
    timeline.note("r", 2, Kind.DECODE)
    timeline.end("r", 3)
    assert told(timeline, "r").spans == (Span(0, 1, Kind.QUEUED), Span(1, 3, Kind.DECODE))


def test_ones_own_chunk_is_not_anothers() -> None:
    timeline = Timeline()
    timeline.share_steps(0, "r")
    for key in ("r", "other"):
        timeline.arrive(key, 0)
        timeline.note(key, 0, Kind.DECODE)
        timeline.end(key, 1)
    assert told(timeline, "r").spans == (Span(0, 1, Kind.DECODE),)
    assert told(timeline, "other").spans == (Span(0, 1, Kind.OTHER_CHUNK, ("r",)),)


def test_only_decoding_requests_share_a_step() -> None:
    timeline = Timeline()
    timeline.arrive("waits", 0)
    timeline.arrive("was", 0)
    timeline.note("was", 1, Kind.DECODE)
    timeline.note("was", 2, Kind.PREEMPTED)
    timeline.share_steps(3, "long")
    for key in ("waits", "was"):
        timeline.end(key, 4)
    assert [span.kind for span in told(timeline, "waits").spans] == [Kind.QUEUED]
    assert [span.kind for span in told(timeline, "was").spans] == [Kind.QUEUED, Kind.DECODE, Kind.PREEMPTED]


def test_an_open_request_is_told_up_to_now() -> None:
    timeline = Timeline()
    timeline.arrive("r", 0)
    timeline.note("r", 2, Kind.DECODE)
    for now_s in (5, 7):
        story = told(timeline, "r", now_s)
        assert story.spans[-1] == Span(2, now_s, Kind.DECODE)
        assert story.seconds == {Kind.QUEUED: 2, Kind.DECODE: now_s - 2}
        assert not story.is_over


def test_a_late_event_is_ignored() -> None:
    timeline = Timeline()
    timeline.arrive("r", 0)
    timeline.end("r", 1)
    timeline.note("r", 2, Kind.DECODE)
    timeline.end("r", 3)
    timeline.note("nobody", 2, Kind.DECODE)
    assert told(timeline, "r").end_s == 1
    assert timeline.story("nobody", 0) is None


def test_the_middle_of_a_long_story_is_folded() -> None:
    timeline = Timeline()
    timeline.arrive("r", 0)
    for now_s in range(1, 1000):
        timeline.note("r", now_s, Kind.DECODE if now_s % 2 else Kind.PREEMPTED)
    timeline.end("r", 1000)
    story = told(timeline, "r")
    assert len(story.spans) == N_SPANS_MAX
    (folded,) = [span for span in story.spans if span.kind is Kind.FOLDED]
    assert (folded.start_s, folded.end_s) == (N_SPANS_MAX // 2, 1000 - (N_SPANS_MAX // 2 - 1))
    assert story.seconds == {Kind.QUEUED: 1, Kind.DECODE: 500, Kind.PREEMPTED: 499}


def test_the_newest_that_are_over_are_kept() -> None:
    timeline = Timeline()
    for i in range(N_FINISHED_MAX + 2):
        timeline.arrive(i, i)
        timeline.end(i, i + 1)
    kept = [timeline.story(i, 0) is not None for i in (0, 1, 2, N_FINISHED_MAX + 1)]
    assert kept == [False, False, True, True]


def test_an_id_that_is_used_again_has_its_newest_story() -> None:
    timeline = Timeline()
    for start in (0, 10):
        timeline.arrive("r", start)
        timeline.end("r", start + 1)
    assert told(timeline, "r").arrival_s == 10


notes = st.lists(
    st.tuples(
        st.integers(0, 3),  # seconds since the last event; whole, so that sums are exact
        st.one_of(
            st.tuples(st.just("share"), st.sampled_from([None, "a", "b"])),
            st.tuples(st.sampled_from(KINDS), st.lists(st.sampled_from("abcde"), max_size=5)),
        ),
    ),
    max_size=300,
)


@given(notes=notes, late=st.integers(-2, 3), repeat=st.integers(1, 3))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_the_spans_are_the_whole_life(notes: list[Any], late: int, repeat: int) -> None:
    timeline, now = Timeline(), 100
    timeline.arrive("a", now)
    truth: dict[Kind, int] = {}
    kind, chunk_of = Kind.QUEUED, None
    for wait_s, (what, argument) in notes * repeat:
        shown = Kind.OTHER_CHUNK if kind is Kind.DECODE and chunk_of == "b" else kind
        truth[shown] = truth.get(shown, 0) + wait_s
        now += wait_s
        if what == "share":
            chunk_of = argument
            timeline.share_steps(now, chunk_of)
        else:
            kind = what
            timeline.note("a", now, kind, argument)
    timeline.end("a", now + late)
    end = now + max(late, 0)
    shown = Kind.OTHER_CHUNK if kind is Kind.DECODE and chunk_of == "b" else kind
    truth[shown] = truth.get(shown, 0) + end - now

    story = told(timeline, "a")
    borders = [100, *(span.end_s for span in story.spans)]
    assert [span.start_s for span in story.spans] == borders[:-1]
    assert borders[-1] == story.end_s
    assert sum(span.end_s - span.start_s for span in story.spans) == story.end_s - story.arrival_s
    assert sum(story.seconds.values()) == story.end_s - story.arrival_s
    assert len(story.spans) <= N_SPANS_MAX
    assert all(len(span.by) <= 3 for span in story.spans)
    for before, after in zip(story.spans, story.spans[1:], strict=False):
        assert (before.kind, before.by) != (after.kind, after.by)
    if late >= 0:
        assert story.end_s == end
        assert {k: s for k, s in story.seconds.items() if s} == {k: s for k, s in truth.items() if s}
