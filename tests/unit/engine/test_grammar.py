"""Grammars in the engine, on the fake core: real matchers, the fake's tokens drawn among those allowed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLParserLimits

from fakes import core, text
from fakes.asks import ask
from fakes.engines import Engine
from llaisys.engine.grammar import COMPILE_S_MAX, Grammars, GrammarTokens
from llaisys.engine.wire import Submit, decode_to_engine, encode
from llaisys.errors import RejectedError, RequestFailedError, UnsupportedError
from llaisys.types import GRAMMAR_BYTES_MAX, FinishReason, SamplingParams
from llaisys.types import StructuredOutputsParams as Spec

TESTS = Path(__file__).parents[2]
TOKENS = GrammarTokens(text.tokenizer().to_json(), (text.EOS, text.EOT), core.VOCAB_SIZE)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 6}, "b": {"enum": ["é", 1, None]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
JSON = Spec(json=SCHEMA)


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENS)


def shown(ids: list[int]) -> str:
    return text.tokenizer().decode([id for id in ids if id not in TOKENS.eos_token_ids], False)


def asked(spec: Spec, **changes: Any) -> dict[str, Any]:
    return {"structured_outputs": spec, "temperature": 1.0, "max_tokens": 200, **changes}


def engine(grammars: Grammars | None, **changes: Any) -> Engine:
    """With room for long answers."""
    return Engine(grammars=grammars, **{"max_model_len": 512, "n_cells": 2048, **changes})


def alone(grammars: Grammars, **changes: Any) -> list[int]:
    made = engine(grammars)
    made.submit("a", **changes)
    made.finish()
    return made.tokens["a"]


# --- answers ---


@pytest.mark.parametrize("seed", range(20))
def test_an_answer_keeps_its_schema(grammars: Grammars, seed: int) -> None:
    made = engine(grammars)
    made.submit("a", **asked(JSON, seed=seed))
    made.finish()
    assert made.ends["a"].finish_reason is FinishReason.STOP
    jsonschema.validate(json.loads(shown(made.tokens["a"])), SCHEMA)
    assert made.tokens["a"][-1] in TOKENS.eos_token_ids, "the end is sampled as any other token"


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
def test_every_answer_of_a_small_grammar_and_no_other(
    grammars: Grammars, spec: Spec, answers: set[str]
) -> None:
    found = {shown(alone(grammars, **asked(spec, seed=seed))) for seed in range(60)}
    assert found == answers


def test_an_answer_that_could_end_may_go_on(grammars: Grammars) -> None:
    found = {shown(alone(grammars, **asked(Spec(regex="a{1,3}"), seed=seed))) for seed in range(40)}
    assert found == {"a", "aa", "aaa"}


def test_any_json_object(grammars: Grammars) -> None:
    ids = alone(grammars, **asked(Spec(json_object=True), seed=3, max_tokens=500))
    assert shown(ids).startswith("{")


def test_mates_of_a_batch_are_as_if_alone(grammars: Grammars) -> None:
    plain = {"temperature": 1.0, "seed": 4, "max_tokens": 30}
    want = {
        "free": core.answer([1, 2, 3], 30, core.SamplerSpec(seed=4)),
        "b": alone(grammars, **asked(JSON, seed=9)),
    }
    made = engine(grammars)
    made.submit("free", **plain)
    made.step(3)
    made.submit("a", **asked(Spec(regex="[ab]{20}"), seed=1))
    made.submit("b", **asked(JSON, seed=9))
    made.finish()
    assert {name: made.tokens[name] for name in want} == want


def test_each_choice_follows_the_grammar_by_itself(grammars: Grammars) -> None:
    made = engine(grammars)
    made.submit("a", **asked(JSON, seed=2, n=4))
    made.finish()
    answers = [shown(ids) for ids in made.tokens.values()]
    assert len(set(answers)) > 1
    for answer in answers:
        jsonschema.validate(json.loads(answer), SCHEMA)


@pytest.mark.parametrize("caching", [True, False])
def test_preemption_changes_nothing(grammars: Grammars, caching: bool) -> None:
    spec = Spec(regex="[a-z]{40}!")
    want = {
        f"r{i}": alone(grammars, **asked(spec, seed=i, prompt=[10 + i] * 20, max_tokens=60)) for i in range(4)
    }
    made = engine(grammars, n_cells=96, max_model_len=96, max_num_seqs=4, enable_prefix_caching=caching)
    for i, name in enumerate(want):
        made.submit(name, **asked(spec, seed=i, prompt=[10 + i] * 20, max_tokens=60))
    made.finish()
    assert made.engine.stats().num_preempted > 0
    assert made.tokens == want


def test_the_mask_is_for_the_row_that_samples(grammars: Grammars) -> None:
    """Not for those of the same prompt that are only scored."""
    want = alone(grammars, **asked(JSON, seed=9, prompt=[7] * 24))
    made = engine(grammars)
    made.submit("free", prompt=[5] * 20, max_tokens=30)
    made.submit("a", **asked(JSON, seed=9, prompt=[7] * 24, prompt_logprobs=0))
    made.finish()
    assert made.tokens["a"] == want


# --- what fails, and whom ---


class Broken(Grammars):
    """A grammar that is lost behind the door."""

    def matcher(self, spec: Spec) -> Any:
        if spec.regex == "lost":
            raise RejectedError("it is gone", param="structured_outputs.regex")
        return super().matcher(spec)


def test_a_grammar_that_fails_ends_its_request_alone() -> None:
    grammars = Broken(TOKENS)
    want = alone(grammars, **asked(JSON, seed=9))
    made = engine(grammars)
    made.submit("b", **asked(JSON, seed=9))
    made.submit("a", **asked(Spec(regex="lost")))
    made.finish()
    assert made.tokens["b"] == want
    assert made.ends["a"].finish_reason is FinishReason.ERROR
    assert isinstance(made.ends["a"].error, RequestFailedError)


def test_a_matcher_in_error_gives_no_mask(grammars: Grammars) -> None:
    """An answer that is not of the grammar cannot be; were it so, its request alone would end."""
    made = engine(grammars)
    made.submit("b", **asked(JSON, seed=9))
    made.submit("a", **asked(Spec(regex="abc")))
    made.step(2)
    (request,) = (r for r in made.engine.requests.running if r.request_id == "a")
    request.token_ids[-1] = ord("z")
    made.finish()
    assert isinstance(made.ends["a"].error, RequestFailedError)
    assert "grammar cannot be followed" in str(made.ends["a"].error)
    assert made.ends["b"].finish_reason is FinishReason.STOP


def test_an_answer_may_be_what_it_may_be_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of a grammar share a lexer of so many states at most: those that others met do not count."""
    limits = LLParserLimits(max_lexer_states=150, verbose_errors=False)
    monkeypatch.setattr("llaisys.engine.grammar._LIMITS", limits)
    spec = Spec(regex="[ab]*a[ab]{12}c")
    want = [alone(Grammars(TOKENS), **asked(spec, seed=seed, max_tokens=60)) for seed in range(18)]
    shared = engine(Grammars(TOKENS))
    for seed in range(18):
        shared.submit(f"{seed}", **asked(spec, seed=seed, max_tokens=60))
        if seed % 3 == 2:
            shared.finish()
    assert {end.error for end in shared.ends.values()} == {None}
    assert [shared.tokens[f"{seed}"] for seed in range(18)] == want


