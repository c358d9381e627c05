"""Sessions on the fake core: ownership, kept tokens, and when pins are released."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fakes import core
from fakes.desk import Desk
from fakes.engines import NOW
from llaisys.engine.prefix_cache import Node
from llaisys.errors import ExhaustedError, RejectedError, RequestFailedError, UnsupportedError
from llaisys.outputs import FinishReason
from llaisys.session_info import SessionInfo

CHAT = list(range(1, 41))


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_a_session_keeps_the_tokens_of_its_last_request(desk: Desk) -> None:
    desk.run("a", CHAT, session_id="chat")
    assert desk.call("list") == SessionInfo("chat", 49, 49, 49)
    desk.flood()
    turn = CHAT + desk.tokens["a"] + [7, 8, 9]
    assert desk.run("b", turn, max_tokens=1, session_id="chat") == 4
    assert desk.tokens["b"] == core.answer(turn, 1)
    assert desk.call("list") == SessionInfo("chat", 53, 53, 53)
    stats = desk.engine.stats()
    assert (stats.num_sessions, stats.kv_cells_session) == (1, 53)


@pytest.mark.parametrize("n_sessions", [4, 32])
def test_unpinning_a_session_walks_its_own_path_alone(
    n_sessions: int, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.run("a", CHAT, session_id="chat")
    for i in range(1, n_sessions):
        desk.call("fork", "chat", f"branch-{i}", i)
    n_walks = 0
    upward = Node.upward

    def counted(node: Node) -> Iterator[Node]:
        nonlocal n_walks
        n_walks += 1
        return upward(node)

    monkeypatch.setattr(Node, "upward", counted)
    n_pinned = desk.engine.sessions.n_pinned
    assert desk.engine.sessions.unpin_least_recent()
    assert (n_walks, desk.engine.sessions.n_pinned) == (1, n_sessions - 1)
    assert n_pinned == 49
    desk.engine.check()


def test_without_a_session_the_cells_are_evicted(desk: Desk) -> None:
    desk.run("a", CHAT)
    desk.flood()
    assert desk.run("b", CHAT, max_tokens=1) == 40


def test_a_fork_copies_nothing(desk: Desk) -> None:
    desk.run("a", CHAT, session_id="chat")
    before = desk.engine.stats()
    assert desk.call("fork", "chat", "branch", 20) == SessionInfo("branch", 20, 20, 20)
    assert desk.engine.stats() == before.__class__(**{**stats_of(before), "num_sessions": 2})
    desk.call("delete", "chat")
    assert desk.engine.stats().kv_cells_session == 20
    desk.flood()
    branch = [*CHAT[:20], *range(200, 210)]
    assert desk.run("b", branch, max_tokens=1, session_id="branch") == 10
    assert desk.tokens["b"] == core.answer(branch, 1)


def stats_of(stats: Any) -> dict[str, Any]:
    return {name: getattr(stats, name) for name in stats.__slots__}


def test_a_fork_of_all_and_of_nothing(desk: Desk) -> None:
    desk.run("a", CHAT, session_id="chat")
    assert desk.call("fork", "chat", "all").num_pinned_tokens == 49
    assert desk.call("fork", "chat", "nothing", 0) == SessionInfo("nothing", 0, 0, 0)
    desk.begin("list")
    assert [session.name for session in desk.end()] == ["all", "chat", "nothing"]
    with pytest.raises(RejectedError, match="n_tokens is 50, session 'chat' has 49"):
        desk.call("fork", "chat", "more", 50)
    with pytest.raises(RejectedError, match="n_tokens is -1"):
        desk.call("trim", "chat", n_tokens=-1)
    with pytest.raises(RejectedError, match="session 'all' already exists"):
        desk.call("fork", "chat", "all")


def test_trimmed_and_deleted_cells_can_be_evicted(desk: Desk) -> None:
    desk.run("a", CHAT, session_id="chat")
    assert desk.call("trim", "chat", n_tokens=30) == SessionInfo("chat", 30, 30, 30)
    desk.flood()
    assert desk.run("b", CHAT, max_tokens=1) == 10
    assert desk.call("delete", "chat").num_tokens == 30
    assert desk.engine.stats().kv_cells_session == 0
    desk.flood()
    assert desk.run("c", CHAT, max_tokens=1) == 40


def test_a_client_has_only_its_own_sessions(desk: Desk) -> None:
    desk.run("a", CHAT, session_id="chat", client_id="x")
    for kind, other in (("fork", "mine"), ("trim", ""), ("delete", "")):
        with pytest.raises(RejectedError, match="there is no session 'chat'"):
            desk.call(kind, "chat", other, 1, client_id="y")
    desk.begin("list", client_id="y")
    assert desk.end() == []
    assert desk.call("create", "chat", client_id="y") == SessionInfo("chat", 0, 0, 0)
    assert desk.call("list", client_id="x").num_tokens == 49


def test_sessions_are_bounded(desk: Desk) -> None:
    desk = Desk(max_sessions=2)
    desk.call("create", "a")
    desk.run("r", CHAT, session_id="b", client_id="other")
    with pytest.raises(ExhaustedError, match="max_sessions"):
        desk.call("create", "c")
    with pytest.raises(ExhaustedError, match="max_sessions"):
        desk.submit("s", session_id="c")
    desk.submit("t", session_id="a")
    desk.finish()
    assert set(desk.ends) == {"r", "t"}


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a" * 65, "-a", "ü", "a\n", "a\0"])
def test_invalid_names_are_rejected(desk: Desk, name: str) -> None:
    for kind in ("create", "delete"):
        with pytest.raises(RejectedError, match="allowed are"):
            desk.call(kind, name)
    if name:
        with pytest.raises(RejectedError, match="allowed are"):
            desk.submit("r", session_id=name)
    assert not desk.engine.has_work()


def test_without_a_prefix_cache_there_are_no_sessions() -> None:
    desk = Desk(enable_prefix_caching=False)
    with pytest.raises(UnsupportedError, match="prefix cache"):
        desk.submit("r", session_id="chat")
    with pytest.raises(UnsupportedError, match="prefix cache"):
        desk.call("create", "chat")
    desk.begin("list")
    assert desk.end() == []


# --- which completions update a session ---


def test_a_canceled_decode_updates_the_session_and_a_canceled_prompt_does_not(desk: Desk) -> None:
    desk = Desk(max_num_batched_tokens=16)
    desk.run("a", CHAT, session_id="chat", max_tokens=1)
    desk.submit("b", prompt=[9] * 50, session_id="chat")
    desk.step(2)
    desk.engine.cancel("b")
    desk.finish()
    assert desk.call("list").num_tokens == 40
    desk.submit("c", prompt=[9] * 20, session_id="chat")
    desk.step(4)
    desk.engine.cancel("c")
    desk.finish()
    assert desk.call("list").num_tokens == 20 + len(desk.tokens["c"]) - 1


def test_a_failed_completion_does_not_update_the_session(desk: Desk) -> None:
    desk.run("a", CHAT, session_id="chat", max_tokens=1)
    desk.submit("bad", session_id="chat", logit_bias={core.NON_FINITE: 100.0})
    desk.finish()
    assert desk.tokens["bad"] == [core.NON_FINITE]
    assert isinstance(desk.ends["bad"].error, RequestFailedError)
    assert desk.call("list") == SessionInfo("chat", 40, 40, 40)


def test_the_first_of_several_choices_updates_the_session(desk: Desk) -> None:
    desk.submit("a", prompt=CHAT, session_id="chat", n=3, temperature=1.0, seed=3)
    desk.finish()
    first = CHAT + desk.tokens["a"]
    assert desk.call("list").num_tokens == 49
    assert desk.engine.sessions.find("", "chat").token_ids.tolist() == first[:49]


def test_a_session_deleted_meanwhile_stays_deleted(desk: Desk) -> None:
    desk.submit("a", prompt=CHAT, session_id="chat")
    desk.step(3)
    desk.call("delete", "chat")
    desk.finish()
    desk.begin("list")
    assert desk.end() == []


# --- pressure ---


def test_pins_are_released_before_any_preemption(desk: Desk) -> None:
    desk = Desk(n_cells=64, session_kv_share=1.0)
    desk.run("a", [1] * 20, session_id="old", max_tokens=1)
    desk.run("b", [2] * 20, session_id="new", max_tokens=1)
    desk.submit("c", prompt=[3] * 10, max_tokens=30)
    desk.finish()
    assert desk.engine.stats().num_preempted == 0
    desk.begin("list")
    by_name = {session.name: session for session in desk.end()}
    assert by_name["new"] == SessionInfo("new", 20, 20, 20)
    assert (by_name["old"].num_tokens, by_name["old"].num_pinned_tokens) == (20, 0)
    assert by_name["old"].num_cached_tokens < 20


def test_pins_are_released_before_a_younger_request_is_preempted() -> None:
    desk = Desk(n_cells=64, session_kv_share=1.0)
    desk.run("a", [1] * 20, session_id="old", max_tokens=1)
    desk.submit("b", prompt=[2] * 5, max_tokens=20)
    desk.submit("c", prompt=[3] * 5, max_tokens=25)
    desk.finish()
    assert desk.engine.stats().num_preempted == 0
    assert desk.call("list").num_pinned_tokens == 0


def test_pinned_cells_count_as_available_for_the_queue() -> None:
    desk = Desk(n_cells=64, session_kv_share=1.0, max_num_queued_reqs=0)
    desk.run("a", [1] * 60, session_id="chat", max_tokens=1)
    desk.submit("b", prompt=[2] * 30)
    desk.finish()
    assert desk.tokens["b"] == core.answer([2] * 30, 10)


def test_pins_never_block_an_admission() -> None:
    desk = Desk(n_cells=64, session_kv_share=1.0)
    for i in range(3):
        desk.run(f"{i}", [i] * 20, session_id=f"s{i}", max_tokens=1)
    assert desk.run("whole", [9] * 54, max_tokens=10) == 63
    assert desk.reasons()["whole"] is FinishReason.LENGTH
    assert desk.engine.stats().kv_cells_session == 0
    again = desk.run("again", [1] * 20 + [5], session_id="s1", max_tokens=1)
    assert again == 21, "the result is right, and the prompt is recomputed"


def test_all_pins_together_are_bounded() -> None:
    desk = Desk(n_cells=100, session_kv_share=0.5)
    for name in "abc":
        desk.run(name, [ord(name)] * 20, session_id=name, max_tokens=1)
    desk.begin("list")
    assert [session.num_pinned_tokens for session in desk.end()] == [0, 20, 20]
    desk.run("a again", [ord("a")] * 20, session_id="a", max_tokens=1)
    desk.begin("list")
    assert [session.num_pinned_tokens for session in desk.end()] == [20, 0, 20]
    desk.run("long", [7] * 51, session_id="long", max_tokens=1)
    assert desk.engine.stats().kv_cells_session == 0, "the session alone exceeds its share"


def test_cells_that_sessions_share_count_once() -> None:
    desk = Desk(n_cells=100, session_kv_share=0.5)
    desk.run("a", [1] * 40, session_id="a", max_tokens=1)
    for i in range(5):
        desk.call("fork", "a", f"f{i}", 40)
    assert desk.engine.stats().kv_cells_session == 40
    desk.begin("list")
    assert {session.num_pinned_tokens for session in desk.end()} == {40}


def test_the_session_of_an_expired_request_pins_no_cell_that_the_step_allocates() -> None:
    desk = Desk(n_cells=64, session_kv_share=1.0)
    desk.submit("old", prompt=[1] * 50, session_id="chat", deadline_s=NOW + 1)
    desk.step(3)
    assert desk.context.n_cells_free == 12
    desk.submit("new", prompt=[2] * 20)
    desk.step(now_s=NOW + 2)  # in one plan, `old` expires and `new` allocates some of its cells
    chat = desk.call("list")
    assert (chat.num_tokens, chat.num_pinned_tokens) == (52, chat.num_cached_tokens)
    assert 0 < chat.num_cached_tokens < 52
    desk.finish()
    assert desk.reasons() == {"old": FinishReason.TIMEOUT, "new": FinishReason.LENGTH}
    assert desk.tokens["new"] == core.answer([2] * 20, 10)
