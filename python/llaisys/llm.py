"""The blocking API, for scripts: prompts in, completions out, whole or as a stream of deltas.

The engine is the one that serves.
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
from llaisys.engine.outputs import EngineOutput
from llaisys.engine.request import EngineRequest
from llaisys.engine.start import start_engine
from llaisys.errors import EngineDeadError, LlaisysError, RejectedError
from llaisys.grammar_trials import GrammarTrials
from llaisys.model import Model, open_model
from llaisys.output import OutputProcessor, append, empty
from llaisys.prompt import bad_word_ids, truncated
from llaisys.sessions import check_name
from llaisys.types import ModelInfo, RequestId, RequestOutput, SamplingParams

log = logging.getLogger(__name__)

Prompt: TypeAlias = "str | Mapping[str, Any] | Sequence[int]"
Messages: TypeAlias = "Sequence[Mapping[str, Any]]"
ParamsOrList: TypeAlias = "SamplingParams | Sequence[SamplingParams]"


@dataclass(frozen=True, slots=True)
class _Ask:
    """One prompt, ready for the engine."""

    request_id: RequestId
    prompt: str | None
    ids: list[int]
    params: SamplingParams
    bad_word_ids: tuple[tuple[int, ...], ...]
    session_id: str


class LLM:
    """One model, loaded when made, freed by `close`, the end of a `with`, or when nobody holds it any more.

    `model` is a folder, a `.gguf` file or the name of an embedded model (`smollm2`). Every field of
    `llaisys.config.Config` is a keyword; an unknown one is refused by name.

    `generate` and `chat` may be called from several threads; their requests share the engine's batches. There
    is no time limit per request unless `request_timeout_s` is set.
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
        """Loads the model. `kv_cache_memory` is in bytes (`kv_cache_memory_bytes`).

        Raises RejectedError or UnsupportedError: the setting or the model, by name.
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
        # Prompts are fed as room appears; a queue shorter than a batch would only keep the batch empty.
        n_open = max(config.max_num_queued_reqs, config.max_num_seqs)
        feed = {"max_num_queued_reqs": n_open, "max_num_queued_tokens": None}
        self._config: Config = config.model_copy(update=feed)
        self._model: Model = open_model(self._config)
        self._router = _Router(n_open)
        self._ordinals = itertools.count()
        # The engine knows the router and not this object, so that dropping an LLM frees its engine.
        grammars = self._model.grammars()
        self._client = start_engine(self._config, self._model.info, self._router.deliver, grammars=grammars)
        self._trials = GrammarTrials(grammars.tokens)
        self._finalizer = weakref.finalize(self, _close, self._client, self._trials)
        self._finalizer.atexit = False  # at exit the client closes itself, Ctrl-C or not

    @property
    def model_info(self) -> ModelInfo:
        """Facts of the checkpoint."""
        return self._model.info

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest request, prompt and answer together."""
        return self._client.limits.max_model_len

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses where none are given: the model's own defaults."""
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
        """Return the completions, in the order of the prompts; with `stream`, an iterator over their deltas.

        - `prompts`: one or several: text, `{"prompt": text}`, `{"prompt_token_ids": ids}` or ids themselves.
        - `sampling_params`: one for all, or one each; None: the model's defaults.
        - `session_id`: the session (made if it is new) whose KV a request's becomes at its end, and is kept;
          one for one prompt, or one each, "" for none. The prompt is the whole conversation all the same.
        - `stream`: each item is what one choice has new: `text`, `token_ids` and `logprobs` of its
          one output. Deltas of several prompts are interleaved; request ids ascend in the order of the
          prompts. Closing the iterator cancels what is still open; nothing is submitted before its first
          item is asked for.

        Everything is checked before anything runs: RejectedError names the field, ContextLengthError both
        lengths. A request that fails or times out while it runs does not stop the others: its `finish_reason`
        is `error` or `timeout`, and the log says why. Raises EngineDeadError if the engine dies.
        """
        texts_and_ids = [self._encode(prompt) for prompt in _as_list(prompts)]
        asks = self._checked(texts_and_ids, sampling_params, session_id)
        return self._run(asks, stream=stream, use_tqdm=use_tqdm)

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
        """Complete one conversation or a list of them, by the model's chat template; else as `generate`.

        Raises UnsupportedError if the model has no template.
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
        asks = self._checked([*rendered], sampling_params, session_id)
        return self._run(asks, stream=stream, use_tqdm=use_tqdm)

    def close(self) -> None:
        """Frees the model; idempotent."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- inside ---

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise RejectedError("this LLM is closed")

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Text, where there is one, and ids."""
        self._check_open()
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), _ids(prompt["prompt_token_ids"])
            if not isinstance(prompt.get("prompt"), str):
                raise RejectedError("a prompt needs 'prompt' or 'prompt_token_ids'", param="prompts")
            prompt = str(prompt["prompt"])
        if isinstance(prompt, str):
            return prompt, self._model.tokenizer.encode(prompt, add_special_tokens=True)
        return None, _ids(prompt)

    def _checked(
        self,
        prompts: Sequence[tuple[str | None, list[int]]],
        sampling_params: ParamsOrList | None,
        session_id: str | Sequence[str],
    ) -> list[_Ask]:
        """What to submit, checked. Raises as `generate`."""
        params = self._params(sampling_params, len(prompts))
        sessions = _sessions(session_id, len(prompts))
        asks = [
            _Ask(
                f"{next(self._ordinals)}",
                text,
                truncated(ids, each, self.max_model_len),
                each,
                bad_word_ids(self._model.tokenizer, each.bad_words),
                session,
            )
            for (text, ids), each, session in zip(prompts, params, sessions, strict=True)
        ]
        for ask in asks:
            self._client.check(ask.ids, ask.params)
            if ask.params.structured_outputs is not None:
                self._trials.check_now(ask.params.structured_outputs)
        return asks

    def _run(
        self, asks: Sequence[_Ask], *, stream: bool, use_tqdm: bool
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        deltas = self._deltas(asks, use_tqdm=use_tqdm)
        return deltas if stream else _joined(asks, deltas)

    def _deltas(self, asks: Sequence[_Ask], *, use_tqdm: bool) -> Iterator[RequestOutput]:
        """Runs the requests. A generator of this object: it keeps the engine alive while it is read."""
        with tqdm(total=len(asks), desc="Processed prompts", disable=not use_tqdm) as progress:
            yield from _Run(self._client, self._model, self._router, self._timeout_s()).deltas(asks, progress)

    def _timeout_s(self) -> float:
        """A batch takes as long as it takes; only a limit that somebody set is kept."""
        is_set = "request_timeout_s" in self._config.model_fields_set
        return self._config.request_timeout_s if is_set else math.inf

    def _params(self, given: ParamsOrList | None, n_prompts: int) -> Sequence[SamplingParams]:
        if given is None:
            given = self.get_default_sampling_params()
        if isinstance(given, SamplingParams):
            return [given] * n_prompts
        if len(given) != n_prompts:
            raise RejectedError(
                f"{n_prompts} prompts and {len(given)} sampling_params: give one for all, or one each",
                param="sampling_params",
            )
        return given


class _Router:
    """Between the engine thread and the calls of `generate`: which call reads which request, and how many may
    be open at once. A permit is taken before a submit, and given back with the request's last output."""

    def __init__(self, n_open_max: int) -> None:
        self._permits = threading.Semaphore(n_open_max)
        self._readers: dict[RequestId, queue.SimpleQueue[EngineOutput]] = {}

    def enter(self, request_id: RequestId, reader: queue.SimpleQueue[EngineOutput], *, wait: bool) -> bool:
        """Takes a permit, waiting for one if asked to; False if there is none now."""
        if not self._permits.acquire(blocking=wait):
            return False
        self._readers[request_id] = reader
        return True

    def leave(self, request_id: RequestId) -> queue.SimpleQueue[EngineOutput]:
        """Gives the permit back; the reader that had it."""
        self._permits.release()
        return self._readers.pop(request_id)

    def deliver(self, outputs: list[EngineOutput]) -> None:
        """Called on the engine thread, once a step."""
        for output in outputs:
            reader = self.leave(output.request_id) if output.last else self._readers[output.request_id]
            reader.put(output)


