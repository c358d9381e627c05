"""Tool calls of Mistral, Qwen3-Coder, Llama (pythonic), DeepSeek and LFM2: parts, grammars, templates."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llaisys.engine.grammar import GrammarCompiler
from llaisys.output_parts import Content, OutputPart, ToolCall
from llaisys.text.reasoning import marks_reasoning, reasoning_format_of
from llaisys.text.tool_calls import ToolFormat, tool_format_of, tool_grammar, tool_parser
from llaisys.text.tool_calls.deepseek import ALL_CLOSE, ALL_OPEN, CLOSE, OPEN, SEPARATOR
from llaisys.text.tool_calls.pythonic import parsed_calls
from parsing import byte_grammars, divided, parsed, takes

TOOLS: dict[str, dict[str, Any]] = {
    "weather": {"properties": {"city": {"type": "string"}, "days": {"type": ["integer", "null"]}}},
    "add": {
        "properties": {
            "a": {"type": "integer"},
            "b": {"$ref": "#/$defs/numbers"},
            "c": {"anyOf": [{"type": "boolean"}, {"type": "string"}]},
        },
        "$defs": {"numbers": {"type": "array", "items": {"type": "number"}}},
    },
    "now": {},
}
WEATHER = ToolCall("weather", '{"city": "Genf é😀"}')
ADD = ToolCall("add", '{"a": 1, "b": [2]}')
NOW = ToolCall("now", "{}")
C = Content
A, B = '{"a": 1, "b": [2]}', '{"city": "Genf \\u00e9\\ud83d\\ude00"}'


def xml(name: str, **values: str) -> str:
    """Return a call in Qwen3-Coder's format."""
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def item(name: str, arguments: str) -> str:
    """Return a call in a list of Mistral's format."""
    return f'{{"name": "{name}", "arguments": {arguments}}}'


def fenced(name: str, arguments: str) -> str:
    """Return a call in the format of DeepSeek V3."""
    return f"{OPEN}function{SEPARATOR}{name}\n```json\n{arguments}\n```{CLOSE}"


def plain(name: str, arguments: str) -> str:
    """Return a call in the format of DeepSeek V3.1."""
    return f"{OPEN}{name}{SEPARATOR}{arguments}{CLOSE}"


def listed(calls: str) -> str:
    """Return a list of calls in the format of LFM2."""
    return f"<|tool_call_start|>[{calls}]<|tool_call_end|>"