def test_an_engine_without_a_tokenizer_refuses() -> None:
    made = engine(None)
    with pytest.raises(UnsupportedError, match="no tokenizer for grammars"):
        made.submit("a", **asked(JSON))


def test_a_model_without_an_end_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="no end-of-text token"):
        Grammars(GrammarTokens(TOKENS.tokenizer, (), core.VOCAB_SIZE)).compile(JSON)


def test_no_grammar_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(TOKENS)
    monkeypatch.setattr(grammars, "matcher", None)
    made = engine(grammars)
    made.submit("a", "b")
    made.finish()
    assert made.reasons() == {"a": FinishReason.LENGTH, "b": FinishReason.LENGTH}


def test_matchers_go_with_their_choices(grammars: Grammars) -> None:
    made = engine(grammars)
    made.submit("a", "b", **asked(Spec(regex="[ab]{100}"), n=2))
    made.step(5)
    guides = made.engine._guides
    assert len(guides._matchers) == len(guides.ordinals) == 4
    made.engine.cancel("a")
    made.step()
    assert len(guides._matchers) == len(guides.ordinals) == 2
    made.finish()
    assert not guides._matchers
    assert not guides.ordinals


# --- the door ---


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"regex": "("}, "regex"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": ".*" * 2000}, "regex"),
        ({"json": "[1]"}, "a schema is an object"),
        ({"json": "{"}, "json"),
        ({"json": {"type": "nope"}}, "Invalid type: nope"),
        ({"json": {"not": {}}}, "Unimplemented keys"),
        ({"json": {"enum": []}}, "Unsatisfiable"),
        ({"json": {"type": "object", "x-guidance": {"lenient": True}, "not": {}}}, "Unimplemented keys"),
        ({"json": {"$ref": "https://example.org/schema"}}, "does not fetch"),
        ({"grammar": "start: nobody"}, "unknown name"),
        ({"grammar": 'begin: "a"'}, "no start rule"),
    ],
)
def test_bad_grammars_are_refused_by_name(grammars: Grammars, values: dict[str, Any], says: str) -> None:
    (field,) = values
    with pytest.raises(RejectedError, match=says) as error:
        grammars.compile(Spec(**values))
    assert error.value.param == f"structured_outputs.{field}"
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"regex": "a", "json_object": True},
        {"json_object": False},
        {"regex": ""},
        {"regex": 5},
        {"regex": "a" * (GRAMMAR_BYTES_MAX + 1)},
        {"regex": "(" * 65 + ")" * 65},
        {"json": {"enum": ["a" * GRAMMAR_BYTES_MAX]}},
        {"json": {"a": float}},
        {"choice": []},
        {"choice": "yes"},
        {"choice": [""]},
        {"choice": ["a" * GRAMMAR_BYTES_MAX, "b"]},
        {"choice": ["\ud800"]},
        {"grammar": "\ud800"},
    ],
)
def test_what_is_no_spec_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(RejectedError) as error:
        Spec(**values)
    assert error.value.param is not None
    assert error.value.param.startswith("structured_outputs")


