"""ChatTemplate: renders chat messages with a model's Jinja template, as transformers does.

Templates come from the model, the operator or a Python caller, never from an HTTP request.
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
from llaisys.model_info import GgufTokenizer, ModelInfo
from llaisys.text.chat_messages import ROLES, check_messages
from llaisys.text.model_files import read_object, read_text, special_strings
from llaisys.text.sandbox import FueledEnvironment, fueled

TEMPLATE_BYTES_MAX = 1 << 20
# Bound of a rendered prompt in characters: a fixed part, plus this many per character of its input.
OUTPUT_CHARS_FREE = 64 << 10
OUTPUT_CHARS_PER_INPUT = 4

_WORD = re.compile(r"\w+")
# A test for messages without content, as DeepSeek V3's template has for messages with tool calls.
_NULL_CONTENT = re.compile(r"content['\"]?\]? is (?:not )?none")
_ESCAPE = re.compile(r"\\(u[0-9a-f]{4}|.)")  # of JSON
# Variables that a request may not set: the conversation, and a template.
_NOT_VARIABLES = frozenset({"messages", "chat_template"})
# Marks the end of the last message for `continue_final_message`. The trailing space shows whether the
# template strips the content of messages.
_CONTINUE_HERE = "\ue000continue here\ue000 "
# Shows whether the template renders a message.
_MARK = "\ue000message\ue000"


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """The texts of templates by name (`default`, optionally `tool_use`), and the texts of special tokens."""

    texts: Mapping[str, str]
    special_tokens: Mapping[str, str]


class ChatTemplate:
    """The compiled chat template of one model. Immutable and safe to use from any thread."""

    def __init__(self, source: TemplateSource) -> None:
        """Compile the templates. Raises RejectedError if one does not parse or none is named `default`."""
        if "default" not in source.texts:
            raise RejectedError(
                f"the model's chat templates are {', '.join(sorted(source.texts))}; none is named 'default'",
                param="chat_template",
            )
        environment = _environment()
        self._templates = {name: _compile(environment, name, text) for name, text in source.texts.items()}
        self._words = frozenset(word for text in source.texts.values() for word in _WORD.findall(text))
        self._knows_null = any(_NULL_CONTENT.search(text) for text in source.texts.values())
        self._knows_developer = any("developer" in text for text in source.texts.values())
        self.source = source

    @property
    def text(self) -> str:
        """The texts of all templates."""
        return "\n".join(self.source.texts.values())

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
        """Return the prompt text of a conversation; encode it with `add_special_tokens=False`.

        - `continue_final_message`: the prompt ends inside the last message, so that the completion continues
          it. No generation prompt is added then.
        - `kwargs`: further variables for the template (`enable_thinking`, `documents`).

        Raises RejectedError for invalid messages and for errors of the template. The text of such an error
        has only words of the template, not of the conversation.
        """
        if reserved := _NOT_VARIABLES.intersection(kwargs):
            raise RejectedError(
                f"{min(reserved)} cannot be a template variable", param="chat_template_kwargs"
            )
        chat = check_messages(messages, keep_developer=self._knows_developer)
        if not self._knows_null:  # most templates concatenate the content
            chat = [{**message, "content": message["content"] or ""} for message in chat]
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
        template = self._templates[name]
        _check_roles(template, variables, self._words)
        text = _bounded_render(template, variables, self._words)
        return _cut_to_continue(text) if continue_final_message else text


def load_chat_template(info: ModelInfo, override: Path | None) -> ChatTemplate | None:
    """Return the chat template of a checkpoint, or None if it has none (a base model).

    Sources, in order of precedence: `override` (a Jinja file), `chat_template.jinja`, `chat_template` in
    `tokenizer_config.json` (a string, or a list of named ones), `tokenizer.chat_template` of a GGUF.
    """
    if override is not None:
        texts = {"default": read_text(override, TEMPLATE_BYTES_MAX)}
    elif info.tokenizer is not None:
        texts = {} if info.tokenizer.chat_template is None else {"default": info.tokenizer.chat_template}
    else:
        texts = _folder_texts(Path(info.path))
    return ChatTemplate(TemplateSource(texts, special_tokens(info))) if texts else None


def read_chat_template(text: str, info: ModelInfo) -> ChatTemplate:
    """Return a template that a caller gives as text, with the special tokens of the model.

    Raises RejectedError for a text that is too long, has no Jinja block (such as a path) or does not parse.
    """
    if not isinstance(text, str):
        raise RejectedError(
            f"chat_template is a {type(text).__name__}, expected the text of a template",
            param="chat_template",
        )
    if len(text) > TEMPLATE_BYTES_MAX:
        raise RejectedError(
            f"chat_template has {len(text)} characters, at most {TEMPLATE_BYTES_MAX} are read",
            param="chat_template",
        )
    if "{" not in text:
        raise RejectedError(
            "chat_template has no Jinja block: pass the text of a template, not its path",
            param="chat_template",
        )
    return ChatTemplate(TemplateSource({"default": text}, special_tokens(info)))


def special_tokens(info: ModelInfo) -> dict[str, str]:
    """Return the texts of a model's special tokens by name, such as `bos_token` -> `<s>`."""
    if info.tokenizer is not None:
        return _gguf_special(info.tokenizer)
    return special_strings(Path(info.path))


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
    """`{% generation %}` marks completions for training; for inference its body is plain text."""

    tags = {"generation"}  # noqa: RUF012 -- Jinja declares it this way

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _environment() -> FueledEnvironment:
    """Return a Jinja2 environment with the settings that transformers documents for chat templates."""
    environment = FueledEnvironment(
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
    """Return JSON as Python writes it; Jinja's own filter escapes `<`, `>`, `&` and `'` for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _compile(environment: FueledEnvironment, name: str, text: str) -> jinja2.Template:
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
        with fueled():
            for piece in template.generate(variables):
                pieces.append(piece)
                n_output += len(piece)
                if n_output > n_max:
                    raise RejectedError(
                        f"the chat template renders more than {n_max} characters", param="messages"
                    )
    except jinja2.TemplateError as e:
        raise RejectedError(
            f"the chat template rejects these messages: {_without_prompt_words(e, variables, words)}",
            param="messages",
        ) from None
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as e:
        # Raised by an expression of the template when a message lacks a field that it expects.
        if isinstance(e, RejectedError):
            raise
        raise RejectedError(
            f"the chat template fails on these messages: {type(e).__name__} "
            f"{_without_prompt_words(e, variables, words)}",
            param="messages",
        ) from None
    return "".join(pieces)


def _check_roles(template: jinja2.Template, variables: dict[str, Any], words: Collection[str]) -> None:
    """Raise RejectedError if the template drops messages of a role that OpenAI's API does not have."""
    chat: list[dict[str, Any]] = variables["messages"]
    others = [(i, message["role"]) for i, message in enumerate(chat) if message["role"] not in ROLES]
    if not others:
        return
    marked = list(chat)
    for at, _ in others:
        marked[at] = {**chat[at], "content": (chat[at]["content"] or "") + _MARK}
    text = _bounded_render(template, {**variables, "messages": marked}, words)
    if text.count(_MARK) < len(others):
        at, role = others[0]
        raise RejectedError(
            f"messages[{at}].role is {role!r}, which the model's chat template does not render; use "
            f"{', '.join(ROLES)}",
            param=f"messages[{at}].role",
        )


def _without_prompt_words(error: Exception, variables: dict[str, Any], own: Collection[str]) -> str:
    """Return an error's text without words of the request, because errors never show a prompt.

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
            "the chat template does not render the last message, so it cannot be continued", param="messages"
        )
    kept = text[:at]
    return kept if text.startswith(_CONTINUE_HERE, at) else kept.rstrip()
