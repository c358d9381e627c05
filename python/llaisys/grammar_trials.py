"""Verdicts on grammars before a request with one is admitted, from a process that may be killed.

What a grammar costs to compile is known only by compiling it, which cannot be interrupted. So each is
compiled there first; what passes may be compiled in a process that serves.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import OrderedDict
from typing import Any

from llaisys.engine.grammar import GrammarTokens
from llaisys.errors import LlaisysError, QueueFullError, RejectedError, UnsupportedError
from llaisys.job_pool import JobPool, JobText
from llaisys.job_process import JobLimits
from llaisys.types import StructuredOutputsParams

# Of one trial. Per byte: of the grammar, and of the tokenizer that the process reads first.
LIMITS = JobLimits(cpu_s=0.5, memory_bytes=64 << 20, cpu_s_per_byte=2e-6, memory_bytes_per_byte=512)
# Grammars of one client that wait for their trial.
WAITING_MAX = 512
VERDICTS_MAX = 1024
_TEXTS = {
    "tokens": JobText("reading the tokenizer for grammars", "structured_outputs"),
    "try": JobText("compiling it and following it for some tokens", "structured_outputs"),
}


class GrammarTrials:
    """The verdicts for one model, and its process, which the first grammar starts.

    `check` belongs to one event loop, `check_now` to any thread; use one of them. Verdicts are kept for each
    client, so that no client learns from a reply's time whether another has used a grammar.
    """

    def __init__(self, tokens: GrammarTokens) -> None:
        self._pool = JobPool("llaisys.engine.grammar_job", 1, LIMITS, _TEXTS, name="grammar")
        self._pool.add_preparation("tokens", tokens.tokenizer, list(tokens.eos_token_ids), tokens.vocab_size)
        self._verdicts: OrderedDict[bytes, LlaisysError | None] = OrderedDict()
        self._clients: dict[str, _Client] = {}
        self._lock = threading.Lock()

    async def check(self, spec: StructuredOutputsParams, client_id: str = "") -> None:
        """Returns if requests may use this grammar.

        Raises RejectedError naming the field of `structured_outputs` and the limit, UnsupportedError for a
        model that cannot have grammars, QueueFullError if WAITING_MAX of the client's wait. One of a client's
        is tried at a time, so another client's waits for one of them at most.
        """
        key = _key(spec, client_id)
        if key not in self._verdicts:
            client = self._clients.setdefault(client_id, _Client())
            if client.num_waiting >= WAITING_MAX:
                raise QueueFullError(
                    f"{WAITING_MAX} grammars wait to be compiled, which is the most; send them one by one",
                    retry_after_s=1.0,
                )
            client.num_waiting += 1
            try:
                async with client.lock:
                    if key not in self._verdicts:
                        self._keep(key, await self._verdict(spec))
            finally:
                client.num_waiting -= 1
                if not client.num_waiting:
                    del self._clients[client_id]
        self._give(key)

    def check_now(self, spec: StructuredOutputsParams) -> None:
        """As `check`, blocking."""
        key = _key(spec, "")
        with self._lock:
            if key not in self._verdicts:
                try:
                    self._pool.call("try", _plain(spec))
                except (RejectedError, UnsupportedError) as error:
                    self._keep(key, _named(error, spec))
                else:
                    self._keep(key, None)
            self._give(key)

    def close(self) -> None:
        """Ends the process; a trial that is under way fails. Idempotent."""
        self._pool.close_now()

    async def _verdict(self, spec: StructuredOutputsParams) -> LlaisysError | None:
        try:
            await self._pool.run("try", _plain(spec))
        except (RejectedError, UnsupportedError) as error:
            return _named(error, spec)
        return None

    def _keep(self, key: bytes, verdict: LlaisysError | None) -> None:
        self._verdicts[key] = verdict
        if len(self._verdicts) > VERDICTS_MAX:
            self._verdicts.popitem(last=False)

    def _give(self, key: bytes) -> None:
        self._verdicts.move_to_end(key)
        verdict = self._verdicts[key]
        if verdict is not None:  # a new one, because the tracebacks of one that is raised often add up
            raise type(verdict)(str(verdict), param=verdict.param)


class _Client:
    """A client with trials that wait."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.num_waiting = 0


def _plain(spec: StructuredOutputsParams) -> dict[str, Any]:
    return {spec.field: getattr(spec, spec.field)}


def _key(spec: StructuredOutputsParams, client_id: str) -> bytes:
    return hashlib.sha256(repr((client_id, _plain(spec))).encode()).digest()


def _named(error: LlaisysError, spec: StructuredOutputsParams) -> LlaisysError:
    """With the field that the spec sets in the message, where the limit of a job has none."""
    where = f"structured_outputs.{spec.field}"
    if isinstance(error, UnsupportedError) or error.param == where:
        return error
    return RejectedError(f"{where}: {error}", param=where)
