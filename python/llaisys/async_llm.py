"""AsyncLLM: the asynchronous API to submit, stream, cancel and drain requests, for one event loop.

Data path: `generate` -> EngineClient -> engine -> OutputHandler -> OutputProcessor -> RequestOutputCollector
-> the caller's `async for`. The OutputHandler wakes the event loop once per step. The OutputProcessor makes
text and finds stop strings. Each request has its own RequestOutputCollector.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Mapping
from typing import Any

from llaisys.async_text import AsyncText
from llaisys.config import Config, package_version
from llaisys.engine.client import EngineClient
from llaisys.engine.engine_output import EngineOutput
from llaisys.engine.limits import LOGPROBS_FREE, LOGPROBS_OPEN_MAX, many_logprobs
from llaisys.engine.request import EngineRequest
from llaisys.engine.sessions.manager import SessionRequest
from llaisys.engine.start import start_engine
from llaisys.engine.timeline import FINISHED_MAX
from llaisys.engine.worker import available_isas, core_digest
from llaisys.errors import EngineDeadError, QueueFullError, RejectedError, SlowReaderError
from llaisys.grammar_trials import GrammarTrials
from llaisys.lazy_engine import LazyEngine
from llaisys.lora_client import LoraClient
from llaisys.lora_request import LoRARequest
from llaisys.model_assets import ModelAssets, load_model_assets
from llaisys.model_info import ModelInfo, Pooling
from llaisys.model_tokenizer import ModelTokenizer
from llaisys.output_collector import COLLECTOR_BYTES_MAX, RequestOutputCollector
from llaisys.output_formats import OutputFormats
from llaisys.output_handler import OutputHandler
from llaisys.output_processor import OutputAccumulator, OutputProcessor, aborted_output, empty_output
from llaisys.outputs import FinishReason, RequestId, RequestOutput
from llaisys.prompt import Prompt, read_prompt, tokenize_bad_words
from llaisys.sampling_params import SamplingParams, StructuredOutputsParams
from llaisys.session_client import SessionClient
from llaisys.session_info import SessionInfo
from llaisys.shares import Shares
from llaisys.stats import EngineStats, RequestStats, ServiceStats
from llaisys.text.tokenizer_pool import TokenizerPool
from llaisys.timeline import Timeline, with_reader_lags
from llaisys.vllm_arguments import refuse

__all__ = ["AsyncLLM", "ServiceStats"]

log = logging.getLogger(__name__)


class AsyncLLM(AsyncText):
    """Serves one model to many concurrent requests. Create it with `start`; call it on that event loop.

    It owns the open streams (a RequestOutputCollector each), their detokenization state (OutputProcessor) and
    the request stats. Without `preload`, the first request loads the engine; after `idle_unload_s` without an
    open request the engine is unloaded. Invariant: while a stream is open, the engine is loaded or loading.

    Errors of a request: RejectedError (its input), ContextLengthError, QueueFullError (with `retry_after_s`),
    RequestTimeoutError, RequestFailedError, EngineDeadError (also while shutting down).
    """

    def __init__(self, config: Config, model: ModelAssets) -> None:
        """Initialize the state without loading; use `start` instead."""
        super().__init__(config, model)
        self._processor = OutputProcessor(model.tokenizer)
        self._output_formats = OutputFormats.of(config, model.template, model.tokenizer)
        self._grammar_compiler = model.grammar_compiler()
        self._grammar_trials = GrammarTrials(self._grammar_compiler.tokenizer)
        self._collectors: dict[RequestId, RequestOutputCollector] = {}
        # Open streams that were not submitted yet -> whether they were aborted.
        self._unsubmitted: dict[RequestId, bool] = {}
        # Intervals in which the readers of ended streams were late; one entry per timeline that the engine
        # keeps.
        self._reader_lags: OrderedDict[RequestId, list[tuple[float, float]]] = OrderedDict()
        # Open requests with many logprobs -> their client and number of entries.
        self._logprobs: dict[RequestId, tuple[str, int]] = {}
        self._sessions = SessionClient(self._call_engine)
        self._output_handler = OutputHandler(asyncio.get_running_loop(), self._process_output)
        self._exits, self._n_clients = False, 1
        self._engine = LazyEngine(self._start_engine, self.model_names[0], config.idle_unload_s)
        self.loras = LoraClient(self._engine, config)
        self._request_stats = RequestStats(self.max_model_len)
        self._admitting = True
        self._closed = False
        self._all_ended = asyncio.Event()

    @classmethod
    async def start(
        cls,
        config: Config,
        *,
        exits: bool = False,
        tokenizer_pool: TokenizerPool | None = None,
        n_clients: int = 1,
    ) -> AsyncLLM:
        """Resolve the model and, unless `preload` is off, load it. Returns when requests are accepted.

        - `exits`: for servers: after a stall, the watchdog ends this process if it is still running.
        - `tokenizer_pool`: worker processes that render and tokenize within limits. Without it, threads of
          this process do so without limits.
        - `n_clients`: number of clients that share the engine's queue and cache. With 1 there are no shares.

        Raises RejectedError or UnsupportedError naming the model or the setting.
        """
        service = cls(config, await asyncio.to_thread(load_model_assets, config))
        if tokenizer_pool is not None:
            service._async_tokenizer = tokenizer_pool.add(service._model.tokenizer, service._model.template)
        service._exits, service._n_clients = exits, n_clients
        if config.preload:
            await service.load()
        return service

    # --- the model ---

    @property
    def config(self) -> Config:
        """The configuration given to `start`."""
        return self._config

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names that requests may use; responses report the first. Never empty."""
        return self._config.served_model_name or (self._model.name,)

    @property
    def model_info(self) -> ModelInfo:
        """Metadata of the checkpoint."""
        return self._model.info

    @property
    def max_model_len(self) -> int:
        """The longest request in tokens, prompt and completion together.

        Before the first load this is the setting or the checkpoint's limit; a small KV cache lowers it.
        """
        configured = self._config.max_model_len or self._model.info.max_position_embeddings
        return self._engine.max_model_len or configured

    @property
    def default_sampling_params(self) -> dict[str, Any]:
        """SamplingParams fields that the model sets (such as `temperature`) for requests that omit them."""
        return dict(self._model.sampling_defaults)

    @functools.cached_property
    def system_fingerprint(self) -> str:
        """What the bits of a response depend on: version, core build, instruction set. Computed once."""
        isa = "cuda" if self._config.device == "cuda" else self._config.isa
        return f"llaisys-{package_version()}-{core_digest()}-{available_isas()[0] if isa == 'auto' else isa}"

    @property
    def pooling(self) -> Pooling:
        """How embeddings are pooled. Raises UnsupportedError if the model needs an unsupported pooling."""
        return self._model.embedding_pooling()

    @property
    def normalizes(self) -> bool:
        """True if the model's embeddings have L2 norm 1, or its scores are from 0 to 1."""
        return self._model.normalizes

    @property
    def output_formats(self) -> OutputFormats:
        """How the model marks tool calls and reasoning in a completion."""
        return self._output_formats

    @property
    def sessions(self) -> SessionClient:
        """Named sessions of the loaded engine; unloading ends them."""
        return self._sessions

    # --- requests ---

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: RequestId,
        *,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: None = None,
        trace_headers: None = None,
        priority: int = 0,
        session_id: str | None = None,
        client_id: str = "",
        cache_salt: str = "",
        add_special_tokens: bool = True,
        pooling: Pooling | None = None,
        normalize: bool = True,
        second_segment: int | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the outputs of a request while it runs; arguments and order are vLLM's, and some more.

        - `prompt`: text (tokenized off the event loop, with `add_special_tokens`), `{"prompt": text}`,
          `{"prompt_token_ids": ids}`, or token ids.
        - `sampling_params.output_kind`: by default each output has everything so far. With DELTA, `outputs`
          have the `text`, `token_ids` and `logprobs` since the previous output. With FINAL_ONLY, only the
          last output is yielded.
        - `priority`: lower runs first. `client_id`: the client for fair scheduling. `cache_salt`: only
          requests with the same salt share cached prefixes.
        - `session_id`: the client's session, which is created if it is new. It keeps the KV of the request,
          or of the first of several choices. The prompt must still be the whole conversation.
        - `pooling`: compute the prompt's embedding or score instead of a completion. The only output has it
          and the finish reason `stop`; of `sampling_params` only `truncate_prompt_tokens` applies.
          `normalize`, `second_segment`: see `EngineRequest`.
        - `lora_request`: the LoRA adapter that computes it; needs `enable_lora`.
        - `tokenization_kwargs`, `trace_headers`: of vLLM; only None is accepted.
        - With `n` > 1 an output has all choices so far; a delta has those that changed, by their `index`.
        - A choice has a `finish_reason` (`stop`, `length` or `abort`) once it has ended, a delta in the last
          one of the choice. Only the last output of the request is `finished`.
        - A slow reader receives several steps in one output; the completion does not depend on its speed.

        Closing the iterator (`aclose`, a canceled task) cancels the request within one engine step. Nothing
        is submitted before the first `anext`, which raises the error of a rejected request.
        """
        params = sampling_params
        collector = self._open_stream(request_id, params)
        try:
            refuse(tokenization_kwargs=tokenization_kwargs, trace_headers=trace_headers)
            lora = self.loras.resolve(lora_request)
            self._model.check_task(pooling)
            if params.structured_outputs is not None:
                await self.compile_grammar(params.structured_outputs, client_id)
            text, given = read_prompt(prompt) if isinstance(prompt, Mapping) else (None, prompt)
            text = given if isinstance(given, str) else text
            ids = await self.prompt_ids(
                (text or "") if given is None else given, params, add_special_tokens=add_special_tokens
            )
            words: tuple[tuple[int, ...], ...] = ()
            if params.bad_words:
                words = await asyncio.to_thread(tokenize_bad_words, self._model.tokenizer, params.bad_words)
            ahead = params.prediction
            prediction = await self.encode(ahead, add_special_tokens=False) if ahead else []
            arrival_s = time.monotonic()
            client = await self._engine.get()
            if self._unsubmitted.pop(request_id):
                yield aborted_output(request_id, text, ids, params.n)
                return
            self._reserve_logprobs(request_id, client_id, many_logprobs(len(ids), params, client.limits))
            self._processor.add(request_id, text, ids, params)
            client.submit(
                EngineRequest(
                    request_id=request_id,
                    prompt_token_ids=ids,
                    params=params,
                    eos_token_ids=tuple(self._model.info.eos_token_ids),
                    arrival_s=arrival_s,
                    deadline_s=arrival_s + self._config.request_timeout_s,
                    client_id=client_id,
                    priority=priority,
                    session_id=session_id or "",
                    cache_salt=cache_salt,
                    bad_word_ids=words,
                    prediction_token_ids=prediction,
                    lora=lora,
                    pooling=pooling,
                    normalize=normalize,
                    second_segment=second_segment,
                    score_token_ids=self._model.score_token_ids(pooling),
                )
            )
            self._request_stats.record_submission(request_id, len(ids), params, arrival_s, time.time())
            whole = OutputAccumulator(params.output_kind, empty_output(request_id, text, ids, params.n))
            finished = False
            while not finished:
                delta = await collector.get()
                finished = delta.finished
                output = whole.add(delta)
                if output is not None:
                    yield output
        finally:
            self._close_stream(request_id)

    async def compile_grammar(self, spec: StructuredOutputsParams, client_id: str = "") -> None:
        """Compile a grammar in a worker process with limits; the result is cached per client.

        Raises RejectedError naming the field of `structured_outputs` and the limit, UnsupportedError, or
        QueueFullError if too many grammars of the client wait.
        """
        await self._grammar_trials.check(spec, client_id)

    def abort(self, request_id: RequestId) -> None:
        """Cancel a request; its stream ends with finish reason `abort`. Unknown ids are ignored."""
        if request_id in self._unsubmitted:
            self._unsubmitted[request_id] = True
        else:
            self._cancel(request_id)

    async def timeline(self, request_id: RequestId, *, client_id: str = "") -> dict[int, Timeline]:
        """Return the timeline of a client's request by choice: what its time was spent on, and why it waited.

        Times are `time.monotonic` seconds. Empty for an unknown request; the engine keeps the timelines of
        open requests and of the newest 1,024 ended choices.

        Raises ExhaustedError (too many calls at the same time) or EngineDeadError.
        """
        if self._client is None:
            return {}
        collector = self._collectors.get(request_id)
        with self._engine.acquired():
            timelines = await asyncio.wrap_future(self._client.timelines(request_id, client_id))
        lags = self._reader_lags.get(request_id, ()) if collector is None else collector.lags()
        return {index: with_reader_lags(timeline, lags) for index, timeline in timelines.items()}

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Remove all cached prefixes, except those of sessions; return True if that was done.

        While requests run, nothing is removed and False is returned, as in vLLM. The arguments are vLLM's;
        only False is accepted. Raises as `timeline`.
        """
        refuse(reset_running_requests=reset_running_requests or None, reset_connector=reset_connector or None)
        if self._client is None:
            return True
        with self._engine.acquired():
            return await asyncio.wrap_future(self._client.reset_prefix_cache())

    def get_tokenizer(self) -> ModelTokenizer:
        """Return the model's tokenizer. Its methods run on the calling thread."""
        return ModelTokenizer(self._model)

    # --- health ---

    def is_alive(self) -> bool:
        """Return False while the engine is dead or stuck, and after `close`. An unloaded model is alive."""
        is_dead = self._client is not None and self._client.error is not None
        return not (self._closed or is_dead or self.is_stuck())

    def is_loaded(self) -> bool:
        """Return True while the engine is loaded."""
        return self._client is not None

    def is_ready(self) -> bool:
        """Return True while requests are accepted: alive and not draining."""
        return self._admitting and self.is_alive()

    def refusal(self, client_id: str = "") -> QueueFullError | None:
        """Return the error with which any new request of the client would be rejected now, or None."""
        return None if self._client is None else self._client.queue_full_error(client_id)

    def is_stuck(self) -> bool:
        """Return True once the watchdog has found the engine stuck; this process should then exit."""
        return self._client is not None and self._client.is_stuck

    def is_lost(self) -> bool:
        """Return True once the engine is dead and is not restarted; a server should then exit."""
        return self._client is not None and self._client.is_lost

    def beat(self) -> None:
        """Report a heartbeat of the event loop. After the first call, the caller must keep calling it."""
        if self._client is not None:
            self._client.beat()

    def stats(self) -> ServiceStats:
        """Return the current gauges and totals."""
        if self._client is None:
            return self._request_stats.snapshot(EngineStats(), 0)
        return self._request_stats.snapshot(self._client.stats(), self._client.num_violations)

    # --- lifecycle ---

    async def load(self) -> None:
        """Load the engine if it is not loaded. Concurrent calls share one load.

        Raises RejectedError or UnsupportedError (the model or a setting), EngineDeadError once closed.
        """
        await self._engine.load()
        await self.loras.load_configured()

    async def close(self, drain_s: float = 0.0) -> None:
        """Stop accepting requests and stop the engine. Idempotent.

        Open streams continue for up to `drain_s` seconds; the rest end with EngineDeadError (shutting down).
        """
        self._admitting = False
        if self._collectors and drain_s > 0 and self.is_alive():
            self._all_ended.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._all_ended.wait(), drain_s)
        self._closed = True
        await asyncio.gather(self._engine.close(), asyncio.to_thread(self._grammar_trials.close))

    # --- internals ---

    @property
    def _client(self) -> EngineClient | None:
        return self._engine.client

    def _start_engine(self) -> EngineClient:
        """Start the engine; runs on a thread."""
        core_digest()  # takes 50 ms, which the first completion would cost on the event loop
        return start_engine(
            self._config,
            self._model.info,
            self._output_handler.deliver,
            exits=self._exits,
            grammar_compiler=self._grammar_compiler,
            n_clients=self._n_clients,
            draft=self._model.draft,
        )

    def _cancel(self, request_id: RequestId, index: int | None = None) -> None:
        if self._client is not None:
            self._client.cancel(request_id, index)

    def _open_stream(self, request_id: RequestId, params: SamplingParams) -> RequestOutputCollector:
        if not self._admitting:
            raise EngineDeadError("shutting down: no new requests")
        if request_id in self._collectors:
            raise RejectedError(f"request id {request_id!r} is in use", param="request_id")
        self._engine.acquire()
        merges = 0 <= (params.logprobs or 0) <= LOGPROBS_FREE
        collector = self._collectors[request_id] = RequestOutputCollector(merges=merges)
        self._unsubmitted[request_id] = False
        self._reader_lags.pop(request_id, None)
        return collector

    def _reserve_logprobs(self, request_id: RequestId, client_id: str, n_entries: int) -> None:
        """Count the entries of a request until its stream is closed.

        Raises QueueFullError if the open requests of all clients, or of this one, would have too many.
        """
        if not n_entries:
            return
        n_open: Counter[str] = Counter()
        for client, n in self._logprobs.values():
            n_open[client] += n
        shares = Shares(LOGPROBS_OPEN_MAX, self._n_clients)
        if n_open[client_id] and not shares.allows(n_open, client_id, n_entries):
            raise QueueFullError(
                f"open requests have {n_open.total()} logprobs, and this one {n_entries}; the limit is "
                f"{shares.maximum}: try later, or request fewer"
            )
        self._logprobs[request_id] = client_id, n_entries

    def _close_stream(self, request_id: RequestId) -> None:
        """Release everything of a stream after its end, its error, or the end of its reader."""
        self._logprobs.pop(request_id, None)
        self._unsubmitted.pop(request_id, None)
        if lags := self._collectors.pop(request_id).lags():
            self._reader_lags[request_id] = lags
            if len(self._reader_lags) > FINISHED_MAX:
                self._reader_lags.popitem(last=False)
        if self._processor.discard(request_id):
            self._cancel(request_id)
            self._request_stats.record_end(request_id, FinishReason.ABORT.value, time.monotonic())
        if not self._collectors:
            self._all_ended.set()
        self._engine.release()

    async def _call_engine(self, call: SessionRequest) -> list[SessionInfo]:
        """Execute a session request. Loads the engine if needed, and keeps it loaded until the result."""
        if not self._admitting:
            raise EngineDeadError("shutting down: no new requests")
        with self._engine.acquired():
            return await asyncio.wrap_future((await self._engine.get()).call_session(call))

    def _process_output(self, output: EngineOutput, now_s: float) -> int:
        """Put an engine output that arrived at `now_s` into its stream's collector.

        An output for a stream or a choice that has ended is dropped. Return the number of bytes added to the
        collector.
        """
        request_id = output.request_id
        collector = self._collectors.get(request_id)
        if collector is None or request_id not in self._processor:
            return 0
        if output.error is not None:  # an error of one choice ends the request
            self._processor.discard(request_id)
            if not output.last:
                self._cancel(request_id)
            collector.fail(output.error)
            reason = output.finish_reason or FinishReason.ERROR
            self._request_stats.record_end(request_id, reason.value, now_s)
            return 0
        if not self._processor.expects(output):  # the choice has ended at a stop string
            return 0
        delta = self._processor.process(output)
        completion = delta.outputs[0]
        if delta.embedding is None and delta.score is None:
            self._request_stats.record_tokens(delta, now_s)
        else:
            self._request_stats.record_pooling(delta, now_s)
        n_before = collector.num_bytes
        if not collector.put(delta):
            self._processor.discard(request_id)
            self._cancel(request_id)
            collector.fail(SlowReaderError(f"the reader fell more than {COLLECTOR_BYTES_MAX} bytes behind"))
            self._request_stats.record_end(request_id, FinishReason.ERROR.value, now_s)
        elif completion.finish_reason is not None:
            if output.finish_reason is None:  # a stop string, which the engine does not see
                self._cancel(request_id, output.index)
            if delta.finished:
                self._request_stats.record_end(request_id, completion.finish_reason, now_s)
        return collector.num_bytes - n_before
