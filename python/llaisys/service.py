"""The async door: submit, stream, cancel, drain. Lives on one event loop; the engine runs on its own thread.

Data path: `generate` -> EngineClient -> engine thread -> one wake of the event loop a step -> OutputProcessor
(text, stop strings) -> one bounded, coalescing mailbox per stream -> the caller's `async for`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from llaisys.config import Config
from llaisys.engine.client import EngineClient
from llaisys.engine.outputs import EngineOutput
from llaisys.engine.request import EngineRequest
from llaisys.engine.start import start_engine
from llaisys.errors import EngineDeadError, RejectedError, RequestFailedError
from llaisys.mailbox import MAILBOX_BYTES_MAX, Mailbox
from llaisys.meter import Meter
from llaisys.model import Model, open_model
from llaisys.output import OutputProcessor
from llaisys.stats import ServiceStats
from llaisys.types import FinishReason, ModelInfo, RequestId, RequestOutput, SamplingParams

__all__ = ["AsyncLLM", "ServiceStats"]


class AsyncLLM:
    """One model, many streams. Made by `start`; every method belongs to the event loop that called it.

    Owns the open streams (mailboxes), the text state of each (OutputProcessor) and the counters. Errors that
    a caller may meet: RejectedError (its input), ContextLengthError, QueueFullError (with `retry_after_s`),
    RequestTimeoutError, RequestFailedError, EngineDeadError (also: shutting down).
    """

    def __init__(self, config: Config, model: Model) -> None:
        """Use `start`; this only lays out the state."""
        self._config = config
        self._model = model
        self._loop = asyncio.get_running_loop()
        self._processor = OutputProcessor(model.tokenizer)
        self._mailboxes: dict[RequestId, Mailbox] = {}
        self._arrivals: deque[list[EngineOutput]] = deque()
        self._meter = Meter()
        self._client: EngineClient | None = None
        self._admitting = False
        self._all_ended = asyncio.Event()

    @classmethod
    async def start(cls, config: Config) -> AsyncLLM:
        """Resolves and loads the model, starts the engine thread; returns when requests are welcome.

        Raises RejectedError or UnsupportedError (the model or a setting), naming it.
        """
        service = cls(config, await asyncio.to_thread(open_model, config))
        service._client = await asyncio.to_thread(start_engine, config, service._model.info, service._deliver)
        service._admitting = True
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
        """Tokens of the longest request, prompt and answer together."""
        return self._engine.limits.max_model_len

    @property
    def default_sampling_params(self) -> dict[str, Any]:
        """SamplingParams fields that the model sets (`temperature`, `top_p` ...) and a request may omit."""
        return dict(self._model.sampling_defaults)

    # --- requests ---

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        request_id: RequestId,
        *,
        client_id: str = "",
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Yields deltas: `outputs[0].text`, `token_ids` and `logprobs` are what is new since the last one.

        - `prompt`: text (tokenised off the loop, special tokens added) or token ids.
        - `priority`: lower goes first. `client_id`: whom fairness is counted for.
        - The last delta alone has `finished` and `finish_reason` (`stop`, `length` or `abort`). Usage:
          `prompt_token_ids`, the sum of the deltas' `token_ids`, `num_cached_tokens`.
        - A reader that is slow gets several steps in one delta, never a different answer.
        - Closing the iterator (`aclose`, a cancelled task) cancels the request within one engine step.

        Nothing is submitted before the first `anext`; what refuses the request is raised there.
        """
        ids, text = await self._prompt(prompt)
        mailbox = self._open_stream(request_id, text, ids, params)
        try:
            arrival_s = time.monotonic()
            self._engine.submit(
                EngineRequest(
                    request_id=request_id,
                    prompt_token_ids=ids,
                    params=params,
                    eos_token_ids=tuple(self._model.info.eos_token_ids),
                    arrival_s=arrival_s,
                    deadline_s=arrival_s + self._config.request_timeout_s,
                    client_id=client_id,
                    priority=priority,
                )
            )
            self._meter.submitted(request_id, len(ids), arrival_s)
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
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation, by the model's chat template, off the loop.

        Raises UnsupportedError if the model has no template, RejectedError for messages it refuses.
        """
        options = {
            **(template_kwargs or {}),
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
        }
        return (await asyncio.to_thread(self._model.chat_prompt, messages, options))[1]

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, off the loop."""
        return await asyncio.to_thread(self._model.tokenizer.encode, text, add_special_tokens)

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of token ids, off the loop."""
        return await asyncio.to_thread(self._model.tokenizer.decode, list(ids), skip_special_tokens)

    def abort(self, request_id: RequestId) -> None:
        """Cancels a request; its stream ends with finish reason `abort`. An unknown id is ignored."""
        self._engine.cancel(request_id)

    # --- health ---

    def is_alive(self) -> bool:
        """False once the engine is dead or closed."""
        return self._client is not None and self._client.error is None

    def is_ready(self) -> bool:
        """True while new requests are welcome: loaded, alive, not draining."""
        return self._admitting and self.is_alive()

    def stats(self) -> ServiceStats:
        """Gauges and totals now."""
        return self._meter.snapshot(self._engine.stats())

    async def close(self, drain_s: float = 0.0) -> None:
        """Stops admitting, lets open streams go on for `drain_s` seconds, ends the rest with EngineDeadError
        (shutting down), stops the engine. Idempotent."""
        self._admitting = False
        if self._mailboxes and drain_s > 0 and self.is_alive():
            self._all_ended.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._all_ended.wait(), drain_s)
        if self._client is not None:
            await asyncio.to_thread(self._client.close)

    # --- inside ---

    @property
    def _engine(self) -> EngineClient:
        if self._client is None:
            raise EngineDeadError("the engine has not been started")
        return self._client

    async def _prompt(self, prompt: str | Sequence[int]) -> tuple[list[int], str | None]:
        if isinstance(prompt, str):
            return await self.encode(prompt), prompt
        return list(prompt), None

    def _open_stream(
        self, request_id: RequestId, text: str | None, ids: list[int], params: SamplingParams
    ) -> Mailbox:
        if not self._admitting:
            raise EngineDeadError("shutting down: no new requests")
        if request_id in self._mailboxes:
            raise RejectedError(f"request id {request_id!r} is in use", param="request_id")
        mailbox = self._mailboxes[request_id] = Mailbox()
        self._processor.add(request_id, text, ids, params)
        return mailbox

    def _close_stream(self, request_id: RequestId) -> None:
        """The only way out of a stream: after its end, its error, or its reader's leaving."""
        del self._mailboxes[request_id]
        if self._processor.discard(request_id):
            self._engine.cancel(request_id)
            self._meter.finished(request_id, FinishReason.ABORT.value, time.monotonic())
        if not self._mailboxes:
            self._all_ended.set()

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        """Called on the engine thread, once a step. What waits is bounded by the open requests' tokens."""
        self._arrivals.append(outputs)
        try:
            self._loop.call_soon_threadsafe(self._drain)
        except RuntimeError:  # the event loop is closed: nobody reads any more
            self._arrivals.clear()

    def _drain(self) -> None:
        now_s = time.monotonic()
        while self._arrivals:
            for event in self._arrivals.popleft():
                self._hand_over(event, now_s)

    def _hand_over(self, event: EngineOutput, now_s: float) -> None:
        """One engine output into its stream's mailbox; what comes after the end of a stream is dropped."""
        request_id = event.request_id
        mailbox = self._mailboxes.get(request_id)
        if mailbox is None or request_id not in self._processor:
            return
        if event.error is not None:
            self._processor.discard(request_id)
            mailbox.fail(event.error)
            reason = event.finish_reason or FinishReason.ERROR
            self._meter.finished(request_id, reason.value, now_s)
            return
        delta = self._processor.process(event)
        answer = delta.outputs[0]
        self._meter.tokens(request_id, len(answer.token_ids), now_s)
        if not mailbox.put(delta):
            self._processor.discard(request_id)
            self._engine.cancel(request_id)
            mailbox.fail(RequestFailedError(f"the reader fell more than {MAILBOX_BYTES_MAX} bytes behind"))
            self._meter.finished(request_id, FinishReason.ERROR.value, now_s)
        elif answer.finish_reason is not None:
            if event.finish_reason is None:  # a stop string: the engine does not know yet
                self._engine.cancel(request_id)
            self._meter.finished(request_id, answer.finish_reason, now_s)