def test_a_schema_is_nested_at_most_64_deep() -> None:
    def nested(depth: int) -> Spec:
        schema: dict[str, Any] = {}
        for _ in range(depth - 1):
            schema = {"not_a_keyword": schema}
        return Spec(json=schema)

    nested(64)
    with pytest.raises(RejectedError, match="deeper than 64"):
        nested(65)


def test_time_to_compile_is_bounded(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, COMPILE_S_MAX, 0.0, COMPILE_S_MAX + 0.1])
    monkeypatch.setattr("llaisys.engine.grammar.time.thread_time", lambda: next(ticks))
    grammars.compile(Spec(regex="in time"))
    with pytest.raises(RejectedError, match=r"0\.6 s to compile"):
        grammars.compile(Spec(regex="too late"))


DEEP = """
from llaisys.engine.grammar import Grammars, GrammarTokens
from llaisys.types import StructuredOutputsParams as Spec
from fakes import text

def chain(n, rule, last):
    return "".join(rule.format(i, i + 1) for i in range(n)) + last.format(n)

level = '"{0:x}":{{"properties":{{"a":{{"$ref":"#/$defs/{1:x}"}}}},"required":["a"]}},'
refs = chain(950, level, '"{:x}":{{}}')
grammars = Grammars(GrammarTokens(text.tokenizer().to_json(), (256,), 300))
for spec in (
    Spec(json='{"$ref":"#/$defs/0","$defs":{' + refs + "}}"),
    Spec(grammar="start: r0\\n" + chain(2500, 'r{}: ("a" [r{}])*\\n', 'r{}: "b"')),
    Spec(grammar="start: R0\\n" + chain(4000, "R{}: R{}\\n", 'R{}: "b"')),
):
    grammars.compile(spec)
    grammars.matcher(spec)
print("alive")
"""


def test_thousands_of_levels_do_not_end_the_process() -> None:
    """In a process of its own, because that is what would die."""
    done = subprocess.run(
        [sys.executable, "-c", DEEP], capture_output=True, text=True, cwd=TESTS, check=False
    )
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


USES = """
import ctypes, gc, random
import numpy as np
from llaisys.engine.grammar import Grammars, GrammarTokens
from llaisys.types import StructuredOutputsParams as Spec
from fakes import core, text

NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
class MallInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in NAMES]
mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = MallInfo

dice, bits = random.Random(1), np.zeros(-(-core.VOCAB_SIZE // 32), np.uint32)
grammars = Grammars(GrammarTokens(text.tokenizer().to_json(), (text.EOS,), core.VOCAB_SIZE))
def bytes_after(uses):
    for _ in range(uses):
        matcher = grammars.matcher(Spec(regex="[a-z]{1,%d}" % dice.randint(1, 300)))
        for _ in range(dice.randint(1, 60)):
            matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            if not matcher.consume_token(dice.randint(ord("a"), ord("z"))):
                break
    del matcher
    gc.collect()
    counted = mallinfo2()
    return counted.uordblks + counted.hblkhd
print(-bytes_after(300) + bytes_after(600))
"""


def test_more_grammars_than_are_kept_hold_no_more_after_a_while() -> None:
    """Bytes that the C library has lent, in a process of its own. One lexer of these takes up to 40 KB, and
    256 of them took 2.4 MB more after 600 uses more."""
    done = subprocess.run([sys.executable, "-c", USES], capture_output=True, text=True, cwd=TESTS, check=True)
    assert int(done.stdout) < 200_000


@pytest.mark.parametrize("field", ["ignore_eos", "min_tokens"])
def test_what_would_go_on_behind_the_end_is_refused(field: str) -> None:
    with pytest.raises(RejectedError) as error:
        SamplingParams(structured_outputs=JSON, **{field: 1})
    assert error.value.param == field


def test_it_travels_as_plain_data() -> None:
    for spec in (JSON, Spec(choice=["a", "b"]), Spec(json_object=True)):
        message = decode_to_engine(encode(Submit(ask("a", **asked(spec)))))
        assert isinstance(message, Submit)
        assert message.request.params.structured_outputs == spec
        assert hash(message.request.params.structured_outputs) == hash(spec)
