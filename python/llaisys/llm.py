"""LLM: the blocking API for scripts, prompts in and completions out, complete or as a stream of deltas.

It runs the same engine as the server.
"""

from __future__ import annotations

import itertools
import logging
import math
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from types import TracebackType
from typing import Any, Literal, NoReturn, TypeAlias, overload

from tqdm import tqdm

from llaisys.config import Config, load_config
from llaisys.engine.client import EngineClient
from llaisys.engine.engine_output import EngineOutput
from llaisys.engine.request import EngineRequest
from llaisys.engine.start import start_engine
from llaisys.errors import EngineDeadError, LlaisysError, RejectedError
from llaisys.grammar_trials import GrammarTrials
from llaisys.model_assets import ModelAssets, load_model_assets
from llaisys.model_info import ModelInfo
from llaisys.output_processor import OutputProcessor, append_delta, empty_output
from llaisys.outputs import RequestId, RequestOutput
from llaisys.prompt import tokenize_bad_words, truncate_prompt
from llaisys.sampling_params import SamplingParams
from llaisys.session_client import check_name

log = logging.getLogger(__name__)

Prompt: TypeAlias = "str | Mapping[str, Any] | Sequence[int]"
Messages: TypeAlias = "Sequence[Mapping[str, Any]]"
ParamsOrList: TypeAlias = "SamplingParams | Sequence[SamplingParams]"


@dataclass(frozen=True, slots=True)
class _PreparedPrompt:
    """One validated prompt with everything that the engine needs."""

    request_id: RequestId
    text: str | None
    ids: list[int]
    params: SamplingParams
    bad_word_ids: tuple[tuple[int, ...], ...]
    prediction_token_ids: list[int]
    session_id: str


