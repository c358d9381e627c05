"""Timelines: spans cover the time of a request exactly and have their kinds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.engines import NOW, Engine
from llaisys.engine.timeline import FINISHED_MAX, SPANS_MAX, TimelineStore
from llaisys.timeline import Span, SpanKind, Timeline, with_reader_lags

KINDS = [kind for kind in SpanKind if kind is not SpanKind.FOLDED]


def timeline_of(timeline: TimelineStore, key: str, now_s: float = 0.0) -> Timeline:
    found = timeline.timeline(key, now_s)
    assert found is not None
    return found


def test_a_timeline_with_every_kind() -> None:
    timeline = TimelineStore()
    timeline.add("r", 10, behind=["a", "b", "c", "d"])
    timeline.record("r", 12, SpanKind.KV_WAIT)
    timeline.record("r", 13, SpanKind.OWN_CHUNK)
    timeline.record("r", 14, SpanKind.DECODE)
    timeline.record_largest_chunk(16, "long")
    timeline.record_largest_chunk(19, None)
    timeline.record("r", 20, SpanKind.PREEMPTED, by=["vip"])
    timeline.record("r", 22, SpanKind.DECODE)
    timeline.end("r", 25)
    found = timeline_of(timeline, "r")
    assert found.spans == (
        Span(10, 12, SpanKind.QUEUED, ("a", "b", "c")),
        Span(12, 13, SpanKind.KV_WAIT),
        Span(13, 14, SpanKind.OWN_CHUNK),
        Span(14, 16, SpanKind.DECODE),
        Span(16, 19, SpanKind.OTHER_CHUNK, ("long",)),
        Span(19, 20, SpanKind.DECODE),
        Span(20, 22, SpanKind.PREEMPTED, ("vip",)),
        Span(22, 25, SpanKind.DECODE),
    )
    assert (found.arrival_s, found.end_s, found.is_over) == (10, 25, True)
    assert found.seconds[SpanKind.DECODE] == 6


def test_equal_kinds_are_one_span() -> None:
    timeline = TimelineStore()
    timeline.add("r", 0)
    for now_s in range(1, 50):
        timeline.record("r", now_s, SpanKind.OWN_CHUNK)
    timeline.end("r", 50)
    assert timeline_of(timeline, "r").spans == (Span(0, 1, SpanKind.QUEUED), Span(1, 50, SpanKind.OWN_CHUNK))


def test_a_kind_without_duration_leaves_no_span() -> None:
    timeline = TimelineStore()
    timeline.add("r", 0)
    timeline.record("r", 1, SpanKind.DECODE)
    timeline.record("r", 2, SpanKind.PREEMPTED)
    timeline.record("r", 2, SpanKind.DECODE)
    timeline.end("r", 3)
    assert timeline_of(timeline, "r").spans == (Span(0, 1, SpanKind.QUEUED), Span(1, 3, SpanKind.DECODE))


def test_a_requests_own_chunk_is_not_another_requests() -> None:
    timeline = TimelineStore()
    timeline.record_largest_chunk(0, "r")
    for key in ("r", "other"):
        timeline.add(key, 0)
        timeline.record(key, 0, SpanKind.DECODE)
        timeline.end(key, 1)
    assert timeline_of(timeline, "r").spans == (Span(0, 1, SpanKind.DECODE),)
    assert timeline_of(timeline, "other").spans == (Span(0, 1, SpanKind.OTHER_CHUNK, ("r",)),)


def test_only_decoding_requests_share_a_step() -> None:
    timeline = TimelineStore()
    timeline.add("waits", 0)
    timeline.add("was", 0)
    timeline.record("was", 1, SpanKind.DECODE)
    timeline.record("was", 2, SpanKind.PREEMPTED)
    timeline.record_largest_chunk(3, "long")
    for key in ("waits", "was"):
        timeline.end(key, 4)
    assert [span.kind for span in timeline_of(timeline, "waits").spans] == [SpanKind.QUEUED]
    assert [span.kind for span in timeline_of(timeline, "was").spans] == [
        SpanKind.QUEUED,
        SpanKind.DECODE,
        SpanKind.PREEMPTED,
    ]


def test_an_open_timeline_ends_now() -> None:
    timeline = TimelineStore()
    timeline.add("r", 0)
    timeline.record("r", 2, SpanKind.DECODE)
    for now_s in (5, 7):
        found = timeline_of(timeline, "r", now_s)
        assert found.spans[-1] == Span(2, now_s, SpanKind.DECODE)
        assert found.seconds == {SpanKind.QUEUED: 2, SpanKind.DECODE: now_s - 2}
        assert not found.is_over


def test_a_late_event_is_ignored() -> None:
    timeline = TimelineStore()
    timeline.add("r", 0)
    timeline.end("r", 1)
    timeline.record("r", 2, SpanKind.DECODE)
    timeline.end("r", 3)
    timeline.record("unknown", 2, SpanKind.DECODE)
    assert timeline_of(timeline, "r").end_s == 1
    assert timeline.timeline("unknown", 0) is None


def test_the_middle_of_a_long_timeline_is_folded() -> None:
    timeline = TimelineStore()
    timeline.add("r", 0)
    for now_s in range(1, 1000):
        timeline.record("r", now_s, SpanKind.DECODE if now_s % 2 else SpanKind.PREEMPTED)
    timeline.end("r", 1000)
    found = timeline_of(timeline, "r")
    assert len(found.spans) == SPANS_MAX
    (folded,) = [span for span in found.spans if span.kind is SpanKind.FOLDED]
    assert (folded.start_s, folded.end_s) == (SPANS_MAX // 2, 1000 - (SPANS_MAX // 2 - 1))
    assert found.seconds == {SpanKind.QUEUED: 1, SpanKind.DECODE: 500, SpanKind.PREEMPTED: 499}


def test_the_newest_finished_timelines_are_kept() -> None:
    timeline = TimelineStore()
    for i in range(FINISHED_MAX + 2):
        timeline.add(i, i)
        timeline.end(i, i + 1)
    kept = [timeline.timeline(i, 0) is not None for i in (0, 1, 2, FINISHED_MAX + 1)]
    assert kept == [False, False, True, True]


def test_a_reused_id_has_its_newest_timeline() -> None:
    timeline = TimelineStore()
    for start in (0, 10):
        timeline.add("r", start)
        timeline.end("r", start + 1)
    assert timeline_of(timeline, "r").arrival_s == 10


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
@settings(max_examples=200, derandomize=True)
def test_the_spans_cover_the_whole_timeline(notes: list[Any], late: int, repeat: int) -> None:
    timeline, now = TimelineStore(), 100
    timeline.add("a", now)
    truth: dict[SpanKind, int] = {}
    kind, chunk_of = SpanKind.QUEUED, None
    for wait_s, (what, argument) in notes * repeat:
        shown = SpanKind.OTHER_CHUNK if kind is SpanKind.DECODE and chunk_of == "b" else kind
        truth[shown] = truth.get(shown, 0) + wait_s
        now += wait_s
        if what == "share":
            chunk_of = argument
            timeline.record_largest_chunk(now, chunk_of)
        else:
            kind = what
            timeline.record("a", now, kind, argument)
    timeline.end("a", now + late)
    end = now + max(late, 0)
    shown = SpanKind.OTHER_CHUNK if kind is SpanKind.DECODE and chunk_of == "b" else kind
    truth[shown] = truth.get(shown, 0) + end - now

    found = timeline_of(timeline, "a")
    borders = [100, *(span.end_s for span in found.spans)]
    assert [span.start_s for span in found.spans] == borders[:-1]
    assert borders[-1] == found.end_s
    assert sum(span.end_s - span.start_s for span in found.spans) == found.end_s - found.arrival_s
    assert sum(found.seconds.values()) == found.end_s - found.arrival_s
    assert len(found.spans) <= SPANS_MAX
    assert all(len(span.by) <= 3 for span in found.spans)
    for before, after in zip(found.spans, found.spans[1:], strict=False):
        assert (before.kind, before.by) != (after.kind, after.by)
    if late >= 0:
        assert found.end_s == end
        assert {k: s for k, s in found.seconds.items() if s} == {k: s for k, s in truth.items() if s}


def test_lags_of_a_slow_reader_replace_decoding() -> None:
    """Only decoding is replaced, and a lag may outlast the engine's part."""
    timeline = TimelineStore()
    timeline.add("r", 0)
    timeline.record("r", 2, SpanKind.DECODE)
    timeline.record("r", 6, SpanKind.PREEMPTED, by=["vip"])
    timeline.record("r", 8, SpanKind.DECODE)
    timeline.end("r", 10)
    found = timeline_of(timeline, "r")
    assert with_reader_lags(found, []) is found
    seen = with_reader_lags(found, [(1, 3), (4, 9), (11, 13)])
    assert seen.spans == (
        Span(0, 2, SpanKind.QUEUED),
        Span(2, 3, SpanKind.SLOW_READER),
        Span(3, 4, SpanKind.DECODE),
        Span(4, 6, SpanKind.SLOW_READER),
        Span(6, 8, SpanKind.PREEMPTED, ("vip",)),
        Span(8, 9, SpanKind.SLOW_READER),
        Span(9, 10, SpanKind.DECODE),
        Span(10, 11, SpanKind.DECODE),
        Span(11, 13, SpanKind.SLOW_READER),
    )
    assert seen.end_s == 13
    assert seen.seconds == {
        SpanKind.QUEUED: 2,
        SpanKind.DECODE: 3,
        SpanKind.PREEMPTED: 2,
        SpanKind.SLOW_READER: 6,
    }


