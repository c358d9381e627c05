"""ThoughtParser: separates Gemma 4's thoughts from the content of a completion.

`<|channel>thought`, a line feed, the thought and `<channel|>`. A thought usually precedes the content. There
may be more, also between and after calls of tools. A call may begin inside a thought that was not ended, and
a model may write an empty thought or a single `<channel|>` after its answer. `<|think|>` in the system turn
asks for thoughts; the template writes it if `enable_thinking` is on. Otherwise the template of larger models
ends the prompt with an empty thought.

Sources: Google's page "Gemma 4 Prompt Formatting" (ai.google.dev/gemma/docs/core/prompt-formatting-gemma4);
`chat_template.jinja` of google/gemma-4-31B-it; llama.cpp's `common/parsers/gemma4.cpp` and its cases in
`tests/test-chat.cpp`; vLLM's `vllm/reasoning/gemma4_reasoning_parser.py` and `vllm/parser/gemma4.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

from llaisys.output_parts import Content, OutputPart, Reasoning, ReasoningFormat, ReasoningState
from llaisys.text.tool_calls import gemma4
from llaisys.text.tool_calls.scanning import partial_tag_len

OPEN, CLOSE, LABEL = "<|channel>", "<channel|>", "thought\n"

# Tags that end a thought or content.
_EDGES = (OPEN, CLOSE, gemma4.OPEN)
_CALL_EDGES = (*_EDGES, gemma4.CLOSE, gemma4.QUOTE)


def _any_of(tags: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, tags)))


_EDGE = _any_of(_EDGES)
_EDGES_IN = {"content": _EDGE, "call": _any_of(_CALL_EDGES), "string": _any_of([gemma4.QUOTE])}


def writes_thoughts(template: str) -> bool:
    """Return True if a chat template knows thoughts in a channel."""
    return OPEN in template or CLOSE in template


def thought_format_of(prompt_end: str) -> ReasoningFormat:
    """Return the format of a completion by the end of its prompt, which may have opened a thought."""
    is_inside = prompt_end.rstrip().endswith((OPEN, OPEN + LABEL.rstrip()))
    return "gemma4_inside" if is_inside else "gemma4"


class ThoughtParser:
    """Parses the thoughts of one completion (a CompletionOutputParser).

    Whitespace around a thought before the content is dropped. A line break separates thoughts that follow
    each other. Tags of channels are not part of the output, except in a string of a call, which stays
    unchanged.

    `starts_inside`: the prompt has opened a thought.
    """

    def __init__(self, *, starts_inside: bool) -> None:
        self._text = ""  # not emitted yet
        # "begin": before the content; "label": at the start of a thought; "string": in a call.
        self._state: Literal["begin", "label", "thought", "content", "call", "string"] = (
            "label" if starts_inside else "begin"
        )
        self._has_thought = starts_inside
        self._has_text = False  # in the open thought
        self._last: Literal["", "thought", "content"] = ""  # of the text that was emitted

    @property
    def reasoning_state(self) -> ReasoningState:
        """See CompletionOutputParser."""
        if self._state in ("label", "thought"):
            return "inside"
        return "undecided" if self._state == "begin" and not self._has_thought else "over"

    def push(self, text: str) -> list[OutputPart]:
        """See OutputParser."""
        self._text += text
        parts: list[OutputPart] = []
        while self._step(parts):
            pass
        return parts

    def finish(self, *, cut: bool = False) -> list[OutputPart]:  # noqa: ARG002 -- a thought may end anywhere
        """See OutputParser."""
        parts: list[OutputPart] = []
        if self._state == "label":
            self._text = "" if LABEL.startswith(self._text) else self._text.removeprefix(LABEL.rstrip())
            self._begin_thought()
        if self._state == "thought":
            self._append_thought(parts, self._text.rstrip())
        else:
            is_dropped = self._state == "begin" and self._has_thought
            self._append_content(parts, self._text.lstrip() if is_dropped else self._text)
        self._text = ""
        return parts

    def _step(self, parts: list[OutputPart]) -> bool:
        """Parse one part; return False if that needs more text."""
        match self._state:
            case "begin":
                return self._begin()
            case "label":
                return self._label()
            case "thought":
                return self._thought(parts)
            case _:
                return self._content(parts)

    def _begin(self) -> bool:
        """Decide whether a thought or the content itself follows."""
        text = self._text.lstrip()
        if any(tag.startswith(text) and tag != text for tag in (OPEN, CLOSE)):
            return False
        if self._has_thought or text.startswith((OPEN, CLOSE)):
            self._text = text
        self._state = "content"
        return True

    def _label(self) -> bool:
        """Drop the label of a thought. Without a line feed it is one only if it is the whole thought."""
        if LABEL.startswith(self._text) and self._text != LABEL:
            return False
        rest = self._text.removeprefix(LABEL.rstrip())
        if rest != self._text:
            if rest.startswith(("\n", *_EDGES)):
                self._text = rest
            elif any(tag.startswith(rest) for tag in _EDGES):
                return False
        self._begin_thought()
        return True

    def _begin_thought(self) -> None:
        self._state, self._has_thought, self._has_text = "thought", True, False

    def _thought(self, parts: list[OutputPart]) -> bool:
        if not self._has_text:
            self._text = self._text.lstrip()
        edge = _EDGE.search(self._text)
        if edge is None:
            n = len(self._text) - max(partial_tag_len(self._text, tag) for tag in _EDGES)
            self._append_thought(parts, self._text[:n])
            self._text = self._text[n:]
            return False
        self._append_thought(parts, self._text[: edge.start()].rstrip())
        if edge[0] == gemma4.OPEN:
            self._text = self._text[edge.start() :]
            self._state = "content"
        else:
            self._after_channel_tag(edge)
        return True

    def _content(self, parts: list[OutputPart]) -> bool:
        edge = _EDGES_IN[self._state].search(self._text)
        if edge is None:
            n = self._n_safe()
            self._append_content(parts, self._text[:n])
            self._text = self._text[n:]
            return False
        tag = edge[0]
        if tag in (OPEN, CLOSE):
            self._append_content(parts, self._text[: edge.start()])
            self._after_channel_tag(edge)
            return True
        self._append_content(parts, self._text[: edge.end()])
        self._text = self._text[edge.end() :]
        if tag == gemma4.QUOTE:
            self._state = "call" if self._state == "string" else "string"
        else:
            self._state = "call" if tag == gemma4.OPEN else "content"
        return True

    def _after_channel_tag(self, tag: re.Match[str]) -> None:
        self._text = self._text[tag.end() :]
        self._has_thought = True
        if tag[0] == OPEN:
            self._state = "label"
        else:
            self._state = "content" if self._last == "content" else "begin"

    def _n_safe(self) -> int:
        """Return the length of the text without an end that may begin a tag."""
        at = self._text.rfind("<")
        is_open = at >= 0 and any(tag.startswith(self._text[at:]) for tag in _CALL_EDGES)
        return at if is_open else len(self._text)

    def _append_thought(self, parts: list[OutputPart], text: str) -> None:
        if text:
            separator = "\n" if self._last == "thought" and not self._has_text else ""
            self._has_text, self._last = True, "thought"
            parts.append(Reasoning(separator + text))

    def _append_content(self, parts: list[OutputPart], text: str) -> None:
        if text:
            self._last = "content"
            parts.append(Content(text))
