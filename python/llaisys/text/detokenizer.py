"""IncrementalDetokenizer: token ids to text, with stop strings. Emits no part of a character or stop string.

Invariant: without a stop string, the concatenated texts of all `push` calls and of `finish` equal
`Tokenizer.decode` of all ids. The text does not depend on how the ids are divided into `push` calls.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from llaisys.sampling_params import SamplingParams
from llaisys.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text that one `push` adds.

    - `stopped`: the stop string that was found, else None. No text follows it.
    - `n_tokens_kept`: how many of the pushed ids belong to the completion. On a stop these end with the id
      that completed the stop string, even where none of its text is shown. vLLM counts `token_ids` and usage
      the same way.
    """

    text: str
    stopped: str | None
    n_tokens_kept: int


class _StopSearch:
    """Finds the stop string that ends first, the longest on a tie (Knuth-Morris-Pratt for each string).

    Amortized cost per character: O(1) for each stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted(stops, key=len, reverse=True)
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)

    def feed(self, character: str) -> str | None:
        """Advance by one character; return the stop string that it completes, if any."""
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
        """Return the length of the longest suffix of the text that is a prefix of a stop string."""
        ends = (
            self._borders[i][n - 1] if n == len(self._stops[i]) else n for i, n in enumerate(self._matched)
        )
        return max(ends, default=0)


def _borders(stop: str) -> list[int]:
    """Return, for each prefix of `stop`, the length of its longest proper prefix that is also a suffix."""
    lengths = [0] * len(stop)
    n = 0
    for i in range(1, len(stop)):
        while n and stop[i] != stop[n]:
            n = lengths[n - 1]
        if stop[i] == stop[n]:
            n += 1
        lengths[i] = n
    return lengths


class IncrementalDetokenizer:
    """The text of one completion. Not thread-safe.

    A token that ends the completion (eos, `stop_token_ids`) is pushed only with `include_stop_str_in_output`.
    Stop strings that end within the first `min_tokens` tokens are ignored, as in vLLM.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._skip_special = params.skip_special_tokens
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._search = _StopSearch(params.stop) if params.stop else None
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = ""
        self._n_tokens = 0
        self._stopped: str | None = None

    def push(self, ids: Sequence[int]) -> TextDelta:
        """Append token ids; return the text that is now final."""
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
        """Return the pending text. It may be the start of a stop string; a partial character is U+FFFD."""
        if self._stopped is not None:
            return ""
        rest = self._pending + self._utf8.decode(b"", final=True)
        self._pending = ""
        return rest

    def _show(self, piece: str) -> str:
        """Append `piece` to the pending text; return all of it except a possible start of a stop string."""
        if self._search is None:
            return piece
        text = self._pending + piece
        for end, character in enumerate(piece, start=len(self._pending) + 1):
            stop = self._search.feed(character)
            if stop is not None and self._n_tokens > self._min_tokens:
                self._stopped, self._pending = stop, ""
                return text[:end] if self._include_stop else text[: end - len(stop)]
        n_pending = 0 if self._include_stop else self._search.n_pending()
        self._pending = text[len(text) - n_pending :]
        return text[: len(text) - n_pending]
