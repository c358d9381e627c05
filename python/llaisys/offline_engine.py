"""OfflineEngine: one loaded model with its engine, for calls that block until their requests have ended."""

from __future__ import annotations

import itertools
import logging
import math
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tqdm import tqdm

from llaisys.config import Config
from llaisys.engine.client import EngineClient
from llaisys.engine.engine_output import EngineOutput
from llaisys.engine.request import EngineRequest
from llaisys.engine.start import start_engine
from llaisys.errors import EngineDeadError, LlaisysError, RejectedError, UnsupportedError
from llaisys.grammar_trials import GrammarTrials
from llaisys.lora_request import LoraNumbers, LoRARequest
from llaisys.model_assets import ModelAssets
from llaisys.model_info import Pooling
from llaisys.output_processor import OutputProcessor, append_delta, empty_output
from llaisys.outputs import RequestId, RequestOutput, RequestStateStats
from llaisys.prompt import Prompt, read_prompt, tokenize_bad_words, truncate_prompt
from llaisys.sampling_params import SamplingParams

log = logging.getLogger(__name__)

# Whether to show a progress bar, or what makes one, such as `functools.partial(tqdm, leave=False)`.
ShowProgress: TypeAlias = "bool | Callable[..., tqdm[Any]]"


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """One validated prompt with everything that the engine needs."""

    request_id: RequestId
    text: str | None
    ids: list[int]
    params: SamplingParams
    bad_word_ids: tuple[tuple[int, ...], ...]
    prediction_token_ids: list[int]
    session_id: str = ""
    priority: int = 0
    pooling: Pooling | None = None
    normalize: bool = True
    second_segment: int | None = None
    lora: LoRARequest | None = None


