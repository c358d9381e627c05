"""Saving and restoring sessions on the fake core: restored tokens, waiting requests and rejected files."""

from __future__ import annotations

import contextlib
import random
import threading
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest

from fakes import core
from fakes.engines import NOW
from fakes.session_runner import SessionRunner
from llaisys.engine.sessions.file import SessionReader
from llaisys.errors import (
    CoreFaultError,
    ExhaustedError,
    RejectedError,
    RequestFailedError,
    UnsupportedError,
)
from llaisys.outputs import FinishReason
from llaisys.session_info import SessionInfo
from open_files import open_files

CHAT = list(range(1, 41))


@pytest.fixture
def runner() -> SessionRunner:
    return SessionRunner()


def saved(tmp_path: Path, **changes: Any) -> tuple[SessionRunner, Path]:
    """Return an engine whose session `chat` is saved in pieces of 8 positions, and the path of its file."""
    runner = SessionRunner(session_store=tmp_path, **changes)
    runner.run("a", CHAT, session_id="chat")
    assert runner.call("save", "chat", "file").num_tokens == 49
    (file,) = tmp_path.glob("*/file.kv")
    return runner, file


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llaisys.engine.sessions.transfer.PIECE_BYTES", 8 * core.CELL_BYTES)


@pytest.mark.parametrize("n_streams", [1, 2])
def test_a_restored_session_computes_only_new_tokens(tmp_path: Path, n_streams: int) -> None:
    first, _ = saved(tmp_path)
    runner = SessionRunner(session_store=tmp_path, n_streams=n_streams)
    assert runner.call("restore", "again", "file") == SessionInfo("again", 49, 49, 49)
    turn = CHAT + first.tokens["a"] + [7, 8, 9]
    assert runner.run("b", turn, max_tokens=5, session_id="again") == 4 + 4
    assert runner.tokens["b"] == core.answer(turn, 5)
    runner.call("delete", "again")
    runner.flood()
    assert runner.run("c", CHAT, max_tokens=1) == 40


@pytest.mark.parametrize("n_streams", [1, 2])
@pytest.mark.parametrize("n_cached", [3, 8, 20, 49])
def test_cached_tokens_are_not_imported_again(tmp_path: Path, n_cached: int, n_streams: int) -> None:
    first, _ = saved(tmp_path)
    whole = CHAT + first.tokens["a"]
    runner = SessionRunner(session_store=tmp_path, n_streams=n_streams)
    runner.run("part", whole[:n_cached], max_tokens=1, session_id="part")
    assert runner.call("restore", "chat", "file") == SessionInfo("chat", 49, 49, 49)
    assert runner.engine.stats().kv_cells_retained == 49
    assert runner.run("b", [*whole, 7], max_tokens=1, session_id="chat") == 2


def test_a_request_waits_for_its_restore_while_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = saved(tmp_path)
    gate, next_piece = threading.Event(), SessionReader.next

    def slow(reader: SessionReader) -> Any:
        assert gate.wait(30)
        return next_piece(reader)

    monkeypatch.setattr(SessionReader, "next", slow)
    runner = SessionRunner(session_store=tmp_path, max_num_seqs=1)
    runner.begin("restore", "chat", "file")
    turn = CHAT + first.tokens["a"]
    runner.submit("mine", prompt=turn, max_tokens=1, session_id="chat")
    runner.submit("not mine", prompt=turn, max_tokens=1, session_id="chat", client_id="y")
    runner.run("other", [5] * 10)
    assert set(runner.ends) == {"other", "not mine"}
    assert runner.engine.stats().waiting_by_reason["remote_kv"] == 1
    assert runner.rejection("trim", "chat", n_tokens=3) == "session 'chat' is being restored"
    assert runner.engine.wait_s() == runner.engine.limits.timeout_scan_s, "nothing is polled"
    gate.set()
    runner.end()
    runner.finish()
    assert runner.tokens["mine"] == core.answer(turn, 1)
    assert runner.cached["mine"] == 49


def test_a_damaged_file_ends_the_waiting_requests_and_frees_everything(tmp_path: Path) -> None:
    _, file = saved(tmp_path)
    raw = bytearray(file.read_bytes())
    raw[-40] ^= 1  # in the second-last checksum: everything was read and most of it imported
    file.write_bytes(raw)
    runner = SessionRunner(session_store=tmp_path)
    runner.begin("restore", "chat", "file")
    runner.submit("a", prompt=CHAT, session_id="chat")
    with pytest.raises(RejectedError, match="damaged"):
        runner.end()
    runner.finish()
    assert isinstance(runner.ends["a"].error, RejectedError)
    assert not open_files(tmp_path)
    stats = runner.engine.stats()
    assert (stats.num_sessions, stats.kv_cells_session, stats.kv_cells_free) == (0, 0, stats.kv_cells)


