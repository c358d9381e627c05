"""The async door: submit, stream, cancel, drain. Lives on one event loop; the engine does not.

Data path: `generate` -> EngineClient -> engine -> one wake of the event loop a step -> OutputProcessor
(text, stop strings) -> one bounded, coalescing mailbox per stream -> the caller's `async for`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any

from llaisys.arrivals import Arrivals
from llaisys.config import Config
from llaisys.engine.client import EngineClient
from llaisys.engine.outputs import EngineOutput
from llaisys.engine.request import EngineRequest
from llaisys.engine.sessions import SessionCall
from llaisys.engine.start import start_engine
from llaisys.engine.timeline import N_FINISHED_MAX
from llaisys.errors import EngineDeadError, QueueFullError, RejectedError, SlowReaderError
from llaisys.grammar_trials import GrammarTrials
from llaisys.mailbox import MAILBOX_BYTES_MAX, Mailbox
from llaisys.meter import Meter
from llaisys.model import Model, open_model
from llaisys.output import OutputProcessor, aborted
from llaisys.prompt import bad_word_ids, truncated
from llaisys.resident import ResidentEngine
from llaisys.sessions import SessionDoor
from llaisys.stats import EngineStats, ServiceStats
from llaisys.story import Story, with_lags
from llaisys.text.pool import PromptMaker, TextPool
from llaisys.text.reasoning import AnswerParser
from llaisys.text.tools import ToolFormat, tool_grammar, tool_parser
from llaisys.types import (
    FinishReason,
    ModelInfo,
    PartParser,
    Pooling,
    RequestId,
    RequestOutput,
    SamplingParams,
    SessionInfo,
    StructuredOutputsParams,
)

__all__ = ["AsyncLLM", "ServiceStats"]

log = logging.getLogger(__name__)


class AsyncLLM:
    """One model, many streams. Made by `start`; every method belongs to the event loop that called it.

    Owns the open streams (mailboxes), the text state of each (OutputProcessor) and the counters. The engine
    comes and goes: without `preload` it is loaded for the first request, and after `idle_unload_s` without
    an open one it is unloaded. Invariant: while a stream is open the engine is loaded, or being so. Errors
    that a caller may meet: RejectedError (its input), ContextLengthError, QueueFullError (with
    `retry_after_s`), RequestTimeoutError, RequestFailedError, EngineDeadError (also: shutting down).
    """

    def __init__(self, config: Config, model: Model) -> None:
        """Use `start`; this only lays out the state."""
        self._config = config
        self._model = model
        self._processor = OutputProcessor(model.tokenizer)
        self._grammars = model.grammars()
        self._trials = GrammarTrials(self._grammars.tokens)
        self._prompts: PromptMaker | None = None  # in processes; else in threads
        self._mailboxes: dict[RequestId, Mailbox] = {}
        # Open streams that the engine has not seen yet, and whether they were aborted.
        self._unseen: dict[RequestId, bool] = {}
        # How the readers of ended streams lagged, if they did; as many as there are timelines.
        self._lags: OrderedDict[RequestId, list[tuple[float, float]]] = OrderedDict()
        self._sessions = SessionDoor(self._call)
        self._arrivals = Arrivals(asyncio.get_running_loop(), self._hand_over)
        self._exits, self._n_clients = False, 1
        self._engine = ResidentEngine(self._start_engine, self.model_names[0], config.idle_unload_s)
        self._meter = Meter(self.max_model_len)
        self._admitting = True
        self._closed = False
        self._all_ended = asyncio.Event()

    @classmethod
    async def start(
        cls,
        config: Config,
        *,
        exits: bool = False,
        text_pool: TextPool | None = None,
        n_clients: int = 1,
    ) -> AsyncLLM:
        """Resolves the model, and loads it unless `preload` is off; returns when requests are welcome.

        `exits`: this process is a server, and may be ended where its engine is stuck and its loop is, too.
        `text_pool`: the processes that render and tokenise; without them threads do, unbounded.
        `n_clients`: clients of the requests, each of which has a share of the engine; 1: no shares.
        Raises RejectedError or UnsupportedError (the model or a setting), naming it.
        """
        service = cls(config, await asyncio.to_thread(open_model, config))
        if text_pool is not None:
            service._prompts = text_pool.add(service._model.tokenizer, service._model.template)
        service._exits, service._n_clients = exits, n_clients
        if config.preload:
            await service.load()
        return service

    # --- facts of the model ---

    @property
    def config(self) -> Config:
        """The configuration it was started with."""
        return self._config

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names that requests may use; the first is reported. Never empty."""
        return self._config.served_model_name or (self._model.name,)

    @property
    def model_info(self) -> ModelInfo:
        """Facts of the checkpoint."""
        return self._model.info

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest request, prompt and answer together. Before the model was ever loaded: what
        it was made for, which a small KV cache makes less."""
        own = self._config.max_model_len or self._model.info.max_position_embeddings
        return self._engine.max_model_len or own

    @property
    def default_sampling_params(self) -> dict[str, Any]:
        """SamplingParams fields that the model sets (`temperature`, `top_p` ...) and a request may omit."""
        return dict(self._model.sampling_defaults)

    @property
    def pooling(self) -> Pooling:
        """How embeddings are pooled. Raises UnsupportedError if the model would have it as we cannot."""
        return self._model.embedding_pooling()

    @property
    def sessions(self) -> SessionDoor:
        """Named sessions of the engine that is loaded; they end with it."""
        return self._sessions

    # --- requests ---

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        request_id: RequestId,
        *,
        client_id: str = "",
        priority: int = 0,
        session_id: str = "",
        cache_salt: str = "",
        add_special_tokens: bool = True,
        pooling: Pooling | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yields deltas: `text`, `token_ids` and `logprobs` of `outputs` are what is new since the last one.

        - `prompt`: text (tokenised off the loop, with `add_special_tokens`) or token ids.
        - `priority`: lower goes first. `client_id`: whom fairness is counted for. `cache_salt`: cached
          prefixes are shared with requests of the same salt only.
        - `session_id`: the client's session (made if it is new) whose KV this request's becomes at its end,
          and is kept; of several choices the first's. The prompt is the whole conversation all the same.
        - `pooling`: the embedding of the prompt is wanted and no answer. The one delta has it, with the
          finish reason `stop`; of `params` only `truncate_prompt_tokens` counts.
        - With `n` > 1 a delta holds the choices that have news, by their `index`.
        - A choice's last delta alone has its `finish_reason` (`stop`, `length` or `abort`), the request's
          last alone `finished`. Usage: `prompt_token_ids`, the sum of the deltas' `token_ids`,
          `num_cached_tokens`.
        - A reader that is slow gets several steps in one delta, never a different answer.
        - Closing the iterator (`aclose`, a cancelled task) cancels the request within one engine step.

        Nothing is submitted before the first `anext`; what refuses the request is raised there.
        """
        mailbox = self._open_stream(request_id)
        try:
            if params.structured_outputs is not None:
                await self.compile_grammar(params.structured_outputs, client_id)
            ids = await self.prompt_ids(prompt, params, add_special_tokens=add_special_tokens)
            text = prompt if isinstance(prompt, str) else None
            words: tuple[tuple[int, ...], ...] = ()
            if params.bad_words:
                words = await asyncio.to_thread(bad_word_ids, self._model.tokenizer, params.bad_words)
            arrival_s = time.monotonic()
            client = await self._engine.wanted()
            if self._unseen.pop(request_id):
                yield aborted(request_id, text, ids, params.n)
                return
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
                    session_id=session_id,
                    cache_salt=cache_salt,
                    bad_word_ids=words,
                    pooling=pooling,
                )
            )
            self._meter.submitted(request_id, len(ids), params, arrival_s)
            finished = False
            while not finished:
                output = await mailbox.take()
                finished = output.finished
                yield output
        finally:
            self._close_stream(request_id)

    async def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        n_most: int | None = None,
    ) -> list[int]:
        """Token ids of a conversation, by the model's chat template, off the loop. Templates write their own
        special tokens; `add_special_tokens` adds the tokenizer's.

        Raises UnsupportedError if the model has no template, RejectedError for messages it refuses,
        ContextLengthError as `encode`.
        """
        options = {
            **(template_kwargs or {}),
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
        }
        if self._prompts is not None:
            self._model.chat_template()
            return await self._prompts.chat(messages, options, add_special_tokens, n_most)
        text, ids = await asyncio.to_thread(self._model.chat_prompt, messages, options)
        return await self.encode(text) if add_special_tokens else ids

    async def prompt_ids(
        self, prompt: str | Sequence[int], params: SamplingParams, *, add_special_tokens: bool = True
    ) -> list[int]:
        """The token ids that `generate` uses of a prompt: encoded if it is text, cut by
        `truncate_prompt_tokens`."""
        if isinstance(prompt, str):
            n_most = self.most_prompt_tokens(params)
            ids = await self.encode(prompt, add_special_tokens=add_special_tokens, n_most=n_most)
        else:
            ids = list(prompt)
        return truncated(ids, params, self.max_model_len)

    async def compile_grammar(self, spec: StructuredOutputsParams, client_id: str = "") -> None:
        """Compiles a grammar in a process that may be killed, for a verdict that is kept for the client.

        Raises RejectedError naming the field of `structured_outputs` and the limit, UnsupportedError, or
        QueueFullError if too many of the client's grammars wait.
        """
        await self._trials.check(spec, client_id)

    def tool_grammar(
        self, tools: Mapping[str, Mapping[str, Any]], *, parallel: bool
    ) -> StructuredOutputsParams:
        """The grammar of an answer that calls tools (name -> JSON schema of the arguments), once or, with
        `parallel`, several times; in the format of `tool_call_parser`, by default hermes."""
        return StructuredOutputsParams(grammar=tool_grammar(self._tool_format, tools, parallel=parallel))

    def answer_parser(self, params: SamplingParams, tools: Collection[str]) -> PartParser | None:
        """What divides the text of one choice into reasoning, content and calls of these tools; None: it is
        content as a whole. An answer under a grammar has no reasoning."""
        reasoning = None if params.structured_outputs is not None else self._config.reasoning_parser
        if reasoning is None and not tools:
            return None
        return AnswerParser(reasoning, tool_parser(self._tool_format, tools) if tools else None)

    @property
    def _tool_format(self) -> ToolFormat:
        return self._config.tool_call_parser or "hermes"

    def most_prompt_tokens(self, params: SamplingParams) -> int | None:
        """Tokens above which `generate` refuses a prompt; None: it cuts it."""
        if params.truncate_prompt_tokens is not None:
            return None
        return self._config.max_input_tokens or self.max_model_len

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, n_most: int | None = None
    ) -> list[int]:
        """Token ids of a text, off the loop. Raises ContextLengthError for one that is so long that it must
        have more than `n_most`, without tokenising it."""
        if self._prompts is not None:
            return await self._prompts.encode(text, add_special_tokens, n_most)
        return await asyncio.to_thread(self._model.tokenizer.encode, text, add_special_tokens, n_most)

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of token ids, off the loop."""
        if self._prompts is not None:
            return await self._prompts.decode(ids, skip_special_tokens)
        return await asyncio.to_thread(self._model.tokenizer.decode, list(ids), skip_special_tokens)

    async def token_strs(self, ids: Sequence[int]) -> list[str]:
        """How the vocabulary writes each of some token ids, off the loop."""
        return await asyncio.to_thread(lambda: [self._model.tokenizer.vocab_text(id) for id in ids])

    def abort(self, request_id: RequestId) -> None:
        """Cancels a request; its stream ends with finish reason `abort`. An unknown id is ignored."""
        if request_id in self._unseen:
            self._unseen[request_id] = True
        else:
            self._cancel(request_id)

    async def timeline(self, request_id: RequestId, *, client_id: str = "") -> dict[int, Story]:
        """Where a client's request spent its time, by choice, each gap with its cause; if open, until now.

        Times are of `time.monotonic`. Empty for a request that is not known: the newest 1,024 ended choices
        are kept, by the engine that ran them.

        Raises ExhaustedError (too many calls at the same time) or EngineDeadError.
        """
        if self._client is None:
            return {}
        mailbox = self._mailboxes.get(request_id)
        with self._engine.held():
            stories = await asyncio.wrap_future(self._client.stories(request_id, client_id))
        lags = self._lags.get(request_id, ()) if mailbox is None else mailbox.lags()
        return {index: with_lags(story, lags) for index, story in stories.items()}

    # --- health ---

    def is_alive(self) -> bool:
        """False while the engine is dead or stuck, and once this is closed. An unloaded model is well."""
        is_dead = self._client is not None and self._client.error is not None
        return not (self._closed or is_dead or self.is_stuck())

    def is_loaded(self) -> bool:
        """True while there is an engine."""
        return self._client is not None

    def is_ready(self) -> bool:
        """True while new requests are welcome: alive, not draining."""
        return self._admitting and self.is_alive()

    def refusal(self, client_id: str = "") -> QueueFullError | None:
        """Why a client's new request would be refused now, whatever it asks; None: it may be taken."""
        return None if self._client is None else self._client.refusal(client_id)

    def is_stuck(self) -> bool:
        """True once the watchdog has given up an engine of this process, which should end, then."""
        return self._client is not None and self._client.stuck

    def is_lost(self) -> bool:
        """True once the engine is dead and nothing restarts it: a server should end, then."""
        return self._client is not None and self._client.is_lost

    def beat(self) -> None:
        """The event loop came round; once this is called, it must be called again and again."""
        if self._client is not None:
            self._client.beat()

    def stats(self) -> ServiceStats:
        """Gauges and totals now."""
        if self._client is None:
            return self._meter.snapshot(EngineStats(), 0)
        return self._meter.snapshot(self._client.stats(), self._client.num_violations)

    # --- life ---

    async def load(self) -> None:
        """Returns with the engine loaded; one load, however many wait for it.

        Raises RejectedError or UnsupportedError (the model or a setting), EngineDeadError once closed.
        """
        await self._engine.load()

    async def close(self, drain_s: float = 0.0) -> None:
        """Stops admitting, lets open streams go on for `drain_s` seconds, ends the rest with EngineDeadError
        (shutting down), stops the engine. Idempotent."""
        self._admitting = False
        if self._mailboxes and drain_s > 0 and self.is_alive():
            self._all_ended.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._all_ended.wait(), drain_s)
        self._closed = True
        await asyncio.to_thread(self._trials.close)
        await self._engine.close()

    # --- inside ---

    @property
    def _client(self) -> EngineClient | None:
        return self._engine.client

    def _start_engine(self) -> EngineClient:
        """On a thread."""
        info = self._model.info
        return start_engine(
            self._config,
            info,
            self._arrivals.deliver,
            exits=self._exits,
            grammars=self._grammars,
            n_clients=self._n_clients,
        )

    def _cancel(self, request_id: RequestId, index: int | None = None) -> None:
        if self._client is not None:
            self._client.cancel(request_id, index)

    def _open_stream(self, request_id: RequestId) -> Mailbox:
        if not self._admitting:
            raise EngineDeadError("shutting down: no new requests")
        if request_id in self._mailboxes:
            raise RejectedError(f"request id {request_id!r} is in use", param="request_id")
        self._engine.hold()
        mailbox = self._mailboxes[request_id] = Mailbox()
        self._unseen[request_id] = False
        self._lags.pop(request_id, None)
        return mailbox

    def _close_stream(self, request_id: RequestId) -> None:
        """The only way out of a stream: after its end, its error, or its reader's leaving."""
        self._unseen.pop(request_id, None)
        if lags := self._mailboxes.pop(request_id).lags():
            self._lags[request_id] = lags
            if len(self._lags) > N_FINISHED_MAX:
                self._lags.popitem(last=False)
        if self._processor.discard(request_id):
            self._cancel(request_id)
            self._meter.finished(request_id, FinishReason.ABORT.value, time.monotonic())
        if not self._mailboxes:
            self._all_ended.set()
        self._engine.release()

    async def _call(self, call: SessionCall) -> list[SessionInfo]:
        """Asks the engine, which is loaded for it and stays so until the answer."""
        if not self._admitting:
            raise EngineDeadError("shutting down: no new requests")
        with self._engine.held():
            return await asyncio.wrap_future((await self._engine.wanted()).call(call))

    def _hand_over(self, event: EngineOutput, now_s: float) -> int:
        """Puts an output that came at `now_s` into its stream's mailbox; drops what comes after the stream's
        end. Returns by how many bytes the mailbox has grown."""
        request_id = event.request_id
        mailbox = self._mailboxes.get(request_id)
        if mailbox is None or request_id not in self._processor:
            return 0
        if event.error is not None:  # one choice's error is the request's
            self._processor.discard(request_id)
            if not event.last:
                self._cancel(request_id)
            mailbox.fail(event.error)
            reason = event.finish_reason or FinishReason.ERROR
            self._meter.finished(request_id, reason.value, now_s)
            return 0
        if not self._processor.expects(event):  # a choice that has met a stop string
            return 0
        delta = self._processor.process(event)
        answer = delta.outputs[0]
        if delta.embedding is None:
            self._meter.tokens(delta, now_s)
        else:
            self._meter.embedded(delta, now_s)
        n_before = mailbox.num_bytes
        if not mailbox.put(delta):
            self._processor.discard(request_id)
            self._cancel(request_id)
            mailbox.fail(SlowReaderError(f"the reader fell more than {MAILBOX_BYTES_MAX} bytes behind"))
            self._meter.finished(request_id, FinishReason.ERROR.value, now_s)
        elif answer.finish_reason is not None:
            if event.finish_reason is None:  # a stop string: the engine does not know yet
                self._cancel(request_id, event.index)
            if delta.finished:
                self._meter.finished(request_id, answer.finish_reason, now_s)
        return mailbox.num_bytes - n_before