class OfflineEngine:
    """Prepares prompts, submits them and returns their outputs. Several threads may call it.

    `close` or garbage collection frees the engine. Requests have no time limit unless `request_timeout_s` is
    set.
    """

    def __init__(self, config: Config, model: ModelAssets) -> None:
        """Start the engine. Raises RejectedError or UnsupportedError naming the setting or the model."""
        # Prompts are submitted as requests end; a queue shorter than a batch would leave the batch partly
        # empty.
        n_open = max(config.max_num_queued_reqs, config.max_num_seqs)
        queue_limits = {"max_num_queued_reqs": n_open, "max_num_queued_tokens": None}
        self._config: Config = config.model_copy(update=queue_limits)
        self.model = model
        self._router = OutputRouter(n_open)
        self._ordinals = itertools.count()
        self._loras, self._lora_lock = LoraNumbers(), threading.Lock()
        # The engine refers to the router and not to this object, so that garbage collection can free the
        # engine.
        compiler = model.grammar_compiler()
        self.client = start_engine(
            self._config, model.info, self._router.deliver, grammar_compiler=compiler, draft=model.draft
        )
        self._grammar_trials = GrammarTrials(compiler.tokenizer)
        self._finalizer = weakref.finalize(self, _close, self.client, self._grammar_trials)
        self._finalizer.atexit = False  # the client closes itself at exit

    def close(self) -> None:
        """Stop the engine. Idempotent."""
        self._finalizer()

    def check_open(self) -> None:
        """Raise RejectedError after `close`."""
        if not self._finalizer.alive:
            raise RejectedError("this LLM is closed")

    @property
    def max_model_len(self) -> int:
        """The longest request in tokens, prompt and completion together."""
        return self.client.limits.max_model_len

    def encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Return the prompt's text, if given, and its token ids."""
        self.check_open()
        text, ids = read_prompt(prompt)
        if ids is None:
            ids = self.model.tokenizer.encode(text or "", add_special_tokens=True)
        return text, ids

    def prepare(
        self,
        prompts: Sequence[tuple[str | None, list[int]]],
        params: Sequence[SamplingParams],
        *,
        sessions: Sequence[str] | None = None,
        priorities: Sequence[int] | None = None,
        pooling: Pooling | None = None,
        normalize: Sequence[bool] | None = None,
        second_segments: Sequence[int | None] | None = None,
        loras: Sequence[LoRARequest | None] | None = None,
    ) -> list[PreparedPrompt]:
        """Validate prompts and complete them with what the engine needs. Raises the errors of `generate`."""
        self.model.check_task(pooling)
        tokenizer = self.model.tokenizer
        normalize = normalize or [True] * len(prompts)
        second_segments = second_segments or [None] * len(prompts)
        loras = self._load_loras(loras or [None] * len(prompts))
        sessions, priorities = sessions or [""] * len(prompts), priorities or [0] * len(prompts)
        prepared = [
            PreparedPrompt(
                f"{next(self._ordinals)}",
                text,
                self._truncated(text, ids, each),
                each,
                tokenize_bad_words(tokenizer, each.bad_words),
                tokenizer.encode(each.prediction, False) if each.prediction else [],
                session,
                priority,
                pooling,
                normalized,
                second_segment,
                lora,
            )
            for (text, ids), each, session, priority, normalized, second_segment, lora in zip(
                prompts, params, sessions, priorities, normalize, second_segments, loras, strict=True
            )
        ]
        for prompt in prepared:
            self.client.check(prompt.ids, prompt.params, pooling=pooling)
            if prompt.params.structured_outputs is not None:
                self._grammar_trials.check_now(prompt.params.structured_outputs)
        return prepared

    def _load_loras(self, requests: Sequence[LoRARequest | None]) -> list[LoRARequest | None]:
        """Load the adapters of some prompts; return their requests with the engine's numbers."""
        wanted = dict.fromkeys(each for each in requests if each is not None)
        limits = self.client.limits
        if wanted and not limits.max_loras:
            raise UnsupportedError("LoRA is off; set enable_lora=True", param="lora_request")
        if len(wanted) > limits.max_loras:
            raise RejectedError(
                f"lora_request names {len(wanted)} adapters, max_loras is {limits.max_loras}; raise it, or "
                "make several calls",
                param="lora_request",
            )
        numbered: dict[LoRARequest | None, LoRARequest | None] = {None: None}
        for request in wanted:
            request.check()
            with self._lora_lock:
                known = self._loras.find(request) or self._loras.new(request)
                self.client.load_lora(known).result()
                self._loras.keep(request, known)
            numbered[request] = known
        return [numbered[each] for each in requests]

    def _truncated(self, text: str | None, ids: list[int], params: SamplingParams) -> list[int]:
        """Return the prompt after `truncate_prompt_tokens`. A text of an encoder keeps its special tokens."""
        tokenizer, n_kept = self.model.tokenizer, params.truncate_prompt_tokens
        if text is None or n_kept is None or not self.model.info.is_encoder:
            return truncate_prompt(ids, params, self.max_model_len)
        n_kept = self.max_model_len if n_kept == -1 else n_kept
        bare = tokenizer.encode(text, add_special_tokens=False)
        return tokenizer.truncate(bare, n_kept, params.truncation_side)

    def deltas(
        self, prepared: Sequence[PreparedPrompt], *, use_tqdm: ShowProgress
    ) -> Iterator[RequestOutput]:
        """Run the requests. The generator refers to `self`, so the engine is not freed while it is read."""
        call = GenerateCall(self.client, self.model, self._router, self._timeout_s())
        make_bar = use_tqdm if callable(use_tqdm) else tqdm
        if not use_tqdm:
            yield from call.deltas(prepared)
            return
        with make_bar(total=len(prepared), desc="Processed prompts", dynamic_ncols=True) as progress:
            for delta in call.deltas(prepared):
                progress.update(delta.finished)
                yield delta

    def _timeout_s(self) -> float:
        """Return the time limit per request in seconds; infinite unless `request_timeout_s` was set."""
        is_set = "request_timeout_s" in self._config.model_fields_set
        return self._config.request_timeout_s if is_set else math.inf


class OutputRouter:
    """Routes outputs from the engine thread to the calls of `generate`; bounds the number of open requests.

    A call acquires a permit before it submits a request; the request's last output releases it.
    """

    def __init__(self, n_open_max: int) -> None:
        self._permits = threading.Semaphore(n_open_max)
        self._readers: dict[RequestId, queue.SimpleQueue[EngineOutput]] = {}

    def register(self, request_id: RequestId, reader: queue.SimpleQueue[EngineOutput], *, wait: bool) -> bool:
        """Acquire a permit and register the reader. Without `wait`, return False if no permit is free."""
        if not self._permits.acquire(blocking=wait):
            return False
        self._readers[request_id] = reader
        return True

    def unregister(self, request_id: RequestId) -> queue.SimpleQueue[EngineOutput]:
        """Release the permit; return the reader of the request."""
        self._permits.release()
        return self._readers.pop(request_id)

    def deliver(self, outputs: list[EngineOutput]) -> None:
        """Route the outputs of a step; called on the engine thread."""
        for output in outputs:
            reader = self.unregister(output.request_id) if output.last else self._readers[output.request_id]
            reader.put(output)