class LLM:
    """Loads one model and generates completions. `close`, a `with` block or garbage collection frees it.

    `model` is a folder, a `.gguf` file or the name of an embedded model (`smollm2`). Every field of
    `llaisys.config.Config` is a keyword; an unknown keyword is an error.

    Several threads may call `generate` and `chat`; their requests share the engine's batches. Requests have
    no time limit unless `request_timeout_s` is set.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str = "auto",
        quantization: str | None = None,
        device: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        kv_cache_memory: int | None = None,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        """Load the model. `kv_cache_memory` is in bytes (`kv_cache_memory_bytes`).

        Raises RejectedError or UnsupportedError naming the setting or the model.
        """
        named = {
            "quantization": quantization,
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "kv_cache_memory_bytes": kv_cache_memory,
        }
        given = {key: value for key, value in named.items() if value is not None}
        config = load_config(
            {"model": str(model), "dtype": dtype, "device": device, "seed": seed, **settings, **given}
        )
        # Prompts are submitted as requests end; a queue shorter than a batch would leave the batch partly
        # empty.
        n_open = max(config.max_num_queued_reqs, config.max_num_seqs)
        queue_limits = {"max_num_queued_reqs": n_open, "max_num_queued_tokens": None}
        self._config: Config = config.model_copy(update=queue_limits)
        self._model: ModelAssets = load_model_assets(self._config)
        self._router = _Router(n_open)
        self._ordinals = itertools.count()
        # The engine refers to the router and not to this object, so that garbage collection can free the
        # engine.
        compiler = self._model.grammar_compiler()
        self._client = start_engine(
            self._config,
            self._model.info,
            self._router.deliver,
            grammar_compiler=compiler,
            draft=self._model.draft,
        )
        self._grammar_trials = GrammarTrials(compiler.tokenizer)
        self._finalizer = weakref.finalize(self, _close, self._client, self._grammar_trials)
        self._finalizer.atexit = False  # the client closes itself at exit

    @property
    def model_info(self) -> ModelInfo:
        """Metadata of the checkpoint."""
        return self._model.info

    @property
    def max_model_len(self) -> int:
        """The longest request in tokens, prompt and completion together."""
        return self._client.limits.max_model_len

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the model's defaults, which `generate` uses without `sampling_params`."""
        return SamplingParams(**self._model.sampling_defaults)

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: ParamsOrList | None = None,
        *,
        stream: Literal[False] = False,
        session_id: str | Sequence[str] = "",
        use_tqdm: bool = False,
    ) -> list[RequestOutput]: ...

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: ParamsOrList | None = None,
        *,
        stream: Literal[True],
        session_id: str | Sequence[str] = "",
        use_tqdm: bool = False,
    ) -> Iterator[RequestOutput]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: ParamsOrList | None = None,
        *,
        stream: bool = False,
        session_id: str | Sequence[str] = "",
        use_tqdm: bool = False,
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        """Return the completions in the order of the prompts; with `stream`, an iterator over deltas.

        - `prompts`: one prompt or several, each as text, `{"prompt": text}`, `{"prompt_token_ids": ids}`, or
          token ids.
        - `sampling_params`: one for all prompts, or one per prompt. None selects the model's defaults.
        - `session_id`: one session name per prompt, "" for no session. A new name creates a session, which
          keeps the request's KV. The prompt must still be the whole conversation.
        - `stream`: each item is a delta of one choice, whose one output has the new `text`, `token_ids` and
          `logprobs`. Deltas of several prompts are interleaved; request ids ascend in the order of the
          prompts. Nothing is submitted before the first item. Closing the iterator cancels open requests.

        All prompts are validated before any of them runs. RejectedError names the field, ContextLengthError
        both lengths. A request that fails or times out does not stop the others. Its `finish_reason` is
        `error` or `timeout`, and the log has the cause. Raises EngineDeadError if the engine dies.
        """
        texts_and_ids = [self._encode(prompt) for prompt in _as_list(prompts)]
        prepared = self._prepare(texts_and_ids, sampling_params, session_id)
        return self._run(prepared, stream=stream, use_tqdm=use_tqdm)

    @overload
    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: ParamsOrList | None = None,
        *,
        stream: Literal[False] = False,
        session_id: str | Sequence[str] = "",
        use_tqdm: bool = False,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]: ...

    @overload
    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: ParamsOrList | None = None,
        *,
        stream: Literal[True],
        session_id: str | Sequence[str] = "",
        use_tqdm: bool = False,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[RequestOutput]: ...

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: ParamsOrList | None = None,
        *,
        stream: bool = False,
        session_id: str | Sequence[str] = "",
        use_tqdm: bool = False,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        """Complete one conversation or several, rendered with the model's chat template.

        Otherwise like `generate`. Raises UnsupportedError if the model has no template.
        """
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: list[Any] = [messages] if one else list(messages)
        options = {
            **(chat_template_kwargs or {}),
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
        }
        self._check_open()
        rendered = [self._model.chat_prompt(conversation, options) for conversation in conversations]
        prepared = self._prepare([*rendered], sampling_params, session_id)
        return self._run(prepared, stream=stream, use_tqdm=use_tqdm)

    def close(self) -> None:
        """Free the model. Idempotent."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- internals ---

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise RejectedError("this LLM is closed")

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Return the prompt's text, if given, and its token ids."""
        self._check_open()
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), _ids(prompt["prompt_token_ids"])
            if not isinstance(prompt.get("prompt"), str):
                raise RejectedError(
                    "a prompt object needs 'prompt' (text) or 'prompt_token_ids'", param="prompts"
                )
            prompt = str(prompt["prompt"])
        if isinstance(prompt, str):
            return prompt, self._model.tokenizer.encode(prompt, add_special_tokens=True)
        return None, _ids(prompt)

    def _prepare(
        self,
        prompts: Sequence[tuple[str | None, list[int]]],
        sampling_params: ParamsOrList | None,
        session_id: str | Sequence[str],
    ) -> list[_PreparedPrompt]:
        """Validate prompts and complete them with what the engine needs. Raises the errors of `generate`."""
        params = self._params(sampling_params, len(prompts))
        sessions = _sessions(session_id, len(prompts))
        prepared = [
            _PreparedPrompt(
                f"{next(self._ordinals)}",
                text,
                truncate_prompt(ids, each, self.max_model_len),
                each,
                tokenize_bad_words(self._model.tokenizer, each.bad_words),
                self._model.tokenizer.encode(each.prediction, False) if each.prediction else [],
                session,
            )
            for (text, ids), each, session in zip(prompts, params, sessions, strict=True)
        ]
        for prompt in prepared:
            self._client.check(prompt.ids, prompt.params)
            if prompt.params.structured_outputs is not None:
                self._grammar_trials.check_now(prompt.params.structured_outputs)
        return prepared

    def _run(
        self, prepared: Sequence[_PreparedPrompt], *, stream: bool, use_tqdm: bool
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        deltas = self._deltas(prepared, use_tqdm=use_tqdm)
        return deltas if stream else _merge_deltas(prepared, deltas)

    def _deltas(self, prepared: Sequence[_PreparedPrompt], *, use_tqdm: bool) -> Iterator[RequestOutput]:
        """Run the requests. The generator refers to `self`, so the engine is not freed while it is read."""
        with tqdm(total=len(prepared), desc="Processed prompts", disable=not use_tqdm) as progress:
            yield from _GenerateCall(self._client, self._model, self._router, self._timeout_s()).deltas(
                prepared, progress
            )

    def _timeout_s(self) -> float:
        """Return the time limit per request in seconds; infinite unless `request_timeout_s` was set."""
        is_set = "request_timeout_s" in self._config.model_fields_set
        return self._config.request_timeout_s if is_set else math.inf

    def _params(self, given: ParamsOrList | None, n_prompts: int) -> Sequence[SamplingParams]:
        if given is None:
            given = self.get_default_sampling_params()
        if isinstance(given, SamplingParams):
            return [given] * n_prompts
        if len(given) != n_prompts:
            raise RejectedError(
                f"{n_prompts} prompts and {len(given)} sampling_params: pass one for all, or one per prompt",
                param="sampling_params",
            )
        return given


class _Router:
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


class _GenerateCall:
    """One call of `generate`: submits its prompts as permits become available, and yields their deltas."""

    def __init__(self, client: EngineClient, model: ModelAssets, router: _Router, timeout_s: float) -> None:
        self._client = client
        self._router = router
        self._timeout_s = timeout_s
        self._eos = tuple(model.info.eos_token_ids)
        self._processor = OutputProcessor(model.tokenizer)
        self._outputs: queue.SimpleQueue[EngineOutput] = queue.SimpleQueue()
        self._open: set[RequestId] = set()

    def deltas(
        self, prepared: Sequence[_PreparedPrompt], progress: tqdm[NoReturn]
    ) -> Iterator[RequestOutput]:
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
                    progress.update(delta.finished)
                    yield delta
        finally:
            for request_id in self._open:
                self._client.cancel(request_id)

    def _submit(self, prompt: _PreparedPrompt) -> bool:
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
                )
            )
        except LlaisysError:
            self._router.unregister(prompt.request_id)
            raise
        self._processor.add(prompt.request_id, prompt.text, prompt.ids, prompt.params)
        self._open.add(prompt.request_id)
        return True

    def _process(self, output: EngineOutput) -> RequestOutput | None:
        """Return the delta of an output, or None if a stop string has already ended its request or choice."""
        if output.request_id not in self._open:
            return None
        if isinstance(output.error, EngineDeadError):
            self._open.remove(output.request_id)
            raise output.error
        if not self._processor.expects(output):
            return None
        if output.error is not None:
            log.error("request %s: %s", output.request_id, output.error)
        delta = self._processor.process(output)
        if delta.prompt_logprobs is not None:
            delta.prompt_logprobs = list(delta.prompt_logprobs)
        if output.finish_reason is None and delta.outputs[0].finish_reason is not None:
            self._client.cancel(output.request_id, output.index)
        if delta.finished:
            self._open.remove(output.request_id)
        return delta


