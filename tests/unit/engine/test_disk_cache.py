"""The disk tier of the prefix cache on the fake core: what is written, what is loaded, and what is a miss."""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes import core
from fakes.disk_runner import DiskRunner
from llaisys.engine.disk_cache.block_store import BlockStore
from llaisys.engine.disk_cache.disk_cache import LOADS_MAX, READ_LIMIT_S
from llaisys.errors import CoreFaultError, RejectedError, StorageFullError
from llaisys.outputs import FinishReason
from open_files import open_files

BLOCK = 8
PROMPT = list(range(1, 45))  # five blocks and four tokens


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 8 tokens, in pieces of 4."""
    monkeypatch.setattr("llaisys.engine.disk_cache.block_index.BLOCK_TOKENS", BLOCK)
    monkeypatch.setattr("llaisys.engine.sessions.transfer.PIECE_BYTES", 4 * core.CELL_BYTES)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., DiskRunner]]:
    """Start an engine on the folder `tmp_path / "cache"`, after the one before has ended without a drain."""
    made: list[DiskRunner] = []

    def new(**changes: Any) -> DiskRunner:
        end()
        made.append(DiskRunner(**{"prefix_cache_dir": tmp_path / "cache", **changes}))
        return made[-1]

    def end() -> None:
        while made:
            made.pop().engine.close()

    yield new
    end()
    assert not open_files(tmp_path)


def blocks(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").glob("*/*.kv"))


def cached(runner: DiskRunner, prompt: list[int] = PROMPT, **changes: Any) -> int:
    """Run a request alone, check its tokens, and return the number of prompt tokens that were cached."""
    name = f"{runner.engine.stats().num_submitted}"
    n_rows = runner.run(name, prompt, max_tokens=2, **changes)
    assert runner.tokens[name] == core.answer(prompt, 2)
    assert n_rows == len(prompt) - runner.cached[name] + 1
    return runner.cached[name]


def written(start: Callable[..., DiskRunner], **changes: Any) -> DiskRunner:
    """Return a fresh engine on a folder that has the five blocks of PROMPT."""
    runner = start(**changes)
    cached(runner)
    runner.write_all()
    return start(**changes)


@pytest.mark.parametrize("n_streams", [1, 2])
def test_a_restart_computes_only_the_tokens_after_the_last_block(
    start: Callable[..., DiskRunner], tmp_path: Path, n_streams: int
) -> None:
    runner = written(start, n_streams=n_streams)
    assert len(blocks(tmp_path)) == 5
    assert cached(runner) == 40
    assert runner.external == (44, 40)
    assert cached(runner) == 43, "now it is in memory"
    assert runner.external == (44 + 1, 40)


def test_memory_comes_first_and_disk_continues(start: Callable[..., DiskRunner]) -> None:
    runner = written(start)
    cached(runner, PROMPT[:19])
    n_query, n_hit = runner.external
    assert (n_query, n_hit) == (19, 16)
    assert cached(runner) == 40
    assert runner.external == (19 + 44 - 19, 16 + 40 - 19)


def test_at_a_drain_everything_is_written(start: Callable[..., DiskRunner], tmp_path: Path) -> None:
    runner = start()
    cached(runner)
    runner.submit("running", prompt=[7] * 20, max_tokens=30)
    runner.step(3)
    assert not blocks(tmp_path)
    runner.shut_down()
    assert len(blocks(tmp_path)) == 5 + 2, "the prompt of the request that still runs, too"
    assert cached(start()) == 40


def test_a_drain_at_the_exit_of_the_interpreter_needs_no_threads(
    start: Callable[..., DiskRunner], tmp_path: Path
) -> None:
    runner = start()
    cached(runner)
    runner.disk._pool.shutdown()  # as the interpreter does before it calls exit hooks
    runner.shut_down()
    assert len(blocks(tmp_path)) == 5


def test_the_deadline_of_a_drain(
    start: Callable[..., DiskRunner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, gate, write = start(), threading.Event(), BlockStore.write
    cached(runner)

    def slow(store: BlockStore, *arguments: Any) -> Any:
        assert gate.wait(30)
        return write(store, *arguments)

    monkeypatch.setattr(BlockStore, "write", slow)
    runner.disk._clock = time.perf_counter
    runner.disk.drain(limit_s=0.01)
    gate.set()
    runner.engine.close()
    assert not blocks(tmp_path), "the block in progress was not finished"
    assert not [*tmp_path.glob("*/*/.*")]


def test_a_path_is_written_before_it_is_evicted(start: Callable[..., DiskRunner], tmp_path: Path) -> None:
    runner = start(n_cells=64)
    cached(runner)
    runner.write_all()
    cached(runner, [100] * 60)
    assert runner.engine.stats().num_evicted_cells > 0
    assert cached(runner) == 40, "from disk"
    assert len(blocks(tmp_path)) == 5


def test_writing_takes_a_small_share_of_the_time_while_requests_run(start: Callable[..., DiskRunner]) -> None:
    runner, now_s = start(), 0.0

    def clock() -> float:  # every call of an export takes a second
        nonlocal now_s
        now_s += 0.5
        return now_s

    runner.disk._clock = clock
    cached(runner)
    runner.disk.resume(is_idle=False)
    first = runner.disk._write
    assert first is not None
    for _ in range(20):
        runner.disk.resume(is_idle=False)
    assert first.future is None, "the second piece of the block waits"
    now_s += 1000.0
    runner.disk.resume(is_idle=False)
    runner.disk.resume(is_idle=True)
    assert first.future is not None, "the block is being written"


def test_other_requests_run_while_one_waits_for_the_disk(
    start: Callable[..., DiskRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, gate, read = written(start, max_num_seqs=1), threading.Event(), BlockStore.read

    def slow(store: BlockStore, *arguments: Any) -> Any:
        assert gate.wait(30)
        return read(store, *arguments)

    monkeypatch.setattr(BlockStore, "read", slow)
    runner.submit("loads", prompt=PROMPT, max_tokens=2)
    runner.submit("other", prompt=[5] * 10, max_tokens=2)
    while runner.engine.has_work():
        runner.disk.resume(is_idle=False)
        runner.step()
    assert set(runner.ends) == {"other"}
    assert runner.engine.stats().waiting_by_reason["remote_kv"] == 1
    assert runner.engine.wait_s() == runner.engine.limits.timeout_scan_s, "nothing is polled"
    gate.set()
    runner.finish()
    assert runner.tokens["loads"] == core.answer(PROMPT, 2)
    assert runner.cached["loads"] == 40


def test_a_disk_that_does_not_answer_is_not_waited_for(
    start: Callable[..., DiskRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, gate, clock = written(start), threading.Event(), [0.0]

    def hang(*_: Any) -> None:
        assert gate.wait(30)

    monkeypatch.setattr(BlockStore, "read", hang)
    runner.disk._clock = lambda: clock[0]
    runner.submit("a", "b", prompt=PROMPT, max_tokens=2)
    for clock[0], n_waiting in ((0.0, 2), (READ_LIMIT_S, 2), (READ_LIMIT_S + 1, 0)):
        runner.disk.resume(is_idle=True)
        assert runner.engine.stats().waiting_by_reason["remote_kv"] == n_waiting
    runner.submit("c", prompt=PROMPT, max_tokens=2)
    runner.finish()
    assert [runner.tokens[name] for name in "abc"] == 3 * [core.answer(PROMPT, 2)]
    gate.set()


def test_a_request_that_ends_while_it_loads_leaves_nothing(start: Callable[..., DiskRunner]) -> None:
    runner = written(start)
    runner.submit("gone", prompt=PROMPT, n=2)
    runner.submit("late", prompt=PROMPT, deadline_s=900.0)
    assert runner.engine.stats().waiting_by_reason["remote_kv"] == 2
    runner.engine.cancel("gone")
    runner.step()
    runner.finish()
    assert runner.reasons()["gone"] == FinishReason.ABORT
    assert runner.reasons()["late"] == FinishReason.TIMEOUT
    assert cached(runner) == 40


def test_a_load_is_not_ended_by_the_restore_of_a_session(start: Callable[..., DiskRunner]) -> None:
    runner = written(start)
    runner.submit("a", prompt=PROMPT, max_tokens=2, session_id="chat")
    session = runner.engine.sessions.find("", "chat")
    runner.engine.remote_kvs.begin_restore(session)
    runner.engine.remote_kvs.end_restore(session, RejectedError("the file is damaged"))
    assert runner.engine.stats().waiting_by_reason["remote_kv"] == 1
    runner.finish()
    assert (runner.tokens["a"], runner.cached["a"]) == (core.answer(PROMPT, 2), 40)


def test_choices_share_a_loaded_prompt(start: Callable[..., DiskRunner]) -> None:
    runner = written(start)
    n_rows = runner.run("three", PROMPT, max_tokens=2, n=3)
    assert n_rows == 4 + 2 + 3, "four of the prompt, the last one again for each sibling, one more token each"
    assert runner.cached["three"] == 40


def test_what_one_request_loads_is_not_loaded_again(
    start: Callable[..., DiskRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, read, n_reads = written(start, n_streams=2), BlockStore.read, 0

    def counted(*arguments: Any) -> Any:
        nonlocal n_reads
        n_reads += 1
        return read(*arguments)

    monkeypatch.setattr(BlockStore, "read", counted)
    runner.submit("a", "b", prompt=PROMPT, max_tokens=1)
    runner.finish()
    assert (n_reads, runner.cached, runner.external) == (5, {"a": 40, "b": 40}, (88, 40))


def test_further_requests_compute_if_too_many_load(start: Callable[..., DiskRunner]) -> None:
    runner = written(start, max_num_queued_reqs=2 * LOADS_MAX)
    runner.submit(*map(str, range(LOADS_MAX + 1)), prompt=PROMPT, max_tokens=1)
    reasons = runner.engine.stats().waiting_by_reason
    assert (reasons["remote_kv"], reasons["capacity"]) == (LOADS_MAX, 1)
    runner.finish()
    assert set(runner.reasons().values()) == {FinishReason.LENGTH}


def damage(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def replace_by_another(path: Path) -> None:
    others = [other for other in path.parents[1].glob("*/*.kv") if other != path]
    shutil.copy(others[0], path)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def link(path: Path) -> None:
    path.rename(path.with_suffix(".other"))
    path.symlink_to(path.with_suffix(".other"))


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("spoil", [damage, truncate, replace_by_another, empty, link, folder, Path.unlink])
def test_a_block_that_cannot_be_used_is_a_miss(
    start: Callable[..., DiskRunner], tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    for i in range(5):
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        runner = written(start)
        names = [key.hex() for key in runner.disk._keys("", PROMPT)]
        spoil(tmp_path / "cache" / names[i][:2] / f"{names[i]}.kv")
        assert cached(runner) == BLOCK * i
        if spoil is not folder:
            runner.write_all()
            assert cached(start()) == 40, "it is written again"


def test_another_model_or_key_has_misses_only(start: Callable[..., DiskRunner], tmp_path: Path) -> None:
    runner = written(start)
    runner.disk._fingerprint = "another model"
    assert (cached(runner), runner.external[1]) == (0, 0)
    (tmp_path / "cache" / "key").write_bytes(bytes(32))
    assert cached(start()) == 0


def test_a_lost_key_is_replaced(start: Callable[..., DiskRunner], tmp_path: Path) -> None:
    written(start)
    (tmp_path / "cache" / "key").write_bytes(b"short")
    assert cached(start()) == 0
    assert len((tmp_path / "cache" / "key").read_bytes()) == 32


def test_salts_hold_on_disk(start: Callable[..., DiskRunner], tmp_path: Path) -> None:
    runner = start()
    for salt in ("a", "b", "", "\ud800"):
        assert cached(runner, cache_salt=salt) == 0
    runner.write_all()
    assert len(blocks(tmp_path)) == 4 * 5, "no two names are the same"
    runner = start()
    assert cached(runner, cache_salt="a") == 40
    assert cached(runner, cache_salt="c") == 0
    others = {path.name for path in blocks(tmp_path)}
    shutil.rmtree(tmp_path / "cache")
    runner = start()
    cached(runner, cache_salt="a")
    runner.write_all()
    assert others.isdisjoint(path.name for path in blocks(tmp_path)), "a name reveals nothing without the key"


def test_the_folder_is_private(start: Callable[..., DiskRunner], tmp_path: Path) -> None:
    written(start)
    cache = tmp_path / "cache"
    assert cache.stat().st_mode & 0o777 == 0o700
    assert {path.parent.stat().st_mode & 0o777 for path in blocks(tmp_path)} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in (cache / "key", *blocks(tmp_path))} == {0o600}


def test_the_least_recently_used_blocks_are_deleted(start: Callable[..., DiskRunner], tmp_path: Path) -> None:
    n_bytes = written(start).disk._block_bytes + 11 * blocks(tmp_path)[0].stat().st_size // 2
    shutil.rmtree(tmp_path / "cache")
    runner = start(prefix_cache_disk_bytes=n_bytes)  # six blocks
    prompts = [[30 * i + j for j in range(24)] for i in range(1, 4)]
    for prompt in prompts[:2]:
        cached(runner, prompt)
    runner.write_all()
    runner = start(prefix_cache_disk_bytes=n_bytes)
    assert cached(runner, prompts[0]) == 23, "the last token is always computed"
    runner.write_all()
    runner = start(prefix_cache_disk_bytes=n_bytes)  # the order of use is that of the files' times
    assert cached(runner, prompts[2]) == 0
    runner.write_all()
    assert sum(path.stat().st_size for path in blocks(tmp_path)) <= n_bytes
    assert runner.disk._index.n_bytes == sum(path.stat().st_size for path in blocks(tmp_path))
    runner = start(prefix_cache_disk_bytes=n_bytes)
    assert [cached(runner, prompt) for prompt in (prompts[0], prompts[2])] == [23, 23]
    assert cached(runner, prompts[1]) < 23
    smallest = runner.disk._block_bytes
    runner = start(prefix_cache_disk_bytes=smallest)
    assert sum(path.stat().st_size for path in blocks(tmp_path)) <= smallest
    with pytest.raises(RejectedError, match=f"one block of 8 tokens takes up to {smallest} bytes") as caught:
        start(prefix_cache_disk_bytes=smallest - 1)
    assert caught.value.param == "prefix_cache_disk_bytes"


def test_the_last_blocks_of_a_path_are_deleted_first(
    start: Callable[..., DiskRunner], tmp_path: Path
) -> None:
    n_bytes = written(start).disk._block_bytes + 11 * blocks(tmp_path)[0].stat().st_size // 2
    shutil.rmtree(tmp_path / "cache")
    runner = start(prefix_cache_disk_bytes=n_bytes)  # six blocks
    prompts = [[30 * i + j for j in range(24)] for i in range(1, 3)]
    for prompt in (*prompts, prompts[0], [5] * 9):
        cached(runner, prompt)
        runner.write_all()
    is_there = [[key in runner.disk._index for key in runner.disk._keys("", prompt)] for prompt in prompts]
    assert is_there == [[True, True, True], [True, True, False]]


def test_a_path_larger_than_the_folder_keeps_its_first_blocks(
    start: Callable[..., DiskRunner], tmp_path: Path
) -> None:
    n_bytes = 2 * start().disk._block_bytes
    assert cached(written(start, prefix_cache_disk_bytes=n_bytes)) == 16
    assert len(blocks(tmp_path)) == 2


def test_a_load_that_is_slower_than_computing_is_not_made(start: Callable[..., DiskRunner]) -> None:
    runner = written(start)
    runner.disk._cost.observe(10.0, 10)
    runner.engine.stats_recorder.speed = runner.engine.stats_recorder.speed.observe(0.5, 1)
    assert (cached(runner), runner.external) == (0, (44, 0))


def test_a_full_disk_pauses_writes_only(
    start: Callable[..., DiskRunner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise StorageFullError("no space left")

    runner = start()
    with monkeypatch.context() as patch:
        patch.setattr("llaisys.engine.disk_cache.block_store.SessionWriter.add", full)
        cached(runner)
        runner.shut_down()
    assert not [*tmp_path.glob("*/*/*")]
    runner = start()
    monkeypatch.setattr(runner.disk, "_paused_until_s", float("inf"))
    cached(runner)
    assert not runner.disk.is_ready
    assert runner.engine.wait_s() is None, "nothing is polled"


def test_a_fault_of_an_export_is_no_error(
    start: Callable[..., DiskRunner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise CoreFaultError("a panic")

    runner = start()
    monkeypatch.setattr(core.Context, "kv_node_export", broken)
    cached(runner)
    runner.write_all()
    assert not blocks(tmp_path)


def test_a_folder_has_one_server(start: Callable[..., DiskRunner], tmp_path: Path) -> None:
    start()
    with pytest.raises(RejectedError, match="used by another server or model") as caught:
        DiskRunner(prefix_cache_dir=tmp_path / "cache")
    assert caught.value.param == "prefix_cache_dir"
    (tmp_path / "file").touch()
    with pytest.raises(RejectedError, match=r"not a writable folder .*--prefix-cache-dir"):
        DiskRunner(prefix_cache_dir=tmp_path / "file")


def test_unfinished_and_foreign_files_do_not_matter(start: Callable[..., DiskRunner], tmp_path: Path) -> None:
    written(start)
    sub = blocks(tmp_path)[0].parent
    (sub / ".left.part").touch()
    (sub / "notes.kv").touch()
    (tmp_path / "cache" / "lost+found").mkdir(mode=0o000)
    (tmp_path / "cache" / "notes").touch()
    assert cached(start()) == 40
    assert [path.name for path in sub.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("seed", range(8))
def test_random_chats_get_their_tokens_and_nothing_leaks(start: Callable[..., DiskRunner], seed: int) -> None:
    """Chats that continue each other, in few cells and few bytes, with restarts; all tokens are right."""
    rng = random.Random(seed)
    changes: dict[str, Any] = {"n_cells": rng.choice([64, 96, 128]), "n_streams": rng.choice([1, 1, 2])}
    changes["max_model_len"] = 32
    changes["prefix_cache_disk_bytes"] = rng.choice([6, 20, 100]) * start().disk._block_bytes
    runner, chats, n_hits = start(**changes), [[1]], 0
    for _ in range(60):
        if rng.random() < 0.1:
            if rng.random() < 0.5:
                runner.shut_down()
            n_hits += runner.external[1]
            runner = start(**changes)
        chat = rng.choice(chats)
        prompt = chat[: rng.randint(1, len(chat))] + [rng.randrange(50) for _ in range(rng.randint(0, 9))]
        prompt = prompt[:29]
        salt, name = rng.choice("aab"), f"{runner.engine.stats().num_submitted}"
        runner.submit(name, prompt=prompt, max_tokens=3, cache_salt=salt)
        chats.append([*prompt, *core.answer(prompt, 3)])
        for _ in range(rng.randint(0, 12)):
            runner.disk.resume(is_idle=rng.random() < 0.5)
            if runner.engine.has_work() and rng.random() < 0.5:
                runner.step()
        if rng.random() < 0.1:
            runner.engine.cancel(name)
        if rng.random() < 0.5:
            runner.finish()
            if rng.random() < 0.7:
                runner.write_all()
        if rng.random() < 0.5:
            runner.engine.reset_prefix_cache()
        for key, end in runner.ends.items():
            if end.finish_reason is FinishReason.LENGTH and key == name:
                assert runner.tokens[key] == core.answer(prompt, 3)
    runner.finish()
    assert n_hits + runner.external[1] > 0
    runner.engine.reset_prefix_cache()
    stats = runner.engine.stats()
    assert (stats.kv_cells_free, stats.seq_ids_free) == (stats.kv_cells, runner.engine.limits.max_num_seqs)
