"""Gemma 4: calls and thoughts in pieces of every size, and grammars whose output the parser accepts."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from fakes import text as fake_text
from llaisys.engine.grammar import GrammarCompiler, GrammarTokenizer
from llaisys.output_parts import Content, OutputPart, Reasoning, ToolCall
from llaisys.sampling_params import StructuredOutputsParams
from llaisys.text.reasoning import CompletionParser, marks_reasoning
from llaisys.text.thoughts import thought_format_of
from llaisys.text.tokenizer import Tokenizer
from llaisys.text.tool_calls import CALLS_MAX, tool_format_of, tool_grammar, tool_parser
from llaisys.text.tool_calls.gemma4 import CLOSE, OPEN, TAGS
from parsing import byte_grammars, divided, parsed, takes

C, R = Content, Reasoning
TOOLS: dict[str, dict[str, Any]] = {"weather": {}, "add": {}, "now": {}}
NOW = ToolCall("now", "{}")


def q(text: str) -> str:
    """Return a string in Gemma 4's form."""
    return f'<|"|>{text}<|"|>'


def call(name: str, arguments: str) -> str:
    """Return a call in Gemma 4's form. `arguments`: without the braces."""
    return f"{OPEN}call:{name}{{{arguments}}}{CLOSE}"


def thought(text: str) -> str:
    """Return a thought in Gemma 4's form."""
    return f"<|channel>thought\n{text}<channel|>"


def added(**arguments: object) -> ToolCall:
    """Return a call of `add`."""
    return ToolCall("add", json.dumps(arguments, ensure_ascii=False))


GENF = ToolCall("weather", '{"city": "Genf é😀"}')
WEATHER = call("weather", f"city:{q('Genf é😀')}")
# A call of an unknown function, with a known one in a string.
UNKNOWN = call("rm", "a:" + q(call("now", "")))

