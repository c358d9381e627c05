"""ReasoningParser: separates the reasoning of a completion (`<think>` ... `</think>`) from its content.

Channels have parsers of their own (`harmony`, `thoughts`).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from llaisys.output_parts import (
    CompletionOutputParser,
    Content,
    OutputParser,
    OutputPart,
    Reasoning,
    ReasoningFormat,
    ReasoningState,
)
from llaisys.text.thoughts import ThoughtParser, writes_thoughts
from llaisys.text.tool_calls.harmony import HarmonyParser, is_harmony
from llaisys.text.tool_calls.scanning import partial_tag_len

_OPEN, _CLOSE = "<think>", "</think>"


def marks_reasoning(template: str) -> bool:
    """Return True if a chat template knows reasoning in `<think>` tags or in a channel."""
    return _CLOSE in template or _OPEN in template or is_harmony(template) or writes_thoughts(template)


def reasoning_format_of(prompt_end: str) -> ReasoningFormat:
    """Return the format of a completion by the end of its prompt, for templates that know reasoning.

    A template may write `<think>` itself, always (DeepSeek R1) or as the request asks (Qwen 3.5, DeepSeek
    V3.1).
    """
    return "deepseek_r1" if prompt_end.rstrip().endswith(_OPEN) else "qwen3"


class ReasoningParser:
    """Parses at most one reasoning block at the start of a completion; whitespace around it is dropped.

    `starts_inside`: the completion starts inside the block, because the chat template has written `<think>`
    (DeepSeek R1). Without `</think>` the whole completion is reasoning then.
    """

    def __init__(self, *, starts_inside: bool) -> None:
        self._starts_inside = starts_inside
        self._text = ""  # not emitted yet
        self._has_begun = False  # reasoning text after the leading whitespace was seen
        self._state: Literal["begin", "inside", "after", "content"] = "begin"

    @property
    def reasoning_state(self) -> ReasoningState:
        """See CompletionOutputParser."""
        if self._state == "begin":
            return "inside" if self._starts_inside else "undecided"
        return "inside" if self._state == "inside" else "over"

    def push(self, text: str) -> list[OutputPart]:
        """See OutputParser."""
        self._text += text
        parts: list[OutputPart] = []
        if self._state == "begin":
            self._begin(is_end=False)
        if self._state == "inside":
            self._inside(parts)
        if self._state == "after":
            self._text = self._text.lstrip()
            self._state = "content" if self._text else "after"
        if self._state == "content" and self._text:
            parts.append(Content(self._text))
            self._text = ""
        return parts

    def finish(self, *, cut: bool = False) -> list[OutputPart]:  # noqa: ARG002 -- reasoning may end anywhere
        """See OutputParser."""
        if self._state == "begin":
            self._begin(is_end=True)
        text, self._text = self._text, ""
        if self._state == "inside":
            text = (text if self._has_begun else text.lstrip()).rstrip()
            return [Reasoning(text)] if text else []
        return [Content(text)] if text else []

    def _begin(self, *, is_end: bool) -> None:
        text = self._text.lstrip()
        if text.startswith(_OPEN):
            self._text, self._state = text[len(_OPEN) :], "inside"
        elif is_end or not _OPEN.startswith(text):
            self._state = "inside" if self._starts_inside else "content"

    def _inside(self, parts: list[OutputPart]) -> None:
        if not self._has_begun:
            self._text = self._text.lstrip()
            self._has_begun = bool(self._text)
        at = self._text.find(_CLOSE)
        n = (
            len(self._text[:at].rstrip())
            if at >= 0
            else len(self._text) - partial_tag_len(self._text, _CLOSE)
        )
        if n:
            parts.append(Reasoning(self._text[:n]))
        self._text = self._text[n:] if at < 0 else self._text[at + len(_CLOSE) :]
        self._state = "inside" if at < 0 else "after"


def _reasoning_parser(
    format: ReasoningFormat | None, channel_calls: Collection[str]
) -> CompletionOutputParser | None:
    match format:
        case None:
            return None
        case "openai_gptoss":
            return HarmonyParser(channel_calls)
        case "deepseek_r1" | "qwen3":
            return ReasoningParser(starts_inside=format == "deepseek_r1")
        case "gemma4" | "gemma4_inside":
            return ThoughtParser(starts_inside=format == "gemma4_inside")


class CompletionParser:
    """Parses reasoning first, if the model has a reasoning format, then tool calls, if there are tools.

    `channel_calls`: functions whose calls are messages in channels, found together with the reasoning.
    """

    def __init__(
        self,
        reasoning: ReasoningFormat | None,
        tools: OutputParser | None,
        channel_calls: Collection[str] = (),
    ) -> None:
        self._reasoning = _reasoning_parser(reasoning, channel_calls)
        self._tools = tools

    @property
    def reasoning_state(self) -> ReasoningState:
        """See CompletionOutputParser."""
        return "over" if self._reasoning is None else self._reasoning.reasoning_state

    def push(self, text: str) -> list[OutputPart]:
        """See OutputParser."""
        return self._find_calls([Content(text)] if self._reasoning is None else self._reasoning.push(text))

    def finish(self, *, cut: bool = False) -> list[OutputPart]:
        """See OutputParser."""
        parts = [] if self._reasoning is None else self._find_calls(self._reasoning.finish(cut=cut))
        return parts if self._tools is None else parts + self._tools.finish(cut=cut)

    def _find_calls(self, parts: list[OutputPart]) -> list[OutputPart]:
        if self._tools is None:
            return parts
        found: list[OutputPart] = []
        for part in parts:
            found += self._tools.push(part.text) if isinstance(part, Content) else [part]
        return found
