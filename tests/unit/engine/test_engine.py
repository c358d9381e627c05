"""LLMEngine on the fake core.

Each request ends once and returns its cells and sequence ids; its tokens equal those of a lone run.
"""

from __future__ import annotations

import pytest

from fakes import core
from fakes.engines import NOW, Engine
from llaisys.engine.request import BrokenInvariant
from llaisys.errors import (
    ContextLengthError,
    EngineDeadError,
    QueueFullError,
    RejectedError,
    RequestFailedError,
    RequestTimeoutError,
)
from llaisys.outputs import FinishReason


def test_a_request_runs_from_prompt_to_max_tokens() -> None:
    made = Engine()
    made.submit("a")
    made.finish()
    assert made.tokens["a"] == core.answer([1, 2, 3], 10)
    assert made.ends["a"].finish_reason is FinishReason.LENGTH
    assert made.ends["a"].stop_reason is None
    assert made.engine.stats().num_steps == 10
    assert not made.engine.has_work()


def test_batched_requests_keep_their_tokens_with_chunked_prompts() -> None:
    made = Engine()
    prompts = {"a": [1, 2, 3], "b": [9] * 40, "c": [4], "d": list(range(20)), "e": [5, 5]}
    for name, prompt in prompts.items():
        made.submit(name, prompt=prompt)
    made.finish()
    assert made.tokens == {name: core.answer(prompt, 10) for name, prompt in prompts.items()}
    assert made.context.n_rows_max <= 16


def test_eos_stop_ids_and_ignore_eos() -> None:
    greedy = core.answer([1, 2, 3], 10)
    made = Engine()
    made.submit("eos", eos_token_ids=(greedy[4],))
    made.submit("ignored", eos_token_ids=(greedy[4],), ignore_eos=True)
    made.submit("id", stop_token_ids=[greedy[2]])
    made.finish()
    ends = {name: (end.finish_reason, end.stop_reason) for name, end in made.ends.items()}
    assert ends == {
        "eos": (FinishReason.STOP, None),
        "ignored": (FinishReason.LENGTH, None),
        "id": (FinishReason.STOP, greedy[2]),
    }
    assert made.tokens == {"eos": greedy[:5], "ignored": greedy, "id": greedy[:3]}


def test_without_max_tokens_a_request_runs_to_the_end_of_the_context() -> None:
    made = Engine(max_model_len=20)
    made.submit("a", max_tokens=None)
    made.finish()
    assert len(made.tokens["a"]) == 17
    assert made.ends["a"].finish_reason is FinishReason.LENGTH


def test_default_seeds_come_from_the_engine_seed_and_the_ordinal() -> None:
    def tokens_of(seed: int) -> dict[str, list[int]]:
        made = Engine(seed)
        made.submit("a", "b", temperature=1.0)
        made.submit("own", temperature=1.0, seed=-1)
        made.finish()
        return made.tokens

    first, again, other = tokens_of(0), tokens_of(0), tokens_of(1)
    assert first == again
    assert first["a"] != first["b"]
    assert first["a"] != other["a"]
    assert first["own"] == other["own"]


def test_logprobs_are_aligned_with_token_ids() -> None:
    made = Engine()
    made.submit("a", logprobs=2, max_tokens=1)
    (output,) = made.engine.step(NOW)
    assert output.new_logprobs is not None
    assert [entry.token_id for entry in output.new_logprobs] == output.new_token_ids


def test_a_rejected_request_has_no_side_effects() -> None:
    made = Engine()
    for changes, error in (
        ({"prompt": [1] * 60}, ContextLengthError),
        ({"prompt": []}, RejectedError),
        ({"prompt": [300]}, RejectedError),
    ):
        with pytest.raises(error):
            made.submit("a", **changes)
    assert not made.engine.has_work()
    made.submit("a")
    with pytest.raises(RejectedError, match="in use"):
        made.submit("a")
    made.finish()


def test_a_full_queue_rejects_and_a_free_sequence_id_makes_space() -> None:
    made = Engine(max_num_seqs=1, max_num_queued_reqs=2)
    made.submit("a", "b", "c")
    with pytest.raises(QueueFullError, match="the limit is 2"):
        made.submit("d")
    made.step()
    assert (made.engine.stats().num_running, made.engine.stats().num_waiting) == (1, 2)
    with pytest.raises(QueueFullError):
        made.submit("d")
    made.engine.cancel("a")
    made.submit("d")
    made.finish()
    assert set(made.ends) == {"a", "b", "c", "d"}


def test_a_queue_of_size_zero_accepts_requests_that_can_run() -> None:
    made = Engine(max_num_seqs=2, max_num_queued_reqs=0)
    made.submit("a", "b")
    with pytest.raises(QueueFullError):
        made.submit("c")
    made.finish()


