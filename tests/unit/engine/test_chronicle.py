"""The timeline of requests on an engine: each second has its cause, and the causes add up."""

from __future__ import annotations

import pytest

from fakes.engines import NOW, Engine
from llaisys.story import Kind


def spans(
    made: Engine, key: object, now_s: float = NOW + 100
) -> list[tuple[float, float, Kind, tuple[object, ...]]]:
    """Spans of a story, in seconds after NOW; checked to add up."""
    story = made.engine._chronicle.timeline.story(key, now_s)  # type: ignore[arg-type]
    assert story is not None
    ends = [story.arrival_s, *(span.end_s for span in story.spans)]
    assert [span.start_s for span in story.spans] == ends[:-1]
    assert sum(story.seconds.values()) == pytest.approx(story.end_s - story.arrival_s)
    return [(span.start_s - NOW, span.end_s - NOW, span.kind, span.by) for span in story.spans]


def run(made: Engine, n: int, first_s: int = 0) -> None:
    """Steps at NOW + first_s, one a second."""
    for i in range(n):
        made.step(1, NOW + first_s + i)


def test_queued_own_chunk_decode() -> None:
    made = Engine(max_num_seqs=1, max_step_time_s=1e9)
    made.submit("a", prompt=[1] * 40, max_tokens=3)
    made.submit("b", max_tokens=2)
    run(made, 9)
    assert spans(made, "a") == [(0, 3, Kind.OWN_CHUNK, ()), (3, 4, Kind.DECODE, ())]
    assert spans(made, "b") == [(0, 5, Kind.QUEUED, ("a",)), (5, 6, Kind.OWN_CHUNK, ())]


def test_anothers_chunk_has_a_name() -> None:
    made = Engine(max_step_time_s=1e9)
    made.submit("a", max_tokens=9)
    run(made, 2)
    made.submit("b", prompt=[2] * 40, max_tokens=2, arrival_s=NOW + 2)
    run(made, 7, 2)
    assert spans(made, "a")[:4] == [
        (0, 1, Kind.OWN_CHUNK, ()),
        (1, 2, Kind.DECODE, ()),
        (2, 5, Kind.OTHER_CHUNK, ("b",)),
        (5, 8, Kind.DECODE, ()),
    ]


def test_preempted_by_whom() -> None:
    made = Engine(n_cells=64, max_num_batched_tokens=64, max_step_time_s=1e9)
    made.submit("a", prompt=[1] * 20, max_tokens=40)
    made.submit("b", prompt=[2] * 20, max_tokens=40)
    run(made, 90)
    kinds = [(kind, by) for _, _, kind, by in spans(made, "b")]
    assert kinds[0] == (Kind.OWN_CHUNK, ())
    assert (Kind.PREEMPTED, ("a",)) in kinds
    assert Kind.KV_WAIT in {kind for kind, _ in kinds}, "its way back was barred by cells alone"
    assert kinds[-1] == (Kind.DECODE, ())


def test_those_without_a_seat_wait_for_those_who_sit() -> None:
    made = Engine(max_batch_size=1, max_num_seqs=2, max_step_time_s=1e9)
    made.submit("a", "b", max_tokens=4)
    run(made, 8)
    assert [(kind, by) for _, _, kind, by in spans(made, "a")][:4] == [
        (Kind.OWN_CHUNK, ()),
        (Kind.QUEUED, ("b",)),
        (Kind.DECODE, ()),
        (Kind.QUEUED, ("b",)),
    ]


def test_choices_have_their_own_stories_and_a_restore_is_told() -> None:
    made = Engine(max_step_time_s=1e9)
    chat = made.engine.sessions.create("", "chat")
    made.engine.begin_restore(chat)
    made.submit("a", n=2, max_tokens=2, session_id="chat")
    made.submit("other")
    run(made, 3)
    made.engine.end_restore(chat)
    run(made, 5, 3)
    assert spans(made, "a")[0] == (0, 3, Kind.REMOTE_KV, ())
    assert spans(made, ("a", 1))[0] == (0, 4, Kind.QUEUED, ("a",))


def test_a_cancelled_request_s_story_ends() -> None:
    made = Engine()
    made.submit("a")
    run(made, 3)
    made.engine.cancel("a")
    story = made.engine.stories("a", NOW + 50)[0]
    assert story is not None
    assert (story.is_over, story.end_s) == (True, NOW + 2)
