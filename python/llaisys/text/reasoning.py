"""Reasoning in an answer's text, told from the answer itself by `<think>` and `</think>`."""

from __future__ import annotations

from typing import Literal, TypeAlias

from llaisys.text.tools import held_back
from llaisys.types import Content, Part, PartParser, Reasoning

ReasoningFormat: TypeAlias = Literal["deepseek_r1", "qwen3"]

_OPEN, _CLOSE = "<think>", "</think>"


class ReasoningParser:
    """At most one block of reasoning, at the answer's beginning; the space around it is dropped.

    `starts_inside`: there is one even where `<think>` is missing, because the chat template has written it
    (DeepSeek R1); an answer without `</think>` is reasoning as a whole then.
    """

    def __init__(self, *, starts_inside: bool) -> None:
        self._starts_inside = starts_inside
        self._text = ""  # not yet told
        self._has_begun = False  # the reasoning, behind the space before it
        self._state: Literal["begin", "inside", "behind", "content"] = "begin"

    def push(self, text: str) -> list[Part]:
        """As PartParser."""
        self._text += text
        parts: list[Part] = []
        if self._state == "begin":
            self._begin(over=False)
        if self._state == "inside":
            self._inside(parts)
        if self._state == "behind":
            self._text = self._text.lstrip()
            self._state = "content" if self._text else "behind"
        if self._state == "content" and self._text:
            parts.append(Content(self._text))
            self._text = ""
        return parts

    def finish(self, *, cut: bool = False) -> list[Part]:  # noqa: ARG002 -- reasoning may end anywhere
        """As PartParser."""
        if self._state == "begin":
            self._begin(over=True)
        text, self._text = self._text, ""
        if self._state == "inside":
            text = (text if self._has_begun else text.lstrip()).rstrip()
            return [Reasoning(text)] if text else []
        return [Content(text)] if text else []

    def _begin(self, *, over: bool) -> None:
        text = self._text.lstrip()
        if text.startswith(_OPEN):
            self._text, self._state = text[len(_OPEN) :], "inside"
        elif over or not _OPEN.startswith(text):
            self._state = "inside" if self._starts_inside else "content"

    def _inside(self, parts: list[Part]) -> None:
        if not self._has_begun:
            self._text = self._text.lstrip()
            self._has_begun = bool(self._text)
        at = self._text.find(_CLOSE)
        n = len(self._text[:at].rstrip()) if at >= 0 else len(self._text) - held_back(self._text, _CLOSE)
        if n:
            parts.append(Reasoning(self._text[:n]))
        self._text = self._text[n:] if at < 0 else self._text[at + len(_CLOSE) :]
        self._state = "inside" if at < 0 else "behind"


class AnswerParser:
    """Reasoning first, if the model does, then calls of tools in what is left, if there are tools."""

    def __init__(self, reasoning: ReasoningFormat | None, tools: PartParser | None) -> None:
        inside = reasoning == "deepseek_r1"
        self._reasoning = None if reasoning is None else ReasoningParser(starts_inside=inside)
        self._tools = tools

    def push(self, text: str) -> list[Part]:
        """As PartParser."""
        return self._find_calls([Content(text)] if self._reasoning is None else self._reasoning.push(text))

    def finish(self, *, cut: bool = False) -> list[Part]:
        """As PartParser."""
        parts = [] if self._reasoning is None else self._find_calls(self._reasoning.finish(cut=cut))
        return parts if self._tools is None else parts + self._tools.finish(cut=cut)

    def _find_calls(self, parts: list[Part]) -> list[Part]:
        if self._tools is None:
            return parts
        found: list[Part] = []
        for part in parts:
            found += self._tools.push(part.text) if isinstance(part, Content) else [part]
        return found
