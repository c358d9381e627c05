"""PredictionProposer: proposes from the text that the client predicts (OpenAI's `prediction`). Pure."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from llaisys.engine.request import Request
from llaisys.engine.spec_decode.proposer import Proposer
from llaisys.engine.spec_decode.token_index import TokenIndex, ngram_before

# Output tokens that must agree with the prediction before it is used again after a difference.
MIN_MATCH = 2


@dataclass(slots=True)
class _Prediction:
    """A prediction, and how far the output follows it: its next token is `index.tokens[at]`.

    `n_read`: output tokens that were compared. `at` is None while the output differs.
    """

    index: TokenIndex
    at: int | None = 0
    n_read: int = 0

    def read(self, request: Request) -> None:
        """Follow the new output tokens; after a difference, continue at the next place where they occur."""
        tokens = self.index.tokens
        # The new tokens, after as many as a match needs before the first of them.
        first = max(0, self.n_read - (MIN_MATCH - 1))
        output = request.output_from(first)
        for n in range(self.n_read - first, len(output)):
            if self.at is not None and self.at < len(tokens) and tokens[self.at] == output[n]:
                self.at += 1
                continue
            before = self.at or 0
            places = self.index.positions_after(ngram_before(output, n + 1, MIN_MATCH)) if n else ()
            # The nearest place after the difference; otherwise the newest one before it.
            self.at = next((place for place in places if place >= before), places[-1] if places else None)
        self.n_read = request.num_output


class PredictionProposer:
    """Proposes the rest of a request's prediction while the output follows it, otherwise what `other`
    proposes.

    `from_prediction`: ordinals of the requests whose newest drafts are from their prediction.
    """

    def __init__(self, other: Proposer) -> None:
        self._other = other
        self._open: dict[int, _Prediction] = {}
        self.from_prediction: set[int] = set()

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[list[int]]:
        """Return the drafts of each request; see `Proposer`."""
        if not any(request.source.prediction_token_ids for request in requests):
            self.from_prediction.clear()
            return self._other.propose(requests, budgets)
        drafts = [self._drafts(*each) for each in zip(requests, budgets, strict=True)]
        self.from_prediction = {r.ordinal for r, own in zip(requests, drafts, strict=True) if own}
        rest = [i for i, own in enumerate(drafts) if not own]
        proposed = self._other.propose([requests[i] for i in rest], [budgets[i] for i in rest])
        for i, tokens in zip(rest, proposed, strict=True):
            drafts[i] = tokens
        return drafts

    @property
    def seconds_per_draft(self) -> float:
        """The seconds of the other proposer; a prediction takes none."""
        return self._other.seconds_per_draft

    def close(self) -> None:
        """Free what the other proposer holds; idempotent."""
        self._other.close()

    def finish(self, request: Request) -> None:
        """Drop the state of a request that has ended."""
        self._open.pop(request.ordinal, None)
        self._other.finish(request)

    def _drafts(self, request: Request, budget: int) -> list[int]:
        predicted = request.source.prediction_token_ids
        if not predicted:
            return []
        prediction = self._open.get(request.ordinal)
        if prediction is None:
            prediction = self._open[request.ordinal] = _Prediction(TokenIndex(MIN_MATCH))
            prediction.index.extend(array("i", predicted))
        prediction.read(request)
        at = prediction.at
        return [] if at is None else list(predicted[at : at + budget])