# Written by hand from the template; none was recorded from a model.
CALLS: dict[str, list[OutputPart]] = {
    "Hello, world": [C("Hello, world")],
    "  1 < 2 <|tool \n": [C("  1 < 2 <|tool \n")],
    WEATHER: [GENF],
    f"I look.\n{WEATHER}{call('now', '')} Done. ": [C("I look."), GENF, NOW, C("Done. ")],
    f"{WEATHER}\n and {call('now', '')}": [GENF, C("and"), NOW],
    # Values.
    call("add", "a:1,b:-2.5,c:1.5e3,d:true,e:false,f:null"): [
        added(a=1, b=-2.5, c=1500.0, d=True, e=False, f=None)
    ],
    call("add", "a:None,b:True"): [added(a=None, b=True)],
    call("add", f"a:{{b:{{c:[{q('x')},[],{{}}]}},d:1}},e:[1,2,[3]]"): [
        added(a={"b": {"c": ["x", [], {}]}, "d": 1}, e=[1, 2, [3]])
    ],
    call("add", f" a : 1 ,\n b : [ 1 , {q('x')} , ] , "): [added(a=1, b=[1, "x"])],
    # Strings and keys with any characters.
    call("add", "a:" + q("") + ",b:" + q(' "q" }]{[ , : null < <|')): [
        added(a="", b=' "q" }]{[ , : null < <|')
    ],
    call("add", f"a:{q(f'{CLOSE} {OPEN}call:now{{}}{CLOSE}')}"): [
        added(a=f"{CLOSE} {OPEN}call:now{{}}{CLOSE}")
    ],
    call("add", "a:" + q("line\nfeed \\n")): [added(a="line\nfeed \\n")],
    call("add", f"{q('a:b')}:1,c d:2,$e.f-g:3,é:4"): [added(**{"a:b": 1, "c d": 2, "$e.f-g": 3, "é": 4})],
    # The last of equal keys counts, as in JSON.
    call("add", "a:1,a:2"): [added(a=2)],
    # Without the closing tag: at the end, or before another call. With several.
    WEATHER.removesuffix(CLOSE): [GENF],
    WEATHER.removesuffix("call|>"): [GENF],
    WEATHER.removesuffix(CLOSE) + call("now", ""): [GENF, NOW],
    f"{WEATHER}{CLOSE}\n{CLOSE} ok": [GENF, C("ok")],
    f"{WEATHER}{CLOSE[:6]}": [GENF, C(CLOSE[:6])],
    # What is no call is content.
    f"a {UNKNOWN} b": [C(f"a {UNKNOWN} b")],
    f"a {OPEN}not a call{CLOSE} b": [C(f"a {OPEN}not a call{CLOSE} b")],
    f"{OPEN}call: I do not know {{}}": [C(f"{OPEN}call: I do not know {{}}")],
    f"{OPEN}call:{'x' * 200}{{}}{CLOSE}": [C(f"{OPEN}call:{'x' * 200}{{}}{CLOSE}")],
    f"{OPEN}call:add": [C(f"{OPEN}call:add")],
    f"{OPEN}": [C(OPEN)],
    f"{call('add', 'a:1').removesuffix(CLOSE)} and more": [
        C(f"{call('add', 'a:1').removesuffix(CLOSE)} and more")
    ],
    f"{OPEN}call:add{{a:1": [C(f"{OPEN}call:add{{a:1")],
    f'{OPEN}call:add{{a:<|"|>x}}{CLOSE} b': [C(f'{OPEN}call:add{{a:<|"|>x}}{CLOSE} b')],
    f"{OPEN}call:add{{a:{{b:1}}{CLOSE} {call('now', '')}": [C(f"{OPEN}call:add{{a:{{b:1}}{CLOSE}"), NOW],
    f"{OPEN}call:add{{a:{{b:1}}{call('now', '')}": [C(f"{OPEN}call:add{{a:{{b:1}}"), NOW],
    **{
        call("add", arguments): [C(call("add", arguments))]
        for arguments in (
            "a",
            "a:",
            ":1",
            "a:1 b:2",
            "a:,b:1",
            "a:Genf",
            'a:"Genf"',
            "a:{1}",
            "a:12:30",
            "a:01x",
            "a:NaN",
            "a:1e999",
            "a:[1",
            "a:1]",
            f"a:{q('x')}{q('y')}",
            f"a{q('b')}:1",
            "a:" + "[" * 100 + "]" * 100,
            "a:" + "[" * 5000 + "]" * 5000,
            "a:" + "9" * 5000,
        )
    },
    f"{call('add', 'a:1}')}": [C(call("add", "a:1}"))],
}
CALLS_CUT: dict[str, list[OutputPart]] = {
    "Hi <|tool": [C("Hi")],
    f"Hi {OPEN}": [C("Hi")],
    f"{OPEN}ca": [],
    f"{OPEN}call:ad": [],
    f"{OPEN}call:add{{": [],
    f'{OPEN}call:add{{a:<|"|>x}}{CLOSE}': [],
    f"{WEATHER}{OPEN}call:ad": [GENF],
    WEATHER.removesuffix(CLOSE): [GENF],
    f"{OPEN}not json": [C(f"{OPEN}not json")],
}

# The first six are cases of llama.cpp.
THOUGHTS: dict[str, list[OutputPart]] = {
    "Hello, world!": [C("Hello, world!")],
    thought("I'm\nthinking") + "Hello, world!\nWhat's up?": [
        R("I'm\nthinking"),
        C("Hello, world!\nWhat's up?"),
    ],
    "<|channel>thought<channel|>Hello": [C("Hello")],
    f"{thought('')}Hello<channel|>": [C("Hello")],
    f"Hello{thought('')}": [C("Hello")],
    f"{thought('hm')}{WEATHER}": [R("hm"), GENF],
    " \n": [C(" \n")],
    "  spaces stay \n": [C("  spaces stay \n")],
    " \n" + thought(" \n a < b <chan \n") + " \nYes \n": [R("a < b <chan"), C("Yes \n")],
    f"{thought('a')}\n{thought('b')}\nc": [R("a\nb"), C("c")],
    # The space before a thought comes after it: a call might have followed.
    f"{thought('a')}b {thought('c')}d{thought('')}\n": [R("a"), C("b"), R("c"), C(" d\n")],
    f"{thought('a')}{WEATHER}{thought('b')}{call('now', '')}": [R("a"), GENF, R("b"), NOW],
    # Without an end: at the end of the completion, before a call, and before another thought.
    "<|channel>thought\nnever ends \n": [R("never ends")],
    "<|channel>thought\nends <chan": [R("ends <chan")],
    f"<|channel>thought\nhm \n{WEATHER} ok": [R("hm"), GENF, C("ok")],
    f"<|channel>thought\na\n{thought('b')}c": [R("a\nb"), C("c")],
    "<|channel>thou": [],
    "<|channel>thought": [],
    "<|channel>thought<chan": [R("<chan")],
    f"<|channel>thought{WEATHER}": [GENF],
    # Other labels stay in the thought.
    "<|channel>thoughtful<channel|>a": [R("thoughtful"), C("a")],
    "<|channel>final\nx<channel|>a": [R("final\nx"), C("a")],
    "<|channel><|channel>thought\nx<channel|>a": [R("x"), C("a")],
    "thought\nis a word": [C("thought\nis a word")],
    # Tags where none belong.
    " <channel|> a": [C("a")],
    "a <channel|>b <|chan": [C("a b <|chan")],
    # A string of a call has any text.
    call("add", f"a:{q(thought('x'))},b:{q('<channel|>')}"): [
        added(a="<|channel>thought\nx<channel|>", b="<channel|>")
    ],
    f"{OPEN}call:add{{a:{thought('x')}1}}{CLOSE}": [R("x"), added(a=1)],
    f"{call('rm', '')}{thought('x')}a": [C(call("rm", "")), R("x"), C("a")],
}


