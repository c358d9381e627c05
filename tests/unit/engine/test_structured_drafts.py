"""Drafts of choices with a grammar: the same tokens and errors as without drafts."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import wait
from typing import Any

import pytest
from llguidance import LLParserLimits

from fakes import core, text
from fakes.drafts import ScriptedSpeculator
from fakes.engines import Engine, grammar_engine
from llaisys.engine.grammar import GrammarCompiler, GrammarTokenizer
from llaisys.engine.request import Request
from llaisys.engine.step_speed import DecodeStep
from llaisys.sampling_params import StructuredOutputsParams as Spec

TOKENS = GrammarTokenizer(text.tokenizer().to_json(), (text.EOS, text.EOT), core.VOCAB_SIZE)
NAMES = [f"{seed}" for seed in range(12)]


class Patient(ScriptedSpeculator):
    """Waits for the matchers of drafts, so that a test does not depend on the time of a compile."""

    def __init__(self, made: Engine, want: dict[str, list[int]]) -> None:
        super().__init__(1, core.N_PLAIN, lambda request, n: self._following(want, request, n))
        self._engine = made.engine

    def propose(
        self, running: Sequence[Request], n_slots: int, last_step: DecodeStep | None
    ) -> dict[int, list[int]]:
        choices = self._engine._structured._choices.values()
        wait([c.draft.matcher for c in choices if c.draft is not None and c.draft.matcher is not None])
        return super().propose(running, n_slots, last_step)

    @staticmethod
    def _following(want: dict[str, list[int]], request: Request, n: int) -> list[int]:
        return want.get(request.request_id, [])[request.num_output : request.num_output + n]


def run(compiler: GrammarCompiler, spec: Spec, want: dict[str, list[int]] | None, **changes: Any) -> Engine:
    """Run twelve requests with a grammar; with drafts if `want`, their tokens, is known."""
    sizes = {"max_model_len": 96, "n_cells": 2048, "max_num_queued_reqs": 12, **changes}
    made = grammar_engine(compiler, **sizes)
    if want is not None:
        made.engine._speculator = Patient(made, want)  # type: ignore[assignment]
    for seed, name in enumerate(NAMES):
        facts: dict[str, Any] = {"structured_outputs": spec, "temperature": 1.0, "max_tokens": 60}
        made.submit(name, seed=seed, prompt=[10 + seed] * 20, logprobs=1, **facts)
    made.finish()
    return made


def ends(made: Engine) -> dict[str, tuple[str, list[int]]]:
    return {name: (str(end.error), made.tokens[name]) for name, end in made.ends.items()}


@pytest.mark.parametrize("changes", [{}, {"n_cells": 128, "max_num_batched_tokens": 40}])
@pytest.mark.parametrize(
    "spec",
    [
        Spec(regex="(ab|ba|[c-e]{3}){3,9}!"),
        Spec(json={"type": "array", "items": {"type": "integer"}, "minItems": 6}),
    ],
)
def test_drafts_change_no_token(spec: Spec, changes: dict[str, Any]) -> None:
    compiler = GrammarCompiler(TOKENS)
    without = run(compiler, spec, None)
    made = run(compiler, spec, without.tokens, **changes)
    assert ends(made) == ends(without)
    speculator = made.engine._speculator
    assert isinstance(speculator, Patient)
    assert speculator.n_accepted > 20


def test_drafts_end_a_request_at_the_same_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some completions reach a bound on lexer states. The states that drafts visit do not count."""
    monkeypatch.setattr(
        "llaisys.engine.grammar.LIMITS", LLParserLimits(max_lexer_states=70, verbose_errors=False)
    )
    spec = Spec(regex="[ab]*a[ab]{12}c")
    without = run(GrammarCompiler(TOKENS), spec, None)
    made = run(GrammarCompiler(TOKENS), spec, without.tokens)
    assert ends(made) == ends(without)
    assert 0 < sum("too many states" in error for error, _ in ends(made).values()) < 12
    speculator = made.engine._speculator
    assert isinstance(speculator, Patient)
    assert speculator.n_accepted > 20


def test_drafts_that_the_grammar_forbids_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Patient, "_draft", lambda *_: ord("z"))
    compiler = GrammarCompiler(TOKENS)
    spec = Spec(regex="[ab]{40}")
    without = run(compiler, spec, None)
    made = run(compiler, spec, {})
    assert made.tokens == without.tokens
    assert made.context.n_rows == without.context.n_rows


def test_a_canceled_request_drops_its_matchers() -> None:
    made = run(GrammarCompiler(TOKENS), Spec(regex="[ab]{40}"), {})
    made.submit("last", structured_outputs=Spec(regex="[ab]{40}"), max_tokens=60)
    made.step(5)
    made.engine.cancel("last")
    made.finish()
    assert len(made.engine._structured) == 0
