"""ReasoningTags: the reasoning and the content of a completion as one text for a terminal."""

from __future__ import annotations


class ReasoningTags:
    """Puts reasoning between `<think>` and `</think>`, piece by piece."""

    def __init__(self) -> None:
        self._is_inside = False

    def text(self, reasoning: str, content: str) -> str:
        """Return the text that the next pieces add."""
        text = ""
        if reasoning:
            text = reasoning if self._is_inside else f"<think>\n{reasoning}"
            self._is_inside = True
        if content:
            text += f"\n</think>\n\n{content}" if self._is_inside else content
            self._is_inside = False
        return text