def completion_parser(format: str = "gemma4") -> CompletionParser:
    """Return a parser of thoughts and calls."""
    return CompletionParser(format, tool_parser("gemma4", TOOLS))  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "parts"), CALLS.items(), ids=range(len(CALLS)))
def test_calls_of_each_text(text: str, parts: list[OutputPart]) -> None:
    assert parsed(tool_parser("gemma4", TOOLS), [text]) == parts
    assert parsed(tool_parser("gemma4", TOOLS), text) == parts, "character by character"
    assert parsed(completion_parser(), [text]) == parts, "with thoughts"
    if len(text) < 500:
        for n in range(1, len(text)):
            assert parsed(tool_parser("gemma4", TOOLS), [text[:n], text[n:]]) == parts, f"divided at {n}"


@pytest.mark.parametrize(("text", "parts"), THOUGHTS.items(), ids=range(len(THOUGHTS)))
def test_thoughts_of_each_text(text: str, parts: list[OutputPart]) -> None:
    assert parsed(completion_parser(), [text]) == parts
    assert parsed(completion_parser(), text) == parts, "character by character"
    for n in range(1, len(text)):
        assert parsed(completion_parser(), [text[:n], text[n:]]) == parts, f"divided at {n}"


@pytest.mark.parametrize(("text", "parts"), CALLS_CUT.items())
def test_a_truncated_call_is_not_content(text: str, parts: list[OutputPart]) -> None:
    for pieces in ([text], text):
        assert parsed(tool_parser("gemma4", TOOLS), pieces, cut=True) == parts
        assert parsed(completion_parser(), pieces, cut=True) == parts


def test_no_prefix_of_a_call_is_content() -> None:
    text = call("add", f"a:{{b:[{q('x')},1]}}")
    for n in range(1, len(text) + 1):
        assert parsed(tool_parser("gemma4", TOOLS), text[:n], cut=True) in ([], [added(a={"b": ["x", 1]})])


@pytest.mark.parametrize(
    "text", [f"<|channel>thought\na{WEATHER}b", f"a {OPEN}call:now{{}}{CLOSE}", call("add", 'a:<|"|>{<|"|>')]
)
def test_every_division_into_three_gives_the_same_parts(text: str) -> None:
    whole = parsed(completion_parser(), [text])
    for end in range(len(text) + 1):
        for middle in range(end + 1):
            pieces = [text[a:b] for a, b in pairwise((0, middle, end, len(text)))]
            assert parsed(completion_parser(), pieces) == whole, pieces


PIECES = (
    *TAGS,
    "<|channel>",
    "<channel|>",
    "thought",
    "\n",
    "call:",
    "add",
    "rm",
    "{",
    "}",
    "[",
    "]",
    "a:",
    ",",
    "1",
    "<",
    "<|",
    " ",
    '"',
    call("now", ""),
    thought("x"),
    WEATHER,
)


@settings(max_examples=1000)
@given(
    st.lists(st.sampled_from(PIECES), max_size=20).map("".join),
    st.lists(st.integers(0, 10_000), max_size=12),
    st.booleans(),
    st.sampled_from(["gemma4", "gemma4_inside", None]),
)
def test_every_chunking_of_any_text_gives_the_same_parts(
    text: str, positions: list[int], cut: bool, reasoning: Any
) -> None:
    whole = parsed(completion_parser(reasoning), [text], cut=cut)
    assert parsed(completion_parser(reasoning), divided(text, positions), cut=cut) == whole
    assert parsed(completion_parser(reasoning), text, cut=cut) == whole


