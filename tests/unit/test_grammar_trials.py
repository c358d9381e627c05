"""Grammar trials: a worker process compiles each grammar first, and is killed if it exceeds the limits."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import psutil
import pytest

from fakes import core, text
from hostile_grammars import ALL, REFUSED
from llaisys import grammar_trials
from llaisys.engine.grammar import GrammarTokenizer
from llaisys.errors import (
    EngineDeadError,
    QueueFullError,
    RejectedError,
    UnsupportedError,
)
from llaisys.grammar_trials import LIMITS, GrammarTrials
from llaisys.job_pool import JobPool
from llaisys.sampling_params import StructuredOutputsParams as Spec
from waiting import block_until

TOKENS = GrammarTokenizer(text.tokenizer().to_json(), (text.EOS, text.EOT), core.VOCAB_SIZE)
# Compiles for tens of seconds unless the trial is stopped.
LONG = Spec(json={"type": "integer", "multipleOf": 999983})


@pytest.fixture
def trials() -> Iterator[GrammarTrials]:
    made = GrammarTrials(TOKENS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[GrammarTrials]:
    made = GrammarTrials(TOKENS)
    yield made
    made.close()


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the grammars that a worker process got, in order."""
    found: list[Any] = []
    call = JobPool.call

    def counted(self: JobPool, name: str, *arguments: Any) -> Any:
        found.append(next(iter(arguments[0].values())))
        return call(self, name, *arguments)

    monkeypatch.setattr(JobPool, "call", counted)
    return found


def processes() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [child for child in children if "grammar_worker" in " ".join(child.cmdline())]


@pytest.mark.parametrize("name", ALL)
def test_a_hostile_grammar_has_a_result(shared: GrammarTrials, name: str) -> None:
    spec = Spec(**ALL[name])
    if name not in REFUSED:
        with contextlib.suppress(RejectedError):
            shared.check_now(spec)
    else:
        with pytest.raises(RejectedError) as refused:
            shared.check_now(spec)
        assert REFUSED[name][1] in str(refused.value)
        assert refused.value.param == f"structured_outputs.{spec.field}"
        assert len(str(refused.value)) < 500
    shared.check_now(Spec(regex=f"the next one is well {len(name)}"))


def test_the_limit_is_named(trials: GrammarTrials, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RejectedError, match=r"structured_outputs\.json: .* more than 0\.5 s of CPU time"):
        trials.check_now(LONG)
    monkeypatch.setattr(grammar_trials, "LIMITS", replace(LIMITS, memory_bytes=8 << 20, cpu_s=60.0))
    small = GrammarTrials(TOKENS)
    with pytest.raises(RejectedError, match="more than 8 MiB of memory"):
        small.check_now(LONG)
    small.close()


@pytest.mark.parametrize("blocking", [True, False])
async def test_a_result_is_cached(trials: GrammarTrials, tried: list[Any], blocking: bool) -> None:
    async def check(spec: Spec) -> None:
        trials.check_now(spec) if blocking else await trials.check(spec)

    for _ in range(3):
        await check(Spec(regex="a+"))
        with pytest.raises(RejectedError, match="unclosed group") as error:
            await check(Spec(regex="("))
    assert tried == ["a+", "("]
    assert error.value.param == "structured_outputs.regex"


async def test_a_result_is_cached_only_for_its_client(trials: GrammarTrials, tried: list[Any]) -> None:
    for client in ("a", "b", "a"):
        await trials.check(Spec(regex="a+"), client)
    assert tried == ["a+", "a+"]


async def test_cached_results_are_bounded(
    trials: GrammarTrials, tried: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_trials, "RESULTS_MAX", 2)
    for regex in ("a", "b", "a", "c", "a", "b"):
        await trials.check(Spec(regex=regex))
    assert tried == ["a", "b", "c", "b"], "the least recently used result is evicted"


async def test_requests_with_one_grammar_share_a_trial(trials: GrammarTrials, tried: list[Any]) -> None:
    await asyncio.gather(*(trials.check(Spec(regex="a+")) for _ in range(10)))
    assert tried == ["a+"]


async def test_a_client_waits_for_one_trial_of_each_other(trials: GrammarTrials, tried: list[Any]) -> None:
    mine = [trials.check(Spec(regex=f"a{i}"), "a") for i in range(5)]
    theirs = [trials.check(Spec(regex=f"b{i}"), "b") for i in range(2)]
    await asyncio.gather(*mine, *theirs)
    assert tried[:4] == ["a0", "b0", "a1", "b1"]
    assert len(tried) == 7


async def test_waiting_trials_of_a_client_are_bounded(
    trials: GrammarTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_trials, "WAITING_MAX", 3)
    checks = [trials.check(Spec(regex=f"a{i}"), "a") for i in range(5)]
    results = await asyncio.gather(*checks, trials.check(Spec(regex="b"), "b"), return_exceptions=True)
    assert [type(result) for result in results] == [*[type(None)] * 3, *[QueueFullError] * 2, type(None)]
    await trials.check(Spec(regex="a4"), "a")


def test_closing_does_not_wait_for_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_trials, "LIMITS", replace(LIMITS, cpu_s=1e5, memory_bytes=8 << 30))
    trials, before = GrammarTrials(TOKENS), processes()
    trials.check_now(Spec(regex="a"))
    (process,) = (each for each in processes() if each not in before)
    used = process.cpu_times().user
    with ThreadPoolExecutor(1) as thread:
        result = thread.submit(trials.check_now, LONG)
        block_until(lambda: process.cpu_times().user >= used + 0.1)
        trials.close()
        with pytest.raises(EngineDeadError, match="shutting down"):
            result.result()
    assert not process.is_running()
    with pytest.raises(EngineDeadError, match="shutting down"):
        trials.check_now(Spec(regex="b"))


def test_without_a_grammar_no_process_is_started() -> None:
    before = processes()
    trials = GrammarTrials(TOKENS)
    assert processes() == before
    trials.close()


@pytest.mark.parametrize("tokens", [replace(TOKENS, eos_token_ids=()), replace(TOKENS, tokenizer_json="{}")])
def test_a_model_without_support_for_grammars_is_rejected(tokens: GrammarTokenizer) -> None:
    trials = GrammarTrials(tokens)
    for _ in range(2):
        with pytest.raises(UnsupportedError) as error:
            trials.check_now(Spec(regex="a"))
        assert error.value.param == "structured_outputs"
    trials.close()
