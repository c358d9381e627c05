"""Tool calls and reasoning: equal parts for every chunking, and grammars whose output the parsers accept."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llaisys.engine.grammar import GrammarCompiler
from llaisys.output_parts import Content, OutputParser, OutputPart, Reasoning, ToolCall
from llaisys.text.reasoning import CompletionParser
from llaisys.text.tool_calls import CALLS_MAX, ToolFormat, tool_grammar, tool_parser
from parsing import byte_grammars, divided, parsed, takes

NAMES: dict[str, dict[str, object]] = {"weather": {}, "add": {}}
WEATHER = ToolCall("weather", '{"city": "Genf é😀"}')
ADD = ToolCall("add", '{"a": 1, "b": [2]}')
C, R = Content, Reasoning

# Written by hand; none was recorded from a model.
HERMES: dict[str, list[OutputPart]] = {
    "Hello, world": [C("Hello, world")],
    "  spaces stay \n": [C("  spaces stay \n")],
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Genf é😀"}}\n</tool_call>': [WEATHER],
    'I look.\n\n<tool_call>{"name": "weather", "arguments": {"city": "Genf \\u00e9\\ud83d\\ude00"}}'
    "</tool_call>\n": [
        C("I look."),
        WEATHER,
    ],
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Genf é😀"}}\n</tool_call>\n<tool_call>\n'
    '{"arguments": {"a": 1, "b": [2]}, "name": "add"}\n</tool_call> Done. ': [WEATHER, ADD, C("Done. ")],
    '<tool_call>{"name": "add", "arguments": {"a": 1, "b": [2]}}': [ADD],
    '<tool_call>{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_': [ADD],
    '<tool_call>{"name": "add", "arguments": {"a": "</tool_call>\\"}"}}</tool_call>': [
        ToolCall("add", '{"a": "</tool_call>\\"}"}')
    ],
    'a <tool_call>{"name": "rm", "arguments": {}}</tool_call> b': [
        C('a <tool_call>{"name": "rm", "arguments": {}}</tool_call> b')
    ],
    "x <tool_call>not json</tool_call>": [C("x <tool_call>not json</tool_call>")],
    '<tool_call>{"name": "add", "arguments": [1]} and more': [
        C('<tool_call>{"name": "add", "arguments": [1]} and more')
    ],
    '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>': [
        C('<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>')
    ],
    '<tool_call>{"name": "add", "argum': [C('<tool_call>{"name": "add", "argum')],
    "1 < 2 <tool <tool_call": [C("1 < 2 <tool <tool_call")],
    "<tool_call>x<tool_call>" + '{"name": "add", "arguments": {"a": 1, "b": [2]}}</tool_call>': [
        C("<tool_call>x"),
        ADD,
    ],
}
LLAMA: dict[str, list[OutputPart]] = {
    "Hello": [C("Hello")],
    " \n": [C(" \n")],
    '{"name": "weather", "parameters": {"city": "Genf é😀"}}': [WEATHER],
    '<|python_tag|>{"name": "weather", "parameters": {"city": "Genf é😀"}}; '
    '{"name": "add", "parameters": {"a": 1, "b": [2]}}\n': [WEATHER, ADD],
    '{"name": "add", "parameters": {"a": 1, "b": [2]}} So.': [ADD, C(" So.")],
    '{"answer": {"name": "add"}} {"name": "add", "parameters": {}}': [
        C('{"answer": {"name": "add"}} {"name": "add", "parameters": {}}')
    ],
    '{"name": "rm", "parameters": {}}': [C('{"name": "rm", "parameters": {}}')],
    '{"name": "add", "parameters": {"a": "}': [C('{"name": "add", "parameters": {"a": "}')],
    "<|python_tag|>print(1)": [C("<|python_tag|>print(1)")],
    "<|pyth": [C("<|pyth")],
}
R1: dict[str, list[OutputPart]] = {
    "I think.\n</think>\n\nSo it is. </think>": [R("I think."), C("So it is. </think>")],
    "<think>\n a < b </thin \n</think>x": [R("a < b </thin"), C("x")],
    " never ends \n": [R("never ends")],
    "<think></think>": [],
    '</think>\n<tool_call>{"name": "add", "arguments": {"a": 1, "b": [2]}}</tool_call>': [ADD],
    "<think>call <tool_call>x</think>y": [R("call <tool_call>x"), C("y")],
}
QWEN3: dict[str, list[OutputPart]] = {
    "\n<think>\nhm\n</think>\n\nYes": [R("hm"), C("Yes")],
    " no thought </think>": [C(" no thought </think>")],
    "<thinking>": [C("<thinking>")],
    "<thi": [C("<thi")],
    "<think> cut": [R("cut")],
}


# A completion that a token limit ended inside a call: complete calls and content, no markup.
A = '{"name": "add", "arguments": {"a": 1, "b": [2]}}'
B = A.replace("arguments", "parameters")
HERMES_CUT: dict[str, list[OutputPart]] = {
    "Hello, wor": [C("Hello, wor")],
    "Hello \n": [C("Hello \n")],
    "I look.\n\n<tool": [C("I look.")],
    "I look.\n<tool_call>": [C("I look.")],
    "<tool_call>\n": [],
    '<tool_call>{"na': [],
    'I look. <tool_call>\n{"name": "add", "arguments": {"a": "<b': [C("I look.")],
    f"<tool_call>{A}</tool_call>\n<tool_call>\n{A[:30]}": [ADD],
    f"<tool_call>{A}\n</tool_": [ADD],
    f"<tool_call>{A}": [ADD],
    'no call: <tool_call>{"name": "rm", "arguments": {}}': [
        C('no call: <tool_call>{"name": "rm", "arguments": {}}')
    ],
    "<tool_call>not json": [C("<tool_call>not json")],
}
LLAMA_CUT: dict[str, list[OutputPart]] = {
    "Hello, wor": [C("Hello, wor")],
    "<|pyth": [],
    "<|python_tag|>": [],
    '<|python_tag|>{"name"': [],
    "{": [],
    '{"na': [],
    '{"name": "ad': [],
    '{"name": "add", "parameters": {"a": "}': [],
    '{"parameters": {"a": 1}, "na': [],
    '{"type": "func': [],
    '{"type": "function", "name": "add", ': [],
    f"{B}; {B[:20]}": [ADD],
    f"{B};": [ADD],
    # JSON that is content, not a call.
    '{"name": "Ada", "born': [C('{"name": "Ada", "born')],
    '{"name": 5, "born': [C('{"name": 5, "born')],
    '{"type": "object", "prop': [C('{"type": "object", "prop')],
    '{"answer": {"name": "add"': [C('{"answer": {"name": "add"')],
    '{"ans': [C('{"ans')],
    "[1, 2": [C("[1, 2")],
    "{not": [C("{not")],
}


def parsers() -> Iterable[tuple[str, Callable[[], OutputParser], str, list[OutputPart]]]:
    """Yield format name, parser factory, text, and the expected parts."""
    for text, parts in HERMES.items():
        yield "hermes", lambda: tool_parser("hermes", NAMES), text, parts
    for text, parts in LLAMA.items():
        yield "llama3_json", lambda: tool_parser("llama3_json", NAMES), text, parts
    for text, parts in R1.items():
        yield "r1", lambda: CompletionParser("deepseek_r1", tool_parser("hermes", NAMES)), text, parts
    for text, parts in QWEN3.items():
        yield "qwen3", lambda: CompletionParser("qwen3", None), text, parts


CASES = list(parsers())


@pytest.mark.parametrize(("name", "make", "text", "parts"), CASES)
def test_parts_of_each_text(
    name: str, make: Callable[[], OutputParser], text: str, parts: list[OutputPart]
) -> None:
    assert parsed(make(), [text]) == parts, name
    assert parsed(make(), text) == parts, f"{name}, character by character"


@pytest.mark.parametrize(
    ("format", "text", "parts"),
    [("hermes", *case) for case in HERMES_CUT.items()]
    + [("llama3_json", *case) for case in LLAMA_CUT.items()],
)
def test_a_truncated_call_is_not_content(format: ToolFormat, text: str, parts: list[OutputPart]) -> None:
    for pieces in ([text], text):
        assert parsed(tool_parser(format, NAMES), pieces, cut=True) == parts
        assert parsed(CompletionParser("qwen3", tool_parser(format, NAMES)), pieces, cut=True) == parts


@pytest.mark.parametrize("format", ["hermes", "llama3_json"])
def test_no_prefix_of_a_call_is_content(format: ToolFormat) -> None:
    for call in (WEATHER, ADD):
        text = written(format, call)
        for n in range(1, len(text) + 1):
            assert parsed(tool_parser(format, NAMES), text[:n], cut=True) in ([], [call])


@settings(max_examples=300)
@given(st.sampled_from(CASES), st.lists(st.integers(0, 10_000), max_size=12))
def test_every_chunking_gives_the_same_parts(
    case: tuple[str, Callable[[], OutputParser], str, list[OutputPart]], positions: list[int]
) -> None:
    _, make, text, parts = case
    assert parsed(make(), divided(text, positions)) == parts


PIECES = ("<tool_call>", "</tool_call>", "<think>", "</think>", "{", "}", '"', "\\", ";", " ", "\n", "a", "<")
CALL = '{"name": "add", "arguments": {"a": 1}, "parameters": {}}'


@settings(max_examples=300)
@given(
    st.lists(st.sampled_from((*PIECES, CALL)), max_size=14).map("".join),
    st.lists(st.integers(0, 10_000), max_size=12),
    st.sampled_from(["hermes", "llama3_json", "r1", "qwen3"]),
)
def test_every_chunking_of_any_text_gives_the_same_parts(text: str, positions: list[int], name: str) -> None:
    make = next(make for case, make, _, _ in CASES if case == name)
    assert parsed(make(), divided(text, positions)) == parsed(make(), [text])


@settings(max_examples=100)
@given(st.text(st.sampled_from('<tol_cal>/ \n{}"a')))
def test_non_calls_stay_unchanged(text: str) -> None:
    assert "".join(part.text for part in parsed(tool_parser("hermes", NAMES), [text])) == text  # type: ignore[union-attr]


# --- the grammar, with a byte tokenizer ---

SCHEMAS = {
    "weather": {
        "properties": {"city": {"$ref": "#/$defs/city"}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"city": {"type": "string", "maxLength": 20}},
    },
    "add": {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False},
}


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    return byte_grammars()


def written(format: str, call: ToolCall) -> str:
    """Return a call in the given format."""
    key = "arguments" if format == "hermes" else "parameters"
    body = f'{{"name": {json.dumps(call.name)}, "{key}": {call.arguments}}}'
    return f"<tool_call>\n{body}\n</tool_call>" if format == "hermes" else body


@pytest.mark.parametrize("format", ["hermes", "llama3_json"])
def test_the_parser_accepts_what_the_grammar_produces(grammars: GrammarCompiler, format: str) -> None:
    calls = [ToolCall("weather", '{"city": "Genf"}'), ToolCall("add", '{"a": 1}'), ToolCall("add", "{}")]
    between = "\n" if format == "hermes" else "; "
    one = tool_grammar(format, SCHEMAS, parallel=False)  # type: ignore[arg-type]
    several = tool_grammar(format, SCHEMAS, parallel=True)  # type: ignore[arg-type]
    for call in calls:
        assert takes(grammars, one, written(format, call))
    text = between.join(written(format, call) for call in calls)
    assert takes(grammars, several, text)
    assert not takes(grammars, one, text)
    assert parsed(tool_parser(format, SCHEMAS), [text]) == calls  # type: ignore[arg-type]
    n_many = between.join([written(format, calls[2])] * (CALLS_MAX + 1))
    assert not takes(grammars, several, n_many)


@pytest.mark.parametrize(
    "call",
    [ToolCall("rm", "{}"), ToolCall("weather", "{}"), ToolCall("add", '{"a": "1"}'), ToolCall("add", "[]")],
)
def test_the_grammar_enforces_names_and_schemas(grammars: GrammarCompiler, call: ToolCall) -> None:
    assert not takes(grammars, tool_grammar("hermes", SCHEMAS, parallel=True), written("hermes", call))
