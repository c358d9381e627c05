"""The engine with its prefix cache: recomputed, cached and evicted tokens. Output tokens never change."""

from __future__ import annotations

from typing import Any

import pytest

from fakes import core
from fakes.engines import NOW, Engine
from llaisys.engine.request import PREEMPTIONS_MAX
from llaisys.outputs import FinishReason

CHAT = list(range(1, 41))


def engine_of(**changes: Any) -> Engine:
    return Engine(**{"max_num_batched_tokens": 64, **changes})


def rows_of(made: Engine, name: str, prompt: list[int], **changes: Any) -> int:
    """Return the number of rows that the core computed for one request that runs alone."""
    before = made.context.n_rows
    made.submit(name, prompt=prompt, max_tokens=1, **changes)
    made.finish()
    assert made.tokens[name] == core.answer(prompt, 1)
    return made.context.n_rows - before


def test_a_second_turn_computes_only_the_new_tokens() -> None:
    made = engine_of()
    made.submit("a", prompt=CHAT, max_tokens=10)
    made.finish()
    turn = CHAT + made.tokens["a"] + [7, 8, 9]
    assert rows_of(made, "b", turn) == 4, "the last output token was never computed, and three tokens are new"
    assert (made.cached["a"], made.cached["b"]) == (0, 49)


def test_an_edited_prompt_is_computed_from_the_edit_on() -> None:
    made = engine_of()
    assert rows_of(made, "a", CHAT) == 40
    assert rows_of(made, "b", [*CHAT[:25], 99, *CHAT[26:]]) == 15
    assert rows_of(made, "again", CHAT) == 1, "the last token is always computed for its logits"
    assert rows_of(made, "end", CHAT[:20]) == 1


def test_cache_salts_do_not_share_prefixes() -> None:
    made = engine_of()
    rows_of(made, "a", CHAT, cache_salt="x")
    assert rows_of(made, "b", CHAT, cache_salt="y") == 40
    assert rows_of(made, "c", CHAT, cache_salt="x") == 1


def test_running_requests_share_their_prefix() -> None:
    made = engine_of()
    made.submit("a", prompt=CHAT, max_tokens=20)
    made.step(2)
    assert rows_of(made, "b", CHAT) == 1 + 18
    assert made.cached["b"] == 39


def test_equal_prompts_in_one_step_are_stored_once() -> None:
    made = engine_of(max_num_batched_tokens=100)
    made.submit("a", "b", prompt=CHAT, max_tokens=20)
    made.step()
    assert made.engine.stats().kv_cells_used == 40, "computed twice, stored once"
    made.finish()
    assert made.tokens == dict.fromkeys("ab", core.answer(CHAT, 20))


def test_prompts_in_one_step_share_their_common_prefix() -> None:
    made = engine_of(max_num_batched_tokens=100)
    other = [*CHAT[:20], *range(100, 120)]
    made.submit("a", prompt=CHAT, max_tokens=20)
    made.submit("b", prompt=other, max_tokens=20)
    made.step()
    assert made.engine.stats().kv_cells_used == 60
    made.finish()
    assert made.tokens == {"a": core.answer(CHAT, 20), "b": core.answer(other, 20)}


def test_without_prefix_caching_no_cells_are_retained() -> None:
    made = engine_of(enable_prefix_caching=False)
    assert rows_of(made, "a", CHAT) == rows_of(made, "b", CHAT) == 40
    assert made.engine.stats().kv_cells_free == made.engine.stats().kv_cells


def test_unused_cells_are_evicted_least_recently_used_first() -> None:
    made = engine_of(n_cells=100)
    rows_of(made, "a", CHAT)
    rows_of(made, "b", CHAT[::-1])
    rows_of(made, "c", [50] * 30)
    stats = made.engine.stats()
    assert (stats.kv_cells_free, stats.kv_cells_retained, stats.num_evicted_cells) == (0, 100, 10)
    assert rows_of(made, "b2", CHAT[::-1]) == 1
    assert rows_of(made, "a2", CHAT) == 11, (
        "its tail was evicted first: 10 cells for c, and one for the last token of b2"
    )


