"""Sessions of models with recurrent layers: kept, forked, trimmed, saved and restored with their states."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest

from fakes.asks import ask
from golden import load_golden
from invariance import bits
from llaisys import _core
from llaisys.engine.engine import LLMEngine
from llaisys.engine.executor import Executor
from llaisys.engine.limits import Limits
from llaisys.engine.sessions.file import SUFFIX
from llaisys.engine.sessions.manager import SessionRequest
from llaisys.engine.worker import Worker, inspect_model
from llaisys.errors import RejectedError
from llaisys.session_info import SessionInfo

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"
FOLDERS = ["qwen3_5_bf16", "qwen3_next_bf16", "lfm2_bf16", "lfm2_moe_bf16"]


class Chat:
    """An engine on a model folder, which runs requests and session requests one by one."""

    def __init__(self, folder: Path, store: Path | None, **changes: Any) -> None:
        info = inspect_model(folder)
        facts: dict[str, Any] = {"max_num_seqs": 4, "n_cells": 512, "n_states_kept": 8, **changes}
        limits = Limits(
            max_num_batched_tokens=128,
            max_num_queued_reqs=8,
            max_model_len=256,
            vocab_size=info.vocab_size,
            max_step_time_s=1e9,
            kv_cell_bytes=info.kv_bytes_per_cell["float32"],
            state_bytes=info.state_bytes,
            session_store=store,
            **facts,
        )
        self.context = _core.Context(
            str(folder),
            dtype="float32",
            n_cells=limits.n_cells,
            n_seq_max=limits.max_num_seqs,
            n_batch=128,
            max_model_len=256,
            n_threads=1,
            n_states_kept=limits.n_states_kept,
            nan_fill=True,
        )
        self.engine = LLMEngine(Executor(Worker(self.context, _core.SamplerSpec)), limits, seed=0)
        self.n_requests = 0

    def run(self, prompt: list[int], session_id: str = "") -> tuple[int, list[int], list[Any]]:
        """Return the number of cached tokens, the output ids, and their bits."""
        self.n_requests += 1
        name = f"{self.n_requests}"
        self.engine.submit(
            ask(name, prompt, session_id=session_id, max_tokens=8, ignore_eos=True, logprobs=3)
        )
        n_cached, made = 0, []
        while self.engine.has_work():
            for output in self.engine.step(1000.0):
                assert output.error is None, output.error
                n_cached += output.num_cached_tokens
                made += bits(output)
        return n_cached, [token_id for token_id, _ in made], made

    def call(self, kind: Any, name: str, other: str = "", n_tokens: int | None = None) -> SessionInfo:
        handler = self.engine.session_requests
        handler.handle(SessionRequest(kind=kind, name=name, other=other, n_tokens=n_tokens))
        while not (replies := handler.pop_replies()):
            wait([transfer.work for transfer in handler._transfers], 30)
            handler.continue_transfer()
            self.engine.check()
        if replies[0].error is not None:
            raise replies[0].error
        return replies[0].sessions[0]

    def flood(self) -> None:
        """Run other requests until they have used every cell and state that is not pinned."""
        for i in range(12):
            self.run([(i * 31 + j) % 500 for j in range(100)])


@pytest.fixture(params=FOLDERS)
def folder(request: pytest.FixtureRequest) -> Path:
    return GOLDENS / str(request.param)


@pytest.fixture
def chat(folder: Path, tmp_path: Path) -> Iterator[Chat]:
    made = Chat(folder, tmp_path)
    yield made
    made.engine.close()


def prompt_of(folder: Path) -> list[int]:
    return load_golden(folder).prompts[2]


def alone(folder: Path, prompt: list[int]) -> list[Any]:
    made = Chat(folder, None, enable_prefix_caching=False, n_states_kept=0)
    try:
        return made.run(prompt)[2]
    finally:
        made.engine.close()


def test_a_session_keeps_its_state_under_pressure(chat: Chat, folder: Path) -> None:
    prompt = prompt_of(folder)
    _, ids, _ = chat.run(prompt, "chat")
    n_computed = len(prompt) + len(ids) - 1
    assert chat.call("fork", "chat", "copy").num_pinned_tokens == n_computed
    chat.flood()
    turn = [*prompt, *ids, 5, 6, 7]
    n_cached, _, made = chat.run(turn, "chat")
    assert n_cached == n_computed
    assert made == alone(folder, turn)
    # A trimmed session continues from the last state before its end, which here was not kept.
    assert chat.call("trim", "copy", n_tokens=n_computed - 1).num_pinned_tokens == 0
    for name in ("chat", "copy"):
        chat.call("delete", name)
    assert chat.engine.reset_prefix_cache()
    chat.engine.check()
    assert (chat.context.n_states_kept, chat.context.n_cells_free) == (0, 512)


def test_sessions_protect_a_share_of_the_states(chat: Chat) -> None:
    for i in range(6):
        chat.run([i + 1] * 20, f"s{i}")
    pinned = [info.num_pinned_tokens > 0 for info in chat.engine.sessions.list_info("")]
    assert pinned == [False, False, True, True, True, True]
    chat.engine.check()


def test_a_restored_session_continues_with_the_same_bits(chat: Chat, folder: Path, tmp_path: Path) -> None:
    prompt = prompt_of(folder)
    _, ids, _ = chat.run(prompt, "chat")
    chat.call("save", "chat", "file")
    turn = [*prompt, *ids, 5, 6, 7]
    other = Chat(folder, tmp_path)
    try:
        info = other.call("restore", "again", "file")
        n_computed = len(prompt) + len(ids) - 1
        assert (info.num_tokens, info.num_cached_tokens, info.num_pinned_tokens) == (n_computed,) * 3
        n_cached, _, made = other.run(turn, "again")
        assert n_cached == n_computed
        assert made == alone(folder, turn)
    finally:
        other.engine.close()


def test_a_session_without_a_kept_state_is_saved_as_tokens(chat: Chat, folder: Path, tmp_path: Path) -> None:
    prompt = prompt_of(folder)
    chat.run(prompt, "chat")
    chat.engine.sessions.unpin_least_recent()
    chat.flood()
    chat.call("save", "chat", "file")
    other = Chat(folder, tmp_path)
    try:
        info = other.call("restore", "again", "file")
        assert (info.num_tokens, info.num_cached_tokens) == (len(prompt) + 7, 0)
        assert other.context.n_states_kept == 0
    finally:
        other.engine.close()


def test_a_damaged_state_is_rejected(chat: Chat, folder: Path, tmp_path: Path) -> None:
    chat.run(prompt_of(folder), "chat")
    chat.call("save", "chat", "file")
    (path,) = tmp_path.rglob(f"*{SUFFIX}")
    whole = bytearray(path.read_bytes())
    n_header = int.from_bytes(whole[12:16], "little")
    start = 16 + n_header + 32  # of the state's section
    n_free = chat.context.n_cells_free
    for at, value in ((start, 0xFF), (start + 100, whole[start + 100] ^ 1)):
        damaged = whole.copy()
        damaged[at] = value
        path.write_bytes(damaged)
        with pytest.raises(RejectedError, match="damaged"):
            chat.call("restore", "again", "file")
    path.write_bytes(whole[: start + 1000])
    with pytest.raises(RejectedError, match="damaged"):
        chat.call("restore", "again", "file")
    assert chat.context.n_cells_free == n_free
    path.write_bytes(whole)
    chat.call("restore", "again", "file")