@settings(max_examples=200)
@given(st.text(st.sampled_from('<|tol_cal>:ad{}"1 ')))
def test_non_calls_stay_unchanged(text: str) -> None:
    assert "".join(part.text for part in parsed(tool_parser("gemma4", TOOLS), [text])) == text  # type: ignore[union-attr]


def test_long_texts_in_small_pieces() -> None:
    long = "x<" * (1 << 15)
    city = call("weather", f"city:{q(long)}")
    assert parsed(completion_parser(), divided(city, range(0, len(city), 16))) == [
        ToolCall("weather", json.dumps({"city": long}))
    ]
    text = thought(f"{long}a")
    assert parsed(completion_parser(), divided(text, range(0, len(text), 16))) == [R(f"{long}a")]


def test_the_state_of_reasoning() -> None:
    parser = completion_parser()
    states = [parser.reasoning_state]
    for piece in (" <|chan", "nel>", "thought\na", "<channel|>", "b", WEATHER, thought("c")):
        parser.push(piece)
        states.append(parser.reasoning_state)
    assert states == ["undecided", "undecided", "inside", "inside", "over", "over", "over", "over"]
    assert completion_parser("gemma4_inside").reasoning_state == "inside"


def test_a_prompt_may_open_the_thought() -> None:
    assert thought_format_of("<|turn>model\n") == thought_format_of(thought("")) == "gemma4"
    assert thought_format_of("<tool_response|>") == "gemma4"
    for end in ("<|channel>", "<|channel>thought", "<|channel>thought\n"):
        assert thought_format_of(end) == "gemma4_inside"
    for text in ("a<channel|>b", "\na<channel|>b", "thought\na<channel|>b"):
        assert parsed(completion_parser("gemma4_inside"), text) == [R("a"), C("b")]


def test_the_format_is_that_of_the_template() -> None:
    template = "{% if tools %}{% endif %}{{ '<|tool_call>call:' + name }}{{ '<|channel>thought\\n' }}"
    assert tool_format_of(template) == "gemma4"
    assert marks_reasoning(template)
    assert tool_format_of("{{ '<|tool_call>call:' }}") is None
    assert not marks_reasoning("<|channel|>")


# --- the grammar, with a byte tokenizer ---

SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "properties": {
            "city": {"type": "string", "maxLength": 8},
            "unit": {"enum": ["C", "F", 1, None, ["x"], {"k": True}]},
            "days": {"$ref": "#/$defs/days"},
        },
        "required": ["city"],
        "$defs": {"days": {"type": "integer", "maximum": 9}},
    },
    "now": {"type": "object", "properties": {}},
    "tree": {
        "properties": {
            "Node": {"$ref": "#/$defs/node"},
            "list": {"type": "array", "items": {"type": ["number", "null"]}, "minItems": 1, "maxItems": 2},
            "any": {},
            "a:b": {"anyOf": [{"type": "string"}, {"type": "boolean"}]},
            "map": {"type": "object", "additionalProperties": {"type": "integer"}},
        },
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"next": {"$ref": "#/$defs/node"}, "v": {"const": "x"}},
                "required": ["v"],
            }
        },
    },
}
ACCEPTED: list[tuple[str, str, dict[str, Any]]] = [
    ("weather", f"city:{q('Genf é<}')}", {"city": "Genf é<}"}),
    ("weather", f"city:{q('')},days:3,unit:{q('C')}", {"city": "", "days": 3, "unit": "C"}),
    ("weather", f"city:{q('<|')},unit:null", {"city": "<|", "unit": None}),
    ("weather", f"city:{q('a')},unit:[{q('x')}]", {"city": "a", "unit": ["x"]}),
    ("weather", f"city:{q('a')},unit:{{k:true}}", {"city": "a", "unit": {"k": True}}),
    ("now", "", {}),
    ("tree", "", {}),
    ("tree", "map:{a:1,b_c:2}", {"map": {"a": 1, "b_c": 2}}),
    (
        "tree",
        f"{q('a:b')}:false,any:{{k:[{q('x')},-1.5,{{}},[]]}}",
        {"a:b": False, "any": {"k": ["x", -1.5, {}, []]}},
    ),
    ("tree", f"{q('a:b')}:{q('y')},list:[1,null]", {"a:b": "y", "list": [1, None]}),
    ("tree", f"Node:{{next:{{v:{q('x')}}},v:{q('x')}}}", {"Node": {"next": {"v": "x"}, "v": "x"}}),
]
REFUSED = [
    ("rm", ""),
    ("weather", ""),
    ("weather", "city:Genf"),
    ("weather", f"city:{q('123456789')}"),
    ("weather", f"city:{q('a')},days:10"),
    ("weather", f"city:{q('a')},unit:{q('K')}"),
    ("weather", f"unit:{q('C')},city:{q('a')}"),
    ("weather", f"city:{q('a')},other:1"),
    ("now", "a:1"),
    ("tree", "list:[]"),
    ("tree", "list:[1,2,3]"),
    ("tree", "map:{a:true}"),
    ("tree", "Node:{}"),
    ("tree", 'any:"x"'),
]


