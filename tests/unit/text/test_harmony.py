"""Harmony: the messages in channels that gpt-oss writes, in pieces of every size."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llaisys.output_parts import Content, OutputPart, Reasoning, ToolCall
from llaisys.text.reasoning import CompletionParser, marks_reasoning
from llaisys.text.tool_calls import tool_format_of, tool_grammar, tool_parser
from llaisys.text.tool_calls.harmony import TAGS, HarmonyParser, is_harmony
from parsing import byte_grammars, divided, parsed, takes

C, R = Content, Reasoning
TOOLS = {
    "get_current_weather": {"properties": {"location": {"type": "string"}}},
    "generate_file": {"properties": {"template": {"type": "string"}, "path": {"type": "string"}}},
}
SF = ToolCall("get_current_weather", '{"location": "San Francisco"}')
FILE = ToolCall("generate_file", '{"template": "basic_html", "path": "index.html"}')
WEATHER = '{"location":"San Francisco"}'
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
CALL = "<|start|>assistant<|channel|>commentary to=functions.get_current_weather <|constrain|>json<|message|>"

# The first three are the examples of OpenAI's documentation; the sixth is how the template writes a call.
CASES: dict[str, list[OutputPart]] = {
    f'{ANALYSIS}User asks: "What is 2 + 2?" Simple arithmetic. Provide answer.<|end|>'
    f"{FINAL}2 + 2 = 4.<|return|>": [
        R('User asks: "What is 2 + 2?" Simple arithmetic. Provide answer.'),
        C("2 + 2 = 4."),
    ],
    f"{ANALYSIS}Need to use function get_current_weather.<|end|>{CALL}{WEATHER}<|call|>": [
        R("Need to use function get_current_weather."),
        SF,
    ],
    f"{ANALYSIS}{{long chain of thought}}<|end|><|start|>assistant<|channel|>commentary<|message|>"
    "**Action plan**:\n1. Generate an HTML file\n---\nWill start<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.generate_file<|constrain|>json<|message|>"
    '{"template": "basic_html", "path": "index.html"}<|call|>': [
        R("{long chain of thought}"),
        C("**Action plan**:\n1. Generate an HTML file\n---\nWill start"),
        FILE,
    ],
    f"{ANALYSIS}a<|end|>{FINAL}b": [R("a"), C("b")],
    f"{ANALYSIS}only thought<|return|>": [R("only thought")],
    f" to=functions.get_current_weather<|channel|>commentary json<|message|>{WEATHER}<|call|>": [SF],
    # Several calls, and analysis between them.
    f"{CALL}{WEATHER}<|end|><|start|>assistant{ANALYSIS}and again <3<|end|>{CALL}{WEATHER}<|end|>{FINAL}ok": [
        SF,
        R("and again <3"),
        SF,
        C("ok"),
    ],
    f"{ANALYSIS}one<|end|><|start|>assistant{ANALYSIS}two<|end|>{FINAL}three<|end|>{FINAL}four": [
        R("one\ntwo"),
        C("three\nfour"),
    ],
    # A call in the channel of the analysis, and a built-in tool, which is not offered.
    f"{ANALYSIS.replace('<|message|>', ' to=functions.get_current_weather<|message|>')}{WEATHER}": [SF],
    "<|channel|>analysis to=python code<|message|>print(1)<|call|>": [R("print(1)")],
    "<|channel|>commentary to=browser.search<|message|>x<|call|>": [C("x")],
    # What is not a call: another function, no JSON, no object, an open string.
    "<|channel|>commentary to=functions.rm<|message|>{}<|call|>": [C("{}")],
    f"{CALL}not json<|call|>": [C("not json")],
    f"{CALL}[1]<|call|>": [C("[1]")],
    f'{CALL}{{"location": "': [C('{"location": "')],
    f'{CALL}{{"a": NaN}}': [C('{"a": NaN}')],
    # Without headers, as after a grammar or a continued message.
    "Hello <world": [C("Hello <world")],
    '{"a": 1}': [C('{"a": 1}')],
    " \n": [],
    "to": [C("to")],
    "to=5 is not a header": [C("to=5 is not a header")],
    "<|message|>hi<|return|>": [C("hi")],
    # Messages without an end, and tags where none belong.
    f"{ANALYSIS}a{FINAL}b": [R("a"), C("b")],
    f"{ANALYSIS}a<|channel|>final<|message|>b": [R("a"), C("b")],
    f"{FINAL}a<|constrain|>b<|message|>c<|en": [C("abc<|en")],
    "<|channel|>analysis<|end|><|start|>assistant<|channel|>final<|message|>b": [C("b")],
    "<|end|><|end|>a": [C("a")],
    f"{FINAL}a<|end|>b": [C("a\nb")],
    f"<|channel|>{'x' * 600}": [C("x" * 600)],
    f"<|channel|>{'x' * 600}<|message|>b": [C(f"{'x' * 600}b")],
    "<|channel|><|channel|>": [],
    "<|start|>assistant<|channel|>fin": [],
}
CUT: dict[str, list[OutputPart]] = {
    f"{ANALYSIS}a <|en": [R("a ")],
    f"{ANALYSIS}a < b": [R("a < b")],
    "<|chan": [],
    "to": [],
    "<|channel|>analy": [],
    f'{CALL}{{"location": "San': [],
    f"{CALL}{WEATHER}": [SF],
    f"{ANALYSIS}a<|end|><|sta": [R("a")],
    "Hello": [C("Hello")],
}


@pytest.mark.parametrize(("text", "parts"), CASES.items())
def test_parts_of_each_text(text: str, parts: list[OutputPart]) -> None:
    assert parsed(HarmonyParser(TOOLS), [text]) == parts
    for n in range(1, len(text)):
        assert parsed(HarmonyParser(TOOLS), [text[:n], text[n:]]) == parts, f"divided at {n}"
    assert parsed(HarmonyParser(TOOLS), text) == parts, "character by character"


@pytest.mark.parametrize(("text", "parts"), CUT.items())
def test_a_cut_call_or_tag_is_not_content(text: str, parts: list[OutputPart]) -> None:
    assert parsed(HarmonyParser(TOOLS), [text], cut=True) == parts
    assert parsed(HarmonyParser(TOOLS), text, cut=True) == parts


def test_calls_are_content_without_tools() -> None:
    assert parsed(HarmonyParser(()), [f"{CALL}{WEATHER}<|call|>"]) == [C(WEATHER)]


PIECES = (
    *TAGS,
    "assistant",
    "analysis",
    "final",
    "commentary",
    " to=functions.generate_file",
    "{",
    "}",
    "<",
    " ",
    "a",
)


@settings(max_examples=500)
@given(
    st.lists(st.sampled_from((*PIECES, "{}", WEATHER, "x" * 300)), max_size=20).map("".join),
    st.lists(st.integers(0, 10_000), max_size=12),
    st.booleans(),
)
def test_every_chunking_of_any_text_gives_the_same_parts(text: str, positions: list[int], cut: bool) -> None:
    whole = parsed(HarmonyParser(TOOLS), [text], cut=cut)
    assert parsed(HarmonyParser(TOOLS), divided(text, positions), cut=cut) == whole
    assert parsed(HarmonyParser(TOOLS), text, cut=cut) == whole
    # Special tokens stay hidden; only a tag that the text breaks off is part of it.
    shown = [part.text for part in whole if not isinstance(part, ToolCall)]
    assert not any(tag in each for tag in TAGS for each in shown)


def test_the_state_of_reasoning() -> None:
    parser = HarmonyParser(TOOLS)
    states = [parser.reasoning_state]
    for piece in ("<|channel|>analysis", "<|message|>a", "<|end|>", f"{FINAL}b", "<|end|>"):
        parser.push(piece)
        states.append(parser.reasoning_state)
    assert states == ["undecided", "undecided", "inside", "undecided", "over", "over"]


def test_a_long_message_in_small_pieces() -> None:
    text = "a<" * 100_000
    parts = parsed(HarmonyParser(TOOLS), divided(f"{ANALYSIS}{text}<|end|>", range(0, 200_000, 7)))
    assert parts == [R(text)]


def test_the_format_is_that_of_the_template() -> None:
    template = "{% if tools %}{% endif %}<|start|>assistant<|channel|>analysis<|message|>"
    assert is_harmony(template)
    assert marks_reasoning(template)
    assert tool_format_of(template) == "openai"
    assert tool_format_of("{% if tools %}<|channel|>") is None


def test_the_parser_accepts_what_the_grammar_produces() -> None:
    grammars = byte_grammars()
    head = CALL.removeprefix("<|start|>assistant")
    weather = json.dumps(json.loads(WEATHER))
    one = f"{head}{weather}"
    several = f"{one}<|end|>{CALL}{weather}"
    for text, parallel in ((one, False), (several, True)):
        grammar = tool_grammar("openai", TOOLS, parallel=parallel)
        assert takes(grammars, grammar, text)
        assert not takes(grammars, grammar, text.replace("functions.", ""))
        assert parsed(tool_parser("openai", TOOLS), [text]) == [SF] * (2 if parallel else 1)
        assert parsed(CompletionParser("openai_gptoss", None, TOOLS), [text])[0] == SF
