"""OutputProcessor: converts engine outputs (token ids) to text, stop strings and logprobs with token texts.

It runs on the client side of `EngineClient`: the engine works on ids only, and a stop string reaches it as a
cancel. One thread owns a processor (the output loop, or the caller of `LLM.generate`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import overload

from llaisys.engine.engine_output import EngineOutput, TokenLogprobs
from llaisys.outputs import CompletionOutput, FinishReason, Logprob, RequestId, RequestOutput
from llaisys.sampling_params import RequestOutputKind, SamplingParams
from llaisys.text.detokenizer import IncrementalDetokenizer
from llaisys.text.tokenizer import Tokenizer


@dataclass(slots=True)
class _Choice:
    """The detokenization state of one open choice; `stream` is None without `detokenize`."""

    stream: IncrementalDetokenizer | None
    cumulative_logprob: float | None


@dataclass(slots=True)
class _RequestState:
    """One open request: its prompt, parameters and open choices by index."""

    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    choices: dict[int, _Choice]


class _PromptLogprobs(Sequence[dict[int, Logprob] | None]):
    """The logprobs of a prompt's tokens, None for the first.

    Token texts are added when an entry is read, because adding all at once would block the output loop.
    """

    def __init__(
        self, entries: list[TokenLogprobs], named: Callable[[TokenLogprobs], dict[int, Logprob]]
    ) -> None:
        self._entries = entries
        self._named = named

    def __len__(self) -> int:
        return len(self._entries) + 1

    @overload
    def __getitem__(self, at: int) -> dict[int, Logprob] | None: ...
    @overload
    def __getitem__(self, at: slice) -> list[dict[int, Logprob] | None]: ...
    def __getitem__(self, at: int | slice) -> dict[int, Logprob] | list[dict[int, Logprob] | None] | None:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        i = range(len(self))[at]
        return None if i == 0 else self._named(self._entries[i - 1])


class OutputProcessor:
    """The open choices of each request, from `add` until their last delta or `discard`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[RequestId, _RequestState] = {}

    def __contains__(self, request_id: object) -> bool:
        """Return True while a choice of the request is open."""
        return request_id in self._requests

    def expects(self, output: EngineOutput) -> bool:
        """Return True if the choice of this output is open, that is, not ended by a stop string."""
        request = self._requests.get(output.request_id)
        return request is not None and output.index in request.choices

    def add(
        self, request_id: RequestId, prompt: str | None, prompt_ids: list[int], params: SamplingParams
    ) -> None:
        """Add a request and open its choices. `prompt`: the text to report, if known."""
        logprob = None if params.logprobs is None else 0.0
        choices = {
            i: _Choice(
                IncrementalDetokenizer(self._tokenizer, params) if params.detokenize else None, logprob
            )
            for i in range(params.n)
        }
        self._requests[request_id] = _RequestState(prompt, prompt_ids, params, choices)

    def discard(self, request_id: RequestId) -> bool:
        """Remove a request; return True if it was open."""
        return self._requests.pop(request_id, None) is not None

    def process(self, output: EngineOutput) -> RequestOutput:
        """Return the delta of one choice for an engine output; `append_delta` merges deltas.

        If the delta has a `finish_reason` and `output.finish_reason` is None, the choice ended at a stop
        string and the caller cancels it. Tokens after the stop string are neither returned nor counted.
        `finished`: no choice is open. Raises KeyError for a choice that is not open (`expects`).
        """
        request = self._requests[output.request_id]
        choice = request.choices[output.index]
        text, stop, n_kept = _detokenize(choice.stream, request.params, output)
        reason, stop_reason = output.finish_reason, output.stop_reason
        if stop is not None:
            reason = FinishReason.STOP
        if reason is not None:
            text += "" if choice.stream is None else choice.stream.finish()
            del request.choices[output.index]
            if not request.choices:
                del self._requests[output.request_id]
        logprobs = None
        named = partial(self._named_logprobs, detokenize=request.params.detokenize)
        if request.params.logprobs is not None:
            kept = (output.new_logprobs or [])[:n_kept]
            ranked = not request.params.logprob_token_ids
            logprobs = [named(entry, ranked=ranked) for entry in kept]
            choice.cumulative_logprob = (choice.cumulative_logprob or 0.0) + sum(e.logprob for e in kept)
        prompt_logprobs = None
        if output.new_prompt_logprobs is not None:
            prompt_logprobs = _PromptLogprobs(output.new_prompt_logprobs, named)
        completion = CompletionOutput(
            index=output.index,
            text=text,
            token_ids=output.new_token_ids[:n_kept],
            cumulative_logprob=choice.cumulative_logprob,
            logprobs=logprobs,
            finish_reason=None if reason is None else reason.value,
            stop_reason=stop if stop is not None else stop_reason,
            num_accepted_prediction_tokens=output.num_accepted_prediction_tokens,
            num_rejected_prediction_tokens=output.num_rejected_prediction_tokens,
        )
        return RequestOutput(
            output.request_id,
            request.prompt,
            request.prompt_ids,
            [completion],
            finished=not request.choices,
            num_cached_tokens=output.num_cached_tokens,
            prompt_logprobs=prompt_logprobs,
            embedding=output.embedding,
            score=output.score,
            queued_s=output.queued_s,
        )

    def _named_logprobs(
        self, entry: TokenLogprobs, *, detokenize: bool, ranked: bool = True
    ) -> dict[int, Logprob]:
        """Return token id -> Logprob: the sampled (or prompt) token first, then the others in their order.

        `ranked`: the others are the best ones, so that their order is their rank.
        """
        text = self._tokenizer.token_text if detokenize else _no_text
        named = {entry.token_id: Logprob(entry.logprob, entry.rank, text(entry.token_id))}
        for rank, (token_id, logprob) in enumerate(entry.top, start=1):
            if token_id != entry.token_id:
                named[token_id] = Logprob(logprob, rank if ranked else None, text(token_id))
        return named


