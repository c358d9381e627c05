"""Tokenizer workers: results and errors equal those of this process, and a limit ends only one job."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import psutil
import pytest

from llaisys.body import read_body
from llaisys.errors import (
    ContextLengthError,
    EngineDeadError,
    LlaisysError,
    RejectedError,
    RequestFailedError,
)
from llaisys.job_pool import _WorkerProcess
from llaisys.job_process import decode
from llaisys.text.chat_template import ChatTemplate, TemplateSource
from llaisys.text.tokenizer import Tokenizer
from llaisys.text.tokenizer_pool import LIMITS, N_PROCESSES, AsyncTokenizer, TokenizerPool
from waiting import block_until

USER = [{"role": "user", "content": "Hi, é漢😀"}]
OPTIONS = {"add_generation_prompt": True, "continue_final_message": False, "tools": None}
TEMPLATE = (
    "{{ bos }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m.role }}:{{ m.content }}|{{ x }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)
WORK = "{{ 9 ** (9 ** 9) }}"  # one template step that needs minutes of CPU time
LOAD = "{{ 'a' * 10 ** 9 }}"


def template(text: str) -> ChatTemplate:
    return ChatTemplate(TemplateSource({"default": text}, {"bos": "<s>"}))


@pytest.fixture
async def pool() -> AsyncIterator[TokenizerPool]:
    made = TokenizerPool(replace(LIMITS, cpu_s=0.5))
    yield made
    await made.close()


async def test_results_and_errors_equal_those_of_this_process(pool: TokenizerPool, tiny: Tokenizer) -> None:
    chat = template(TEMPLATE)
    prompts = pool.add(tiny, chat)
    await pool.ready()
    for text in ("", "abc é漢😀 <|end|>", "\0"):
        for add in (True, False):
            assert await prompts.encode(text, add) == tiny.encode(text, add)
    cases: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [
        (USER, OPTIONS),
        (USER, {**OPTIONS, "x": [1, 2.5, None, True, 10**30, "\ud800"[:0]]}),
        (USER, {**OPTIONS, "add_generation_prompt": False, "continue_final_message": True}),
        ([{"role": "tool", "content": "x", "tool_call_id": "y"}], OPTIONS),
        ([{"role": "user"}], OPTIONS),
        (USER, {**OPTIONS, "x": "\ud800"}),
        ([], OPTIONS),
    ]
    for messages, options in cases:
        try:
            want: Any = tiny.encode(chat.render(messages, **options), False)
        except LlaisysError as e:
            want = (type(e), str(e), e.param)
        try:
            got: Any = await prompts.chat(messages, options, False)
        except LlaisysError as e:
            got = (type(e), str(e), e.param)
        assert got == want


async def test_a_much_too_long_text_is_rejected_in_a_worker(pool: TokenizerPool, tiny: Tokenizer) -> None:
    prompts = pool.add(tiny, template(TEMPLATE))
    messages = [{"role": "user", "content": "a" * 100_000}]
    assert await prompts.chat(messages, OPTIONS, False, 100_000)
    with pytest.raises(ContextLengthError, match="more than the 10 tokens"):
        await prompts.chat(messages, OPTIONS, False, 10)
    with pytest.raises(ContextLengthError, match="more than the 10 tokens"):
        await prompts.encode("a" * 100_000, False, 10)


@pytest.mark.parametrize(
    ("text", "says"),
    [(WORK, r"messages takes more than 0\.5 s of CPU"), (LOAD, r"messages takes more than 512 MiB")],
    ids=["time", "memory"],
)
async def test_exceeding_a_limit_affects_that_request_alone(
    pool: TokenizerPool, tiny: Tokenizer, text: str, says: str
) -> None:
    good, bad = pool.add(tiny, template(TEMPLATE)), pool.add(tiny, template(text))
    await pool.ready()
    want = await good.chat(USER, OPTIONS, False)
    for _ in range(2):
        doomed = asyncio.ensure_future(bad.chat(USER, OPTIONS, False))
        await asyncio.sleep(0)  # the job has started
        assert await good.chat(USER, OPTIONS, False) == want
        with pytest.raises(RejectedError, match=says) as caught:
            await doomed
        assert caught.value.param == "messages"
    answers = await asyncio.gather(*(good.chat(USER, OPTIONS, False) for _ in range(20)))
    assert answers == [want] * 20


def processes(pool: TokenizerPool) -> list[psutil.Process]:
    return [
        psutil.Process(process._child.pid) for process in pool._jobs._processes if process._child is not None
    ]


async def test_a_killed_process_is_started_again(pool: TokenizerPool, tiny: Tokenizer) -> None:
    prompts = pool.add(tiny, None)
    await pool.ready()
    before = processes(pool)
    assert len(before) == N_PROCESSES
    for child in before:  # the worker is idle, so no request is affected
        child.kill()
    assert await prompts.encode("abc", False) == tiny.encode("abc", False)
    assert set(processes(pool)) != set(before)


@pytest.mark.parametrize("n_deaths", [1, 2])
async def test_a_job_survives_one_process_that_was_killed_externally(
    pool: TokenizerPool, tiny: Tokenizer, monkeypatch: pytest.MonkeyPatch, n_deaths: int
) -> None:
    prompts = pool.add(tiny, template(TEMPLATE))
    await pool.ready()
    want = await prompts.chat(USER, OPTIONS, False)
    exchange, killed = _WorkerProcess._exchange, []

    def interrupted(process: _WorkerProcess, raw: bytes) -> tuple[Any, ...]:
        """Kill the worker after `poll` has reported it alive."""
        if decode(raw)[0] == "chat" and len(killed) < n_deaths:
            assert process._child is not None
            process._child.kill()
            killed.append(process._child.pid)
        return exchange(process, raw)

    monkeypatch.setattr(_WorkerProcess, "_exchange", interrupted)
    if n_deaths == 1:
        assert await prompts.chat(USER, OPTIONS, False) == want
    else:
        with pytest.raises(RequestFailedError, match="ended with code -9"):
            await prompts.chat(USER, OPTIONS, False)
    assert len(set(killed)) == n_deaths
    assert await prompts.chat(USER, OPTIONS, False) == want


async def test_workers_receive_no_settings_and_no_secrets(
    pool: TokenizerPool, tiny: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("LLAISYS_API_KEY", "secret"), ("HF_TOKEN", "secret"), ("TZ", "Asia/Tokyo")):
        monkeypatch.setenv(name, value)
    pool.add(tiny, None)
    await pool.ready()
    assert len(processes(pool)) == N_PROCESSES
    for process in processes(pool):
        given = process.environ()
        assert given["TZ"] == "Asia/Tokyo"  # templates may ask for the local time
        assert set(given) <= {"LD_LIBRARY_PATH", "PYTHONHOME", "TZ"}


def until_busy(pool: TokenizerPool) -> None:
    """Wait until one of the workers has used CPU time."""
    start = [(child, child.cpu_times().user) for child in processes(pool)]
    block_until(lambda: any(child.cpu_times().user > user + 0.1 for child, user in start))


async def test_bodies_are_parsed_as_in_this_process(pool: TokenizerPool) -> None:
    value = {"a": [1, -2.5e300, None, True, "é\ud800", {"b": {}}], "n": 10**40}
    assert await pool.read_body(json.dumps(value).encode(), None) == (value, None)
    with pytest.raises(json.JSONDecodeError) as caught:
        await pool.read_body(b'{"a": x}', None)
    assert caught.value.pos == 6
    with pytest.raises(ValueError, match="not a JSON"):
        await pool.read_body(b'"\xff"', None)
    with pytest.raises(ValueError, match="not a JSON"):
        await pool.read_body(b"[" * 100_000, None)
    with pytest.raises(ValueError, match="not a JSON"):
        await pool.read_body(b"9" * 5_000, None)  # more digits than Python converts to an integer
    with pytest.raises(RejectedError, match="nested"):
        await pool.read_body(b'{"a":' + b"[" * 50 + b"]" * 50 + b"}", None)


async def test_bodies_are_validated_as_in_this_process(pool: TokenizerPool) -> None:
    model = "llaisys.server.request_schemas:ChatCompletionRequest"
    for body in (
        {"messages": [{}] * 1000},
        {"messages": [{}] * 1000 + [5]},
        {"messages": [1] * 200_000},
        {"messages": [], "stop": [1] * 200_000},
        [],
    ):
        raw = json.dumps(body).encode()
        assert await pool.read_body(raw, model) == read_body(raw, model)


async def test_ids_are_detokenized_as_in_this_process(pool: TokenizerPool, tiny: Tokenizer) -> None:
    prompts = pool.add(tiny, None)
    ids = tiny.encode("abc é漢😀 <|end|>", True)
    for skip in (True, False):
        assert await prompts.decode(ids, skip) == tiny.decode(ids, skip)


async def test_a_closed_pool_rejects_jobs_and_leaves_no_process(tiny: Tokenizer) -> None:
    pool = TokenizerPool(replace(LIMITS, cpu_s=1000.0))  # the job never ends by itself
    prompts = pool.add(tiny, template(WORK))
    await pool.ready()
    children = processes(pool)
    doomed = asyncio.ensure_future(prompts.chat(USER, OPTIONS, False))
    await asyncio.to_thread(until_busy, pool)
    await pool.close()
    await pool.close()
    with pytest.raises(LlaisysError):
        await doomed
    with pytest.raises(EngineDeadError, match="shutting down"):
        await prompts.encode("x", False)
    assert not any(child.is_running() for child in children)


async def test_a_pool_may_be_closed_while_it_starts(tiny: Tokenizer) -> None:
    pool = TokenizerPool()
    prompts: AsyncTokenizer = pool.add(tiny, None)
    await pool.close()
    assert not processes(pool)
    with pytest.raises(EngineDeadError):
        await prompts.encode("x", False)
