"""Speculator: proposes the drafts of each step and keeps the statistics of speculation. Engine thread
only."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from llaisys.config import SpeculativeConfig
from llaisys.engine.request import Request
from llaisys.engine.spec_decode.ngram import NgramProposer
from llaisys.engine.spec_decode.planner import ROWS_MAX, CostCurve, DraftPlanner
from llaisys.engine.spec_decode.prediction import PredictionProposer
from llaisys.engine.spec_decode.proposer import Proposer
from llaisys.engine.spec_decode.suffix import SuffixProposer
from llaisys.engine.step_speed import DecodeStep

log = logging.getLogger(__name__)

# Rows of the decodes that measure the cost curve at start, most important first, and their total seconds.
_MEASURED_ROWS = (1, 8, 4, 2, 16)
_MEASURE_S = 0.5
# Steps without drafts after which a proposer that takes time is tried again.
_STEPS_BETWEEN_PROBES = 32
# After `_MISSES_MAX` empty proposals in a row, one step in `_STEPS_BETWEEN_LOOKS` looks for drafts of the
# request. Text without repeats then costs a quarter, and a repeat is found at most three tokens later.
_MISSES_MAX, _STEPS_BETWEEN_LOOKS = 8, 4


class Speculator:
    """Joins a proposer and a planner. `max_drafts`: drafts per request and step.

    Proposals that the planner does not use are compared with the output, too. So the estimates of the
    acceptance stay current at no cost, and drafts resume when they pay again.
    """

    def __init__(self, proposer: Proposer, planner: DraftPlanner, max_drafts: int) -> None:
        self._proposer = PredictionProposer(proposer)
        self._planner = planner
        self._max_drafts = max_drafts
        # By ordinal: the newest proposal, and the number of tokens that it follows.
        self._proposed: dict[int, tuple[int, list[int]]] = {}
        # By ordinal: proposals in a row that were empty.
        self._n_misses: dict[int, int] = {}
        self._num_drafts = self._num_draft_tokens = 0
        self._accepted_per_pos = [0] * max_drafts
        self._n_steps_without = 0
        self._proposing_s = 0.0

    def propose(
        self, running: Sequence[Request], n_slots: int, last_step: DecodeStep | None
    ) -> dict[int, list[int]]:
        """Return the drafts of running requests by ordinal, without empty ones.

        `n_slots`: requests in one step. `last_step`: the previous step, if it computed only decode rows.
        """
        if last_step is not None:
            # The time of a draft model is planned apart.
            self._planner.curve.observe(last_step.n_rows, last_step.seconds - self._proposing_s)
        self._proposing_s = 0.0
        if not running or len(running) >= ROWS_MAX or len(running) > n_slots:
            self._proposed.clear()
            return {}
        requests, budgets = [], []
        for request in running:
            self._observe(request)
            budget = min(self._max_drafts, request.token_limit - len(request.token_ids) - 1)
            if budget <= 0 or not self._is_due(request):
                continue
            if request.num_missing == 1 and request.num_output and request.pool is None:
                requests.append(request)
                budgets.append(budget)
        self._proposed.clear()
        begin_s = time.perf_counter()
        if self._proposer.seconds_per_draft:
            budgets = self._affordable(len(running), requests, budgets)
        tokens_of_requests = self._proposer.propose(requests, budgets)
        if self._proposer.seconds_per_draft:
            self._proposing_s = time.perf_counter() - begin_s
        proposed = {}
        for request, tokens in zip(requests, tokens_of_requests, strict=True):
            if drafts := _before_stop(tokens, request.stop_ids):
                proposed[request.ordinal] = drafts
                self._proposed[request.ordinal] = (len(request.token_ids), drafts)
                self._n_misses.pop(request.ordinal, None)
            else:
                self._n_misses[request.ordinal] = self._n_misses.get(request.ordinal, 0) + 1
        planned = self._planner.plan(len(running), {ordinal: len(each) for ordinal, each in proposed.items()})
        return {ordinal: proposed[ordinal][:n] for ordinal, n in planned.items()}

    def close(self) -> None:
        """Free the proposer; idempotent."""
        self._proposer.close()

    def _affordable(self, n_rows: int, requests: Sequence[Request], budgets: Sequence[int]) -> list[int]:
        """Return the budgets of a proposer that takes time, planned before it drafts.

        If no draft pays, one request gets one every `_STEPS_BETWEEN_PROBES` steps, to notice a change.
        """
        wanted = {request.ordinal: n for request, n in zip(requests, budgets, strict=True)}
        planned = self._planner.plan(n_rows, wanted, self._proposer.seconds_per_draft)
        self._n_steps_without = 0 if planned else self._n_steps_without + 1
        if requests and self._n_steps_without >= _STEPS_BETWEEN_PROBES:
            planned, self._n_steps_without = {requests[0].ordinal: 1}, 0
        return [planned.get(request.ordinal, 0) for request in requests]

    def record_accepted(self, request: Request, n_drafts: int, n_accepted: int) -> None:
        """Record the drafts of a request that a step verified, and how many of them became output."""
        self._num_drafts += 1
        self._num_draft_tokens += n_drafts
        for position in range(n_accepted):
            self._accepted_per_pos[position] += 1
        if request.ordinal in self._proposer.from_prediction:
            request.num_accepted_prediction_tokens += n_accepted
            request.num_rejected_prediction_tokens += n_drafts - n_accepted

    def finish(self, request: Request) -> None:
        """Drop the state of a request that has ended."""
        self._proposed.pop(request.ordinal, None)
        self._n_misses.pop(request.ordinal, None)
        self._planner.finish(request.ordinal)
        self._proposer.finish(request)

    def totals(self) -> dict[str, Any]:
        """Return the totals as fields of EngineStats."""
        return {
            "spec_decode_num_drafts": self._num_drafts,
            "spec_decode_num_draft_tokens": self._num_draft_tokens,
            "spec_decode_num_accepted_tokens": sum(self._accepted_per_pos),
            "spec_decode_num_accepted_tokens_per_pos": tuple(self._accepted_per_pos),
        }

    def _is_due(self, request: Request) -> bool:
        """Return whether to propose for a request now. A proposer that takes time is planned apart."""
        if self._proposer.seconds_per_draft or self._n_misses.get(request.ordinal, 0) < _MISSES_MAX:
            return True
        return (len(request.token_ids) + request.ordinal) % _STEPS_BETWEEN_LOOKS == 0

    def _observe(self, request: Request) -> None:
        """Compare the newest proposal of a request with the tokens that it got since."""
        if (proposed := self._proposed.get(request.ordinal)) is not None:
            n_before, drafts = proposed
            self._planner.observe_drafts(request.ordinal, drafts, request.token_ids[n_before:])


def make_speculator(
    config: SpeculativeConfig,
    decode_seconds: Callable[[int], float],
    draft_model: Proposer | None = None,
) -> Speculator:
    """Build the speculator of an engine.

    `decode_seconds(n)`: decode `n` rows and return the seconds. `draft_model`: for the method of this name.
    """
    proposer: Proposer
    if draft_model is not None:
        proposer = draft_model
    elif config.method == "ngram":
        proposer = NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)
    else:
        proposer = SuffixProposer(
            config.suffix_decoding_max_tree_depth,
            config.suffix_decoding_max_cached_requests,
            config.suffix_decoding_max_spec_factor,
            config.suffix_decoding_min_token_prob,
        )
    measured = _measure(decode_seconds)
    log.info("seconds of a decode by rows: %s", {n: round(seconds, 5) for n, seconds in measured.items()})
    return Speculator(proposer, DraftPlanner(CostCurve(measured)), config.num_speculative_tokens)


def _measure(decode_seconds: Callable[[int], float]) -> dict[int, float]:
    """Return the shortest seconds of decodes by their rows. Large models are measured at fewer points."""
    decode_seconds(ROWS_MAX)  # the first decode touches every weight
    measured: dict[int, float] = {}
    spent_s = 0.0
    for _ in range(3):
        for n_rows in _MEASURED_ROWS:
            if spent_s < _MEASURE_S or len(measured) < 2:
                seconds = decode_seconds(n_rows)
                measured[n_rows] = min(seconds, measured.get(n_rows, seconds))
                spent_s += seconds
    return measured


def _before_stop(tokens: Sequence[int], stop_ids: frozenset[int]) -> list[int]:
    """Return the tokens before the first one that ends the completion: a row after it would be useless."""
    end = next((i for i, token in enumerate(tokens) if token in stop_ids), len(tokens))
    return list(tokens[:end])
