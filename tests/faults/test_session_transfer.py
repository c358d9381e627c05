"""Each call into the core of a save and a restore fails once.

Only the save may fail, and the next message of the chat gets the same tokens.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

import crowd
from fakes.asks import ask
from llaisys.engine.engine import LLMEngine
from llaisys.engine.sessions.manager import SessionRequest
from llaisys.errors import LlaisysError, RequestFailedError

# Two layers of K and V, two heads of 16 numbers of four bytes.
CELL_BYTES = 2 * 2 * 2 * 16 * 4
PIECE_CELLS = 8
PROMPT = [*range(1, 31)]
POINTS = ("kv.node_export", "kv.node_import", "kv.node_split", "kv.node_trim")


def answer(engine: LLMEngine, name: str, prompt: list[int], session: str) -> list[int]:
    tokens = []
    engine.submit(ask(name, prompt, max_tokens=6, eos_token_ids=(), session_id=session))
    while engine.has_work():
        for output in engine.step(1000.0):
            assert output.error is None
            tokens += output.new_token_ids
    engine.check()
    return tokens


def call(engine: LLMEngine, kind: str, name: str, other: str = "") -> LlaisysError | None:
    """Return the error of the one reply."""
    handler = engine.session_requests
    handler.handle(SessionRequest(kind=kind, name=name, other=other))  # type: ignore[arg-type]
    while not (answers := handler.pop_replies()):
        wait([transfer.work for transfer in handler._transfers], 60)
        handler.continue_transfer()
    (one,) = answers
    engine.check()
    return one.error


def run(core: ModuleType, store: Path, arm: Callable[[], None]) -> tuple[list[list[int]], list[LlaisysError]]:
    """Return the tokens of a chat across a save and a restore while half of it is still cached."""
    limits = replace(crowd.bounds(prefix=True), session_store=store, kv_cell_bytes=CELL_BYTES, vocab_size=600)
    context = crowd.context_of(core, limits)
    engine = crowd.make_engine(context, core.SamplerSpec, limits)
    try:
        first = answer(engine, "first", PROMPT, "chat")
        arm()
        errors = [call(engine, "save", "chat", "file"), call(engine, "delete", "chat")]
        # Other requests need the cells; only the beginning of the chat is computed again.
        for i in range(6):
            answer(engine, f"other {i}", [100 + i] * 50, "")
        answer(engine, "half", PROMPT[:15], "")
        if errors[0] is None:
            errors.append(call(engine, "restore", "chat", "file"))
        turn = [*PROMPT, *first, 7, 8]
        tokens = [first, answer(engine, "second", turn, "chat")]
        return tokens, [error for error in errors if error is not None]
    finally:
        engine.close()


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llaisys.engine.sessions.transfer.PIECE_BYTES", PIECE_CELLS * CELL_BYTES)


@pytest.mark.parametrize("action", ["error", "panic"])
@pytest.mark.parametrize("point", POINTS)
def test_a_fault_fails_the_session_request_at_most(
    core: ModuleType, tmp_path: Path, point: str, action: str
) -> None:
    start = 0

    def note() -> None:
        nonlocal start
        start = core.fault_hits(point)

    want, errors = run(core, tmp_path, note)
    assert errors == []
    n_passed = core.fault_hits(point) - start
    assert n_passed > 0
    for nth in range(1, n_passed + 1):
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        tokens, errors = run(core, tmp_path, partial(core.set_fault, point, action, nth))
        assert tokens == want
        assert [type(error) for error in errors] == (
            [RequestFailedError] if point == "kv.node_export" else []
        )