@pytest.mark.parametrize("n_steps", [0, 1, 3])
def test_cancel_ends_a_request_once_and_frees_its_cells(n_steps: int) -> None:
    made = Engine(max_num_seqs=1)
    made.submit("a", "b", prompt=[1] * 20)
    made.step(n_steps)
    for name in ("a", "b", "a", "unknown"):
        made.engine.cancel(name)
    made.step()
    assert made.reasons() == dict.fromkeys("ab", FinishReason.ABORT)
    stats = made.engine.stats()
    assert (stats.kv_cells_used, stats.kv_cells_retained) == (0, stats.kv_cells - stats.kv_cells_free)
    made.engine.cancel("a")
    assert not made.engine.has_work()


def test_a_deadline_includes_waiting_and_running_time() -> None:
    made = Engine(max_num_seqs=1)
    made.submit("runs", deadline_s=NOW + 5)
    made.submit("waits", deadline_s=NOW + 5)
    made.submit("later", deadline_s=NOW + 50)
    made.step(2, NOW + 4.9)
    made.step(1, NOW + 5)
    assert made.reasons() == dict.fromkeys(("waits", "runs"), FinishReason.TIMEOUT)
    assert isinstance(made.ends["runs"].error, RequestTimeoutError)
    assert "5.0 s" in str(made.ends["runs"].error)
    made.finish()
    assert made.ends["later"].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("trouble", [core.NON_FINITE, core.REFUSED])
def test_a_faulty_row_fails_only_its_request(trouble: int) -> None:
    made = Engine()
    made.submit("a", "b")
    made.submit("bad", prompt=[1, trouble, 2])
    made.finish()
    assert made.ends["bad"].finish_reason is FinishReason.ERROR
    assert isinstance(made.ends["bad"].error, RequestFailedError)
    assert made.tokens["a"] == made.tokens["b"] == core.answer([1, 2, 3], 10)


def test_a_sampler_rejected_by_the_core_fails_its_request_at_admission() -> None:
    made = Engine()
    made.submit("bad", logit_bias={core.REFUSED: 1.0})
    made.submit("good")
    made.finish()
    assert isinstance(made.ends["bad"].error, RejectedError)
    assert made.tokens["good"] == core.answer([1, 2, 3], 10)


def test_a_request_rejected_at_admission_releases_its_cached_prefix() -> None:
    made = Engine()
    made.submit("a")
    made.finish()
    made.submit("bad", logit_bias={core.REFUSED: 1.0})
    made.finish()  # checks all counts, pins included
    assert isinstance(made.ends["bad"].error, RejectedError)
    made.submit("b")
    made.finish()
    assert made.cached == {"a": 0, "bad": 0, "b": 2}


def test_preempted_requests_keep_their_tokens() -> None:
    made = Engine(n_cells=64, max_num_queued_reqs=20)
    prompts = {name: [i] * 12 for i, name in enumerate("abcdefgh")}
    for name, prompt in prompts.items():
        made.submit(name, prompt=prompt, max_tokens=40)
    made.finish()
    assert made.engine.stats().num_preempted > 0
    assert made.tokens == {name: core.answer(prompt, 40) for name, prompt in prompts.items()}


def test_a_preempted_request_waits_without_sequence_id_or_cells() -> None:
    made = Engine(n_cells=64)
    made.submit("a", prompt=[1] * 20, max_tokens=40)
    made.submit("b", prompt=[2] * 20, max_tokens=40)
    while made.engine.stats().num_preempted == 0:
        made.step()
    stats = made.engine.stats()
    assert (stats.num_running, stats.waiting_by_reason["preempted"]) == (1, 1)
    assert made.context.n_seq_free == 3
    had = len(made.tokens["b"])
    made.step(2)
    assert len(made.tokens["b"]) == had, "the newer request waits until the older one needs fewer cells"
    made.finish()
    assert made.tokens["b"] == core.answer([2] * 20, 40)


def test_a_dead_core_ends_the_engine() -> None:
    made = Engine()
    made.submit("a", prompt=[core.DEADLY])
    with pytest.raises(EngineDeadError, match="device"):
        made.step()


def test_check_detects_inconsistent_kv_accounting() -> None:
    made = Engine()
    made.submit("a")
    made.step()
    made.engine.check()
    made.context._refs[-1] = 1
    with pytest.raises(BrokenInvariant, match="4 cells are used; requests own 0, the cache has 3"):
        made.engine.check()


def test_close_closes_the_context_once() -> None:
    made = Engine()
    made.engine.close()
    made.engine.close()
    with pytest.raises(RejectedError, match="closed"):
        made.context.seq_acquire()


def test_check_detects_a_lost_sequence_id() -> None:
    made = Engine()
    made.submit("a")
    made.context.seq_acquire()
    with pytest.raises(BrokenInvariant, match="2 sequence ids are free, 1 run"):
        made.finish()


def test_a_missing_sequence_id_ends_the_engine_even_without_checks() -> None:
    made = Engine(max_num_seqs=1)
    made.engine.check = lambda: None  # type: ignore[method-assign]
    made.context.seq_acquire()
    made.submit("a")
    with pytest.raises(BrokenInvariant, match="id"):
        made.step()


