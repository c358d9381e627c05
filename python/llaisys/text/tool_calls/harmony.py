"""Harmony, the output format of gpt-oss: messages in channels, some of them to a function.

- `<|channel|>analysis<|message|>...<|end|>` is reasoning.
- `<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>` is a
  call. The recipient may be before the channel. Commentary without a recipient is for the user.
- `<|start|>assistant<|channel|>final<|message|>...<|return|>` is the answer.

A prompt ends with `<|start|>assistant`, so a completion begins inside a header. `<|return|>` and `<|call|>`
end a completion, `<|end|>` ends a message. Source: OpenAI's documentation of the format, and the chat
template of gpt-oss.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Literal, TypeAlias

from llaisys.output_parts import Content, OutputPart, Reasoning, ReasoningState, ToolCall
from llaisys.text.tool_calls.grammar import CallGrammar
from llaisys.text.tool_calls.scanning import json_value, named_call

START, END, RETURN, CALL = "<|start|>", "<|end|>", "<|return|>", "<|call|>"
CHANNEL, MESSAGE, CONSTRAIN = "<|channel|>", "<|message|>", "<|constrain|>"
TAGS = (START, END, RETURN, CALL, CHANNEL, MESSAGE, CONSTRAIN)
# Tokens that end a completion.
END_TAGS = (RETURN, CALL)
# A call ends with the grammar, so no `<|call|>` follows.
GRAMMAR = CallGrammar(
    before=f"{CHANNEL}commentary to=functions.{{name}} {CONSTRAIN}json{MESSAGE}",
    after="",
    between=f"{END}{START}assistant",
)

# What a header may begin with; other text is the answer.
_HEADS = (START, CHANNEL, MESSAGE, CONSTRAIN, "to=")
_ENDS = (END, RETURN, CALL)
# No header is longer.
_HEADER_CHARS_MAX = 512
_TAG = re.compile("|".join(map(re.escape, TAGS)))
_MESSAGE_EDGE = re.compile("|".join(map(re.escape, (START, *_ENDS))))
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTION = re.compile(r"\bto=functions\.([\w-]{1,128})(?=\s|<|\Z)")

_Kind: TypeAlias = Literal["content", "reasoning", "call"]


def is_harmony(template: str) -> bool:
    """Return True if a chat template writes messages in channels."""
    return CHANNEL in template and f"{CHANNEL}analysis{MESSAGE}" in template


class HarmonyParser:
    """Parses the messages of one completion (a CompletionOutputParser).

    `names`: functions whose calls are parsed. Other calls, and those without a JSON object, are content.
    Messages of one kind that follow each other are separated by a line break. Tags are never part of the
    output; a completion without a header is content.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._text = ""  # not parsed yet
        self._state: Literal["between", "header", "body"] = "between"
        self._kind: _Kind = "content"
        self._function, self._arguments = "", ""  # of the open call
        self._last: _Kind | None = None  # of the last message with text
        self._has_text = False  # of the open message

    @property
    def reasoning_state(self) -> ReasoningState:
        """See CompletionOutputParser."""
        if self._state != "body":
            return "undecided" if self._last in (None, "reasoning") else "over"
        return "inside" if self._kind == "reasoning" else "over"

    def push(self, text: str) -> list[OutputPart]:
        """See OutputParser."""
        self._text += text
        parts: list[OutputPart] = []
        while self._step(parts):
            pass
        return parts

    def finish(self, *, cut: bool = False) -> list[OutputPart]:
        """See OutputParser."""
        parts: list[OutputPart] = []
        # The rest is whitespace, a header without its text, or the start of a tag.
        is_answer = self._state != "body" and not cut and self._text.strip()
        if is_answer and _TAG.search(self._text) is None:
            self._begin_body("content")
        if self._state == "body":
            if not cut:
                self._append(parts, self._text)
            self._end_body(parts, cut=cut)
        self._text = ""
        return parts

    def _step(self, parts: list[OutputPart]) -> bool:
        """Parse one part; return False if that needs more text."""
        match self._state:
            case "between":
                return self._between()
            case "header":
                return self._header()
            case "body":
                return self._body(parts)

    def _between(self) -> bool:
        """Decide whether a header or the answer itself follows."""
        text = self._text.lstrip()
        if text.startswith(_HEADS):
            self._text, self._state = text, "header"
            return True
        tag = next((tag for tag in _ENDS if text.startswith(tag)), None)
        if tag is not None:
            self._text = text[len(tag) :]
            return True
        if any(head.startswith(text) for head in _HEADS + _ENDS):
            return False
        self._begin_body("content")
        return True

    def _header(self) -> bool:
        n_max = _HEADER_CHARS_MAX + len(MESSAGE)
        at = self._text.find(MESSAGE, 0, n_max)
        if at < 0:
            if len(self._text) < n_max:
                return False
            # Not a header: an answer after a tag.
            head = next(head for head in _HEADS if self._text.startswith(head))
            self._text = self._text.removeprefix(head if head in TAGS else "")
            self._begin_body("content")
            return True
        header, self._text = _MESSAGE_EDGE.split(self._text[:at])[-1], self._text[at + len(MESSAGE) :]
        channel, function = _CHANNEL.search(header), _FUNCTION.search(header)
        if function is not None and function[1] in self._names:
            self._begin_body("call")
            self._function = function[1]
        else:
            self._begin_body("reasoning" if channel is not None and channel[1] == "analysis" else "content")
        return True

    def _begin_body(self, kind: _Kind) -> None:
        self._state, self._kind, self._has_text, self._arguments = "body", kind, False, ""

    def _body(self, parts: list[OutputPart]) -> bool:
        found = _TAG.search(self._text)
        if found is None:
            n = self._n_safe()
            self._append(parts, self._text[:n])
            self._text = self._text[n:]
            return False
        self._append(parts, self._text[: found.start()])
        tag, self._text = found[0], self._text[found.end() :]
        if tag in (MESSAGE, CONSTRAIN):  # not a place for them: left out
            return True
        if tag in (START, CHANNEL):  # a message without its end, before the next header
            self._text = tag + self._text
        self._end_body(parts, cut=False)
        return True

    def _n_safe(self) -> int:
        """Return the length of the text without an end that may begin a tag."""
        at = self._text.rfind("<")
        return at if at >= 0 and any(tag.startswith(self._text[at:]) for tag in TAGS) else len(self._text)

    def _append(self, parts: list[OutputPart], text: str) -> None:
        """Add text to the open message."""
        if self._kind == "call":
            self._arguments += text
        elif text:
            if not self._has_text and self._last == self._kind:
                text = "\n" + text
            self._has_text, self._last = True, self._kind
            parts.append(Reasoning(text) if self._kind == "reasoning" else Content(text))

    def _end_body(self, parts: list[OutputPart], *, cut: bool) -> None:
        self._state = "between"
        if self._kind != "call":
            return
        call = self._call()
        if call is not None:
            parts.append(call)
            self._last = "call"
        elif not cut:
            self._kind = "content"
            self._append(parts, self._arguments)

    def _call(self) -> ToolCall | None:
        try:
            return named_call(self._function, json_value(self._arguments), self._names)
        except (ValueError, RecursionError):
            return None
