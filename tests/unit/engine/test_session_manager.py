"""Sessions on the fake core: ownership, kept tokens, and when pins are released."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fakes import core
from fakes.engines import NOW
from fakes.session_runner import SessionRunner
from llaisys.engine.prefix_tree import Node
from llaisys.engine.request import BrokenInvariant
from llaisys.errors import ExhaustedError, RejectedError, RequestFailedError, UnsupportedError
from llaisys.outputs import FinishReason
from llaisys.session_info import SessionInfo

CHAT = list(range(1, 41))


@pytest.fixture
def runner() -> SessionRunner:
    return SessionRunner()


def test_a_session_keeps_the_tokens_of_its_last_request(runner: SessionRunner) -> None:
    runner.run("a", CHAT, session_id="chat")
    assert runner.call("list") == SessionInfo("chat", 49, 49, 49)
    runner.flood()
    turn = CHAT + runner.tokens["a"] + [7, 8, 9]
    assert runner.run("b", turn, max_tokens=1, session_id="chat") == 4
    assert runner.tokens["b"] == core.answer(turn, 1)
    assert runner.call("list") == SessionInfo("chat", 53, 53, 53)
    stats = runner.engine.stats()
    assert (stats.num_sessions, stats.kv_cells_session) == (1, 53)


@pytest.mark.parametrize("n_sessions", [4, 32])
def test_unpinning_a_session_walks_its_own_path_alone(
    n_sessions: int, runner: SessionRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner.run("a", CHAT, session_id="chat")
    for i in range(1, n_sessions):
        runner.call("fork", "chat", f"branch-{i}", i)
    n_walks = 0
    upward = Node.upward

    def counted(node: Node) -> Iterator[Node]:
        nonlocal n_walks
        n_walks += 1
        return upward(node)

    monkeypatch.setattr(Node, "upward", counted)
    n_pinned = runner.engine.sessions.n_pinned
    assert runner.engine.sessions.unpin_least_recent()
    assert (n_walks, runner.engine.sessions.n_pinned) == (1, n_sessions - 1)
    assert n_pinned == 49
    runner.engine.check()


def test_without_a_session_the_cells_are_evicted(runner: SessionRunner) -> None:
    runner.run("a", CHAT)
    runner.flood()
    assert runner.run("b", CHAT, max_tokens=1) == 40


def test_a_fork_copies_nothing(runner: SessionRunner) -> None:
    runner.run("a", CHAT, session_id="chat")
    before = runner.engine.stats()
    assert runner.call("fork", "chat", "branch", 20) == SessionInfo("branch", 20, 20, 20)
    assert runner.engine.stats() == before.__class__(**{**stats_of(before), "num_sessions": 2})
    runner.call("delete", "chat")
    assert runner.engine.stats().kv_cells_session == 20
    runner.flood()
    branch = [*CHAT[:20], *range(200, 210)]
    assert runner.run("b", branch, max_tokens=1, session_id="branch") == 10
    assert runner.tokens["b"] == core.answer(branch, 1)


def stats_of(stats: Any) -> dict[str, Any]:
    return {name: getattr(stats, name) for name in stats.__slots__}


def test_a_fork_of_all_and_of_nothing(runner: SessionRunner) -> None:
    runner.run("a", CHAT, session_id="chat")
    assert runner.call("fork", "chat", "all").num_pinned_tokens == 49
    assert runner.call("fork", "chat", "nothing", 0) == SessionInfo("nothing", 0, 0, 0)
    runner.begin("list")
    assert [session.name for session in runner.end()] == ["all", "chat", "nothing"]
    with pytest.raises(RejectedError, match="n_tokens is 50, session 'chat' has 49"):
        runner.call("fork", "chat", "more", 50)
    with pytest.raises(RejectedError, match="n_tokens is -1"):
        runner.call("trim", "chat", n_tokens=-1)
    with pytest.raises(RejectedError, match="session 'all' already exists"):
        runner.call("fork", "chat", "all")


def test_trimmed_and_deleted_cells_can_be_evicted(runner: SessionRunner) -> None:
    runner.run("a", CHAT, session_id="chat")
    assert runner.call("trim", "chat", n_tokens=30) == SessionInfo("chat", 30, 30, 30)
    runner.flood()
    assert runner.run("b", CHAT, max_tokens=1) == 10
    assert runner.call("delete", "chat").num_tokens == 30
    assert runner.engine.stats().kv_cells_session == 0
    runner.flood()
    assert runner.run("c", CHAT, max_tokens=1) == 40


def test_a_client_has_only_its_own_sessions(runner: SessionRunner) -> None:
    runner.run("a", CHAT, session_id="chat", client_id="x")
    for kind, other in (("fork", "mine"), ("trim", ""), ("delete", "")):
        with pytest.raises(RejectedError, match="there is no session 'chat'"):
            runner.call(kind, "chat", other, 1, client_id="y")
    runner.begin("list", client_id="y")
    assert runner.end() == []
    assert runner.call("create", "chat", client_id="y") == SessionInfo("chat", 0, 0, 0)
    assert runner.call("list", client_id="x").num_tokens == 49


def test_sessions_are_bounded(runner: SessionRunner) -> None:
    runner = SessionRunner(max_sessions=2)
    runner.call("create", "a")
    runner.run("r", CHAT, session_id="b", client_id="other")
    with pytest.raises(ExhaustedError, match="max_sessions"):
        runner.call("create", "c")
    with pytest.raises(ExhaustedError, match="max_sessions"):
        runner.submit("s", session_id="c")
    runner.submit("t", session_id="a")
    runner.finish()
    assert set(runner.ends) == {"r", "t"}


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a" * 65, "-a", "ü", "a\n", "a\0"])
def test_invalid_names_are_rejected(runner: SessionRunner, name: str) -> None:
    for kind in ("create", "delete"):
        with pytest.raises(RejectedError, match="allowed are"):
            runner.call(kind, name)
    if name:
        with pytest.raises(RejectedError, match="allowed are"):
            runner.submit("r", session_id=name)
    assert not runner.engine.has_work()


def test_without_a_prefix_cache_there_are_no_sessions() -> None:
    runner = SessionRunner(enable_prefix_caching=False)
    with pytest.raises(UnsupportedError, match="prefix cache"):
        runner.submit("r", session_id="chat")
    with pytest.raises(UnsupportedError, match="prefix cache"):
        runner.call("create", "chat")
    runner.begin("list")
    assert runner.end() == []


# --- which completions update a session ---


def test_a_canceled_decode_updates_the_session_and_a_canceled_prompt_does_not(runner: SessionRunner) -> None:
    runner = SessionRunner(max_num_batched_tokens=16)
    runner.run("a", CHAT, session_id="chat", max_tokens=1)
    runner.submit("b", prompt=[9] * 50, session_id="chat")
    runner.step(2)
    runner.engine.cancel("b")
    runner.finish()
    assert runner.call("list").num_tokens == 40
    runner.submit("c", prompt=[9] * 20, session_id="chat")
    runner.step(4)
    runner.engine.cancel("c")
    runner.finish()
    assert runner.call("list").num_tokens == 20 + len(runner.tokens["c"]) - 1


def test_a_failed_completion_does_not_update_the_session(runner: SessionRunner) -> None:
    runner.run("a", CHAT, session_id="chat", max_tokens=1)
    runner.submit("bad", session_id="chat", logit_bias={core.NON_FINITE: 100.0})
    runner.finish()
    assert runner.tokens["bad"] == [core.NON_FINITE]
    assert isinstance(runner.ends["bad"].error, RequestFailedError)
    assert runner.call("list") == SessionInfo("chat", 40, 40, 40)


def test_the_first_of_several_choices_updates_the_session(runner: SessionRunner) -> None:
    runner.submit("a", prompt=CHAT, session_id="chat", n=3, temperature=1.0, seed=3)
    runner.finish()
    first = CHAT + runner.tokens["a"]
    assert runner.call("list").num_tokens == 49
    assert runner.engine.sessions.find("", "chat").token_ids.tolist() == first[:49]


def test_a_session_deleted_meanwhile_stays_deleted(runner: SessionRunner) -> None:
    runner.submit("a", prompt=CHAT, session_id="chat")
    runner.step(3)
    runner.call("delete", "chat")
    runner.finish()
    runner.begin("list")
    assert runner.end() == []


# --- pressure ---


def test_pins_are_released_before_any_preemption(runner: SessionRunner) -> None:
    runner = SessionRunner(n_cells=64, session_kv_share=1.0)
    runner.run("a", [1] * 20, session_id="old", max_tokens=1)
    runner.run("b", [2] * 20, session_id="new", max_tokens=1)
    runner.submit("c", prompt=[3] * 10, max_tokens=30)
    runner.finish()
    assert runner.engine.stats().num_preempted == 0
    runner.begin("list")
    by_name = {session.name: session for session in runner.end()}
    assert by_name["new"] == SessionInfo("new", 20, 20, 20)
    assert (by_name["old"].num_tokens, by_name["old"].num_pinned_tokens) == (20, 0)
    assert by_name["old"].num_cached_tokens < 20


def test_pins_are_released_before_a_younger_request_is_preempted() -> None:
    runner = SessionRunner(n_cells=64, session_kv_share=1.0)
    runner.run("a", [1] * 20, session_id="old", max_tokens=1)
    runner.submit("b", prompt=[2] * 5, max_tokens=20)
    runner.submit("c", prompt=[3] * 5, max_tokens=25)
    runner.finish()
    assert runner.engine.stats().num_preempted == 0
    assert runner.call("list").num_pinned_tokens == 0


def test_pinned_cells_count_as_available_for_the_queue() -> None:
    runner = SessionRunner(n_cells=64, session_kv_share=1.0, max_num_queued_reqs=0)
    runner.run("a", [1] * 60, session_id="chat", max_tokens=1)
    runner.submit("b", prompt=[2] * 30)
    runner.finish()
    assert runner.tokens["b"] == core.answer([2] * 30, 10)


def test_pins_never_block_an_admission() -> None:
    runner = SessionRunner(n_cells=64, session_kv_share=1.0)
    for i in range(3):
        runner.run(f"{i}", [i] * 20, session_id=f"s{i}", max_tokens=1)
    assert runner.run("whole", [9] * 54, max_tokens=10) == 63
    assert runner.reasons()["whole"] is FinishReason.LENGTH
    assert runner.engine.stats().kv_cells_session == 0
    again = runner.run("again", [1] * 20 + [5], session_id="s1", max_tokens=1)
    assert again == 21, "the result is right, and the prompt is recomputed"


def test_all_pins_together_are_bounded() -> None:
    runner = SessionRunner(n_cells=100, session_kv_share=0.5)
    for name in "abc":
        runner.run(name, [ord(name)] * 20, session_id=name, max_tokens=1)
    runner.begin("list")
    assert [session.num_pinned_tokens for session in runner.end()] == [0, 20, 20]
    runner.run("a again", [ord("a")] * 20, session_id="a", max_tokens=1)
    runner.begin("list")
    assert [session.num_pinned_tokens for session in runner.end()] == [20, 0, 20]
    runner.run("long", [7] * 51, session_id="long", max_tokens=1)
    assert runner.engine.stats().kv_cells_session == 0, "the session alone exceeds its share"


def test_cells_that_sessions_share_count_once() -> None:
    runner = SessionRunner(n_cells=100, session_kv_share=0.5)
    runner.run("a", [1] * 40, session_id="a", max_tokens=1)
    for i in range(5):
        runner.call("fork", "a", f"f{i}", 40)
    assert runner.engine.stats().kv_cells_session == 40
    runner.begin("list")
    assert {session.num_pinned_tokens for session in runner.end()} == {40}


def test_the_session_of_an_expired_request_pins_no_cell_that_the_step_allocates() -> None:
    runner = SessionRunner(n_cells=64, session_kv_share=1.0)
    runner.submit("old", prompt=[1] * 50, session_id="chat", deadline_s=NOW + 1)
    runner.step(3)
    assert runner.context.n_cells_free == 12
    runner.submit("new", prompt=[2] * 20)
    runner.step(now_s=NOW + 2)  # in one plan, `old` expires and `new` allocates some of its cells
    chat = runner.call("list")
    assert (chat.num_tokens, chat.num_pinned_tokens) == (52, chat.num_cached_tokens)
    assert 0 < chat.num_cached_tokens < 52
    runner.finish()
    assert runner.reasons() == {"old": FinishReason.TIMEOUT, "new": FinishReason.LENGTH}
    assert runner.tokens["new"] == core.answer([2] * 20, 10)


def test_wrong_pins_are_detected(runner: SessionRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    runner.run("a", CHAT, session_id="chat")
    sessions = runner.engine.sessions
    with monkeypatch.context() as patch:
        patch.setattr(sessions, "_n_pinned_max", 48)
        with pytest.raises(BrokenInvariant, match="sessions pin 49 cells, the limit is 48"):
            runner.engine.check()
    runner.engine.check()
    sessions._pinned.clear()
    with pytest.raises(BrokenInvariant, match="1 sessions have a pin, 0 are listed"):
        runner.engine.check()