def special_grammars() -> tuple[GrammarCompiler, Tokenizer]:
    """Return a compiler for a tokenizer that has the tags as special tokens, as in a folder of a model."""
    backend = Backend.from_str(fake_text.tokenizer().to_json())
    backend.add_special_tokens([AddedToken(tag, special=True) for tag in TAGS])
    tokenizer = Tokenizer(backend)
    return GrammarCompiler(
        GrammarTokenizer(tokenizer.to_json(), (fake_text.EOS,), tokenizer.vocab_size)
    ), tokenizer


@pytest.fixture(scope="module", params=["text", "special tokens"])
def takes_call(request: pytest.FixtureRequest) -> Any:
    """Return a function: whether the grammar of one call, or of several, accepts a text."""
    if request.param == "text":
        compiler = byte_grammars()
        return lambda text, parallel=False: takes(
            compiler, tool_grammar("gemma4", SCHEMAS, parallel=parallel), text
        )
    compiler, tokenizer = special_grammars()
    special = {tag: tokenizer.token_id(tag) for tag in TAGS}

    def takes_tokens(text: str, parallel: bool = False) -> bool:
        grammar = tool_grammar("gemma4", SCHEMAS, parallel=parallel, special_ids=special)  # type: ignore[arg-type]
        matcher = compiler.compile(StructuredOutputsParams(grammar=grammar))
        ids = tokenizer.encode(text, False)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return takes_tokens


@pytest.mark.parametrize(("name", "arguments", "values"), ACCEPTED)
def test_the_parser_accepts_what_the_grammar_produces(
    takes_call: Any, name: str, arguments: str, values: dict[str, Any]
) -> None:
    text = call(name, arguments)
    assert takes_call(text)
    (found,) = parsed(tool_parser("gemma4", SCHEMAS), text)
    assert isinstance(found, ToolCall)
    assert (found.name, json.loads(found.arguments)) == (name, values)


@pytest.mark.parametrize(("name", "arguments"), REFUSED)
def test_the_grammar_enforces_names_and_schemas(takes_call: Any, name: str, arguments: str) -> None:
    assert not takes_call(call(name, arguments), True)


def test_the_grammar_limits_calls(takes_call: Any) -> None:
    several = WEATHER.replace(" é😀", "") + call("now", "")
    assert takes_call(several, True)
    assert not takes_call(several)
    assert not takes_call("Hi", True)
    assert not takes_call(call("now", "") * (CALLS_MAX + 1), True)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"allOf": [{"type": "integer"}, {"minimum": 1}]}}},
        {"properties": {"a": {"type": "array", "prefixItems": [{}]}}},
        {"properties": {"a": {"$ref": "https://example.com/a"}}},
        {"properties": {"a": {"$ref": "#/$defs/none"}}},
        {"properties": {"a": {"type": "what"}}},
        {"properties": {"a": True}},
        {"required": ["a"]},
        {},
    ],
)
def test_a_schema_that_the_grammar_cannot_express_allows_any_value(schema: dict[str, Any]) -> None:
    grammar = tool_grammar("gemma4", {"f": schema}, parallel=False)
    assert takes(byte_grammars(), grammar, call("f", "a:[1]"))


def test_a_deeply_nested_schema_compiles() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(200):
        schema = {"type": "object", "properties": {"a": schema}}
    grammar = tool_grammar("gemma4", {"f": schema}, parallel=False)
    assert takes(byte_grammars(), grammar, call("f", "a:{a:{}}"))