def test_a_restore_allocates_no_cell_that_a_request_needs(tmp_path: Path) -> None:
    first, _ = saved(tmp_path)
    runner = SessionRunner(session_store=tmp_path, n_cells=64)
    runner.submit("runs", prompt=[9] * 30, max_tokens=20)
    runner.step(5)
    session = runner.call("restore", "chat", "file")
    assert session.num_tokens == 49
    assert session.num_cached_tokens == 16, "30 cells are free, 9 are needed soon, a piece has 8"
    runner.finish()
    assert runner.engine.stats().num_preempted == 0
    turn = CHAT + first.tokens["a"]
    runner.run("b", turn, max_tokens=1, session_id="chat")
    assert runner.tokens["b"] == core.answer(turn, 1)


def test_cached_tokens_need_no_cells(tmp_path: Path) -> None:
    first, _ = saved(tmp_path)
    runner = SessionRunner(session_store=tmp_path, n_cells=64, session_kv_share=1.0)
    runner.run("same", CHAT + first.tokens["a"][:9], max_tokens=1)
    runner.submit("runs", prompt=[9] * 10)
    runner.step()
    assert runner.engine.stats().kv_cells_free < 8
    assert runner.call("restore", "chat", "file") == SessionInfo("chat", 49, 49, 49)


def test_a_restored_prefix_belongs_to_its_salt(tmp_path: Path) -> None:
    saved(tmp_path)
    runner = SessionRunner(session_store=tmp_path)
    runner.call("restore", "chat", "file", cache_salt="x")
    assert runner.run("b", CHAT, max_tokens=1) == 40
    assert runner.run("c", CHAT, max_tokens=1, cache_salt="x") == 1


def test_each_restore_continues_its_own_requests() -> None:
    runner = SessionRunner()
    for client_id in "xy":
        session = runner.engine.sessions.create(client_id, "chat")
        runner.engine.remote_kvs.begin_restore(session)
        runner.submit(client_id, session_id="chat", client_id=client_id)
    runner.engine.remote_kvs.end_restore(session)
    runner.finish()
    assert set(runner.ends) == {"y"}


def test_an_earlier_completion_does_not_disturb_a_restore() -> None:
    runner = SessionRunner()
    runner.submit("a", prompt=CHAT, session_id="chat")
    runner.step(3)
    runner.call("delete", "chat")
    session = runner.engine.sessions.create("", "chat")
    runner.engine.remote_kvs.begin_restore(session)
    runner.finish()
    assert runner.call("list") == SessionInfo("chat", 0, 0, 0, is_restoring=True)


def test_the_engine_has_work_when_file_work_is_done(tmp_path: Path) -> None:
    runner, _ = saved(tmp_path)
    runner.begin("save", "chat", "one")
    runner.begin("save", "chat", "two")
    handler, n_replies = runner.engine.session_requests, 0
    while n_replies < 2:
        wait([transfer.work for transfer in handler._transfers], 30)
        assert runner.engine.wait_s() == 0.0
        handler.continue_transfer()
        n_replies += len(handler.pop_replies())
    assert runner.engine.wait_s() is None


def test_a_session_that_lost_its_cells_is_saved_as_tokens(tmp_path: Path) -> None:
    runner = SessionRunner(session_store=tmp_path, session_kv_share=0.0)
    runner.run("a", CHAT, session_id="chat")
    runner.flood()
    runner.call("save", "chat", "file")
    fresh = SessionRunner(session_store=tmp_path)
    session = fresh.call("restore", "chat", "file")
    assert (session.num_tokens, session.num_cached_tokens) == (49, 0)
    assert fresh.engine.stats().kv_cells_free == 256


def test_a_save_has_the_state_of_its_start(tmp_path: Path) -> None:
    """The session is forked and deleted while the file is written."""
    runner = SessionRunner(session_store=tmp_path)
    runner.run("a", CHAT, session_id="chat")
    runner.begin("save", "chat", "file")
    runner.call_at_once("fork", "chat", "branch", 13)
    runner.call_at_once("delete", "chat")
    runner.end()
    fresh = SessionRunner(session_store=tmp_path)
    assert fresh.call("restore", "chat", "file") == SessionInfo("chat", 49, 49, 49)