def _merge_deltas(
    prepared: Sequence[_PreparedPrompt], deltas: Iterator[RequestOutput]
) -> list[RequestOutput]:
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


def _as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Any]:
    """Return a list of prompts; a list of token ids is one prompt."""
    if isinstance(prompts, (str, Mapping)) or (len(prompts) > 0 and isinstance(prompts[0], Integral)):
        return [prompts]
    return prompts


def _sessions(given: str | Sequence[str], n_prompts: int) -> Sequence[str]:
    """Return one session name per prompt. Raises RejectedError for an invalid or repeated name."""
    sessions = [""] * n_prompts if given == "" else [given] if isinstance(given, str) else given
    if len(sessions) != n_prompts:
        raise RejectedError(
            f"{n_prompts} prompts and {len(sessions)} session_id: pass one per prompt", param="session_id"
        )
    named = [name for name in sessions if name]
    for name in named:
        check_name(name)
    if len(named) > len(set(named)):
        raise RejectedError(
            "session_id names a session twice; name a different one for each prompt", param="session_id"
        )
    return sessions


def _ids(ids: Sequence[Any]) -> list[int]:
    for each in ids:
        if not isinstance(each, Integral):
            raise RejectedError(f"the prompt has {each!r}, expected token ids", param="prompt_token_ids")
    return [int(each) for each in ids]