# Written by hand from the templates; none was recorded from a model.
CASES: dict[ToolFormat, dict[str, list[OutputPart]]] = {
    "mistral": {
        "Hello [TOOL] [1]": [C("Hello [TOOL] [1]")],
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {B}}}]': [WEATHER],
        f"I look. [TOOL_CALLS][{item('weather', B)}, {item('add', A)}] ok": [
            C("I look."),
            WEATHER,
            ADD,
            C("ok"),
        ],
        f"[TOOL_CALLS]weather[ARGS]{B}[TOOL_CALLS]add[ARGS]{A}": [WEATHER, ADD],
        f"[TOOL_CALLS]add[CALL_ID]abcDEF123[ARGS]{A}": [ADD],
        f"[TOOL_CALLS]add {A}\n": [ADD],
        f"[TOOL_CALLS]rm[ARGS]{A}": [C(f"[TOOL_CALLS]rm[ARGS]{A}")],
        "[TOOL_CALLS]add[ARGS]": [C("[TOOL_CALLS]add[ARGS]")],
        "[TOOL_CALLS]add[ARGS]{'a'}": [C("[TOOL_CALLS]add[ARGS]{'a'}")],
        "a [TOOL_CALLS] then": [C("a [TOOL_CALLS] then")],
        '[TOOL_CALLS][{"name": "rm", "arguments": {}}]': [C('[TOOL_CALLS][{"name": "rm", "arguments": {}}]')],
        "[TOOL_CALLS][]": [C("[TOOL_CALLS][]")],
    },
    "qwen3_coder": {
        "1 < 2 <function": [C("1 < 2 <function")],
        xml("weather", city="Genf é😀"): [WEATHER],
        f"I look.\n{xml('add', a='1', b='[2]')}\n{xml('now')} done": [C("I look."), ADD, NOW, C("done")],
        xml("add", a="1", b="[2]").removeprefix("<tool_call>\n"): [ADD, C("</tool_call>")],
        xml("add", a="1", b="[2]").removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"): [ADD],
        xml("add", a="1", b="[2]").removesuffix("tool_call>"): [ADD],
        xml("weather", city="12", days="3"): [ToolCall("weather", '{"city": "12", "days": 3}')],
        xml("weather", city="a\nb ", days="null"): [ToolCall("weather", '{"city": "a\\nb ", "days": null}')],
        xml("weather", days="None", city="None"): [ToolCall("weather", '{"days": null, "city": "None"}')],
        xml("weather", days="many", other="5"): [ToolCall("weather", '{"days": "many", "other": "5"}')],
        xml("add", c="True", a="1.5"): [ToolCall("add", '{"c": true, "a": "1.5"}')],
        xml("add", c="maybe", b="2"): [ToolCall("add", '{"c": "maybe", "b": "2"}')],
        xml("weather", city="say </parameter> twice </function>"): [
            ToolCall("weather", '{"city": "say </parameter> twice </function>"}')
        ],
        xml("rm", a="1"): [C(xml("rm", a="1"))],
        "<tool_call>\nnot a call</tool_call>": [C("<tool_call>\nnot a call</tool_call>")],
        "<tool_call><function=now>so</function>": [C("<tool_call><function=now>so</function>")],
    },
    "pythonic": {
        "Hello": [C("Hello")],
        " \n": [C(" \n")],
        "[1, 2] are numbers": [C("[1, 2] are numbers")],
        "[add]": [C("[add]")],
        "[weather(city='Genf é😀')]": [WEATHER],
        '[weather(city="Genf \\u00e9\\ud83d\\ude00")]': [WEATHER],
        " [add(a=1, b=[2]), now()]\n": [ADD, NOW],
        "<|python_start|>[add(a=1,b=[2,],)]<|python_end|> ok": [ADD, C("ok")],
        "[now()]<|python_end|><|python_end|>": [NOW, C("<|python_end|>")],
        "[now()] and more": [NOW, C("and more")],
        "[add(a=-1.5, c=True), add(c=None), add(c={'x': [false, null]})]": [
            ToolCall("add", '{"a": -1.5, "c": true}'),
            ToolCall("add", '{"c": null}'),
            ToolCall("add", '{"c": {"x": [false, null]}}'),
        ],
        '[weather(city=")]\'\\"")]': [ToolCall("weather", '{"city": ")]\'\\""}')],
        "[rm(a=1)]": [C("[rm(a=1)]")],
        "[add(1)]": [C("[add(1)]")],
        "[add(a=x)]": [C("[add(a=x)]")],
        "[add(a=1) + 1]": [C("[add(a=1) + 1]")],
        "[add(a=1": [C("[add(a=1")],
        "<|pyth": [C("<|pyth")],
    },
    "deepseek": {
        "1 <｜ 2": [C("1 <｜ 2")],
        f"{ALL_OPEN}{fenced('weather', B)}{ALL_CLOSE}": [WEATHER],
        f"I look.{ALL_OPEN}{fenced('weather', B)}\n{fenced('add', A)}{ALL_CLOSE}": [
            C("I look."),
            WEATHER,
            ADD,
        ],
        f"{ALL_OPEN}{plain('weather', B)}{plain('add', A)}{ALL_CLOSE} ok": [WEATHER, ADD, C("ok")],
        f"{ALL_OPEN}\n{plain('add', A)}\n{ALL_CLOSE}\n": [ADD],
        fenced("add", A): [ADD],
        plain("add", A).removesuffix(CLOSE): [ADD],
        fenced("add", A).removesuffix(f"``{CLOSE}"): [ADD],
        plain("rm", A): [C(plain("rm", A))],
        plain("add", "[]"): [C(plain("add", "[]"))],
        f"{ALL_OPEN}none": [C(f"{ALL_OPEN}none")],
        f"{OPEN}{'x' * 300}": [C(f"{OPEN}{'x' * 300}")],
    },
    "lfm2": {
        "1 <|tool_ 2": [C("1 <|tool_ 2")],
        listed('weather(city="Genf é😀")'): [WEATHER],
        f"I look. {listed('add(a=1, b=[2]), now()')} ok": [C("I look."), ADD, NOW, C("ok")],
        listed("weather(city='<|tool_call_end|>')"): [ToolCall("weather", '{"city": "<|tool_call_end|>"}')],
        listed(f"{item('weather', B)}, {item('add', A)}"): [WEATHER, ADD],
        listed("now()").removesuffix("<|tool_call_end|>"): [NOW],
        listed("now()").removesuffix("_end|>"): [NOW],
        listed("now()") + listed("add(a=1, b=[2])"): [NOW, ADD],
        listed("rm(a=1)"): [C(listed("rm(a=1)"))],
        listed(item("rm", A)): [C(listed(item("rm", A)))],
        listed(f"{item('add', A)}, 1"): [C(listed(f"{item('add', A)}, 1"))],
        listed(""): [C(listed(""))],
        "<|tool_call_start|>now()": [C("<|tool_call_start|>now()")],
        "<|tool_call_start|>[now()] then": [C("<|tool_call_start|>[now()] then")],
    },
}