def spans(
    made: Engine, key: object, now_s: float = NOW + 100
) -> list[tuple[float, float, SpanKind, tuple[object, ...]]]:
    """Return the spans of a timeline, in seconds after NOW, after checking that they add up."""
    found = made.engine._timelines.store.timeline(key, now_s)  # type: ignore[arg-type]
    assert found is not None
    ends = [found.arrival_s, *(span.end_s for span in found.spans)]
    assert [span.start_s for span in found.spans] == ends[:-1]
    assert sum(found.seconds.values()) == pytest.approx(found.end_s - found.arrival_s)
    return [(span.start_s - NOW, span.end_s - NOW, span.kind, span.by) for span in found.spans]


def run(made: Engine, n: int, first_s: int = 0) -> None:
    """Run steps from NOW + first_s on, one per second."""
    for i in range(n):
        made.step(1, NOW + first_s + i)


def test_queued_own_chunk_decode() -> None:
    made = Engine(max_num_seqs=1, max_step_time_s=1e9)
    made.submit("a", prompt=[1] * 40, max_tokens=3)
    made.submit("b", max_tokens=2)
    run(made, 9)
    assert spans(made, "a") == [(0, 3, SpanKind.OWN_CHUNK, ()), (3, 4, SpanKind.DECODE, ())]
    assert spans(made, "b") == [(0, 5, SpanKind.QUEUED, ("a",)), (5, 6, SpanKind.OWN_CHUNK, ())]


