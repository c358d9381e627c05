"""Sessions on the fake core: whose they are, what they keep, what they give up, and when."""

from __future__ import annotations

import contextlib
import random
import threading
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest

from fakes import core
from fakes.engines import NOW, Engine
from llaisys.engine.session_file import SessionReader
from llaisys.engine.sessions import SessionCall
from llaisys.errors import ExhaustedError, RejectedError, RequestFailedError, UnsupportedError
from llaisys.types import FinishReason, SessionInfo

CHAT = list(range(1, 41))


class Desk(Engine):
    """An engine whose sessions are asked, too."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(**{"max_num_batched_tokens": 64, **changes})

    def begin(
        self, kind: Any, name: str = "", other: str = "", n_tokens: int | None = None, **more: Any
    ) -> None:
        call = SessionCall(kind=kind, name=name, other=other, n_tokens=n_tokens, **more)
        self.engine.session_calls.call(call)

    def end(self) -> list[SessionInfo]:
        """The answer, which may take turns."""
        calls = self.engine.session_calls
        while not (answers := calls.take_answers()):
            wait([transfer.work for transfer in calls._transfers], 30)
            calls.turn()
            self.engine.check()
        (answer,) = answers
        if answer.error is not None:
            raise answer.error
        return answer.sessions

    def call(self, *what: Any, **more: Any) -> SessionInfo:
        self.begin(*what, **more)
        (session,) = self.end()
        return session

    def refused(self, *what: Any, **more: Any) -> str:
        """Of a call that is refused at once, while others are under way."""
        self.begin(*what, **more)
        (answer,) = self.engine.session_calls.take_answers()
        assert isinstance(answer.error, RejectedError)
        return str(answer.error)

    def now(self, *what: Any) -> None:
        """A call that is answered at once, while others are under way."""
        self.begin(*what)
        (answer,) = self.engine.session_calls.take_answers()
        assert answer.error is None

    def run(self, name: str, prompt: list[int], **changes: Any) -> int:
        """Rows that the core computed for a request that runs alone to its end."""
        before = self.context.n_rows
        self.submit(name, prompt=prompt, **changes)
        self.finish()
        return self.context.n_rows - before

    def flood(self) -> None:
        """Requests of others, enough to use every cell that can be had."""
        for i in range(8):
            self.run(f"flood {i} {self.engine.stats().num_submitted}", [100 + i] * 50)


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_a_session_keeps_what_its_last_request_computed(desk: Desk) -> None:
    desk.run("a", CHAT, session_id="chat")
    assert desk.call("list") == SessionInfo("chat", 49, 49, 49)
    desk.flood()
    turn = CHAT + desk.tokens["a"] + [7, 8, 9]
    assert desk.run("b", turn, max_tokens=1, session_id="chat") == 4
    assert desk.tokens["b"] == core.answer(turn, 1)
    assert desk.call("list") == SessionInfo("chat", 53, 53, 53)
    stats = desk.engine.stats()
    assert (stats.num_sessions, stats.kv_cells_session) == (1, 53)


def test_without_a_session_it_would_be_gone(desk: Desk) -> None:
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
    with pytest.raises(RejectedError, match="a session 'all' already"):
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


def test_a_session_is_its_clients_alone(desk: Desk) -> None:
    desk.run("a", CHAT, session_id="chat", client_id="x")
    for kind, other in (("fork", "mine"), ("trim", ""), ("delete", "")):
        with pytest.raises(RejectedError, match="there is no session 'chat'"):
            desk.call(kind, "chat", other, 1, client_id="y")
    desk.begin("list", client_id="y")
    assert desk.end() == []
    assert desk.call("create", "chat", client_id="y") == SessionInfo("chat", 0, 0, 0)
    assert desk.call("list", client_id="x").num_tokens == 49


def test_sessions_are_counted(desk: Desk) -> None:
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
def test_odd_names_are_refused(desk: Desk, name: str) -> None:
    for kind in ("create", "delete"):
        with pytest.raises(RejectedError, match="allowed are"):
            desk.call(kind, name)
    if name:
        with pytest.raises(RejectedError, match="allowed are"):
            desk.submit("r", session_id=name)
    assert not desk.engine.has_work()


def test_without_a_prefix_cache_there_are_none() -> None:
    desk = Desk(enable_prefix_caching=False)
    with pytest.raises(UnsupportedError, match="prefix cache"):
        desk.submit("r", session_id="chat")
    with pytest.raises(UnsupportedError, match="prefix cache"):
        desk.call("create", "chat")
    desk.begin("list")
    assert desk.end() == []


# --- which ends count ---


def test_an_answer_that_was_cut_off_counts_and_a_prompt_that_was_does_not(desk: Desk) -> None:
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


def test_an_answer_that_failed_does_not_count(desk: Desk) -> None:
    desk.run("a", CHAT, session_id="chat", max_tokens=1)
    desk.submit("bad", prompt=[5, core.NON_FINITE], session_id="chat")
    desk.finish()
    assert isinstance(desk.ends["bad"].error, RequestFailedError)
    assert desk.call("list") == SessionInfo("chat", 40, 40, 40)


def test_of_several_choices_the_first_counts(desk: Desk) -> None:
    desk.submit("a", prompt=CHAT, session_id="chat", n=3, temperature=1.0, seed=3)
    desk.finish()
    first = CHAT + desk.tokens["a"]
    assert desk.call("list").num_tokens == 49
    assert desk.engine.sessions.find("", "chat").token_ids.tolist() == first[:49]


def test_a_session_that_was_deleted_meanwhile_stays_so(desk: Desk) -> None:
    desk.submit("a", prompt=CHAT, session_id="chat")
    desk.step(3)
    desk.call("delete", "chat")
    desk.finish()
    desk.begin("list")
    assert desk.end() == []


# --- pressure ---


def test_pins_go_before_anybody_gives_way(desk: Desk) -> None:
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


def test_pins_never_keep_a_request_out() -> None:
    desk = Desk(n_cells=64, session_kv_share=1.0)
    for i in range(3):
        desk.run(f"{i}", [i] * 20, session_id=f"s{i}", max_tokens=1)
    assert desk.run("whole", [9] * 54, max_tokens=10) == 63
    assert desk.reasons()["whole"] is FinishReason.LENGTH
    assert desk.engine.stats().kv_cells_session == 0
    again = desk.run("again", [1] * 20 + [5], session_id="s1", max_tokens=1)
    assert again == 21, "never wrong, only slower"


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
    assert desk.engine.stats().kv_cells_session == 0, "it alone is too much"


def test_cells_that_sessions_share_count_once() -> None:
    desk = Desk(n_cells=100, session_kv_share=0.5)
    desk.run("a", [1] * 40, session_id="a", max_tokens=1)
    for i in range(5):
        desk.call("fork", "a", f"f{i}", 40)
    assert desk.engine.stats().kv_cells_session == 40
    desk.begin("list")
    assert {session.num_pinned_tokens for session in desk.end()} == {40}


# --- save and restore ---


def saved(tmp_path: Path, **changes: Any) -> tuple[Desk, Path]:
    """A desk whose session `chat` is saved as `file` in pieces of 8 positions, and the file."""
    desk = Desk(session_store=tmp_path, **changes)
    desk.run("a", CHAT, session_id="chat")
    assert desk.call("save", "chat", "file").num_tokens == 49
    (file,) = tmp_path.glob("*/file.kv")
    return desk, file


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llaisys.engine.session_calls.PIECE_BYTES", 8 * core.CELL_BYTES)


@pytest.mark.parametrize("n_streams", [1, 2])
def test_a_restored_session_computes_what_is_new(tmp_path: Path, n_streams: int) -> None:
    first, _ = saved(tmp_path)
    desk = Desk(session_store=tmp_path, n_streams=n_streams)
    assert desk.call("restore", "again", "file") == SessionInfo("again", 49, 49, 49)
    turn = CHAT + first.tokens["a"] + [7, 8, 9]
    assert desk.run("b", turn, max_tokens=5, session_id="again") == 4 + 4
    assert desk.tokens["b"] == core.answer(turn, 5)
    desk.call("delete", "again")
    desk.flood()
    assert desk.run("c", CHAT, max_tokens=1) == 40


@pytest.mark.parametrize("n_cached", [3, 8, 20, 49])
def test_what_is_cached_already_is_not_imported_again(tmp_path: Path, n_cached: int) -> None:
    first, _ = saved(tmp_path)
    whole = CHAT + first.tokens["a"]
    desk = Desk(session_store=tmp_path)
    desk.run("part", whole[:n_cached], max_tokens=1)
    assert desk.call("restore", "chat", "file") == SessionInfo("chat", 49, 49, 49)
    assert desk.engine.stats().kv_cells_retained == 49
    assert desk.run("b", [*whole, 7], max_tokens=1, session_id="chat") == 2


def test_a_request_waits_for_its_restore_while_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = saved(tmp_path)
    gate, next_piece = threading.Event(), SessionReader.next

    def slow(reader: SessionReader) -> Any:
        assert gate.wait(30)
        return next_piece(reader)

    monkeypatch.setattr(SessionReader, "next", slow)
    desk = Desk(session_store=tmp_path, max_num_seqs=1)
    desk.begin("restore", "chat", "file")
    turn = CHAT + first.tokens["a"]
    desk.submit("mine", prompt=turn, max_tokens=1, session_id="chat")
    desk.submit("not mine", prompt=turn, max_tokens=1, session_id="chat", client_id="y")
    desk.run("other", [5] * 10)
    assert set(desk.ends) == {"other", "not mine"}
    assert desk.engine.stats().waiting_by_reason["remote_kv"] == 1
    assert desk.refused("trim", "chat", n_tokens=3) == "session 'chat' is being restored"
    assert desk.engine.wait_s() == desk.engine.limits.timeout_scan_s, "nothing is polled"
    gate.set()
    desk.end()
    desk.finish()
    assert desk.tokens["mine"] == core.answer(turn, 1)
    assert desk.cached["mine"] == 49


def test_a_damaged_file_ends_those_who_wait_and_leaves_nothing(tmp_path: Path) -> None:
    _, file = saved(tmp_path)
    raw = bytearray(file.read_bytes())
    raw[-40] ^= 1  # in the last checksum but one: everything was read, most of it imported
    file.write_bytes(raw)
    desk = Desk(session_store=tmp_path)
    desk.begin("restore", "chat", "file")
    desk.submit("a", prompt=CHAT, session_id="chat")
    with pytest.raises(RejectedError, match="damaged"):
        desk.end()
    desk.finish()
    assert isinstance(desk.ends["a"].error, RejectedError)
    stats = desk.engine.stats()
    assert (stats.num_sessions, stats.kv_cells_session, stats.kv_cells_free) == (0, 0, stats.kv_cells)


def test_a_restore_takes_no_cell_that_a_request_needs(tmp_path: Path) -> None:
    first, _ = saved(tmp_path)
    desk = Desk(session_store=tmp_path, n_cells=64)
    desk.submit("runs", prompt=[9] * 30, max_tokens=20)
    desk.step(5)
    session = desk.call("restore", "chat", "file")
    assert session.num_tokens == 49
    assert 8 <= session.num_cached_tokens <= 24
    desk.finish()
    assert desk.engine.stats().num_preempted == 0
    turn = CHAT + first.tokens["a"]
    desk.run("b", turn, max_tokens=1, session_id="chat")
    assert desk.tokens["b"] == core.answer(turn, 1)


def test_a_session_that_lost_its_cells_is_saved_as_tokens(tmp_path: Path) -> None:
    desk = Desk(session_store=tmp_path, session_kv_share=0.0)
    desk.run("a", CHAT, session_id="chat")
    desk.flood()
    desk.call("save", "chat", "file")
    fresh = Desk(session_store=tmp_path)
    session = fresh.call("restore", "chat", "file")
    assert (session.num_tokens, session.num_cached_tokens) == (49, 0)
    assert fresh.engine.stats().kv_cells_free == 256


def test_a_save_is_of_its_moment(tmp_path: Path) -> None:
    """Edited, split and used while it is written."""
    desk = Desk(session_store=tmp_path)
    desk.run("a", CHAT, session_id="chat")
    desk.begin("save", "chat", "file")
    desk.now("fork", "chat", "branch", 13)
    desk.now("delete", "chat")
    desk.end()
    fresh = Desk(session_store=tmp_path)
    assert fresh.call("restore", "chat", "file") == SessionInfo("chat", 49, 49, 49)


def test_files_are_their_clients_and_in_the_store(tmp_path: Path) -> None:
    desk, file = saved(tmp_path)
    with pytest.raises(RejectedError, match="there is no saved session 'file'"):
        desk.call("restore", "mine", "file", client_id="y")
    for name in ("../file", "/etc/passwd", "", ".", "a" * 65, "a\0"):
        for kind in ("save", "restore"):
            with pytest.raises(RejectedError, match=r"file is .* allowed are"):
                desk.call(kind, "chat", name)
    with pytest.raises(RejectedError, match="a session 'chat' already"):
        desk.call("restore", "chat", "file")
    with pytest.raises(RejectedError, match="no session 'other'"):
        desk.call("save", "other", "file")
    assert [path.name for path in file.parent.iterdir()] == ["file.kv"]
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_without_a_store_nothing_is_saved(desk: Desk) -> None:
    desk.run("a", CHAT, session_id="chat")
    for kind in ("save", "restore"):
        with pytest.raises(UnsupportedError, match="session_store"):
            desk.call(kind, "chat", "file")


def test_an_engine_that_ends_gives_up_what_is_under_way(tmp_path: Path) -> None:
    desk = Desk(session_store=tmp_path)
    desk.run("a", CHAT, session_id="chat")
    desk.begin("save", "chat", "file")
    desk.engine.close()
    assert [*tmp_path.glob("*/*")] == []


def test_a_restore_that_waits_has_its_requests_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path)
    gate, next_piece = threading.Event(), SessionReader.next
    monkeypatch.setattr(SessionReader, "next", lambda r: gate.wait(30) and next_piece(r))
    desk = Desk(session_store=tmp_path)
    desk.begin("restore", "chat", "file")
    desk.submit("late", session_id="chat", deadline_s=NOW + 5)
    desk.step(1, NOW + 5)
    assert desk.reasons() == {"late": FinishReason.TIMEOUT}
    gate.set()
    desk.end()


@pytest.mark.parametrize("seed", range(12))
def test_whatever_sessions_do_answers_stay_and_books_agree(tmp_path: Path, seed: int) -> None:
    """Requests, forks, trims, saves and restores at random, under pressure; checked after every step."""
    chance = random.Random(seed)
    desk = Desk(
        n_cells=chance.choice([64, 96, 160]),
        n_streams=chance.choice([1, 1, 2]),
        max_model_len=32,
        max_sessions=6,
        session_kv_share=chance.choice([0.3, 0.5, 1.0]),
        session_store=tmp_path,
        max_num_queued_reqs=100,
    )
    calls, prompts, n_answers, n_calls = desk.engine.session_calls, {}, 0, 0
    for i in range(250):
        if chance.random() < 0.3:
            kind = chance.choice(["create", "fork", "trim", "delete", "save", "restore", "list"])
            n_tokens = chance.choice([None, 0, 5, 12])
            desk.begin(kind, chance.choice("abcd"), chance.choice("abcd"), n_tokens)
            n_calls += 1
        elif len(prompts) - len(desk.ends) < 12:
            prompt = [chance.randrange(3)] * chance.randrange(1, 12) + [chance.randrange(5)] * 5
            prompts[f"{i}"] = prompt
            with contextlib.suppress(ExhaustedError):
                desk.submit(f"{i}", prompt=prompt, session_id=chance.choice(["", *"abcd"]))
                continue
            del prompts[f"{i}"]
        calls.turn()
        n_answers += len(calls.take_answers())
        desk.step()
    while n_answers < n_calls:
        wait([transfer.work for transfer in calls._transfers], 30)
        calls.turn()
        n_answers += len(calls.take_answers())
        desk.engine.check()
    desk.finish()
    assert n_answers == n_calls
    for name, prompt in prompts.items():
        end = desk.ends[name]  # a restore that failed took its requests along
        assert end.error is not None or desk.tokens[name] == core.answer(prompt, 10)
    assert sum(end.error is None for end in desk.ends.values()) > len(prompts) / 2
    for name in "abcd":
        desk.begin("delete", name)
    assert desk.engine.stats().kv_cells_session == desk.engine.stats().kv_cells_used == 0