def test_files_belong_to_their_client_and_stay_in_the_store(tmp_path: Path) -> None:
    runner, file = saved(tmp_path)
    with pytest.raises(RejectedError, match="there is no saved session 'file'"):
        runner.call("restore", "mine", "file", client_id="y")
    for name in ("../file", "/etc/passwd", "", ".", "a" * 65, "a\0"):
        for kind in ("save", "restore"):
            with pytest.raises(RejectedError, match=r"file is .* allowed are"):
                runner.call(kind, "chat", name)
    with pytest.raises(RejectedError, match="session 'chat' already exists"):
        runner.call("restore", "chat", "file")
    with pytest.raises(RejectedError, match="no session 'other'"):
        runner.call("save", "other", "file")
    assert [path.name for path in file.parent.iterdir()] == ["file.kv"]
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_a_failed_export_fails_only_its_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = SessionRunner(session_store=tmp_path)
    runner.run("a", CHAT, session_id="chat")

    def fails(*_: int) -> None:
        raise CoreFaultError("a panic")

    with monkeypatch.context() as patch:
        patch.setattr(runner.context, "kv_node_export", fails)
        with pytest.raises(RequestFailedError, match="could not be read: a panic"):
            runner.call("save", "chat", "file")
    assert [*tmp_path.glob("*/*")] == [], "no partial file is left"
    assert runner.call("save", "chat", "file").num_tokens == 49


def test_without_a_store_nothing_is_saved(runner: SessionRunner) -> None:
    runner.run("a", CHAT, session_id="chat")
    for kind in ("save", "restore"):
        with pytest.raises(UnsupportedError, match="session_store"):
            runner.call(kind, "chat", "file")


def test_closing_the_engine_cancels_transfers(tmp_path: Path) -> None:
    runner = SessionRunner(session_store=tmp_path)
    runner.run("a", CHAT, session_id="chat")
    runner.begin("save", "chat", "file")
    runner.engine.close()
    assert [*tmp_path.glob("*/*")] == []


def test_a_restore_that_waits_has_its_requests_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path)
    gate, next_piece = threading.Event(), SessionReader.next
    monkeypatch.setattr(SessionReader, "next", lambda r: gate.wait(30) and next_piece(r))
    runner = SessionRunner(session_store=tmp_path)
    runner.begin("restore", "chat", "file")
    runner.submit("late", session_id="chat", deadline_s=NOW + 5)
    runner.step(1, NOW + 5)
    assert runner.reasons() == {"late": FinishReason.TIMEOUT}
    gate.set()
    runner.end()


@pytest.mark.parametrize("seed", range(12))
def test_random_session_requests_change_no_completion_and_no_invariant(tmp_path: Path, seed: int) -> None:
    """Requests, forks, trims, saves and restores at random, under pressure; checked after every step."""
    rng = random.Random(seed)
    runner = SessionRunner(
        n_cells=rng.choice([64, 96, 160]),
        n_streams=rng.choice([1, 1, 2]),
        max_model_len=32,
        max_sessions=6,
        session_kv_share=rng.choice([0.3, 0.5, 1.0]),
        session_store=tmp_path,
        max_num_queued_reqs=100,
    )
    handler, prompts, n_replies, n_calls = runner.engine.session_requests, {}, 0, 0
    for i in range(250):
        if rng.random() < 0.3:
            kind = rng.choice(["create", "fork", "trim", "delete", "save", "restore", "list"])
            n_tokens = rng.choice([None, 0, 5, 12])
            runner.begin(kind, rng.choice("abcd"), rng.choice("abcd"), n_tokens)
            n_calls += 1
        elif len(prompts) - len(runner.ends) < 12:
            prompt = [rng.randrange(3)] * rng.randrange(1, 12) + [rng.randrange(5)] * 5
            prompts[f"{i}"] = prompt
            with contextlib.suppress(ExhaustedError):
                runner.submit(f"{i}", prompt=prompt, session_id=rng.choice(["", *"abcd"]))
                continue
            del prompts[f"{i}"]
        handler.continue_transfer()
        n_replies += len(handler.pop_replies())
        runner.step()
    while n_replies < n_calls:
        wait([transfer.work for transfer in handler._transfers], 30)
        handler.continue_transfer()
        n_replies += len(handler.pop_replies())
        runner.engine.check()
    runner.finish()
    assert n_replies == n_calls
    for name, prompt in prompts.items():
        end = runner.ends[name]  # a failed restore ends its requests
        assert end.error is not None or runner.tokens[name] == core.answer(prompt, 10)
    assert sum(end.error is None for end in runner.ends.values()) > len(prompts) / 2
    for name in "abcd":
        runner.begin("delete", name)
    assert runner.engine.stats().kv_cells_session == runner.engine.stats().kv_cells_used == 0