# A completion that a token limit ended inside a call: complete calls and content, no markup.
CUT: dict[ToolFormat, dict[str, list[OutputPart]]] = {
    "mistral": {
        "Hi [TOOL_CA": [C("Hi")],
        "[TOOL_CALLS]we": [],
        "[TOOL_CALLS]add[AR": [],
        "[TOOL_CALLS]add[CALL_ID]ab": [],
        f"[TOOL_CALLS]add[ARGS]{A[:9]}": [],
        f'[TOOL_CALLS][{{"name": "add", "arguments": {A}}}, {{"na': [ADD],
    },
    "qwen3_coder": {
        "Hi <tool": [C("Hi")],
        "<tool_call>\n<function=we": [],
        "<tool_call>\n<function=weather>\n<parameter=city>\nGen": [],
        f"{xml('now')}\n<tool_call>\n<func": [NOW],
    },
    "pythonic": {
        "[": [],
        "[ad": [],
        "[add(a='": [],
        "<|python_st": [],
        "[1, 2": [C("[1, 2")],
        "[adx": [C("[adx")],
    },
    "deepseek": {
        f"Hi {ALL_OPEN[:9]}": [C("Hi")],
        f"{ALL_OPEN}{OPEN}func": [],
        f"{ALL_OPEN}{plain('add', A)}{OPEN}ad": [ADD],
    },
    "lfm2": {
        "Hi <|tool_ca": [C("Hi")],
        "<|tool_call_start|>[ad": [],
        "<|tool_call_start|>[now(), add(a='": [],
    },
}
FLAT = [(format, text, parts) for format, cases in CASES.items() for text, parts in cases.items()]
FORMATS: list[ToolFormat] = ["mistral", "qwen3_coder", "pythonic", "deepseek", "lfm2"]


@pytest.mark.parametrize(("format", "text", "parts"), FLAT)
def test_parts_of_each_text(format: ToolFormat, text: str, parts: list[OutputPart]) -> None:
    assert parsed(tool_parser(format, TOOLS), [text]) == parts
    assert parsed(tool_parser(format, TOOLS), text) == parts, "character by character"


@pytest.mark.parametrize(
    ("format", "text", "parts"),
    [(f, text, parts) for f, cases in CUT.items() for text, parts in cases.items()],
)
def test_a_truncated_call_is_not_content(format: ToolFormat, text: str, parts: list[OutputPart]) -> None:
    for pieces in ([text], text):
        assert parsed(tool_parser(format, TOOLS), pieces, cut=True) == parts


@settings(max_examples=300)
@given(st.sampled_from(FLAT), st.lists(st.integers(0, 10_000), max_size=12))
def test_every_chunking_gives_the_same_parts(
    case: tuple[ToolFormat, str, list[OutputPart]], positions: list[int]
) -> None:
    format, text, parts = case
    assert parsed(tool_parser(format, TOOLS), divided(text, positions)) == parts