def test_the_chunk_of_another_request_is_named() -> None:
    made = Engine(max_step_time_s=1e9)
    made.submit("a", max_tokens=9)
    run(made, 2)
    made.submit("b", prompt=[2] * 40, max_tokens=2, arrival_s=NOW + 2)
    run(made, 7, 2)
    assert spans(made, "a")[:4] == [
        (0, 1, SpanKind.OWN_CHUNK, ()),
        (1, 2, SpanKind.DECODE, ()),
        (2, 5, SpanKind.OTHER_CHUNK, ("b",)),
        (5, 8, SpanKind.DECODE, ()),
    ]


def test_a_preemption_names_its_cause() -> None:
    made = Engine(n_cells=64, max_num_batched_tokens=64, max_step_time_s=1e9)
    made.submit("a", prompt=[1] * 20, max_tokens=40)
    made.submit("b", prompt=[2] * 20, max_tokens=40)
    run(made, 90)
    kinds = [(kind, by) for _, _, kind, by in spans(made, "b")]
    assert kinds[0] == (SpanKind.OWN_CHUNK, ())
    assert (SpanKind.PREEMPTED, ("a",)) in kinds
    assert SpanKind.KV_WAIT in {kind for kind, _ in kinds}, "only missing cells delayed its readmission"
    assert kinds[-1] == (SpanKind.DECODE, ())


def test_requests_without_a_batch_slot_wait_for_the_batch() -> None:
    made = Engine(max_batch_size=1, max_num_seqs=2, max_step_time_s=1e9)
    made.submit("a", "b", max_tokens=4)
    run(made, 8)
    assert [(kind, by) for _, _, kind, by in spans(made, "a")][:4] == [
        (SpanKind.OWN_CHUNK, ()),
        (SpanKind.QUEUED, ("b",)),
        (SpanKind.DECODE, ()),
        (SpanKind.QUEUED, ("b",)),
    ]


def test_choices_have_their_own_timelines_and_a_restore_is_recorded() -> None:
    made = Engine(max_step_time_s=1e9)
    chat = made.engine.sessions.create("", "chat")
    made.engine.remote_kvs.begin_restore(chat)
    made.submit("a", n=2, max_tokens=2, session_id="chat")
    made.submit("other")
    run(made, 3)
    made.engine.remote_kvs.end_restore(chat)
    run(made, 5, 3)
    assert spans(made, "a")[0] == (0, 3, SpanKind.REMOTE_KV, ())
    assert spans(made, ("a", 1))[0] == (0, 4, SpanKind.QUEUED, ("a",))


def test_drafts_are_counted_until_the_end() -> None:
    store = TimelineStore()
    store.add("a", 1.0)
    store.record_drafts("a", 4, 1)
    store.record_drafts("a", 2, 2)
    store.end("a", 2.0)
    store.record_drafts("a", 5, 5)
    timeline = timeline_of(store, "a", 3.0)
    assert (timeline.num_draft_tokens, timeline.num_accepted_tokens) == (6, 3)


def test_the_timeline_of_a_canceled_request_ends() -> None:
    made = Engine()
    made.submit("a")
    run(made, 3)
    made.engine.cancel("a")
    found = made.engine.timelines("a", NOW + 50)[0]
    assert found is not None
    assert (found.is_over, found.end_s) == (True, NOW + 2)
