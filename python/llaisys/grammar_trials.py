"""GrammarTrials: tries each grammar in a worker process that may be killed, before a request may use it.

Compiling is the only way to determine the cost of a grammar, and it cannot be interrupted. A grammar that
compiles within the limits there may be compiled in a serving process.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import OrderedDict
from typing import Any

from llaisys.engine.grammar import GrammarTokenizer
from llaisys.errors import LlaisysError, QueueFullError, RejectedError, UnsupportedError
from llaisys.job_pool import JobPool, JobText
from llaisys.job_process import JobLimits
from llaisys.sampling_params import StructuredOutputsParams

# The limits of one trial. The per-byte parts apply to the grammar, and to the tokenizer that the process
# loads first.
LIMITS = JobLimits(cpu_s=0.5, memory_bytes=64 << 20, cpu_s_per_byte=2e-6, memory_bytes_per_byte=512)
# Maximum grammars of one client that wait for their trial.
WAITING_MAX = 512
RESULTS_MAX = 1024
_TEXTS = {
    "load_tokenizer": JobText("reading the tokenizer for grammars", "structured_outputs"),
    "try_grammar": JobText("compiling it and following it for some tokens", "structured_outputs"),
}


class GrammarTrials:
    """Caches the trial results of one model, and owns its worker process, which the first grammar starts.

    Use either `check` on one event loop, or `check_now` on any thread. Results are cached for each client,
    so that response times do not reveal whether another client has used a grammar.
    """

    def __init__(self, tokenizer: GrammarTokenizer) -> None:
        self._pool = JobPool("llaisys.engine.grammar_worker", 1, LIMITS, _TEXTS, name="grammar")
        self._pool.add_preparation(
            "load_tokenizer",
            tokenizer.tokenizer_json,
            list(tokenizer.eos_token_ids),
            tokenizer.vocab_size,
        )
        self._results: OrderedDict[bytes, LlaisysError | None] = OrderedDict()
        self._clients: dict[str, _Client] = {}
        self._lock = threading.Lock()

    async def check(self, spec: StructuredOutputsParams, client_id: str = "") -> None:
        """Return normally if requests may use this grammar.

        Raises RejectedError naming the field of `structured_outputs` and the limit, or UnsupportedError for a
        model without support for grammars. Raises QueueFullError if WAITING_MAX grammars of the client wait.
        Each client has one trial at a time, so a trial waits for one trial of each other client at most.
        """
        key = _key(spec, client_id)
        if key not in self._results:
            client = self._clients.setdefault(client_id, _Client())
            if client.num_waiting >= WAITING_MAX:
                raise QueueFullError(
                    f"{WAITING_MAX} grammars wait to be compiled, which is the limit; send them one by one",
                    retry_after_s=1.0,
                )
            client.num_waiting += 1
            try:
                async with client.lock:
                    if key not in self._results:
                        self._store(key, await self._try(spec))
            finally:
                client.num_waiting -= 1
                if not client.num_waiting:
                    del self._clients[client_id]
        self._raise_error(key)

    def check_now(self, spec: StructuredOutputsParams) -> None:
        """Check a grammar as `check` does, without an event loop. Blocks until the trial has ended."""
        key = _key(spec, "")
        with self._lock:
            if key not in self._results:
                try:
                    self._pool.call("try_grammar", _plain(spec))
                except (RejectedError, UnsupportedError) as error:
                    self._store(key, _with_field(error, spec))
                else:
                    self._store(key, None)
            self._raise_error(key)

    def close(self) -> None:
        """Stop the worker process; a trial in progress fails. Idempotent."""
        self._pool.close_now()

    async def _try(self, spec: StructuredOutputsParams) -> LlaisysError | None:
        try:
            await self._pool.run("try_grammar", _plain(spec))
        except (RejectedError, UnsupportedError) as error:
            return _with_field(error, spec)
        return None

    def _store(self, key: bytes, result: LlaisysError | None) -> None:
        self._results[key] = result
        if len(self._results) > RESULTS_MAX:
            self._results.popitem(last=False)

    def _raise_error(self, key: bytes) -> None:
        self._results.move_to_end(key)
        result = self._results[key]
        if result is not None:  # raise a copy, because each raise adds a traceback to an error
            raise type(result)(str(result), param=result.param)


class _Client:
    """The state of a client with waiting trials."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.num_waiting = 0


def _plain(spec: StructuredOutputsParams) -> dict[str, Any]:
    return {spec.field: getattr(spec, spec.field)}


def _key(spec: StructuredOutputsParams, client_id: str) -> bytes:
    return hashlib.sha256(repr((client_id, _plain(spec))).encode()).digest()


def _with_field(error: LlaisysError, spec: StructuredOutputsParams) -> LlaisysError:
    """Return the error with the field that the spec sets, if the error names no field."""
    where = f"structured_outputs.{spec.field}"
    if isinstance(error, UnsupportedError) or error.param == where:
        return error
    return RejectedError(f"{where}: {error}", param=where)