def test_cells_of_a_running_request_are_never_evicted() -> None:
    made = engine_of(n_cells=64)
    rows_of(made, "a", CHAT)
    made.submit("b", prompt=CHAT, max_tokens=20)
    made.step()
    assert rows_of(made, "c", [60] * 10) == 10 + made.engine.stats().num_steps - 2
    made.finish()
    assert made.tokens["b"] == core.answer(CHAT, 20)


def test_a_preempted_request_finds_its_cached_prefix() -> None:
    made = engine_of(n_cells=64)
    made.submit("a", prompt=[1] * 20, max_tokens=20)
    made.submit("b", prompt=[2] * 20, max_tokens=40)
    made.finish()
    n_alone = 39 + 59
    assert made.engine.stats().num_preempted > 0
    assert made.context.n_rows < n_alone + 20
    assert made.tokens == {"a": core.answer([1] * 20, 20), "b": core.answer([2] * 20, 40)}


def test_without_a_cache_a_preempted_request_is_recomputed() -> None:
    made = engine_of(n_cells=64, enable_prefix_caching=False)
    made.submit("a", prompt=[1] * 20, max_tokens=20)
    made.submit("b", prompt=[2] * 20, max_tokens=40)
    made.finish()
    assert made.engine.stats().num_preempted > 0
    assert made.tokens == {"a": core.answer([1] * 20, 20), "b": core.answer([2] * 20, 40)}


