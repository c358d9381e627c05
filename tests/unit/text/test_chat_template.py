"""Chat templates: output equal to that of transformers, limits, and errors with a fix."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from llaisys.errors import RejectedError, UnsupportedError
from llaisys.model_info import GgufTokenizer, ModelInfo
from llaisys.text.chat_template import OUTPUT_CHARS_FREE, ChatTemplate, TemplateSource, load_chat_template
from llaisys.text.tokenizer import Tokenizer

Info = Callable[..., ModelInfo]
DATA = Path(__file__).parents[2] / "data"
CASES = json.loads((DATA / "qwen2-tokenizer" / "chat_golden.json").read_text("utf-8"))
USER = [{"role": "user", "content": "Hi"}]
CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def template(text: str, **special_tokens: str) -> ChatTemplate:
    return ChatTemplate(TemplateSource({"default": text}, special_tokens))


def loaded(info: ModelInfo, override: Path | None = None) -> ChatTemplate:
    found = load_chat_template(info, override)
    assert found is not None
    return found


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_rendering_equals_the_goldens_of_transformers(
    case: dict[str, Any], qwen: Tokenizer, qwen_folder: Path, info: Info
) -> None:
    text = loaded(info(qwen_folder)).render(
        case["messages"], add_generation_prompt=case["add_generation_prompt"], tools=case.get("tools")
    )
    assert text == case["rendered"]
    assert qwen.encode(text, add_special_tokens=False) == case["ids"]


# --- what templates may use ---


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("{% if true %}\n  x\n{% endif %}\ny", "  x\ny"),  # trim_blocks
        ("a\n   {% if true %}b{% endif %}", "a\nb"),  # lstrip_blocks
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "Hi"}'),
        ("{{ {'a': \"<é'&>\"} | tojson }}", '{"a": "<é\'&>"}'),
        ("{{ 'é' | tojson(ensure_ascii=true) }}", '"\\u00e9"'),
        ("{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':'), sort_keys=true) }}", '{"a":2,"b":1}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{{ strftime_now('%%|%d')[:2] }}", "%|"),
        ("{% generation %}\nx{% set y = 1 %}{% endgeneration %}{{ y is defined }}", "xFalse"),
        ("{{ bos_token }}|{{ eos_token }}|{{ pad_token }}", "<s>|</s>|"),
        ("{{ tools is none }}{{ documents is none }}{{ enable_thinking }}", "TrueTrueFalse"),
        ("{% set ns = namespace(n=0) %}{% set ns.n = 3 %}{{ ns.n }}", "3"),
        ("{{ messages[0].content.strip().startswith('H') }}", "True"),
    ],
)
def test_the_jinja_environment_equals_that_of_transformers(text: str, want: str) -> None:
    made = template(text, bos_token="<s>", eos_token="</s>")
    assert made.render(USER, enable_thinking=False) == want


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "fails on these messages"),
        ("{{ messages[7].content }}", "has no element 7"),
        ("{{ messages[0].missing.key }}", "missing"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ ''.__class__.__mro__ }}", "__class__"),
        ("{{ messages.append(1) }}", "append"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% include 'x' %}", "loader"),
    ],
)
def test_a_template_error_is_a_rejection_with_its_message(text: str, words: str) -> None:
    with pytest.raises(RejectedError, match=words) as caught:
        template(text).render(USER)
    assert caught.value.param == "messages"


CANARY = "canary-5081"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{{ raise_exception(messages[0].content) }}", r"rejects these messages: \s*\S*\.\.\."),
        ("{{ raise_exception('no role ' + messages[0].content) }}", r"no role \s*\S*\.\.\."),
        ("{{ raise_exception('no role ' ~ messages[0].content) }}", r"no role \s*\S*\.\.\."),
        ("{{ messages[messages[0].content] }}{{ messages[0][messages[0].content].x }}", "has no attribute"),
        ("{{ 'x'.index(messages[0].content) }}", "ValueError"),
        ("{{ {}.pop(messages[0].content) }}", "pop"),
        ("{{ ('%d' % messages[0].content) }}", "TypeError"),
        ("{{ ['x'] | map(messages[0].content) | list }}", "named"),
        ("{{ 'é'.encode('ascii', messages[0].content) }}", "unknown error handler"),
    ],
)
@pytest.mark.parametrize(
    "content", [CANARY, f'it\'s "{CANARY}" é', f"it's {CANARY}", f"\n{CANARY}\t\x01{CANARY}"]
)
def test_no_error_shows_the_conversation(text: str, says: str, content: str) -> None:
    with pytest.raises(RejectedError, match=says) as caught:
        template(text).render([{"role": "user", "content": content}])
    assert CANARY not in str(caught.value)
    assert caught.value.__cause__ is None


def test_large_constants_are_not_folded_at_compile_time() -> None:
    tracemalloc.start()
    try:
        template("{{ 'a' * 10**9 }}{{ 10**10**6 }}{{ '%1000000000d' % 1 }}")
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


def test_output_is_capped() -> None:
    n_chars = OUTPUT_CHARS_FREE * 20
    bomb = template(
        "{% for i in range(100000) %}{% for j in range(100000) %}xxxxxxxx{% endfor %}{% endfor %}"
    )
    with pytest.raises(RejectedError, match="more than"):
        bomb.render(USER)
    long = "x" * n_chars
    assert template("{{ messages[0].content }}").render([{"role": "user", "content": long}]) == long


@pytest.mark.parametrize(
    "text",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{% set x = range(90000) | list %}{% for i in range(90000) %}{% set y = x | sum %}{% endfor %}",
        "{% for i in range(90000) | select %}{% for j in range(90000) | reject %}{% endfor %}{% endfor %}",
    ],
)
def test_an_endless_template_is_stopped(text: str) -> None:
    with pytest.raises(RejectedError, match="more than 500000 steps"):
        template(text).render(USER)


def test_a_long_conversation_has_enough_fuel() -> None:
    messages = [{"role": "user", "content": "Hi " * 100}] * 2048
    body = "{% for m in messages %}{{ m.role | trim }}{{ m.content | upper }}{{ loop.last }}{% endfor %}"
    text = template(body).render(messages)
    assert text.count("HI") == 2048 * 100
    assert text.endswith("True")


def test_a_template_that_does_not_parse_is_rejected_with_its_line() -> None:
    with pytest.raises(RejectedError, match="line 2"):
        template("x\n{% if %}")


def test_variables_of_the_conversation_cannot_be_replaced() -> None:
    made = template("{{ messages[0].content }}{{ documents[0] }}{{ bos_token }}", bos_token="<s>")
    assert made.render(USER, documents=["x"], bos_token="<b>") == "Hix<b>"
    for name in ("messages", "chat_template"):
        variables: dict[str, Any] = {name: "x"}
        with pytest.raises(RejectedError, match=name):
            made.render(USER, **variables)


# --- messages ---


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, "b", {"type": "text", "text": "c"}]
    assert template("{{ messages[0].content }}").render([{"role": "user", "content": parts}]) == "a\nb\nc"


def test_arguments_of_tool_calls_become_objects() -> None:
    function = {"name": "f", "arguments": '{"x": [1]}'}
    calls: list[dict[str, Any]] = [{"type": "function", "function": function}, {"name": "g"}]
    made = template(
        "{{ messages[1].tool_calls[0].function.arguments.x[0] }}{{ messages[1].content is none }}"
    )
    messages: list[dict[str, Any]] = [*USER, {"role": "assistant", "tool_calls": calls}]
    assert made.render(messages) == "1True"
    assert calls[0]["function"] == {"name": "f", "arguments": '{"x": [1]}'}, (
        "the messages of the caller are not modified"
    )


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("{{ 'A' + messages[0].content }}", "A"),
        ("{{ 'null' if messages[0].content is none else 'text' }}", "null"),
        ("{{ 'null' if messages[0]['content'] is not none else 'text' }}", "text"),
    ],
)
def test_missing_content_is_empty_unless_the_template_asks_for_it(text: str, want: str) -> None:
    calls = [{"function": {"name": "f", "arguments": {}}}]
    assert template(text).render([{"role": "assistant", "content": None, "tool_calls": calls}]) == want


def test_another_role_is_rendered_if_the_template_takes_it() -> None:
    messages = [*USER, {"role": "critic", "content": "No"}, {"role": "critic", "content": "Yes"}]
    assert template(CHATML).render(messages, add_generation_prompt=False).count("<|critic|>") == 2
    only_known = "{% for m in messages if m.role in ['user', 'assistant'] %}{{ m.content }}{% endfor %}"
    with pytest.raises(RejectedError, match="'critic', which the model's chat template does not render") as e:
        template(only_known).render(messages)
    assert e.value.param == "messages[1].role"
    assert template(only_known).render(USER) == "Hi"


def test_the_developer_role_becomes_system_if_the_template_lacks_it() -> None:
    message = [{"role": "developer", "content": "x"}]
    assert template("{{ messages[0].role }}").render(message) == "system"
    assert template("{% if messages[0].role == 'developer' %}dev{% endif %}").render(message) == "dev"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("Hi", "messages"),
        ({"role": "user"}, "messages"),
        (["Hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user<|im_end|>", "content": "x"}], "messages[0].role"),
        ([{"role": "x" * 10_000, "content": "x"}], "messages[0].role"),
        ([{"role": ["x"] * 10_000, "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": [{"type": "x" * 10_000}]}], "messages[0].content[0]"),
        ([*USER, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": [3]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([{"role": "assistant", "tool_calls": ["f"]}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{"arguments": "{"}]}], "messages[0].tool_calls"),
    ],
)
def test_invalid_messages_are_rejected_by_position(messages: Any, param: str) -> None:
    with pytest.raises((RejectedError, UnsupportedError)) as caught:
        template(CHATML).render(messages)
    assert caught.value.param == param
    assert len(str(caught.value)) < 300


def test_a_part_with_media_is_refused_by_its_type() -> None:
    for kind in ("image_url", "input_audio", "file"):
        with pytest.raises(UnsupportedError, match=rf"'{kind}'; images, sound and files are not read"):
            template(CHATML).render([{"role": "user", "content": [{"type": kind}]}])
    with pytest.raises(UnsupportedError, match=r"of type 'refusal'; supported are parts of type 'text'"):
        template(CHATML).render([{"role": "user", "content": [{"type": "refusal"}]}])


# --- continuing the last message ---

PREFILLED = [*USER, {"role": "assistant", "content": "Sure, "}]


def test_continue_final_message_ends_inside_it() -> None:
    assert (
        template(CHATML).render(PREFILLED, continue_final_message=True)
        == "<|user|>Hi<|end|><|assistant|>Sure, "
    )


def test_continue_final_message_if_the_template_strips_it() -> None:
    stripping = CHATML.replace("m.content", "m.content | trim")
    assert template(stripping).render(PREFILLED, continue_final_message=True).endswith("<|assistant|>Sure,")


@pytest.mark.parametrize(
    "last", [{"role": "assistant", "content": ""}, {"role": "assistant", "content": None}]
)
def test_continue_final_message_needs_a_text(last: Mapping[str, Any]) -> None:
    with pytest.raises(RejectedError, match="last message with text"):
        template(CHATML).render([*USER, last], continue_final_message=True)


def test_continue_final_message_needs_a_template_that_renders_it() -> None:
    with pytest.raises(RejectedError, match="does not render"):
        template("{{ messages[0].content }}").render(PREFILLED, continue_final_message=True)


# --- sources of templates ---


def test_order_of_template_sources(tmp_path: Path, info: Info) -> None:
    facts = info(tmp_path)
    assert load_chat_template(facts, None) is None
    config = {"chat_template": "config {{ eos_token }}", "eos_token": {"content": "</s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    assert loaded(facts).render(USER) == "config </s>"
    (tmp_path / "chat_template.jinja").write_text("jinja {{ eos_token }}", "utf-8")
    assert loaded(facts).render(USER) == "jinja </s>"
    (tmp_path / "mine.jinja").write_text("mine {{ eos_token }}", "utf-8")
    assert loaded(facts, tmp_path / "mine.jinja").render(USER) == "mine </s>"
    with pytest.raises(RejectedError, match=r"none\.jinja"):
        load_chat_template(facts, tmp_path / "none.jinja")


def test_special_tokens_map_json_of_older_folders(tmp_path: Path, info: Info) -> None:
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<s>", "eos_token": null}', "utf-8")
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ eos_token is defined }}", "utf-8")
    assert loaded(info(tmp_path)).render(USER) == "<s>False"


def test_named_templates(tmp_path: Path, info: Info) -> None:
    def state(chat_template: Any) -> None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": chat_template}), "utf-8")

    both = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t {{ tools[0].x }}"}]
    state(both)
    made = loaded(info(tmp_path))
    assert made.render(USER) == "d"
    assert made.render(USER, tools=[]) == "d"
    assert made.render(USER, tools=[{"x": 1}]) == "t 1"
    state(both[1:])
    with pytest.raises(RejectedError, match="tool_use; none is named 'default'"):
        load_chat_template(info(tmp_path), None)
    state(["x"])
    with pytest.raises(RejectedError, match="neither a string nor a list"):
        load_chat_template(info(tmp_path), None)


def test_the_template_of_a_gguf_file(
    qwen_gguf: GgufTokenizer, info: Info, small: Callable[..., GgufTokenizer]
) -> None:
    assert loaded(info(Path("x.gguf"), qwen_gguf)).render(USER) == "Hi<|im_end|>"
    assert load_chat_template(info(Path("x.gguf"), small()), None) is None