class GenerateCall:
    """One call of `generate`: submits its prompts as permits become available, and yields their deltas."""

    def __init__(
        self, client: EngineClient, model: ModelAssets, router: OutputRouter, timeout_s: float
    ) -> None:
        self._client = client
        self._router = router
        self._timeout_s = timeout_s
        self._model = model
        self._eos = tuple(model.info.eos_token_ids)
        self._processor = OutputProcessor(model.tokenizer)
        self._outputs: queue.SimpleQueue[EngineOutput] = queue.SimpleQueue()
        self._open: dict[RequestId, RequestStateStats] = {}

    def deltas(self, prepared: Sequence[PreparedPrompt]) -> Iterator[RequestOutput]:
        """Yield deltas in the order of the engine's outputs.

        An error, Ctrl-C or closing the iterator cancels open requests.
        """
        queued = deque(prepared)
        try:
            while queued or self._open:
                while queued and self._submit(queued[0]):
                    queued.popleft()
                delta = self._process(self._outputs.get())
                if delta is not None:
                    yield delta
        finally:
            for request_id in self._open:
                self._client.cancel(request_id)

    def _submit(self, prompt: PreparedPrompt) -> bool:
        """Submit a prompt; return False if an open request of this call has to end first.

        Without an open request of this call, wait for one of another call.
        """
        if not self._router.register(prompt.request_id, self._outputs, wait=not self._open):
            return False
        now_s = time.monotonic()
        try:
            self._client.submit(
                EngineRequest(
                    request_id=prompt.request_id,
                    prompt_token_ids=prompt.ids,
                    params=prompt.params,
                    eos_token_ids=self._eos,
                    arrival_s=now_s,
                    deadline_s=now_s + self._timeout_s,
                    bad_word_ids=prompt.bad_word_ids,
                    prediction_token_ids=prompt.prediction_token_ids,
                    session_id=prompt.session_id,
                    priority=prompt.priority,
                    pooling=prompt.pooling,
                    normalize=prompt.normalize,
                    second_segment=prompt.second_segment,
                    score_token_ids=self._model.score_token_ids(prompt.pooling),
                    lora=prompt.lora,
                )
            )
        except LlaisysError:
            self._router.unregister(prompt.request_id)
            raise
        self._processor.add(prompt.request_id, prompt.text, prompt.ids, prompt.params)
        self._open[prompt.request_id] = RequestStateStats(time.time(), now_s)
        return True

    def _process(self, output: EngineOutput) -> RequestOutput | None:
        """Return the delta of an output, or None if a stop string has already ended its request or choice."""
        if output.request_id not in self._open:
            return None
        if isinstance(output.error, EngineDeadError):
            del self._open[output.request_id]
            raise output.error
        if not self._processor.expects(output):
            return None
        if output.error is not None:
            log.error("request %s: %s", output.request_id, output.error)
        delta = self._processor.process(output)
        if delta.embedding is None:
            delta.metrics = self._open[output.request_id]
            if n_tokens := len(delta.outputs[0].token_ids):
                delta.metrics.record_tokens(n_tokens, delta.queued_s, time.monotonic())
        if delta.prompt_logprobs is not None:
            delta.prompt_logprobs = list(delta.prompt_logprobs)
        if output.finish_reason is None and delta.outputs[0].finish_reason is not None:
            self._client.cancel(output.request_id, output.index)
        if delta.finished:
            del self._open[output.request_id]
        return delta


def merge_deltas(prepared: Sequence[PreparedPrompt], deltas: Iterator[RequestOutput]) -> list[RequestOutput]:
    """Return whole completions in the order of the prompts."""
    merged = {
        prompt.request_id: empty_output(prompt.request_id, prompt.text, prompt.ids, prompt.params.n)
        for prompt in prepared
    }
    for delta in deltas:
        append_delta(merged[delta.request_id], delta)
    return list(merged.values())


def _close(client: EngineClient, trials: GrammarTrials) -> None:
    client.close()
    trials.close()