@pytest.mark.parametrize(("bound", "n_preempted"), [(PREEMPTIONS_MAX, 3), (99, 4)])
def test_preemptions_per_request_are_bounded(
    bound: int, n_preempted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever the request of the lowest priority runs alone, two requests arrive that need its cells."""
    monkeypatch.setattr("llaisys.engine.request.PREEMPTIONS_MAX", bound)
    monkeypatch.setattr("llaisys.engine.kv_cache_planner.LOOKAHEAD_TOKENS", 0)
    made = engine_of(n_cells=64, enable_prefix_caching=False)
    made.submit("low", prompt=[1] * 8, max_tokens=30, priority=1)
    (low,) = made.engine.requests.by_ordinal.values()
    n_arrived = 0
    while made.engine.has_work():
        if made.engine.requests.running == [low]:
            made.submit(f"{n_arrived}", f"{n_arrived + 1}", prompt=[2] * 22, max_tokens=6)
            n_arrived += 2
        made.step()
    assert low.num_preempted == made.engine.stats().num_preempted == n_preempted
    assert n_arrived > 2 * n_preempted
    assert made.tokens["low"] == core.answer([1] * 8, 30)


def test_cells_of_a_faulty_request_are_invalidated() -> None:
    made = engine_of()
    rows_of(made, "a", CHAT)
    made.submit("bad", prompt=[*CHAT, core.NON_FINITE, 5])
    made.finish()
    assert made.ends["bad"].finish_reason is FinishReason.ERROR
    assert made.engine.stats().kv_cells_retained == 40
    assert rows_of(made, "b", CHAT) == 1


@pytest.mark.parametrize("n_steps", [1, 2, 5])
def test_a_canceled_request_leaves_its_tokens_in_the_cache(n_steps: int) -> None:
    made = engine_of(max_num_batched_tokens=16)
    made.submit("a", prompt=CHAT)
    made.step(n_steps)
    made.engine.cancel("a")
    stats = made.engine.stats()
    assert (stats.kv_cells_used, stats.kv_cells_retained) == (0, min(40, 16 * n_steps) + max(0, n_steps - 3))


def test_the_cache_is_evicted_to_its_threshold_once_per_interval() -> None:
    made = engine_of(n_cells=100, kv_eviction_threshold=0.5, kv_cleanup_interval_s=1.0)
    made.submit("a", prompt=CHAT, max_tokens=1)
    made.step(1, NOW)
    made.submit("b", prompt=CHAT[::-1], max_tokens=3)
    made.step(1, NOW + 0.9)
    assert made.engine.stats().kv_cells_free == 20
    made.step(1, NOW + 1.0)
    assert made.engine.stats().kv_cells_free == 49, "the threshold, less one more token"
    made.finish()


def test_an_idle_engine_wakes_once_to_evict_to_the_threshold() -> None:
    made = engine_of(n_cells=100, kv_eviction_threshold=0.5, kv_cleanup_interval_s=1.0)
    made.submit("a", prompt=CHAT, max_tokens=1)
    made.step(1, NOW)
    made.submit("b", prompt=CHAT[::-1], max_tokens=1)
    made.step(1, NOW + 0.5)
    assert not made.engine.has_work()
    assert (made.engine.stats().kv_cells_free, made.engine.wait_s()) == (20, 1.0)
    made.step(1, NOW + 1.5)
    assert (made.engine.stats().kv_cells_free, made.engine.wait_s()) == (50, None)


def test_an_idle_engine_sleeps_if_session_pins_exceed_the_threshold() -> None:
    made = engine_of(n_cells=100, kv_eviction_threshold=0.25, kv_cleanup_interval_s=1.0)
    made.submit("a", prompt=CHAT, max_tokens=1, session_id="s")
    made.step(1, NOW)
    assert (made.engine.stats().kv_cells_free, made.engine.wait_s()) == (60, None)


# --- KV streams ---


@pytest.mark.parametrize("n_streams", [1, 2, 4])
def test_tokens_do_not_depend_on_the_number_of_kv_streams(n_streams: int) -> None:
    made = Engine(n_cells=256, n_streams=n_streams, max_num_seqs=6, max_num_queued_reqs=40)
    prompts = {f"{i}": CHAT[: 10 + i] + [i] * (i % 5) for i in range(24)}
    for name, prompt in prompts.items():
        made.submit(name, prompt=prompt, max_tokens=12)
    made.finish()
    assert made.tokens == {name: core.answer(prompt, 12) for name, prompt in prompts.items()}


def test_a_request_runs_in_the_kv_stream_of_its_prefix_or_the_emptiest() -> None:
    made = engine_of(n_cells=128, n_streams=2)
    made.submit("a", prompt=CHAT, max_tokens=10)
    made.step()
    made.submit("b", prompt=[7] * 20, max_tokens=10)
    made.step()
    assert [r.state.stream for r in made.engine.requests.running] == [0, 1]  # type: ignore[union-attr]
    made.submit("c", prompt=[*CHAT[:30], 9], max_tokens=3)
    made.step()
    assert [r.state.stream for r in made.engine.requests.running] == [0, 1, 0]  # type: ignore[union-attr]
    made.finish()


def test_a_prefix_is_copied_if_its_kv_stream_is_full() -> None:
    made = engine_of(n_cells=128, n_streams=2)
    made.submit("a", prompt=CHAT, max_tokens=24)
    made.step(8)
    made.submit("b", prompt=[*CHAT[:30], *[9] * 10], max_tokens=20)
    before = made.context.n_rows
    made.step()
    assert made.context.n_rows - before == 1 + 10
    assert [r.state.stream for r in made.engine.requests.running] == [0, 1]  # type: ignore[union-attr]
    made.finish()
    assert made.cached["b"] == 30
    assert made.tokens["b"] == core.answer([*CHAT[:30], *[9] * 10], 20)


def test_a_prefix_that_cannot_stay_until_the_copy_is_recomputed() -> None:
    """Only the prefix is evictable in that stream, and its running request needs a cell in this step."""
    made = engine_of(n_cells=128, n_streams=2)
    rows_of(made, "prefix", CHAT)
    made.submit("a", prompt=[7] * 20, max_tokens=30)
    made.step(5)
    assert made.context.n_cells_free_in(0) == 0
    made.submit("b", prompt=[*CHAT, 9, 9], max_tokens=3)
    made.step()
    assert [r.state.stream for r in made.engine.requests.running] == [0, 1]  # type: ignore[union-attr]
    made.finish()
    assert made.cached["b"] == 0
    assert made.tokens["a"] == core.answer([7] * 20, 30)
    assert made.tokens["b"] == core.answer([*CHAT, 9, 9], 3)
