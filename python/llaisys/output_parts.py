"""Parts of a completion: content, reasoning and tool calls, and the protocol of a parser that finds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

# How a completion marks its reasoning: it begins inside it (`deepseek_r1`), may open it with `<think>`
# (`qwen3`), writes messages in channels (`openai_gptoss`), may open the channel of a thought (`gemma4`), or
# begins inside that (`gemma4_inside`).
ReasoningFormat: TypeAlias = Literal["deepseek_r1", "qwen3", "openai_gptoss", "gemma4", "gemma4_inside"]


@dataclass(frozen=True, slots=True)
class Content:
    """Text of a completion that is shown to the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of a completion in which the model reasons."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call of a function. `arguments`: a JSON object, as text."""

    name: str
    arguments: str


OutputPart: TypeAlias = Content | Reasoning | ToolCall

# Whether the next text is reasoning. `undecided`: nothing that tells it was parsed yet.
ReasoningState: TypeAlias = Literal["undecided", "inside", "over"]


class OutputParser(Protocol):
    """Divides the text of one completion into its parts.

    After joining adjacent parts of one kind, the result does not depend on how the text is divided into
    pushes.
    """

    def push(self, text: str) -> list[OutputPart]:
        """Append text; return the parts that are now final."""

    def finish(self, *, cut: bool = False) -> list[OutputPart]:
        """Return the remaining parts of an ended completion.

        `cut`: a token limit ended it, so an incomplete tool call is dropped instead of returned as content.
        """


class CompletionOutputParser(OutputParser, Protocol):
    """Parses a whole completion, whose reasoning comes first."""

    @property
    def reasoning_state(self) -> ReasoningState:
        """Return whether the text after what was pushed is reasoning."""
