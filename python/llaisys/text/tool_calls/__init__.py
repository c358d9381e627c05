"""Tool calls in a completion: the formats, the grammars that enforce them, and the parsers that find them.

A format is chosen from the model's chat template (`tool_format_of`) or by `--tool-call-parser`. Each has its
own module, which names the source of the format.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Literal, TypeAlias

from llaisys.output_parts import OutputParser
from llaisys.text.tool_calls import (
    deepseek,
    gemma4,
    gemma4_grammar,
    harmony,
    hermes,
    lfm2,
    llama3,
    mistral,
    pythonic,
    qwen3_coder,
)
from llaisys.text.tool_calls.grammar import CALLS_MAX, CallGrammar, Schema

ToolFormat: TypeAlias = Literal[
    "hermes", "llama3_json", "mistral", "qwen3_coder", "pythonic", "deepseek", "lfm2", "openai", "gemma4"
]

__all__ = [
    "CALLS_MAX",
    "TOOL_TAGS",
    "ToolFormat",
    "tool_format_of",
    "tool_grammar",
    "tool_parser",
]

# Tags without which calls cannot be parsed, and which are single tokens in some models.
TOOL_TAGS: Mapping[ToolFormat, Collection[str]] = {
    "hermes": (hermes.OPEN, hermes.CLOSE),
    "llama3_json": (),
    "mistral": mistral.TAGS,
    "qwen3_coder": (qwen3_coder.OPEN, qwen3_coder.CLOSE),
    "pythonic": (),
    "deepseek": deepseek.TAGS,
    "lfm2": (lfm2.OPEN, lfm2.CLOSE),
    "openai": harmony.TAGS,
    "gemma4": gemma4.TAGS,
}

_PARSERS: Mapping[ToolFormat, Callable[[Mapping[str, Schema]], OutputParser]] = {
    "hermes": hermes.parser,
    "llama3_json": llama3.Llama3Parser,
    "mistral": mistral.parser,
    "qwen3_coder": qwen3_coder.parser,
    "pythonic": pythonic.PythonicParser,
    "deepseek": deepseek.parser,
    "lfm2": lfm2.parser,
    "openai": harmony.HarmonyParser,
    "gemma4": gemma4.parser,
}


def tool_parser(format: ToolFormat, tools: Mapping[str, Schema]) -> OutputParser:
    """Return a parser of one completion. Calls of functions that are not in `tools` are content.

    `tools`: name -> JSON schema of the arguments.
    """
    return _PARSERS[format](tools)


def tool_grammar(
    format: ToolFormat,
    tools: Mapping[str, Schema],
    *,
    parallel: bool,
    template: str = "",
    special_ids: Mapping[str, int] | None = None,
) -> str:
    """Return a Lark grammar for one call, or with `parallel` for 1 to 16 calls.

    `template`: the chat template, which decides between the variants of a format. `special_ids`: the ids of
    TOOL_TAGS that are added tokens.
    """
    grammar = _call_grammar(format, template, special_ids or {})
    return grammar.lark(tools, parallel=parallel, special_ids=special_ids)


def _call_grammar(format: ToolFormat, template: str, special_ids: Mapping[str, int]) -> CallGrammar:
    match format:
        case "hermes":
            return hermes.GRAMMAR
        case "llama3_json":
            return llama3.GRAMMAR
        case "qwen3_coder":
            return qwen3_coder.GRAMMAR
        case "pythonic":
            return pythonic.GRAMMAR
        case "lfm2":
            return lfm2.GRAMMAR
        case "openai":
            return harmony.GRAMMAR
        case "gemma4":
            return gemma4_grammar.call_grammar(special_ids.get(gemma4.QUOTE))
        case "mistral":
            return mistral.ARGS_GRAMMAR if mistral.ARGS in template else mistral.LIST_GRAMMAR
        case "deepseek":
            is_fenced = not template or "```json" in template
            return deepseek.FENCED_GRAMMAR if is_fenced else deepseek.PLAIN_GRAMMAR


def tool_format_of(template: str) -> ToolFormat | None:
    """Return the format in which a chat template writes tool calls, or None if it is none of these."""
    if "tools" not in template:
        return None
    if harmony.is_harmony(template):
        return "openai"
    if gemma4.writes_calls(template):
        return "gemma4"
    if "<function=" in template and "<parameter=" in template:
        return "qwen3_coder"
    if hermes.OPEN in template and "arguments" in template and "<arg_key>" not in template:
        return "hermes"
    if mistral.OPEN in template:
        return "mistral"
    if deepseek.OPEN in template:
        return "deepseek"
    if "<|tool_list_start|>" in template or lfm2.OPEN in template:
        return "lfm2"
    if "[func_name1(" in template:
        return "pythonic"
    if "<|python_tag|>" in template or '"parameters": dictionary of argument name' in template:
        return "llama3_json"
    return None