def test_an_idle_engine_fails_one_unschedulable_request_then_itself() -> None:
    """With nothing running, any request must fit. The invariant checks are off, so only this rule is left."""
    made = Engine(max_num_seqs=2, max_num_queued_reqs=8)
    made.engine.check = lambda: None  # type: ignore[method-assign]
    made.context._refs = [1] * 256
    made.submit("a", "b", "c")
    made.step()
    assert isinstance(made.ends["a"].error, RequestFailedError)
    with pytest.raises(BrokenInvariant, match="0 requests run, 2 wait"):
        made.step(1, NOW + 59)
    made.step(1, NOW + 61)
    assert set(made.ends) == {"a", "b"}


def test_invariants_are_checked_periodically_and_when_idle() -> None:
    made = Engine()
    checked: list[int] = []
    made.engine.check = lambda: checked.append(made.engine.stats().num_steps)  # type: ignore[method-assign]
    made.submit("a", max_tokens=3)
    while made.engine.has_work():
        made.engine.step(NOW)
    assert checked == [3]
    made.submit("b", prompt=[1], max_tokens=60)
    made.engine.stats_recorder.num_steps = 1020
    for _ in range(5):
        made.engine.step(NOW)
    assert checked == [3, 1024]


def test_stats_count_waiting_requests_and_computed_tokens() -> None:
    made = Engine(max_num_seqs=2)
    made.submit("a", "b", "c", prompt=[1] * 6, max_tokens=3)
    made.step(1, NOW)
    made.step(1, NOW + 0.25)
    stats = made.engine.stats()
    assert stats.waiting_by_reason == {"capacity": 1, "preempted": 0, "sibling": 0, "remote_kv": 0}
    assert (stats.num_running, stats.num_waiting, stats.step_decode_tokens) == (2, 1, 2)
    assert stats.step_prefill_tokens == 0
    assert stats.step_s == 0.25
    phases = {name: data.count for name, data in stats.seconds_of_phases.items()}
    assert phases == {"plan": 2, "execute": 2, "settle": 2, "deliver": 1}
    assert stats.seq_ids_free == 0
    assert stats.num_queued == 1
    assert stats.queue_s == 6 * (made.engine.stats_recorder.speed.prefill_token_s or 0) > 0, (
        "the prompt of `c`"
    )
    assert (stats.tokens_of_steps.count, stats.tokens_of_steps.sum) == (2, 12 + 2)
    made.finish()
    stats = made.engine.stats()
    assert stats.seq_ids_free == 2
    assert (stats.finished, stats.num_submitted) == ({"length": 3}, 3)
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (18, 5)


# --- restores ---


def test_a_request_that_waits_for_a_restore_blocks_no_other() -> None:
    made = Engine(max_num_seqs=1)
    chat = made.engine.sessions.create("", "chat")
    made.engine.remote_kvs.begin_restore(chat)
    made.submit("a", session_id="chat")
    made.submit("b")
    made.finish()
    assert set(made.ends) == {"b"}
    assert made.engine.stats().waiting_by_reason["remote_kv"] == 1
    assert made.engine.wait_s() == made.engine.limits.timeout_scan_s
    made.engine.remote_kvs.end_restore(chat)
    made.submit("c", session_id="chat")
    made.finish()
    assert made.tokens == dict.fromkeys("abc", core.answer([1, 2, 3], 10))
    assert made.engine.wait_s() is None


@pytest.mark.parametrize("n", [1, 3])
def test_a_failed_restore_ends_its_requests(n: int) -> None:
    made = Engine()
    chat = made.engine.sessions.create("", "chat")
    made.engine.remote_kvs.begin_restore(chat)
    made.submit("a", session_id="chat", n=n)
    made.submit("b")
    made.engine.remote_kvs.end_restore(chat, RejectedError("the file is damaged"))
    made.finish()
    assert len(made.ends) == n + 1
    assert "damaged" in str(made.ends["a"].error)
    assert made.ends["b"].finish_reason is FinishReason.LENGTH


def test_a_request_that_waits_for_a_restore_can_expire_or_be_canceled() -> None:
    made = Engine()
    chat = made.engine.sessions.create("", "chat")
    made.engine.remote_kvs.begin_restore(chat)
    made.submit("a", session_id="chat", deadline_s=NOW + 5)
    made.submit("b", session_id="chat")
    made.engine.cancel("b")
    made.step(1, NOW + 5)
    assert made.reasons() == {"a": FinishReason.TIMEOUT, "b": FinishReason.ABORT}


def test_only_the_first_output_has_the_queue_time() -> None:
    made = Engine(max_num_seqs=1)
    made.submit("a", "b", max_tokens=2)
    waited = [
        (output.request_id, output.queued_s)
        for now_s in (NOW + 0.5, NOW + 1, NOW + 3, NOW + 4)
        for output in made.engine.step(now_s)
    ]
    assert waited == [("a", 0.5), ("a", 0), ("b", 3), ("b", 0)]