class _Run:
    """One call of `generate`: feeds its prompts as permits come free, and yields what comes of them."""

    def __init__(self, client: EngineClient, model: Model, router: _Router, timeout_s: float) -> None:
        self._client = client
        self._router = router
        self._timeout_s = timeout_s
        self._eos = tuple(model.info.eos_token_ids)
        self._processor = OutputProcessor(model.tokenizer)
        self._news: queue.SimpleQueue[EngineOutput] = queue.SimpleQueue()
        self._open: set[RequestId] = set()

    def deltas(self, asks: Sequence[_Ask], progress: tqdm[NoReturn]) -> Iterator[RequestOutput]:
        """What each choice has new, in the order of the engine. On any error, Ctrl-C too, and when the
        iterator is closed, what is open is cancelled."""
        queued = deque(asks)
        try:
            while queued or self._open:
                while queued and self._submit(queued[0]):
                    queued.popleft()
                delta = self._take(self._news.get())
                if delta is not None:
                    progress.update(delta.finished)
                    yield delta
        finally:
            for request_id in self._open:
                self._client.cancel(request_id)

    def _submit(self, ask: _Ask) -> bool:
        """False if other requests have to end first; waits for those of other calls if none is ours."""
        if not self._router.enter(ask.request_id, self._news, wait=not self._open):
            return False
        now_s = time.monotonic()
        try:
            self._client.submit(
                EngineRequest(
                    request_id=ask.request_id,
                    prompt_token_ids=ask.ids,
                    params=ask.params,
                    eos_token_ids=self._eos,
                    arrival_s=now_s,
                    deadline_s=now_s + self._timeout_s,
                    bad_word_ids=ask.bad_word_ids,
                    session_id=ask.session_id,
                )
            )
        except LlaisysError:
            self._router.leave(ask.request_id)
            raise
        self._processor.add(ask.request_id, ask.prompt, ask.ids, ask.params)
        self._open.add(ask.request_id)
        return True

    def _take(self, event: EngineOutput) -> RequestOutput | None:
        """The delta of an event; None for an event of a request or choice that a stop string has ended."""
        if event.request_id not in self._open:
            return None
        if isinstance(event.error, EngineDeadError):
            self._open.remove(event.request_id)
            raise event.error
        if not self._processor.expects(event):
            return None
        if event.error is not None:
            log.error("request %s: %s", event.request_id, event.error)
        delta = self._processor.process(event)
        if delta.prompt_logprobs is not None:
            delta.prompt_logprobs = list(delta.prompt_logprobs)
        if event.finish_reason is None and delta.outputs[0].finish_reason is not None:
            self._client.cancel(event.request_id, event.index)
        if delta.finished:
            self._open.remove(event.request_id)
        return delta


