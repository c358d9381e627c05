"""Grammars in the engine: real matchers, and a fake core that samples among the allowed tokens."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLParserLimits

from fakes import core, text
from fakes.engines import Engine, grammar_engine
from llaisys.engine.grammar import GrammarCompiler, GrammarTokenizer
from llaisys.errors import RejectedError, RequestFailedError, UnsupportedError
from llaisys.outputs import FinishReason
from llaisys.sampling_params import StructuredOutputsParams as Spec

TESTS = Path(__file__).parents[2]
TOKENS = GrammarTokenizer(text.tokenizer().to_json(), (text.EOS, text.EOT), core.VOCAB_SIZE)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 6}, "b": {"enum": ["é", 1, None]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
JSON = Spec(json=SCHEMA)


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    return GrammarCompiler(TOKENS)


def shown(ids: list[int]) -> str:
    return text.tokenizer().decode([id for id in ids if id not in TOKENS.eos_token_ids], False)


def constrained(spec: Spec, **changes: Any) -> dict[str, Any]:
    return {"structured_outputs": spec, "temperature": 1.0, "max_tokens": 200, **changes}


def engine(grammars: GrammarCompiler | None, **changes: Any) -> Engine:
    """Return an engine with cells for long completions."""
    return grammar_engine(grammars, **{"max_model_len": 512, "n_cells": 2048, **changes})


def alone(grammars: GrammarCompiler, **changes: Any) -> list[int]:
    made = engine(grammars)
    made.submit("a", **changes)
    made.finish()
    return made.tokens["a"]


def completions(grammars: GrammarCompiler, spec: Spec, n_seeds: int) -> set[str]:
    """Return the different completions of seeds 0 to `n_seeds` - 1."""
    made = engine(grammars, max_num_queued_reqs=n_seeds)
    for seed in range(n_seeds):
        made.submit(f"{seed}", **constrained(spec, seed=seed))
    made.finish()
    return {shown(ids) for ids in made.tokens.values()}


# --- completions ---


@pytest.mark.parametrize("seed", range(20))
def test_a_completion_follows_its_schema(grammars: GrammarCompiler, seed: int) -> None:
    made = engine(grammars)
    made.submit("a", **constrained(JSON, seed=seed))
    made.finish()
    assert made.ends["a"].finish_reason is FinishReason.STOP
    jsonschema.validate(json.loads(shown(made.tokens["a"])), SCHEMA)
    assert made.tokens["a"][-1] in TOKENS.eos_token_ids, "the end token is sampled like any other token"


@pytest.mark.parametrize(
    ("spec", "answers"),
    [
        (Spec(regex="(ab|c|d)e"), {"abe", "ce", "de"}),
        (
            Spec(choice=["yes", 'n"o\\\n\x7f', "é😀", "(a|b)*", " "]),
            {"yes", 'n"o\\\n\x7f', "é😀", "(a|b)*", " "},
        ),
        (Spec(grammar='start: "x" ("1" | "2")'), {"x1", "x2"}),
    ],
)
def test_sampling_finds_exactly_the_completions_of_a_small_grammar(
    grammars: GrammarCompiler, spec: Spec, answers: set[str]
) -> None:
    assert completions(grammars, spec, 60) == answers


def test_a_completion_that_could_end_may_continue(grammars: GrammarCompiler) -> None:
    assert completions(grammars, Spec(regex="a{1,3}"), 40) == {"a", "aa", "aaa"}


def test_json_object_starts_an_object(grammars: GrammarCompiler) -> None:
    ids = alone(grammars, **constrained(Spec(json_object=True), seed=3, max_tokens=500))
    assert shown(ids).startswith("{")


def test_batched_requests_equal_lone_requests(grammars: GrammarCompiler) -> None:
    plain = {"temperature": 1.0, "seed": 4, "max_tokens": 30}
    want = {
        "free": core.answer([1, 2, 3], 30, core.SamplerSpec(seed=4)),
        "b": alone(grammars, **constrained(JSON, seed=9)),
    }
    made = engine(grammars)
    made.submit("free", **plain)
    made.step(3)
    made.submit("a", **constrained(Spec(regex="[ab]{20}"), seed=1))
    made.submit("b", **constrained(JSON, seed=9))
    made.finish()
    assert {name: made.tokens[name] for name in want} == want


def test_each_choice_follows_the_grammar_by_itself(grammars: GrammarCompiler) -> None:
    made = engine(grammars)
    made.submit("a", **constrained(JSON, seed=2, n=4))
    made.finish()
    answers = [shown(ids) for ids in made.tokens.values()]
    assert len(set(answers)) > 1
    for answer in answers:
        jsonschema.validate(json.loads(answer), SCHEMA)


@pytest.mark.parametrize("caching", [True, False])
def test_preemption_changes_nothing(grammars: GrammarCompiler, caching: bool) -> None:
    spec = Spec(regex="[a-z]{40}!")
    want = {
        f"r{i}": alone(grammars, **constrained(spec, seed=i, prompt=[10 + i] * 20, max_tokens=60))
        for i in range(4)
    }
    made = engine(grammars, n_cells=96, max_model_len=96, max_num_seqs=4, enable_prefix_caching=caching)
    for i, name in enumerate(want):
        made.submit(name, **constrained(spec, seed=i, prompt=[10 + i] * 20, max_tokens=60))
    made.finish()
    assert made.engine.stats().num_preempted > 0
    assert made.tokens == want


def test_the_mask_applies_only_to_the_row_that_samples(grammars: GrammarCompiler) -> None:
    """Rows of the same prompt that are only scored have no mask."""
    want = alone(grammars, **constrained(JSON, seed=9, prompt=[7] * 24))
    made = engine(grammars)
    made.submit("free", prompt=[5] * 20, max_tokens=30)
    made.submit("a", **constrained(JSON, seed=9, prompt=[7] * 24, prompt_logprobs=0))
    made.finish()
    assert made.tokens["a"] == want


# --- failures ---


class Broken(GrammarCompiler):
    """A grammar that passed its trial and does not compile in the engine."""

    def compile(self, spec: Spec) -> Any:
        match spec.regex:
            case "rejected":
                raise RejectedError("a rejection", param="structured_outputs.regex")
            case "bug":
                raise TypeError("a bug")
        return super().compile(spec)


@pytest.mark.parametrize(("regex", "kind"), [("rejected", RejectedError), ("bug", RequestFailedError)])
def test_a_grammar_that_fails_ends_its_request_alone(regex: str, kind: type[Exception]) -> None:
    grammars = Broken(TOKENS)
    want = alone(grammars, **constrained(JSON, seed=9))
    made = engine(grammars)
    made.submit("b", **constrained(JSON, seed=9))
    made.submit("a", **constrained(Spec(regex=regex)))
    made.finish()
    assert made.tokens["b"] == want
    assert made.ends["a"].finish_reason is FinishReason.ERROR
    assert isinstance(made.ends["a"].error, kind)


def test_a_completion_that_violates_its_grammar_fails_alone(grammars: GrammarCompiler) -> None:
    """This is a bug of the engine; only the request ends."""
    made = engine(grammars)
    made.submit("b", **constrained(JSON, seed=9))
    made.submit("a", **constrained(Spec(regex="abc")))
    while not made.tokens.get("a"):
        made.step()
    (request,) = (r for r in made.engine.requests.running if r.request_id == "a")
    request.token_ids[-1] = ord("z")
    made.finish()
    assert isinstance(made.ends["a"].error, RequestFailedError)
    assert "violates its grammar" in str(made.ends["a"].error)
    assert made.ends["b"].finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    "changes", [{}, {"n_cells": 96, "max_model_len": 96, "max_num_seqs": 4, "max_num_queued_reqs": 12}]
)
def test_a_grammar_ends_its_request_at_the_same_token_whatever_else_runs(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """Some completions reach a bound on lexer states.

    Each choice counts only its own states, and a preempted choice does not restart its count.
    """
    limits = LLParserLimits(max_lexer_states=70, verbose_errors=False)
    monkeypatch.setattr("llaisys.engine.grammar.LIMITS", limits)
    spec = Spec(regex="[ab]*a[ab]{12}c")

    def ends(engines: list[Engine]) -> dict[str, tuple[str, list[int]]]:
        ended = [(name, end, made.tokens[name]) for made in engines for name, end in made.ends.items()]
        return {name: (str(end.error), tokens) for name, end, tokens in ended}

    def submit(made: Engine, seed: int) -> None:
        made.submit(f"{seed}", **constrained(spec, seed=seed, prompt=[10 + seed] * 20, max_tokens=60))

    each = [engine(GrammarCompiler(TOKENS)) for _ in range(12)]
    for seed, made in enumerate(each):
        submit(made, seed)
        made.finish()
    together = engine(GrammarCompiler(TOKENS), **changes)
    for seed in range(12):
        submit(together, seed)
    together.finish()
    want = ends(each)
    assert ends([together]) == want
    assert 0 < sum("too many states" in error for error, _ in want.values()) < 12
    assert not changes or together.engine.stats().num_preempted > 0


def test_a_grammar_that_exceeds_its_limits_later_names_the_field(grammars: GrammarCompiler) -> None:
    made = engine(grammars, max_model_len=2048, n_cells=4096)
    made.submit("a", **constrained(Spec(regex="b{40}(a{1000}){1000}"), max_tokens=1000))
    made.finish()
    error = made.ends["a"].error
    assert isinstance(error, RejectedError)
    assert error.param == "structured_outputs"
    assert "more than 50000 units of work" in str(error)


def test_an_engine_without_a_tokenizer_rejects_grammars() -> None:
    made = engine(None)
    with pytest.raises(UnsupportedError, match="no tokenizer for structured outputs"):
        made.submit("a", **constrained(JSON))


def test_a_model_without_an_end_token_is_rejected() -> None:
    with pytest.raises(UnsupportedError, match="no end-of-text token"):
        GrammarCompiler(GrammarTokenizer(TOKENS.tokenizer_json, (), core.VOCAB_SIZE)).compile(JSON)


def test_without_a_grammar_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = GrammarCompiler(TOKENS)
    monkeypatch.setattr(grammars, "compile", None)
    made = engine(grammars)
    made.submit("a", "b")
    made.finish()
    assert made.reasons() == {"a": FinishReason.LENGTH, "b": FinishReason.LENGTH}


def test_matchers_are_dropped_with_their_choices(grammars: GrammarCompiler) -> None:
    made = engine(grammars)
    made.submit("a", "b", **constrained(Spec(regex="[ab]{100}"), n=2))
    made.step(5)
    assert len(made.engine._structured) == 4
    made.engine.cancel("a")
    made.step()
    assert len(made.engine._structured) == 2
    made.finish()
    assert len(made.engine._structured) == 0


class Gated(GrammarCompiler):
    """Compiles the regex "slow" only when allowed. `num_compiled`: compiles that have begun."""

    def __init__(self) -> None:
        super().__init__(TOKENS)
        self.gate = threading.Event()
        self.num_compiled = 0

    def compile(self, spec: Spec) -> Any:
        self.num_compiled += 1
        if spec.regex == "slow":
            self.gate.wait()
        return super().compile(spec)


def test_other_rows_run_while_a_grammar_is_compiled() -> None:
    grammars = Gated()
    made = engine(grammars)
    made.submit("b", **constrained(Spec(regex="[ab]{20}"), seed=1))
    while "b" not in made.tokens:  # its own grammar occupies the only thread
        made.step()
    made.submit("a", **constrained(Spec(regex="slow")))
    made.submit("free", max_tokens=30)
    while not {"b", "free"} <= set(made.ends):
        made.step()
    assert made.tokens.get("a", []) == []
    grammars.gate.set()
    made.finish()
    assert shown(made.tokens["a"]) == "slow"
    assert grammars.num_compiled == 2


def test_an_engine_whose_rows_all_wait_for_a_grammar_is_not_stuck() -> None:
    grammars = Gated()
    made = engine(grammars)
    made.submit("a", **constrained(Spec(regex="slow")))
    made.step(3)
    assert not made.ends
    grammars.gate.set()
    made.finish()
    assert made.ends["a"].error is None


def test_a_canceled_compile_changes_nothing() -> None:
    grammars = Gated()
    made = engine(grammars)
    made.submit("a", **constrained(Spec(regex="slow")))
    made.step(2)
    made.engine.cancel("a")
    made.submit("b", **constrained(JSON, seed=9))
    made.step()
    assert made.ends["a"].finish_reason is FinishReason.ABORT
    grammars.gate.set()  # the thread is free for the other grammar
    made.finish()
    assert made.ends["b"].finish_reason is FinishReason.STOP
    made.engine.close()


@pytest.mark.parametrize("bound", ["SLOW_MASK_S", "STEP_MASKS_S"])
def test_masks_of_the_pool_equal_those_of_the_engine_thread(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    want = {f"{seed}": alone(grammars, **constrained(JSON, seed=seed)) for seed in range(4)}
    monkeypatch.setattr(f"llaisys.engine.structured_output.{bound}", -1.0)
    made = engine(grammars)
    for seed in range(4):
        made.submit(f"{seed}", **constrained(JSON, seed=seed))
    made.submit("free", max_tokens=30)
    made.finish()
    assert {name: made.tokens[name] for name in want} == want
