"""Grammar compilation: accepted and rejected grammars, the cost of matchers, and the thread pool."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLParserLimits

from fakes import core, text
from fakes.asks import ask
from llaisys.engine.grammar import LIMITS, FairThreadPool, GrammarCompiler, GrammarTokenizer, try_grammar
from llaisys.engine.messages import Submit, decode_to_engine, encode
from llaisys.errors import RejectedError
from llaisys.sampling_params import GRAMMAR_BYTES_MAX, SamplingParams
from llaisys.sampling_params import StructuredOutputsParams as Spec
from llaisys.text.tool_calls import tool_grammar
from schemas import schema

TESTS = Path(__file__).parents[2]
TOKENS = GrammarTokenizer(text.tokenizer().to_json(), (text.EOS, text.EOT), core.VOCAB_SIZE)
JSON = Spec(json={"type": "object", "properties": {"a": {"type": "string"}}})


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    return GrammarCompiler(TOKENS)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"regex": "("}, "regex"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": ".*" * 2000}, "regex"),
        ({"json": "[1]"}, "a schema must be an object"),
        ({"json": "{"}, "json"),
        ({"json": {"type": "nope"}}, "Invalid type: nope"),
        ({"json": {"not": {}}}, "Unimplemented keys"),
        ({"json": {"enum": []}}, "Unsatisfiable"),
        ({"json": {"type": "object", "x-guidance": {"lenient": True}, "not": {}}}, "Unimplemented keys"),
        ({"json": {"$ref": "https://example.org/schema"}}, "does not fetch"),
        ({"grammar": "start: undefined"}, "unknown name"),
        ({"grammar": 'begin: "a"'}, "no start rule"),
    ],
)
def test_invalid_grammars_are_rejected_by_field(
    grammars: GrammarCompiler, values: dict[str, Any], says: str
) -> None:
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
def test_invalid_specs_are_rejected(values: dict[str, Any]) -> None:
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


@pytest.mark.parametrize("seed", range(0, 200, 10))
def test_ordinary_schemas_stay_below_half_of_the_limits(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    halve_the_limits(monkeypatch)
    for spec in (Spec(json=schema(each)) for each in range(seed, seed + 10)):
        try_grammar(grammars, spec)


def many(n: int, value: dict[str, Any]) -> dict[str, Any]:
    return {f"property_{i}": value for i in range(n)}


WORDS = [f"{i * 7919:x}-street" for i in range(3000)]


@pytest.mark.parametrize(
    "spec",
    [
        Spec(json={"type": "object", "properties": many(350, {"type": "string", "maxLength": 80})}),
        Spec(json={"type": "object", "properties": many(900, {}), "required": list(many(900, {}))}),
        Spec(json={"type": "object", "properties": {f"{i}": schema(i) for i in range(100)}}),
        Spec(json={"anyOf": [schema(i) for i in range(50)]}),
        Spec(json={"type": "string", "maxLength": 5000}),
        Spec(json={"enum": WORDS}),
        Spec(choice=WORDS),
        Spec(regex=r"[a-zA-Z0-9._%+-]+@[a-zA-Z0-9.-]+\.[a-zA-Z]{2,}"),
        Spec(regex=r"\w{1,2000}"),
        Spec(regex=r"(?i)(select|insert)[^;]{0,500};"),
        Spec(json_object=True),
        Spec(grammar=tool_grammar("hermes", {f"f{i}": schema(i) for i in range(40)}, parallel=True)),
        Spec(grammar='start: e\ne: t (("+" | "-") t)*\nt: f (("*" | "/") f)*\nf: /[0-9]+/ | "(" e ")"\n'),
    ],
)
def test_ordinary_grammars_stay_below_half_of_the_limits(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, spec: Spec
) -> None:
    halve_the_limits(monkeypatch)
    try_grammar(grammars, spec)


def halve_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    names = (
        *("initial_lexer_fuel", "max_grammar_size", "max_lexer_states"),
        *("step_lexer_fuel", "step_max_items", "max_items_in_row"),
    )
    halves = LLParserLimits(**{name: getattr(LIMITS, name) // 2 for name in names}, verbose_errors=False)
    monkeypatch.setattr("llaisys.engine.grammar.LIMITS", halves)


DEEP = """
from llaisys.engine.grammar import FairThreadPool
from llaisys.engine.grammar import GrammarCompiler, GrammarTokenizer
from llaisys.sampling_params import StructuredOutputsParams as Spec
from fakes import text

