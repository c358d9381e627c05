"""docs/reference/limits.md: each row names its setting, and the behavior at each limit is tested."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml

from fakes import core
from fakes.asks import ask
from fakes.engines import NOW, Engine
from llaisys.cli.config_flags import flag_of
from llaisys.config import Config, load_config
from llaisys.engine.host import Cpus
from llaisys.engine.limits import LOGPROBS_MAX, PROMPT_LOGPROBS_MAX
from llaisys.engine.memory import EngineSizing, size_engine
from llaisys.engine.sessions.manager import SessionRequest
from llaisys.engine.worker import inspect_model
from llaisys.errors import (
    ContextLengthError,
    ExhaustedError,
    LlaisysError,
    QueueFullError,
    RejectedError,
    RequestTimeoutError,
)
from llaisys.outputs import FinishReason
from llaisys.server.http_errors import TABLE
from llaisys.server.listener import bind
from llaisys.server.middleware.body_limits import BodyLimitMiddleware, BodyLimits
from llaisys.server.middleware.rate_limits import RateLimitMiddleware
from middleware import reading, statuses_through
from server_limits import (
    max_chat_bytes_per_key,
    max_loras,
    max_response_bytes,
    max_response_bytes_in_flight,
    max_stored_response_bytes_per_key,
)

ROOT = Path(__file__).parents[2]
DESIGN = ROOT / "configs" / "concurrency-design.yaml"
pytestmark = pytest.mark.usefixtures("fake_core")


@dataclass(frozen=True)
class Row:
    flag: str
    variable: str
    default: str
    design: str


def rows() -> dict[str, Row]:
    """Return the rows of the table by setting."""
    table = {}
    for line in (ROOT / "docs" / "reference" / "limits.md").read_text("utf-8").splitlines():
        cells = [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            table[cells[0]] = Row(*cells[1:5])
    return table


def sized(**settings: Any) -> EngineSizing:
    info = replace(inspect_model(Path("fake")), max_position_embeddings=4096)
    return size_engine(load_config({"num_kv_cells": 4096, **settings}), info, 2**30, Cpus(2))


def made(**settings: Any) -> Engine:
    """Return an engine sized by the settings."""
    return Engine(bounds=sized(**settings).limits)


def status(error: LlaisysError | None) -> int:
    return TABLE[type(error)].status if error is not None else 0


def rejection(engine: Engine, **request: Any) -> RejectedError:
    with pytest.raises(RejectedError) as caught:
        engine.submit("rejected", **request)
    assert status(caught.value) == 400
    return caught.value


def start_rejected(**settings: Any) -> None:
    with pytest.raises(RejectedError) as caught:
        sized(**settings)
    assert caught.value.param in settings


# --- one function per row ---


def max_num_queued_reqs() -> None:
    engine = made(max_num_queued_reqs=3, max_num_seqs=2)
    engine.submit(*"abcde")
    with pytest.raises(QueueFullError) as caught:
        engine.submit("f")
    assert (status(caught.value), caught.value.retry_after_s >= 1) == (429, True)
    engine.finish()


def max_num_queued_tokens() -> None:
    engine = made(max_num_queued_tokens=30, max_num_seqs=1)
    engine.submit("a", prompt=[1] * 40)
    engine.step()
    engine.submit("waits alone", prompt=[1] * 31)
    with pytest.raises(QueueFullError, match="32 prompt tokens would wait; the limit is 30"):
        engine.submit("one more", prompt=[1])
    engine.engine.cancel("waits alone")
    engine.submit("b", prompt=[1] * 10)
    engine.submit("c", prompt=[1] * 20)
    with pytest.raises(QueueFullError) as caught:
        engine.submit("d", prompt=[1])
    assert (status(caught.value), caught.value.retry_after_s >= 1) == (429, True)
    engine.finish()


def max_concurrent_requests() -> None:
    engine = made(max_concurrent_requests=8)
    engine.submit(*"abcdefghi", max_tokens=20)
    engine.step(10)
    stats = engine.engine.stats()
    assert (stats.num_running, stats.num_waiting) == (8, 1)
    start_rejected(max_concurrent_requests=8, max_num_seqs=9)
    start_rejected(max_concurrent_requests=8, max_batch_size=9)


def max_num_seqs() -> None:
    engine = made(max_num_seqs=8)
    engine.submit(*"abcdefghi", max_tokens=20)
    engine.step(10)
    assert engine.engine.stats().num_running == 8
    engine.finish()
    assert rejection(engine, n=9).param == "n"
    engine.submit("choices", n=8)
    engine.finish()
    start_rejected(max_num_seqs=257)
    start_rejected(max_num_seqs=0)


def max_batch_size() -> None:
    engine = made(max_num_seqs=8, max_batch_size=4)
    engine.submit(*"abcdefgh", max_tokens=100)
    while engine.engine.stats().num_running < 8:
        engine.step()
    had = Counter({name: len(tokens) for name, tokens in engine.tokens.items()})
    rows_before = engine.context.n_rows
    engine.step(20)
    assert engine.context.n_rows - rows_before == 80
    gained = {name: len(tokens) - had[name] for name, tokens in engine.tokens.items()}
    assert set(gained.values()) <= {9, 10, 11}


def max_num_batched_tokens() -> None:
    engine = made(max_num_batched_tokens=512)
    engine.submit(*"abc", prompt=[1] * 300)
    engine.finish()
    assert engine.context.n_rows_max == 512


def max_input_tokens() -> None:
    engine = made(max_input_tokens=128)
    engine.submit("fits", prompt=[1] * 128)
    assert isinstance(rejection(engine, prompt=[1] * 129), ContextLengthError)


def max_output_tokens() -> None:
    engine = made(max_output_tokens=256)
    engine.submit("absent", max_tokens=None)
    engine.submit("most", max_tokens=256)
    assert rejection(engine, max_tokens=257).param == "max_tokens"
    engine.finish()
    assert {len(tokens) for tokens in engine.tokens.values()} == {256}


def max_logprobs() -> None:
    engine = made(max_logprobs=30)
    engine.submit("most", max_tokens=1, logprobs=30, prompt_logprobs=30)
    for field in ("logprobs", "prompt_logprobs"):
        for n in (31, -1):
            assert rejection(engine, **{field: n}).param == field
    all_tokens = made(max_logprobs=-1, max_output_tokens=4096)
    all_tokens.submit("all", max_tokens=32, logprobs=-1, prompt_logprobs=-1)
    all_tokens.finish()
    (entry,) = all_tokens.ends["all"].new_logprobs or ()
    assert {token_id for token_id, _ in entry.top} == {*range(core.VOCAB_SIZE)}
    n_most = LOGPROBS_MAX // (n_entries := core.VOCAB_SIZE + 1)
    all_tokens.submit("fits", max_tokens=n_most, logprobs=-1)
    assert rejection(all_tokens, max_tokens=n_most + 1, logprobs=-1).param == "logprobs"
    assert rejection(all_tokens, prompt=[1] * (PROMPT_LOGPROBS_MAX // n_entries + 1), prompt_logprobs=-1)


def request_timeout_s() -> None:
    assert (
        load_config({"request_timeout_s": 60}).request_timeout_s == 60.0
    )  # the entry points add it to the arrival time
    engine = made(max_num_seqs=1)
    engine.submit("runs", "waits", arrival_s=NOW, deadline_s=NOW + 60, max_tokens=None)
    engine.step(1, NOW + 58.9)
    engine.step(1, NOW + 60)
    assert engine.reasons() == dict.fromkeys(("runs", "waits"), FinishReason.TIMEOUT)
    assert all(isinstance(end.error, RequestTimeoutError) for end in engine.ends.values())
    assert status(engine.ends["runs"].error) == 408


def timeout_scan_s() -> None:
    engine = made(timeout_scan_s=2.0)
    engine.submit("a", deadline_s=NOW + 1, max_tokens=None)
    engine.step(1, NOW)
    engine.step(1, NOW + 1.9)
    assert engine.reasons() == {}
    engine.step(1, NOW + 2)
    assert engine.reasons() == {"a": FinishReason.TIMEOUT}
    start_rejected(timeout_scan_s=0.4)
    start_rejected(timeout_scan_s=5.1)


def num_kv_cells() -> None:
    engine = made(num_kv_cells=100)
    engine.submit("fits", prompt=[1] * 60, max_tokens=40)
    assert isinstance(rejection(engine, prompt=[1] * 60, max_tokens=41), ContextLengthError)
    engine.submit("waits", prompt=[2] * 60, max_tokens=10)
    engine.step()
    assert engine.engine.stats().num_waiting == 1
    engine.finish()


def kv_cache_memory_bytes() -> None:
    assert sized(num_kv_cells=100, kv_cache_memory_bytes=400).limits.n_cells == 100
    assert sized(num_kv_cells=100, kv_cache_memory_bytes=399).limits.n_cells == 99
    assert sized(num_kv_cells=100, kv_cache_memory_bytes=10**6).limits.n_cells == 100


def kv_eviction_policy() -> None:
    with pytest.raises(RejectedError):
        load_config({"kv_eviction_policy": "fifo"})
    engine = made(num_kv_cells=100, kv_eviction_policy="lru")
    for name in ("old", "new", "old again"):
        engine.submit(name, prompt=[len(name.split()[0])] * 40 if name == "new" else [9] * 40, max_tokens=1)
        engine.finish()
    engine.submit("large", prompt=[7] * 50, max_tokens=1)
    engine.finish()
    engine.submit("old once more", prompt=[9] * 40, max_tokens=1)
    engine.finish()
    assert engine.cached["old once more"] == 39


def kv_eviction_threshold() -> None:
    engine = made(num_kv_cells=100, kv_eviction_threshold=0.8)
    engine.submit("a", prompt=[1] * 90, max_tokens=5)
    engine.step(1, NOW)
    engine.step(1, NOW + 1)
    assert engine.engine.stats().kv_cells_used == 91, "cells of a running request are never evicted"
    engine.finish()
    engine.submit("b", prompt=[2], max_tokens=2)
    engine.step(1, NOW + 2)
    assert engine.engine.stats().kv_cells_free == 19, "evicted to 80 cells, then one token"


def kv_cleanup_interval_s() -> None:
    engine = made(
        num_kv_cells=100, kv_eviction_threshold=0.5, kv_cleanup_interval_s=3.0, max_step_time_s=1000.0
    )
    engine.submit("b", prompt=[2], max_tokens=50)
    engine.step(1, NOW)
    engine.submit("a", prompt=[1] * 80, max_tokens=1)
    engine.step(1, NOW + 2.9)
    assert engine.engine.stats().kv_cells_free < 50
    engine.step(1, NOW + 3)
    assert engine.engine.stats().kv_cells_free == 49


def max_queue_wait_s() -> None:
    engine = made(max_num_seqs=1, max_queue_wait_s=30)
    engine.submit("busy", max_tokens=5)
    engine.step()
    engine.submit("old", arrival_s=NOW, priority=5)
    engine.submit("urgent", arrival_s=NOW + 29, priority=-5, max_tokens=1)
    engine.step(5, NOW + 29.9)
    assert "urgent" in engine.ends
    engine.submit("urgent too", arrival_s=NOW + 30, priority=-5)
    engine.step(2, NOW + 30)
    assert "old" in engine.tokens
    assert "urgent too" not in engine.tokens


def max_step_time_s() -> None:
    def second_step(limit_s: float, n_first: int) -> int:
        engine = made(max_step_time_s=limit_s, max_num_batched_tokens=100)
        engine.submit("first", prompt=[2] * n_first, max_tokens=50)
        engine.step(1, NOW)
        engine.submit("second", prompt=[1] * 1000)
        engine.step(1, NOW + 1)  # the first 100 tokens took one second
        return engine.engine.stats().step_prefill_tokens

    assert second_step(0.1, 100) == 16, "the first decodes: 10 tokens would fit; a prompt gets at least 16"
    assert second_step(0.5, 100) == 50
    assert second_step(0.1, 1000) == 40, "no request decodes: four times the limit"


def long_prefill_token_threshold() -> None:
    engine = made(long_prefill_token_threshold=20)
    engine.submit("a", prompt=[1] * 100)
    engine.submit("b", prompt=[2] * 5)
    engine.step()
    assert engine.engine.stats().step_prefill_tokens == 25
    engine.finish()


def max_client_tokens_per_step() -> None:
    engine = made(max_client_tokens_per_step=20)
    engine.submit("a", "b", prompt=[1] * 30, client_id="x")
    engine.submit("c", prompt=[2] * 5, client_id="y")
    engine.step()
    assert engine.engine.stats().step_prefill_tokens == 25
    engine.finish()


def num_kv_streams() -> None:
    engine = made(num_kv_cells=100, num_kv_streams=2)
    engine.submit("fits", prompt=[1] * 40)
    assert isinstance(rejection(engine, prompt=[1] * 41), ContextLengthError)
    engine.finish()
    assert engine.tokens["fits"] == core.answer([1] * 40, 10)
    assert sized(num_kv_cells=101, num_kv_streams=2).limits.n_cells == 100


def max_sessions() -> None:
    engine = made(max_sessions=2)
    for name in ("x", "y", "x"):
        engine.submit(name + str(len(engine.ends)), session_id=name)
        engine.finish()
    with pytest.raises(ExhaustedError) as caught:
        engine.submit("z", session_id="z")
    assert status(caught.value) == 429
    start_rejected(max_sessions=-1)


def session_kv_share() -> None:
    engine = made(num_kv_cells=100, session_kv_share=0.4)
    for token in (1, 2, 3):
        engine.submit(f"{token}", prompt=[token] * 20, max_tokens=1, session_id=f"{token}")
        engine.finish()
    assert engine.engine.stats().kv_cells_session == 40
    engine.submit("large", prompt=[4] * 90, max_tokens=1)
    engine.finish()
    assert engine.engine.stats().kv_cells_session == 0
    start_rejected(session_kv_share=1.1)


def session_store() -> None:
    engine = made()
    engine.engine.session_requests.handle(SessionRequest(kind="save", name="a", other="b"))
    (answer,) = engine.engine.session_requests.pop_replies()
    assert (status(answer.error), answer.error is not None and answer.error.param) == (400, "session_store")
    assert sized(session_store="somewhere").limits.session_store == Path("somewhere")


def prefix_cache_disk_bytes() -> None:
    """`test_disk_cache.py` has the blocks that are deleted."""
    with TemporaryDirectory() as folder, pytest.raises(RejectedError, match="one block of 256") as caught:
        made(prefix_cache_dir=folder, prefix_cache_disk_bytes=1000)
    assert caught.value.param == "prefix_cache_disk_bytes"


def enable_prefix_caching() -> None:
    for enabled in (True, False):
        engine = made(enable_prefix_caching=enabled)
        for name in "ab":
            engine.submit(name, prompt=[1] * 30)
            engine.finish()
        assert engine.cached["b"] == (29 if enabled else 0)


def bodies(**settings: Any) -> BodyLimitMiddleware:
    return BodyLimitMiddleware(reading, BodyLimits.of(load_config(settings)))


def max_body_bytes() -> None:
    assert statuses_through(bodies(max_body_bytes=3), b"abc") == [200]
    assert statuses_through(bodies(max_body_bytes=3), b"abcd") == [413]


def max_body_bytes_in_flight() -> None:
    assert statuses_through(bodies(max_body_bytes_in_flight=6), b"abc", b"abc", b"a") == [429, 200, 200]


def upload_timeout_s() -> None:
    assert statuses_through(bodies(upload_timeout_s=0.01), b"never") == [408]


def send_timeout_s() -> None:
    """The kernel applies it to whole responses; `test_slow_readers.py` has a client that exceeds it."""
    with closing(bind(load_config({"send_timeout_s": 1.5, "port": 0}))) as listener:
        assert listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1500


def max_concurrent_requests_per_key() -> None:
    assert statuses_through(RateLimitMiddleware(reading, 2, None), b"", b"", b"") == [200, 200, 429]


def max_requests_per_minute_per_key() -> None:
    assert statuses_through(RateLimitMiddleware(reading, None, 2), b"", b"", b"") == [200, 200, 429]


BEHAVIORS: dict[str, Callable[[], None]] = {
    test.__name__: test
    for test in (
        max_num_queued_reqs,
        max_num_queued_tokens,
        max_concurrent_requests,
        max_num_seqs,
        max_batch_size,
        max_num_batched_tokens,
        max_input_tokens,
        max_output_tokens,
        max_logprobs,
        request_timeout_s,
        max_loras,
        timeout_scan_s,
        num_kv_cells,
        kv_cache_memory_bytes,
        kv_eviction_policy,
        kv_eviction_threshold,
        kv_cleanup_interval_s,
        max_queue_wait_s,
        max_step_time_s,
        long_prefill_token_threshold,
        max_client_tokens_per_step,
        num_kv_streams,
        max_sessions,
        session_kv_share,
        session_store,
        prefix_cache_disk_bytes,
        enable_prefix_caching,
        max_body_bytes,
        max_body_bytes_in_flight,
        max_response_bytes,
        max_response_bytes_in_flight,
        upload_timeout_s,
        send_timeout_s,
        max_concurrent_requests_per_key,
        max_requests_per_minute_per_key,
        max_chat_bytes_per_key,
        max_stored_response_bytes_per_key,
    )
}


@pytest.mark.parametrize("key", [*rows()])
def test_behavior_of_each_row(key: str) -> None:
    BEHAVIORS[key]()


@pytest.mark.parametrize("key", [*rows()])
def test_each_row_names_its_setting(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = rows()[key]
    default = Config.model_fields[key].default
    assert row.flag == flag_of(key)
    assert row.default == ("none" if default is None else str(default))
    value = row.design or row.default
    monkeypatch.setenv(row.variable, "7" if value == "none" else value)
    assert key in load_config().model_fields_set


def test_the_design_file_equals_the_design_column() -> None:
    design = {key: str(value) for key, value in yaml.safe_load(DESIGN.read_text("utf-8")).items()}
    assert design == {key: row.design for key, row in rows().items() if row.design}
    config = load_config(yaml_path=DESIGN)
    assert size_engine(config, inspect_model(Path("fake")), 2**34, Cpus(2)).limits.n_batch_slots == 4


def test_the_design_serves_a_hundred_requests() -> None:
    """Eight requests run, four per step, and all complete with the tokens of a lone run."""
    config = load_config(yaml_path=DESIGN)
    info = replace(
        inspect_model(Path("fake")), max_position_embeddings=4096, kv_bytes_per_cell={"bfloat16": 2**18}
    )
    engine = Engine(bounds=size_engine(config, info, 2**34, Cpus(2)).limits)
    assert engine.engine.limits.n_cells == 4096, "1,024 MiB at 256 KiB per cell"
    prompts = {f"{i}": [i] * (i + 1) for i in range(100)}
    for name, prompt in prompts.items():
        engine.engine.submit(ask(name, prompt, max_tokens=20))
    engine.finish()
    assert engine.tokens == {name: core.answer(prompt, 20) for name, prompt in prompts.items()}