def _joined(asks: Sequence[_Ask], deltas: Iterator[RequestOutput]) -> list[RequestOutput]:
    """The whole completions, in the order of the requests."""
    wholes = {ask.request_id: empty(ask.request_id, ask.prompt, ask.ids, ask.params.n) for ask in asks}
    for delta in deltas:
        append(wholes[delta.request_id], delta)
    return list(wholes.values())


def _close(client: EngineClient, trials: GrammarTrials) -> None:
    client.close()
    trials.close()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Any]:
    """One prompt becomes a list of one; a list of ids is one prompt."""
    if isinstance(prompts, (str, Mapping)) or (len(prompts) > 0 and isinstance(prompts[0], Integral)):
        return [prompts]
    return prompts


def _sessions(given: str | Sequence[str], n_prompts: int) -> Sequence[str]:
    """One for each prompt. Raises RejectedError for a name that is none, or that several prompts have."""
    sessions = [""] * n_prompts if given == "" else [given] if isinstance(given, str) else given
    if len(sessions) != n_prompts:
        raise RejectedError(
            f"{n_prompts} prompts, {len(sessions)} session_id: give one each", param="session_id"
        )
    named = [name for name in sessions if name]
    for name in named:
        check_name(name)
    if len(named) > len(set(named)):
        raise RejectedError("session_id holds a session twice: each goes with one prompt", param="session_id")
    return sessions


def _ids(ids: Sequence[Any]) -> list[int]:
    for each in ids:
        if not isinstance(each, Integral):
            raise RejectedError(f"the prompt holds {each!r}, which is no token id", param="prompt_token_ids")
    return [int(each) for each in ids]
