"""From the engine's ids to what a caller sees: text, stop strings, logprobs with their tokens.

Stands on the client side of `EngineClient`: the engine speaks ids, and learns of a stop string by a cancel.
Owned by one thread (the event loop, or the caller of `LLM.generate`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from llaisys.engine.outputs import EngineOutput, TokenLogprobs
from llaisys.text.stream import TextStream
from llaisys.text.tokenizer import Tokenizer
from llaisys.types import CompletionOutput, FinishReason, Logprob, RequestId, RequestOutput, SamplingParams


@dataclass(slots=True)
class _Answer:
    """The text state of one open request."""

    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    stream: TextStream
    cumulative_logprob: float | None = field(init=False)

    def __post_init__(self) -> None:
        self.cumulative_logprob = None if self.params.logprobs is None else 0.0


class OutputProcessor:
    """Holds one open answer per request id, from `add` until its last delta or `discard`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._answers: dict[RequestId, _Answer] = {}

    def __contains__(self, request_id: object) -> bool:
        """True while the answer is open."""
        return request_id in self._answers

    def add(
        self, request_id: RequestId, prompt: str | None, prompt_ids: list[int], params: SamplingParams
    ) -> None:
        """Opens an answer. `prompt`: its text, where the caller has one, to be reported with the output."""
        stream = TextStream(self._tokenizer, params)
        self._answers[request_id] = _Answer(prompt, prompt_ids, params, stream)

    def discard(self, request_id: RequestId) -> bool:
        """Forgets an answer; True if it was open."""
        return self._answers.pop(request_id, None) is not None

    def process(self, event: EngineOutput) -> RequestOutput:
        """What is new since the last call: a delta, to be joined by `append`.

        A delta that is `finished` where `event.finish_reason` is None met a stop string: the caller cancels
        the request. Tokens after it are neither shown nor counted. Raises KeyError if the answer is not open.
        """
        answer = self._answers[event.request_id]
        text, stop, n_kept = _show(answer, event)
        reason, stop_reason = event.finish_reason, event.stop_reason
        if stop is not None:
            reason = FinishReason.STOP
        if reason is not None:
            text += answer.stream.finish()
            del self._answers[event.request_id]
        logprobs = None
        if answer.params.logprobs is not None:
            kept = (event.new_logprobs or [])[:n_kept]
            logprobs = [self._named(entry) for entry in kept]
            answer.cumulative_logprob = (answer.cumulative_logprob or 0.0) + sum(e.logprob for e in kept)
        completion = CompletionOutput(
            index=0,
            text=text,
            token_ids=event.new_token_ids[:n_kept],
            cumulative_logprob=answer.cumulative_logprob,
            logprobs=logprobs,
            finish_reason=None if reason is None else reason.value,
            stop_reason=stop if stop is not None else stop_reason,
        )
        return RequestOutput(
            event.request_id,
            answer.prompt,
            answer.prompt_ids,
            [completion],
            finished=reason is not None,
            num_cached_tokens=event.num_cached_tokens,
        )

    def _named(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        """Token id -> Logprob: the sampled token first, then the best in falling order."""
        named = {entry.token_id: self._logprob(entry.token_id, entry.logprob, entry.rank)}
        for rank, (token_id, logprob) in enumerate(entry.top, start=1):
            named.setdefault(token_id, self._logprob(token_id, logprob, rank))
        return named

    def _logprob(self, token_id: int, logprob: float, rank: int) -> Logprob:
        return Logprob(logprob, rank, self._tokenizer.token_text(token_id))


def _show(answer: _Answer, event: EngineOutput) -> tuple[str, str | None, int]:
    """Text, the stop string met, ids that count; an id that ended the answer counts, shown only if asked."""
    ids = event.new_token_ids
    ends_by_id = event.finish_reason is FinishReason.STOP and not answer.params.include_stop_str_in_output
    delta = answer.stream.push(ids[:-1] if ends_by_id else ids)
    n_kept = len(ids) if delta.stopped is None else delta.n_tokens_kept
    return delta.text, delta.stopped, n_kept


def append(whole: RequestOutput, delta: RequestOutput) -> None:
    """Joins the next delta of the same request to what came before, in place."""
    for mine, new in zip(whole.outputs, delta.outputs, strict=True):
        mine.text += new.text
        mine.token_ids += new.token_ids
        if new.logprobs is not None:
            mine.logprobs = mine.logprobs or []
            mine.logprobs += new.logprobs
        mine.cumulative_logprob = new.cumulative_logprob
        mine.finish_reason = new.finish_reason
        mine.stop_reason = new.stop_reason
    whole.finished = delta.finished
    whole.num_cached_tokens = max(whole.num_cached_tokens, delta.num_cached_tokens)


def empty(request_id: RequestId, prompt: str | None, prompt_ids: list[int]) -> RequestOutput:
    """An output that nothing has been appended to."""
    return RequestOutput(request_id, prompt, prompt_ids, [CompletionOutput(0, "", [])], finished=False)
