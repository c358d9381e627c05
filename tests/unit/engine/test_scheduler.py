"""plan(view, now): budgets, order, admission, expiry. No engine, no core."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fakes.asks import ask, limits
from llaisys.engine.limits import Limits, token_limit
from llaisys.engine.request import Admitted, Request, advance
from llaisys.engine.scheduler import Plan, PlannedChunk, View, admissible, plan, queue_key

NOW = 1000.0


def request(
    name: str, n_prompt: int = 3, *, computed: int = -1, output: int = 0, **changes: object
) -> Request:
    """A waiting request; with `computed` or `output`, a running one."""
    source = ask(name, [1] * n_prompt, **changes)
    made = Request(
        source, ordinal=int(name), seed=0, token_limit=token_limit([1] * n_prompt, source.params, limits())
    )
    made.token_ids += [2] * output
    if computed >= 0 or output:
        made.state = advance(made.state, Admitted(int(name)))
        made.num_computed = computed if computed >= 0 else n_prompt + output - 1
    return made


def planned(waiting: list[Request], running: list[Request], bounds: Limits | None = None) -> Plan:
    view = View(sorted(waiting, key=queue_key), sorted(running, key=queue_key), bounds or limits())
    return plan(view, NOW)


def sizes(made: Plan) -> dict[str, int]:
    return {chunk.request_id: chunk.n_tokens for chunk in made.chunks}


def test_nothing_gives_nothing() -> None:
    assert planned([], []) == Plan((), (), ())


def test_a_prompt_that_fits_is_computed_at_once_and_samples() -> None:
    assert planned([request("1", 5)], []) == Plan((), ("1",), (PlannedChunk("1", 0, 5, True),))


def test_a_long_prompt_is_cut_and_samples_with_its_last_chunk_only() -> None:
    long = request("1", 40)
    assert planned([long], []).chunks == (PlannedChunk("1", 0, 16, False),)
    assert planned([], [request("1", 40, computed=16)]).chunks == (PlannedChunk("1", 16, 16, False),)
    assert planned([], [request("1", 40, computed=32)]).chunks == (PlannedChunk("1", 32, 8, True),)


def test_answers_come_before_prompts_and_prompts_share_the_rest() -> None:
    made = planned([request("4", 10)], [request("1", 40, computed=16), request("2", 3, output=2)])
    assert sizes(made) == {"2": 1, "1": 15}
    made = planned([request("4", 10)], [request("1", 40, computed=32), request("2", 3, output=2)])
    assert sizes(made) == {"2": 1, "1": 8, "4": 7}
    assert made.admit == ("4",)


def test_nobody_is_admitted_without_budget() -> None:
    made = planned([request("4", 1)], [request("1", 40, computed=0)])
    assert (made.admit, sizes(made)) == ((), {"1": 16})


def test_answers_beyond_the_budget_advance_alike() -> None:
    running = [request("1", output=3), request("2", output=1), request("3", output=2)]
    assert sizes(planned([], running, limits(max_num_batched_tokens=2))) == {"2": 1, "3": 1}


def test_priority_then_arrival() -> None:
    waiting = [request("1"), request("2", priority=1), request("3", priority=-1)]
    assert planned(waiting, [], limits(max_num_seqs=2)).admit == ("3", "1")


def test_the_head_is_never_overtaken() -> None:
    small = limits(n_cells=64, max_model_len=64)
    waiting = [request("2", 40, max_tokens=24), request("3", 1, max_tokens=1)]
    running = [request("1", 3, output=1)]
    assert planned(waiting, running, small).admit == ()
    assert planned(waiting, [], small).admit == ("2",)


def test_cells_are_reserved_for_the_worst_case() -> None:
    small = limits(n_cells=64, max_model_len=64)
    waiting = [request(str(i), 6, max_tokens=10) for i in range(9)]
    assert planned(waiting, [], limits(n_cells=64, max_num_batched_tokens=64)).admit == ("0", "1", "2", "3")
    assert [r.request_id for r in admissible(View(waiting, [request("9", 6, output=1)], small))] == [
        "0",
        "1",
        "2",
    ]


def test_the_expired_go_first_and_their_room_is_used() -> None:
    late = request("1", 3, output=1, deadline_s=NOW)
    waiting = [request("2", deadline_s=NOW - 1), request("3"), request("4", deadline_s=NOW + 1e-6)]
    made = planned(waiting, [late], limits(max_num_seqs=1))
    assert (made.expire, made.admit) == (("2", "1"), ("3",))
    assert sizes(made) == {"3": 3}


@st.composite
def views(draw: st.DrawFn) -> View:
    bounds = limits(
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.integers(1, 40)),
        n_cells=draw(st.integers(64, 300)),
    )
    running: list[Request] = []
    waiting: list[Request] = []
    for i in range(draw(st.integers(0, 12))):
        n_prompt = draw(st.integers(1, 30))
        facts = {
            "max_tokens": draw(st.integers(1, 34)),
            "priority": draw(st.integers(-1, 1)),
            "deadline_s": draw(st.sampled_from([NOW, NOW + 1])),
        }
        each = request(str(i), n_prompt, **facts)
        if draw(st.booleans()) and admissible(View([each], running, bounds)):
            each = request(str(i), n_prompt, computed=draw(st.integers(0, n_prompt - 1)), **facts)
            running.append(each)
        else:
            waiting.append(each)
    return View(sorted(waiting, key=queue_key), sorted(running, key=queue_key), bounds)


@given(views())
def test_every_plan_keeps_the_bounds(view: View) -> None:
    made = plan(view, NOW)
    assert plan(view, NOW) == made
    by_id = {r.request_id: r for r in (*view.waiting, *view.running)}
    gone = set(made.expire)
    assert gone == {name for name, r in by_id.items() if r.source.deadline_s <= NOW}
    kept = [r for r in view.running if r.request_id not in gone]
    admitted = [by_id[name] for name in made.admit]
    # budgets: tokens, sequences, cells of the worst case
    assert sum(c.n_tokens for c in made.chunks) <= view.limits.max_num_batched_tokens
    assert len(admitted) <= max(0, view.limits.max_num_seqs - len(kept))
    if admitted:
        assert sum(r.token_limit for r in (*kept, *admitted)) <= view.limits.n_cells
    # the queue's order, nobody overtaken
    assert (
        list(made.admit) == [r.request_id for r in view.waiting if r.request_id not in gone][: len(admitted)]
    )
    # chunks: once each, of those who run, from where they are
    assert len({c.request_id for c in made.chunks}) == len(made.chunks)
    assert (
        set(made.admit) <= {c.request_id for c in made.chunks} <= {r.request_id for r in (*kept, *admitted)}
    )
    for chunk in made.chunks:
        request = by_id[chunk.request_id]
        assert chunk.start == request.num_computed
        assert 1 <= chunk.n_tokens <= request.num_missing
        assert chunk.samples == (chunk.n_tokens == request.num_missing)
    # progress: somebody open means that something is computed
    assert bool(made.chunks) == bool(kept or set(by_id) - gone)
