"""The speculator proposes for decoding requests only, and counts what was accepted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fakes.asks import ask
from llaisys.config import SpeculativeConfig
from llaisys.engine.request import Request
from llaisys.engine.spec_decode.planner import ROWS_MAX, CostCurve, DraftPlanner
from llaisys.engine.spec_decode.proposer import HostProposer
from llaisys.engine.spec_decode.speculator import Speculator, make_speculator
from llaisys.engine.step_speed import DecodeStep

PERIOD = [7, 8, 9]


def decoding(ordinal: int, *, limit: int = 1000, **changes: object) -> Request:
    """Return a decoding request of periodic text."""
    made = Request(ask(f"{ordinal}", PERIOD, **changes), ordinal, 0, limit)
    made.token_ids.extend(PERIOD)
    made.num_computed = 5
    return made


class Rounds(HostProposer):
    """Proposes the next tokens of periodic text."""

    def _drafts(self, request: Request, budget: int) -> list[int]:  # noqa: ARG002 -- as the real proposers'
        return [PERIOD[i % 3] for i in range(budget)]

    def finish(self, request: Request) -> None:
        """Hold no state."""


def speculator(max_drafts: int = 4, seconds: dict[int, float] | None = None) -> Speculator:
    return Speculator(Rounds(), DraftPlanner(CostCurve(seconds or {1: 1.0})), max_drafts)


def test_only_decoding_requests_get_drafts() -> None:
    prompt, first, last = decoding(1), decoding(2), decoding(3, limit=7)
    prompt.num_computed = 4
    del first.token_ids[3:]
    first.num_computed = 2
    drafts = speculator().propose([prompt, first, last, decoding(4)], 8, None)
    assert drafts == {4: [7, 8, 9, 7]}


def test_drafts_end_before_the_token_limit_and_before_stop_ids() -> None:
    drafts = speculator().propose([decoding(1, limit=9), decoding(2, stop_token_ids=[9])], 8, None)
    assert drafts == {1: [7, 8], 2: [7, 8]}


def test_no_drafts_at_many_requests_or_with_too_few_slots() -> None:
    many = [decoding(i) for i in range(ROWS_MAX)]
    assert speculator().propose(many, 100, None) == {}
    assert speculator().propose(many[:4], 3, None) == {}
    assert speculator().propose(many[:4], 4, None)


def test_steps_change_the_cost_curve() -> None:
    made = speculator(seconds={1: 1.0, 16: 1.0})
    assert made.propose([decoding(1)], 8, None)
    for _ in range(400):
        made.propose([], 8, DecodeStep(1, 1.0))
        for n_rows in range(2, ROWS_MAX + 1):
            made.propose([], 8, DecodeStep(n_rows, 20.0))
    assert made.propose([decoding(1)], 8, None) == {}


def test_unused_proposals_are_compared_with_the_output() -> None:
    made = speculator(seconds={1: 1.0, 16: 31.0})
    request = decoding(1)
    for token in (1, 2, 3):
        assert made.propose([request], 8, None) == {}
        request.token_ids.append(token)
        request.num_computed += 1
    made.propose([request], 8, None)
    assert made._planner.acceptance(1).first < 0.4


class Late(Rounds):
    """Proposes only for a text of 40 tokens or more. `asked_at`: lengths of the texts at its calls."""

    def __init__(self) -> None:
        self.asked_at: list[int] = []

    def _drafts(self, request: Request, budget: int) -> list[int]:
        n = len(request.token_ids)
        self.asked_at.append(n)
        return super()._drafts(request, budget) if n >= 40 else []


def test_a_text_without_proposals_is_looked_at_in_one_of_four_steps() -> None:
    proposer = Late()
    made = Speculator(proposer, DraftPlanner(CostCurve({1: 1.0})), 4)
    request = decoding(1)
    while len(request.token_ids) < 46:
        made.propose([request], 8, None)
        request.token_ids.append(1)
        request.num_computed += 1
    assert proposer.asked_at == [*range(6, 14), *range(15, 40, 4), *range(43, 46)]
    made.finish(request)
    again = decoding(1)
    made.propose([again], 8, None)
    assert proposer.asked_at[-1] == len(again.token_ids)


def test_totals_count_accepted_drafts_by_position() -> None:
    made = speculator()
    request = decoding(1, prediction_token_ids=PERIOD)
    made.propose([request], 8, None)
    made.record_accepted(request, 4, 2)
    made.record_accepted(decoding(2), 3, 0)
    assert made.totals() == {
        "spec_decode_num_drafts": 2,
        "spec_decode_num_draft_tokens": 7,
        "spec_decode_num_accepted_tokens": 2,
        "spec_decode_num_accepted_tokens_per_pos": (1, 1, 0, 0),
    }
    assert (request.num_accepted_prediction_tokens, request.num_rejected_prediction_tokens) == (0, 0)


def test_prediction_tokens_are_counted_apart() -> None:
    made = speculator()
    request = decoding(1, prediction_token_ids=[*PERIOD, 1, 2])
    assert made.propose([request], 8, None) == {1: [1, 2]}
    made.record_accepted(request, 2, 1)
    assert (request.num_accepted_prediction_tokens, request.num_rejected_prediction_tokens) == (1, 1)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_start_measures_decodes_within_its_time(method: str) -> None:
    measured: list[int] = []

    def decode_seconds(n_rows: int) -> float:
        measured.append(n_rows)
        return 0.3

    made = make_speculator(SpeculativeConfig(method=method), decode_seconds)  # type: ignore[arg-type]
    assert measured == [ROWS_MAX, 1, 8], "a slow model is measured at two points"
    text = decoding(1)
    text.token_ids.extend([*PERIOD] * 3)
    text.num_computed = len(text.token_ids) - 1
    assert made.propose([text], 8, None)


class Slow(Rounds):
    """A proposer that takes half of a step for each draft, and records its budgets."""

    seconds_per_draft = 0.5

    def __init__(self) -> None:
        self.budgets: list[list[int]] = []

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[list[int]]:
        self.budgets.append([*budgets])
        return super().propose(requests, budgets)


def test_a_slow_proposer_drafts_only_what_pays_and_is_tried_again() -> None:
    proposer = Slow()
    made = Speculator(proposer, DraftPlanner(CostCurve({1: 1.0})), 4)
    request = decoding(1)
    made._planner.acceptance(1).first = 0.1
    for _ in range(100):
        made.propose([request], 8, None)
    assert sum(map(sum, proposer.budgets)) == 3, "once in 32 steps"
    made._planner.acceptance(1).first = 1.0
    made.propose([request], 8, None)
    assert proposer.budgets[-1][0] > 0


def test_the_time_of_a_draft_model_is_no_cost_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(100))
    monkeypatch.setattr("llaisys.engine.spec_decode.speculator.time.perf_counter", lambda: next(times) * 0.25)
    made = Speculator(Slow(), DraftPlanner(CostCurve({1: 1.0})), 4)
    for _ in range(20):
        made.propose([decoding(1)], 8, DecodeStep(1, 1.25))  # a quarter of a second for drafts
    assert made._planner.curve.seconds(1) == pytest.approx(1.0, rel=0.05)
