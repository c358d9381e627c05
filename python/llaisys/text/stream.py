"""Ids become text as they come: never half a character, never a piece of a stop string.

Property: with no stop string met, the texts of all `push` and the `finish` joined are `Tokenizer.decode` of
all ids. What is shown does not depend on how the ids were cut into pushes.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from llaisys.text.tokenizer import Tokenizer
from llaisys.types import SamplingParams


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one push adds.

    - `stopped`: the stop string that was met, else None; from then on nothing more is shown.
    - `n_tokens_kept`: how many of the pushed ids belong to the answer: all of them, or on a stop those up to
      and including the one that completed the stop string, even where none of its text is shown. vLLM's
      `token_ids` and usage count the same way. Ids after it were computed in vain: not shown, not counted.
    """

    text: str
    stopped: str | None
    n_tokens_kept: int


class _StopSearch:
    """Finds the stop string that ends first, the longest on a tie; Knuth, Morris and Pratt for each string.

    Per character O(1) amortised for each stop string, so that no text is looked at twice.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted(stops, key=len, reverse=True)
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)

    def feed(self, character: str) -> str | None:
        """Takes one character; the stop string that it completes, if any."""
        found = None
        for i, stop in enumerate(self._stops):
            n = self._matched[i]
            while n and (n == len(stop) or stop[n] != character):
                n = self._borders[i][n - 1]
            if stop[n] == character:
                n += 1
            self._matched[i] = n
            if n == len(stop) and found is None:
                found = stop
        return found

    def n_pending(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        ends = (
            self._borders[i][n - 1] if n == len(self._stops[i]) else n for i, n in enumerate(self._matched)
        )
        return max(ends, default=0)


def _borders(stop: str) -> list[int]:
    """`[len(stop)]`: for each prefix, the length of its longest proper prefix that is also its end."""
    lengths = [0] * len(stop)
    n = 0
    for i in range(1, len(stop)):
        while n and stop[i] != stop[n]:
            n = lengths[n - 1]
        if stop[i] == stop[n]:
            n += 1
        lengths[i] = n
    return lengths


class TextStream:
    """The text of one answer. Not shared: one owner pushes.

    A token that ends the answer by itself (eos, `stop_token_ids`) is not pushed by the caller unless its text
    is wanted (`include_stop_str_in_output`). Stop strings that end within the first `min_tokens` tokens are
    ignored, as in vLLM.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._skip_special = params.skip_special_tokens
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._search = _StopSearch(params.stop) if params.stop else None
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._n_tokens = 0
        self._stopped: str | None = None

    def push(self, ids: Sequence[int]) -> TextDelta:
        """Takes the next ids; the text that can now be shown for good."""
        shown: list[str] = []
        n_kept = 0
        for id in ids:
            if self._stopped is not None:
                break
            n_kept += 1
            self._n_tokens += 1
            if not (self._skip_special and self._tokenizer.is_special(id)):
                shown.append(self._show(self._utf8.decode(self._tokenizer.id_to_bytes(id))))
        return TextDelta("".join(shown), self._stopped, n_kept)

    def finish(self) -> str:
        """The rest: text held back as the beginning of a stop string, and half a character as U+FFFD."""
        if self._stopped is not None:
            return ""
        rest = self._held + self._utf8.decode(b"", final=True)
        self._held = ""
        return rest

    def _show(self, piece: str) -> str:
        """The showable part of held text and `piece`; what may begin a stop string is held back."""
        if self._search is None:
            return piece
        text = self._held + piece
        for end, character in enumerate(piece, start=len(self._held) + 1):
            stop = self._search.feed(character)
            if stop is not None and self._n_tokens > self._min_tokens:
                self._stopped, self._held = stop, ""
                return text[:end] if self._include_stop else text[: end - len(stop)]
        n_held = 0 if self._include_stop else self._search.n_pending()
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]