def chain(n, rule, last):
    return "".join(rule.format(i, i + 1) for i in range(n)) + last.format(n)

level = '"{0:x}":{{"properties":{{"a":{{"$ref":"#/$defs/{1:x}"}}}},"required":["a"]}},'
refs = chain(950, level, '"{:x}":{{}}')
grammars = GrammarCompiler(GrammarTokenizer(text.tokenizer().to_json(), (256,), 300))
for spec in (
    Spec(json='{"$ref":"#/$defs/0","$defs":{' + refs + "}}"),
    Spec(grammar="start: r0\\n" + chain(2500, 'r{}: ("a" [r{}])*\\n', 'r{}: "b"')),
    Spec(grammar="start: R0\\n" + chain(4000, "R{}: R{}\\n", 'R{}: "b"')),
):
    FairThreadPool(1, "deep").submit("", lambda: grammars.compile(spec)).result()
print("alive")
"""


def test_thousands_of_levels_do_not_crash_the_process() -> None:
    """Runs in its own process, because a stack overflow would end it."""
    done = subprocess.run(
        [sys.executable, "-c", DEEP], capture_output=True, text=True, cwd=TESTS, check=False
    )
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


USES = """
import ctypes, gc, random
import numpy as np
from llaisys.engine.grammar import GrammarCompiler, GrammarTokenizer
from llaisys.sampling_params import StructuredOutputsParams as Spec
from fakes import core, text

NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
class MallInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in NAMES]
mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = MallInfo

dice, bits = random.Random(1), np.zeros(-(-core.VOCAB_SIZE // 32), np.uint32)
grammars = GrammarCompiler(GrammarTokenizer(text.tokenizer().to_json(), (text.EOS,), core.VOCAB_SIZE))
def bytes_after(uses):
    for _ in range(uses):
        matcher = grammars.compile(Spec(regex="[a-z]{1,%d}" % dice.randint(1, 300)))
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


def test_a_grammar_leaks_no_memory_after_its_completion() -> None:
    """Counts the bytes that the C library allocates, in its own process. One grammar takes up to 40 KB."""
    done = subprocess.run([sys.executable, "-c", USES], capture_output=True, text=True, cwd=TESTS, check=True)
    assert int(done.stdout) < 200_000


@pytest.mark.parametrize("field", ["ignore_eos", "min_tokens"])
def test_a_grammar_that_continues_after_the_end_is_rejected(field: str) -> None:
    with pytest.raises(RejectedError) as error:
        SamplingParams(structured_outputs=JSON, **{field: 1})
    assert error.value.param == field


def test_a_structured_outputs_spec_survives_a_message() -> None:
    for spec in (JSON, Spec(choice=["a", "b"]), Spec(json_object=True)):
        message = decode_to_engine(encode(Submit(ask("a", structured_outputs=spec))))
        assert isinstance(message, Submit)
        assert message.request.params.structured_outputs == spec
        assert hash(message.request.params.structured_outputs) == hash(spec)


def test_the_pool_serves_clients_round_robin() -> None:
    threads, order = FairThreadPool(1, "test"), list[str]()
    begun, gate = threading.Event(), threading.Event()
    threads.submit("a", lambda: begun.set() or gate.wait())  # type: ignore[func-returns-value]
    begun.wait()
    works = [
        threads.submit(name[0], lambda name=name: order.append(name))  # type: ignore[misc]
        for name in ("a1", "a2", "a3", "b1", "b2", "c1")
    ]
    gate.set()
    for work in works:
        work.result()
    threads.close()
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_an_exception_of_a_job_is_raised_by_its_future() -> None:
    threads = FairThreadPool(1, "test")

    def exit_thread() -> None:
        raise SystemExit(1)

    with pytest.raises(SystemExit):
        threads.submit("a", exit_thread).result()
    assert threads.submit("a", lambda: 1).result() == 1, "the thread continues"
    threads.close()


def test_close_waits_for_running_work_and_cancels_the_rest() -> None:
    threads, begun, gate = FairThreadPool(1, "test"), threading.Event(), threading.Event()

    def work() -> int:
        begun.set()
        gate.wait()
        return 1

    first = threads.submit("a", work)
    queued = threads.submit("a", work)
    begun.wait()
    threading.Timer(0.01, gate.set).start()
    threads.close()
    assert first.result(timeout=0) == 1
    assert not queued.running()
    with pytest.raises(CancelledError):
        queued.result(timeout=0)
    threads.close()
