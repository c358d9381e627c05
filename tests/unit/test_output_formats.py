"""The formats of tool calls and reasoning that a model's settings, template and tokenizer determine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from fakes import text
from llaisys.config import Config
from llaisys.engine.grammar import GrammarCompiler, GrammarTokenizer
from llaisys.output_formats import OutputFormats
from llaisys.output_parts import Content, Reasoning, ToolCall
from llaisys.sampling_params import SamplingParams, StructuredOutputsParams
from llaisys.text.chat_template import ChatTemplate, TemplateSource
from llaisys.text.tokenizer import Tokenizer
from llaisys.text.tool_calls import gemma4, harmony
from parsing import parsed

MISTRAL = "{% if tools %}[TOOL_CALLS]name[ARGS]{}{% endif %}"
THINKING = "{{ '<think>\\n' if enable_thinking else '<think></think>' }}"


def formats(template: str, *special: str, **settings: Any) -> OutputFormats:
    """Return the formats of a model with this template, and with more special tokens from id 512 on."""
    backend = Backend.from_str(text.tokenizer().to_json())
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    source = ChatTemplate(TemplateSource({"default": template}, {})) if template else None
    return OutputFormats.of(Config(**settings), source, Tokenizer(backend))


def test_the_setting_overrides_the_template() -> None:
    assert formats(MISTRAL).tool == "mistral"
    assert formats(MISTRAL, tool_call_parser="hermes").tool == "hermes"
    assert formats("").tool is formats("{{ messages }}").tool is None


def test_special_tokens_that_mark_calls_are_shown() -> None:
    params = SamplingParams()
    assert params.skip_special_tokens
    assert formats(MISTRAL).parsed_params(params, has_tools=True) is params
    special = formats(MISTRAL, "[TOOL_CALLS]")
    assert not special.parsed_params(params, has_tools=True).skip_special_tokens
    assert special.parsed_params(params, has_tools=False) is params
    assert formats("", "[TOOL_CALLS]").parsed_params(params, has_tools=True) is params


def test_a_grammar_writes_special_tokens_as_tokens() -> None:
    """A grammar of text cannot produce a special token."""
    mistral = formats(MISTRAL, "[TOOL_CALLS]", "[ARGS]")
    tokenizer = mistral.tokenizer
    compiler = GrammarCompiler(GrammarTokenizer(tokenizer.to_json(), (text.EOS,), tokenizer.vocab_size))
    spec = mistral.tool_grammar({"now": {"properties": {}}}, parallel=False)
    matcher = compiler.compile(spec)
    ids = tokenizer.encode("[TOOL_CALLS]now[ARGS]{}", False)
    assert ids[0] == tokenizer.token_id("[TOOL_CALLS]")
    assert matcher.try_consume_tokens(ids) == len(ids)
    assert matcher.is_accepting()
    parser = mistral.parser(SamplingParams(), {"now": {}}, None)
    assert parser is not None
    assert parser.push(tokenizer.decode(ids, False)) == [ToolCall("now", "{}")]


@pytest.mark.parametrize(
    ("template", "settings", "prompt", "want"),
    [
        (THINKING, {}, "hi<think>\n", "deepseek_r1"),
        (THINKING, {}, "hi<think></think>", "qwen3"),
        (THINKING, {"reasoning_parser": "qwen3"}, "hi<think>\n", "qwen3"),
        ("{{ messages }}", {}, "hi<think>\n", None),
        ("{{ messages }}", {"reasoning_parser": "deepseek_r1"}, "hi", "deepseek_r1"),
        ("", {}, "hi", None),
    ],
)
def test_reasoning_is_that_of_the_setting_or_of_the_prompt(
    template: str, settings: dict[str, Any], prompt: str, want: str | None
) -> None:
    made = formats(template, "<think>", "</think>", **settings)
    assert made.reasoning_of(made.tokenizer.encode(prompt, False)) == want


HARMONY = "{% if tools %}{% endif %}<|start|>assistant<|channel|>analysis<|message|>"


def test_channels_are_shown_and_end_completions() -> None:
    made = formats(HARMONY, *harmony.TAGS)
    assert (made.tool, made.reasoning_of([1]), made.has_reasoning) == ("openai", "openai_gptoss", True)
    ends = [made.tokenizer.token_id(tag) for tag in ("<|return|>", "<|call|>")]
    params = made.parsed_params(SamplingParams(stop_token_ids=[ends[1], 5]), has_tools=False)  # type: ignore[list-item]
    assert not params.skip_special_tokens
    assert list(params.stop_token_ids) == [ends[1], 5, ends[0]]
    assert not made.parsed_params(SamplingParams(ignore_eos=True), has_tools=False).stop_token_ids
    by_setting = formats("", *harmony.TAGS, reasoning_parser="openai_gptoss")
    assert by_setting.parsed_params(SamplingParams(), has_tools=False).stop_token_ids
    assert not formats(HARMONY, reasoning_parser="qwen3").writes_channels


def test_calls_in_channels_and_in_another_format() -> None:
    text = '<|channel|>analysis<|message|>a<|end|><|channel|>final<|message|>b<tool_call>{"name": "now", '
    text += '"arguments": {}}</tool_call><|end|><|channel|>commentary to=functions.now<|message|>{}'
    call = ToolCall("now", "{}")
    shown = 'b<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    for settings, want in (
        ({}, [Reasoning("a"), Content(shown), call]),
        ({"tool_call_parser": "hermes"}, [Reasoning("a"), Content("b"), call, Content("{}")]),
    ):
        made = formats(HARMONY, *harmony.TAGS, **settings)
        parser = made.parser(SamplingParams(), {"now": {}}, made.reasoning_of([1]))
        assert parser is not None
        assert parsed(parser, [text]) == want


GEMMA4 = "{% if tools %}<|tool_call>call:{% endif %}<|channel>thought\n<channel|>"
CHANNEL = ("<|channel>", "<channel|>")


def test_thoughts_and_calls_of_gemma4() -> None:
    made = formats(GEMMA4, *CHANNEL, *gemma4.TAGS, *gemma4.END_TAGS)
    assert (made.tool, made.has_reasoning, made.writes_channels, made.has_channels) == (
        "gemma4",
        True,
        False,
        True,
    )
    for prompt, want in (("<|channel>", "gemma4_inside"), ("<|channel>thought\n<channel|>", "gemma4")):
        for by in (made, formats("", *CHANNEL, reasoning_parser="gemma4")):
            assert by.reasoning_of(by.tokenizer.encode(prompt, False)) == want
    ends = [made.tokenizer.token_id(tag) for tag in gemma4.END_TAGS]
    for has_tools in (False, True):
        params = made.parsed_params(SamplingParams(), has_tools=has_tools)
        assert not params.skip_special_tokens
        assert list(params.stop_token_ids) == ends
    assert not made.parsed_params(SamplingParams(ignore_eos=True), has_tools=False).stop_token_ids
    parser = made.parser(SamplingParams(), {"now": {}}, "gemma4")
    assert parser is not None
    text = "<|channel>thought\na<channel|>b<|tool_call>call:now{}<tool_call|>"
    assert parsed(parser, [text]) == [Reasoning("a"), Content("b"), ToolCall("now", "{}")]


def test_tags_that_are_not_special_are_tokens_of_a_grammar() -> None:
    """In a GGUF file of Gemma 4 most tags are user-defined tokens."""
    backend = Backend.from_str(text.tokenizer().to_json())
    backend.add_tokens([*CHANNEL, *gemma4.TAGS, *gemma4.END_TAGS])
    source = ChatTemplate(TemplateSource({"default": GEMMA4}, {}))
    made = OutputFormats.of(Config(), source, Tokenizer(backend))
    ends = [backend.token_to_id(tag) for tag in gemma4.END_TAGS]
    assert list(made.parsed_params(SamplingParams(), has_tools=True).stop_token_ids) == ends
    spec = made.tool_grammar({"now": {"required": ["a"]}}, parallel=False)
    compiler = GrammarCompiler(
        GrammarTokenizer(made.tokenizer.to_json(), (text.EOS,), made.tokenizer.vocab_size)
    )
    matcher = compiler.compile(spec)
    ids = made.tokenizer.encode('<|tool_call>call:now{a:<|"|>b<|"|>}<tool_call|>', False)
    assert ids[0] == backend.token_to_id(gemma4.OPEN)
    assert matcher.try_consume_tokens(ids) == len(ids)
    assert matcher.is_accepting()


def test_a_completion_without_parts_has_no_parser() -> None:
    made, params = formats(THINKING), SamplingParams()
    assert made.parser(params, {}, None) is None
    parser = made.parser(params, {}, "deepseek_r1")
    assert parser is not None
    assert parser.push("a</think>b") == [Reasoning("a"), Content("b")]
    under_grammar = params.with_grammar(StructuredOutputsParams(json=json.dumps({})))
    assert made.parser(under_grammar, {}, "deepseek_r1") is None
