"""Chat messages become the prompt text that the model was trained on: its Jinja template, rendered as
transformers does. Templates come from the model or the operator, never from a request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from llaisys.errors import RejectedError
from llaisys.text.files import read_object, read_text, special_strings
from llaisys.text.messages import check_messages
from llaisys.text.sandbox import FuelledEnvironment, fuelled
from llaisys.types import GgufTokenizer, ModelInfo

TEMPLATE_BYTES_MAX = 1 << 20
# Characters that a render may give: this many, and so many for each character of its input.
OUTPUT_CHARS_FREE = 64 << 10
OUTPUT_CHARS_PER_INPUT = 4

_WORD = re.compile(r"\w+")
_ESCAPE = re.compile(r"\\(u[0-9a-f]{4}|.)")  # of JSON
# Variables that a request may not set: one is the conversation, the other would be a template of its own.
_NOT_VARIABLES = frozenset({"messages", "chat_template"})
# Follows the last message where the answer is to go on from it. The space tells whether the template strips.
_CONTINUE_HERE = "\ue000continue here\ue000 "


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """Where templates come from: their texts by name (`default`, perhaps `tool_use`) and the model's special
    tokens (`bos_token` -> its text), which templates may write."""

    texts: Mapping[str, str]
    special_tokens: Mapping[str, str]


class ChatTemplate:
    """The compiled chat template of one model; immutable, usable from any thread."""

    def __init__(self, source: TemplateSource) -> None:
        """Raises RejectedError if a template does not parse or none is the `default`."""
        if "default" not in source.texts:
            raise RejectedError(
                f"the model's chat templates are {', '.join(sorted(source.texts))}; none is named 'default'",
                param="chat_template",
            )
        environment = _environment()
        self._templates = {name: _compile(environment, name, text) for name, text in source.texts.items()}
        self._words = frozenset(word for text in source.texts.values() for word in _WORD.findall(text))
        self._knows_developer = any("developer" in text for text in source.texts.values())
        self.source = source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt of a conversation; encode it with `add_special_tokens=False`.

        - `continue_final_message`: the prompt ends inside the last message, so that the answer goes on from
          it; there is no generation prompt then.
        - `kwargs`: further variables for the template (`enable_thinking`, `documents`).

        Raises RejectedError: bad messages, or whatever the template raises: its own words are kept, those of
        the conversation are not.
        """
        if taken := _NOT_VARIABLES.intersection(kwargs):
            raise RejectedError(f"{min(taken)} cannot be a template variable", param="chat_template_kwargs")
        chat = check_messages(messages, keep_developer=self._knows_developer)
        if continue_final_message:
            chat = [*chat[:-1], {**chat[-1], "content": _text_to_continue(chat[-1]) + _CONTINUE_HERE}]
        variables = {
            "documents": None,
            **self.source.special_tokens,
            **kwargs,
            "messages": chat,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        text = _bounded_render(self._templates[name], variables, self._words)
        return _cut_to_continue(text) if continue_final_message else text


def load_chat_template(info: ModelInfo, override: Path | None) -> ChatTemplate | None:
    """The chat template of a checkpoint, None if it has none (a base model).

    In this order: `override` (a Jinja file), `chat_template.jinja`, `chat_template` in
    `tokenizer_config.json` (a string, or a list of named ones), `tokenizer.chat_template` of a GGUF.
    """
    if info.tokenizer is not None:
        special = _gguf_special(info.tokenizer)
        texts = {} if info.tokenizer.chat_template is None else {"default": info.tokenizer.chat_template}
    else:
        special = special_strings(Path(info.path))
        texts = {} if override is not None else _folder_texts(Path(info.path))
    if override is not None:
        texts = {"default": read_text(override, TEMPLATE_BYTES_MAX)}
    return ChatTemplate(TemplateSource(texts, special)) if texts else None


def _folder_texts(folder: Path) -> dict[str, str]:
    path = folder / "chat_template.jinja"
    if path.exists():
        return {"default": read_text(path, TEMPLATE_BYTES_MAX)}
    stated = read_object(folder / "tokenizer_config.json").get("chat_template")
    if stated is None:
        return {}
    if isinstance(stated, str):
        return {"default": stated}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in stated}
    except (TypeError, KeyError) as e:
        raise RejectedError(
            "chat_template in tokenizer_config.json is neither a string nor a list of {name, template}",
            param="model",
        ) from e


def _gguf_special(facts: GgufTokenizer) -> dict[str, str]:
    ids = {"bos_token": facts.bos, "eos_token": facts.eos, "unk_token": facts.unk}
    return {
        name: facts.tokens[id] for name, id in ids.items() if id is not None and 0 <= id < len(facts.tokens)
    }


class _GenerationTag(Extension):
    """`{% generation %}` marks answers for training; here its body is simply part of the text."""

    tags = {"generation"}  # noqa: RUF012 -- Jinja declares it this way

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _environment() -> FuelledEnvironment:
    """Jinja2 set up as transformers documents it for chat templates."""
    environment = FuelledEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Python writes it; Jinja's own filter would escape `<`, `>`, `&` and `'` for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _compile(environment: FuelledEnvironment, name: str, text: str) -> jinja2.Template:
    try:
        return environment.from_string(text)
    except jinja2.TemplateSyntaxError as e:
        raise RejectedError(
            f"chat template {name!r}, line {e.lineno}: {e.message}", param="chat_template"
        ) from e


def _bounded_render(template: jinja2.Template, variables: dict[str, Any], words: Collection[str]) -> str:
    n_input = len(json.dumps([variables["messages"], variables["tools"]], ensure_ascii=False, default=str))
    n_max = OUTPUT_CHARS_FREE + OUTPUT_CHARS_PER_INPUT * n_input
    pieces: list[str] = []
    n_output = 0
    try:
        with fuelled():
            for piece in template.generate(variables):
                pieces.append(piece)
                n_output += len(piece)
                if n_output > n_max:
                    raise RejectedError(
                        f"the chat template gives more than {n_max} characters", param="messages"
                    )
    except jinja2.TemplateError as e:
        raise RejectedError(
            f"the chat template refuses these messages: {_told(e, variables, words)}", param="messages"
        ) from None
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as e:
        # What an expression of the template raises when a message lacks what it expects.
        if isinstance(e, RejectedError):
            raise
        raise RejectedError(
            f"the chat template fails on these messages: {type(e).__name__} {_told(e, variables, words)}",
            param="messages",
        ) from None
    return "".join(pieces)


def _told(error: Exception, variables: dict[str, Any], own: Collection[str]) -> str:
    """An error's text without the words that it can only have from the request: an answer shows no prompt.

    `own`: the words of the template.
    """
    given = _ESCAPE.sub(" ", json.dumps(variables, ensure_ascii=False, default=str)).casefold()
    kept = set(_WORD.findall(given)).difference(word.casefold() for word in own)
    return _WORD.sub(lambda word: "..." if word[0].casefold() in kept else word[0], str(error))


def _text_to_continue(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if not isinstance(content, str) or not content:
        raise RejectedError("continue_final_message needs a last message with text", param="messages")
    return content


def _cut_to_continue(text: str) -> str:
    at = text.rfind(_CONTINUE_HERE.rstrip())
    if at < 0:
        raise RejectedError(
            "the chat template does not show the last message, which was to go on", param="messages"
        )
    kept = text[:at]
    return kept if text.startswith(_CONTINUE_HERE, at) else kept.rstrip()