PIECES: dict[ToolFormat, list[str]] = {
    "mistral": ["[TOOL_CALLS]", "[", "]", "[ARGS]", "[CALL_ID]", "add", A, item("add", A)],
    "qwen3_coder": ["<tool_call>", "</tool_call>", "<function=add>", "</function>", "</parameter>"],
    "pythonic": ["[", "]", "add", "(", ")", "a=", "1", "'", '"', "now()", "<|python_start|>"],
    "deepseek": [ALL_OPEN, ALL_CLOSE, OPEN, CLOSE, SEPARATOR, "function", "add", "```json", "```", A],
    "lfm2": [
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        "[",
        "]",
        "now()",
        "add(a=",
        "1",
        ")",
        "'",
        item("add", A),
    ],
}
PIECES["qwen3_coder"] += ["<parameter=a>", "1", xml("now")]
PIECES["pythonic"] += ["<|python_end|>"]


@settings(max_examples=500)
@given(st.data(), st.sampled_from(FORMATS), st.lists(st.integers(0, 10_000), max_size=12), st.booleans())
def test_every_chunking_of_any_text_gives_the_same_parts(
    data: st.DataObject, format: ToolFormat, positions: list[int], cut: bool
) -> None:
    pieces = [*PIECES[format], " ", "\n", ",", "x", "{", "<"]
    text = "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=14)))
    whole = parsed(tool_parser(format, TOOLS), [text], cut)
    assert parsed(tool_parser(format, TOOLS), divided(text, positions), cut) == whole


@pytest.mark.parametrize("format", FORMATS)
def test_a_long_call_in_small_pieces(format: ToolFormat) -> None:
    city = "x" * (1 << 16)
    text = {
        "mistral": f'[TOOL_CALLS]weather[ARGS]{{"city": "{city}"}}',
        "qwen3_coder": xml("weather", city=city),
        "pythonic": f'[weather(city="{city}")]',
        "deepseek": plain("weather", f'{{"city": "{city}"}}'),
        "lfm2": listed(f'weather(city="{city}")'),
    }[format]
    pieces = [text[at : at + 16] for at in range(0, len(text), 16)]
    assert parsed(tool_parser(format, TOOLS), pieces) == [ToolCall("weather", json.dumps({"city": city}))]


@pytest.mark.parametrize(
    "text",
    ["[add(a=" + "[" * 5000 + "]" * 5000 + ")]", "[add(a='\\Uffffffff')]", "[add(a=1, a=2)]", "[add(]"],
)
def test_an_invalid_list_of_calls_is_content(text: str) -> None:
    assert parsed_calls(text, TOOLS) is None


# --- the grammars, with a byte tokenizer ---

SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "properties": {
            "city": {"type": "string"},
            "unit": {"enum": ["C", "F"]},
            "days": {"$ref": "#/$defs/days"},
        },
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"days": {"type": "integer", "maximum": 9}},
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
CITY = '{"city": "Genf"}'
# Template -> a completion of two calls, and completions that are refused.
WRITTEN: list[tuple[ToolFormat, str, str, list[str]]] = [
    (
        "mistral",
        "",
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Genf"}}, {"name": "now", "arguments": {}}]',
        ['[TOOL_CALLS][{"name": "weather", "arguments": {}}]', "[TOOL_CALLS][]", "Hi"],
    ),
    (
        "mistral",
        "[ARGS]",
        '[TOOL_CALLS]weather[ARGS]{"city": "Genf"}[TOOL_CALLS]now[ARGS]{}',
        ["[TOOL_CALLS]weather[ARGS]{}", "[TOOL_CALLS]rm[ARGS]{}"],
    ),
    (
        "qwen3_coder",
        "",
        f"{xml('weather', city='Genf < é', unit='C', days='3')}\n{xml('now')}",
        [xml("weather"), xml("weather", city="a", days="10"), xml("weather", city="a", unit="K"), xml("rm")],
    ),
    (
        "pythonic",
        "",
        '[weather(city="Genf", unit="C", days=3), now()]',
        ["[weather()]", '[weather(city="a", days=10)]', "[]", '[weather(unit="C")]', '[weather(city="a",)]'],
    ),
    (
        "deepseek",
        "",
        ALL_OPEN + fenced("weather", CITY) + "\n" + fenced("now", "{}") + ALL_CLOSE,
        [f"{ALL_OPEN}{fenced('weather', '{}')}{ALL_CLOSE}", fenced("now", "{}")],
    ),
    (
        "deepseek",
        "V3.1",
        ALL_OPEN + plain("weather", CITY) + plain("now", "{}") + ALL_CLOSE,
        [f"{ALL_OPEN}{plain('weather', '{}')}{ALL_CLOSE}", plain("now", "{}")],
    ),
    (
        "lfm2",
        "",
        listed('weather(city="Genf", unit="C", days=3), now()'),
        [listed("weather()"), listed(""), "[now()]", listed('weather(city="a", days=10)')],
    ),
]


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    return byte_grammars()