def _no_text(token_id: int) -> None:  # noqa: ARG001 -- the signature of `Tokenizer.token_text`
    return None


def _detokenize(
    stream: IncrementalDetokenizer | None, params: SamplingParams, output: EngineOutput
) -> tuple[str, str | None, int]:
    """Return the text, the stop string or None, and the number of ids that count.

    An id that ended the completion counts; its text is shown only with `include_stop_str_in_output`.
    """
    ids = output.new_token_ids
    if stream is None:
        return "", None, len(ids)
    ends_by_id = output.finish_reason is FinishReason.STOP and not params.include_stop_str_in_output
    delta = stream.push(ids[:-1] if ends_by_id else ids)
    n_kept = len(ids) if delta.stopped is None else delta.n_tokens_kept
    return delta.text, delta.stopped, n_kept


def append_delta(whole: RequestOutput, delta: RequestOutput) -> None:
    """Merge the next delta of a request into `whole`, in place, choice by choice."""
    choices = {choice.index: choice for choice in whole.outputs}
    for new in delta.outputs:
        choice = choices.get(new.index)
        if choice is None:
            whole.outputs.append(new)
            continue
        choice.text += new.text
        choice.token_ids += new.token_ids
        if new.logprobs is not None:
            choice.logprobs = choice.logprobs or []
            choice.logprobs += new.logprobs
        choice.cumulative_logprob = new.cumulative_logprob
        choice.finish_reason = new.finish_reason
        choice.stop_reason = new.stop_reason
        for name in ("num_accepted_prediction_tokens", "num_rejected_prediction_tokens"):
            setattr(choice, name, max(getattr(choice, name), getattr(new, name)))
    whole.finished = delta.finished
    whole.prompt_logprobs = whole.prompt_logprobs or delta.prompt_logprobs
    whole.num_cached_tokens = max(whole.num_cached_tokens, delta.num_cached_tokens)
    whole.embedding = whole.embedding or delta.embedding
    whole.score = delta.score if whole.score is None else whole.score
    whole.queued_s = max(whole.queued_s, delta.queued_s)
    whole.metrics = delta.metrics or whole.metrics


class OutputAccumulator:
    """Converts the deltas of one request to outputs of its `output_kind`.

    Outputs are independent: a later delta changes no output that the caller has.
    """

    def __init__(self, kind: RequestOutputKind, whole: RequestOutput) -> None:
        """`whole`: the empty output of the request, with all its choices."""
        self._kind = kind
        self._whole = whole

    def add(self, delta: RequestOutput) -> RequestOutput | None:
        """Return the output that a delta leads to, or None if the caller only wants the last one."""
        if self._kind is RequestOutputKind.DELTA:
            return delta
        append_delta(self._whole, delta)
        if self._whole.finished:
            return self._whole
        return None if self._kind is RequestOutputKind.FINAL_ONLY else _copy(self._whole)


def _copy(whole: RequestOutput) -> RequestOutput:
    choices = [
        replace(
            choice,
            token_ids=[*choice.token_ids],
            logprobs=None if choice.logprobs is None else [*choice.logprobs],
        )
        for choice in whole.outputs
    ]
    return replace(whole, outputs=choices)


def empty_output(
    request_id: RequestId, prompt: str | None, prompt_ids: list[int], n: int = 1
) -> RequestOutput:
    """Return an output of `n` empty choices."""
    outputs = [CompletionOutput(index, "", []) for index in range(n)]
    return RequestOutput(request_id, prompt, prompt_ids, outputs, finished=False)


def aborted_output(request_id: RequestId, prompt: str | None, prompt_ids: list[int], n: int) -> RequestOutput:
    """Return the only delta of a request that was canceled before it was submitted."""
    aborted = empty_output(request_id, prompt, prompt_ids, n)
    for choice in aborted.outputs:
        choice.finish_reason = FinishReason.ABORT.value
    aborted.finished = True
    return aborted
