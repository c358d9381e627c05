"""From the engine's ids to what a caller sees: text, stop strings, logprobs with their tokens.

Stands on the client side of `EngineClient`: the engine speaks ids, and learns of a stop string by a cancel.
Owned by one thread (the event loop, or the caller of `LLM.generate`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import overload

from llaisys.engine.outputs import EngineOutput, TokenLogprobs
from llaisys.text.stream import TextStream
from llaisys.text.tokenizer import Tokenizer
from llaisys.types import CompletionOutput, FinishReason, Logprob, RequestId, RequestOutput, SamplingParams


@dataclass(slots=True)
class _Answer:
    """The text state of one open choice."""

    stream: TextStream
    cumulative_logprob: float | None


@dataclass(slots=True)
class _Asked:
    """One open request: what was asked, and its open choices by index."""

    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    answers: dict[int, _Answer]


class _PromptLogprobs(Sequence[dict[int, Logprob] | None]):
    """Those of a prompt's tokens, None for the first. An entry gets its texts when it is read: all of a long
    prompt's at once would block the event loop."""

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
    """Holds the open choices of each request id, from `add` until their last delta or `discard`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._asked: dict[RequestId, _Asked] = {}

    def __contains__(self, request_id: object) -> bool:
        """True while a choice of the request is open."""
        return request_id in self._asked

    def expects(self, event: EngineOutput) -> bool:
        """True if the choice that the event speaks of is open: it has not met a stop string before."""
        asked = self._asked.get(event.request_id)
        return asked is not None and event.index in asked.answers

    def add(
        self, request_id: RequestId, prompt: str | None, prompt_ids: list[int], params: SamplingParams
    ) -> None:
        """Opens the request's choices. `prompt`: its text, where the caller has one, to be reported."""
        logprob = None if params.logprobs is None else 0.0
        answers = {i: _Answer(TextStream(self._tokenizer, params), logprob) for i in range(params.n)}
        self._asked[request_id] = _Asked(prompt, prompt_ids, params, answers)

    def discard(self, request_id: RequestId) -> bool:
        """Forgets a request; True if it was open."""
        return self._asked.pop(request_id, None) is not None

    def process(self, event: EngineOutput) -> RequestOutput:
        """What is new of one choice since the last call: a delta, to be joined by `append`.

        A delta with a `finish_reason` where `event.finish_reason` is None met a stop string: the caller
        cancels the choice. Tokens after it are neither shown nor counted. `finished`: no choice is open any
        more. Raises KeyError for a choice that is not open (`expects`).
        """
        asked = self._asked[event.request_id]
        answer = asked.answers[event.index]
        text, stop, n_kept = _show(answer.stream, asked.params, event)
        reason, stop_reason = event.finish_reason, event.stop_reason
        if stop is not None:
            reason = FinishReason.STOP
        if reason is not None:
            text += answer.stream.finish()
            del asked.answers[event.index]
            if not asked.answers:
                del self._asked[event.request_id]
        logprobs = None
        if asked.params.logprobs is not None:
            kept = (event.new_logprobs or [])[:n_kept]
            logprobs = [self._named(entry) for entry in kept]
            answer.cumulative_logprob = (answer.cumulative_logprob or 0.0) + sum(e.logprob for e in kept)
        prompt_logprobs = None
        if event.new_prompt_logprobs is not None:
            prompt_logprobs = _PromptLogprobs(event.new_prompt_logprobs, self._named)
        completion = CompletionOutput(
            index=event.index,
            text=text,
            token_ids=event.new_token_ids[:n_kept],
            cumulative_logprob=answer.cumulative_logprob,
            logprobs=logprobs,
            finish_reason=None if reason is None else reason.value,
            stop_reason=stop if stop is not None else stop_reason,
        )
        return RequestOutput(
            event.request_id,
            asked.prompt,
            asked.prompt_ids,
            [completion],
            finished=not asked.answers,
            num_cached_tokens=event.num_cached_tokens,
            prompt_logprobs=prompt_logprobs,
            embedding=event.embedding,
            queued_s=event.queued_s,
        )

    def _named(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        """Token id -> Logprob: the token that stands there first, then the best in falling order."""
        named = {entry.token_id: self._logprob(entry.token_id, entry.logprob, entry.rank)}
        for rank, (token_id, logprob) in enumerate(entry.top, start=1):
            named.setdefault(token_id, self._logprob(token_id, logprob, rank))
        return named

    def _logprob(self, token_id: int, logprob: float, rank: int) -> Logprob:
        return Logprob(logprob, rank, self._tokenizer.token_text(token_id))


def _show(stream: TextStream, params: SamplingParams, event: EngineOutput) -> tuple[str, str | None, int]:
    """Text, the stop string met, ids that count; an id that ended the answer counts, shown only if asked."""
    ids = event.new_token_ids
    ends_by_id = event.finish_reason is FinishReason.STOP and not params.include_stop_str_in_output
    delta = stream.push(ids[:-1] if ends_by_id else ids)
    n_kept = len(ids) if delta.stopped is None else delta.n_tokens_kept
    return delta.text, delta.stopped, n_kept


def append(whole: RequestOutput, delta: RequestOutput) -> None:
    """Joins the next delta of the same request to what came before, in place, choice by choice."""
    mine = {answer.index: answer for answer in whole.outputs}
    for new in delta.outputs:
        answer = mine.get(new.index)
        if answer is None:
            whole.outputs.append(new)
            continue
        answer.text += new.text
        answer.token_ids += new.token_ids
        if new.logprobs is not None:
            answer.logprobs = answer.logprobs or []
            answer.logprobs += new.logprobs
        answer.cumulative_logprob = new.cumulative_logprob
        answer.finish_reason = new.finish_reason
        answer.stop_reason = new.stop_reason
    whole.finished = delta.finished
    whole.prompt_logprobs = whole.prompt_logprobs or delta.prompt_logprobs
    whole.num_cached_tokens = max(whole.num_cached_tokens, delta.num_cached_tokens)
    whole.embedding = whole.embedding or delta.embedding
    whole.queued_s = max(whole.queued_s, delta.queued_s)


def empty(request_id: RequestId, prompt: str | None, prompt_ids: list[int], n: int = 1) -> RequestOutput:
    """An output of `n` choices that nothing has been appended to."""
    outputs = [CompletionOutput(index, "", []) for index in range(n)]
    return RequestOutput(request_id, prompt, prompt_ids, outputs, finished=False)


def aborted(request_id: RequestId, prompt: str | None, prompt_ids: list[int], n: int) -> RequestOutput:
    """The one delta of a request that was cancelled before any engine saw it."""
    output = empty(request_id, prompt, prompt_ids, n)
    for answer in output.outputs:
        answer.finish_reason = FinishReason.ABORT.value
    output.finished = True
    return output