@pytest.mark.parametrize(("format", "template", "text", "refused"), WRITTEN)
def test_the_parser_accepts_what_the_grammar_produces(
    grammars: GrammarCompiler, format: ToolFormat, template: str, text: str, refused: list[str]
) -> None:
    one = tool_grammar(format, SCHEMAS, parallel=False, template=template)
    several = tool_grammar(format, SCHEMAS, parallel=True, template=template)
    assert takes(grammars, several, text)
    assert not takes(grammars, one, text)
    calls = parsed(tool_parser(format, SCHEMAS), text)
    assert [call.name for call in calls if isinstance(call, ToolCall)] == ["weather", "now"]
    for wrong in refused:
        assert not takes(grammars, several, wrong), wrong


def test_optional_arguments_have_commas_between_them(grammars: GrammarCompiler) -> None:
    grammar = tool_grammar("pythonic", SCHEMAS, parallel=False)
    for arguments in ('city="a"', 'city="a", days=1', 'city="a", unit="F", days=1', 'city="a", unit="F"'):
        assert takes(grammars, grammar, f"[weather({arguments})]"), arguments
    optional = {"f": {"properties": {"x": {"type": "null"}, "y": {"type": "null"}}}}
    grammar = tool_grammar("pythonic", optional, parallel=False)
    for arguments in ("", "x=null", "y=null", "x=null, y=null"):
        assert takes(grammars, grammar, f"[f({arguments})]"), arguments
    assert not takes(grammars, grammar, "[f(x=null,y=null)]")


def test_tags_that_are_special_tokens_are_written_as_tokens() -> None:
    ids = {"[TOOL_CALLS]": 5, "[ARGS]": 32}
    grammar = tool_grammar("mistral", {"now": {}}, parallel=False, template="[ARGS]", special_ids=ids)
    assert 'call_0: <[5]> "now" <[32]> arguments_0' in grammar


# --- chat templates ---


@pytest.mark.parametrize(
    ("template", "format"),
    [
        ('{% if tools %}<tool_call>\n{"name": <function-name>, "arguments": <args>}\n</tool_call>', "hermes"),
        ("{% if tools %}<tool_call>\n<function=example>\n<parameter=p>\n", "qwen3_coder"),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]", "mistral"),
        (f"{{% if tools %}}{ALL_OPEN}{OPEN}", "deepseek"),
        ("{% if tools %}List of tools: <|tool_list_start|>[", "lfm2"),
        ("{% if tools %}List of tools: [ <|tool_call_start|>", "lfm2"),
        ("{% if tools %}in the format [func_name1(params_name1=params_value1...)]", "pythonic"),
        (
            'tools: {"name": function name, "parameters": dictionary of argument name and its value}.',
            "llama3_json",
        ),
        ("{% if tools %}<tool_call>{name}<arg_key>k</arg_key>arguments", None),
        ("<tool_call> arguments", None),
        ("{{ messages[0].content }}", None),
        ("", None),
    ],
)
def test_the_format_of_a_template(template: str, format: ToolFormat | None) -> None:
    assert tool_format_of(template) == format


def test_the_format_of_reasoning_depends_on_the_end_of_the_prompt() -> None:
    assert marks_reasoning("{{ '<think>\\n' }}")
    assert marks_reasoning("content.split('</think>')")
    assert not marks_reasoning("{{ content }}")
    for end, format in (("<think>", "deepseek_r1"), ("<think>\n", "deepseek_r1"), ("assistant\n", "qwen3")):
        assert reasoning_format_of(end) == format
    assert reasoning_format_of("<think>\n\n</think>\n\n") == "qwen3"
