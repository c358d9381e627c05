"""Where a request's time went, from arrival to end: every gap has a cause, and often somebody to name. Pure.

The engine says what a request's time goes to *from now on*, at the moment when it knows: at submission, and
when it has a plan (a step's time passes after its plan). A cause holds until the next one, so spans cannot
overlap or leave a gap, and a request that goes on decoding costs nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from llaisys.story import Key, Kind, Span, Story

N_SPANS_MAX = 256
N_FINISHED_MAX = 1024
N_NAMES_MAX = 3


class _Record:
    """Marks (from when on, kind, by) in order of time; the last one is open. Times never go back."""

    __slots__ = ("_counted_s", "arrival_s", "end_s", "marks", "seconds")

    def __init__(self, now_s: float, kind: Kind, by: tuple[Key, ...]) -> None:
        self.arrival_s = now_s
        self.end_s: float | None = None
        self.marks = [(now_s, kind, by)]
        self.seconds: dict[Kind, float] = {}
        self._counted_s = now_s  # `seconds` covers the time before

    def mark(self, now_s: float, kind: Kind, by: tuple[Key, ...]) -> None:
        since_s, last_kind, last_by = self.marks[-1]
        if (last_kind, last_by) == (kind, by):
            return
        now_s = max(now_s, self._counted_s)
        self._pass(now_s)
        if now_s == since_s:
            self.marks.pop()
            if self.marks and self.marks[-1][1:] == (kind, by):
                return
        self.marks.append((now_s, kind, by))
        if len(self.marks) > N_SPANS_MAX:
            middle = N_SPANS_MAX // 2
            self.marks[middle] = (self.marks[middle][0], Kind.FOLDED, ())
            del self.marks[middle + 1]

    def close(self, now_s: float) -> None:
        self.end_s = max(now_s, self._counted_s)
        self._pass(self.end_s)

    def _pass(self, now_s: float) -> None:
        kind = self.marks[-1][1]
        self.seconds[kind] = self.seconds.get(kind, 0.0) + now_s - self._counted_s
        self._counted_s = now_s

    def story(self, now_s: float) -> Story:
        end_s = max(now_s, self._counted_s) if self.end_s is None else self.end_s
        ends = [*(start_s for start_s, _, _ in self.marks[1:]), end_s]
        spans = [Span(mark[0], until_s, *mark[1:]) for mark, until_s in zip(self.marks, ends, strict=True)]
        open_kind = spans[-1].kind
        seconds = {**self.seconds, open_kind: self.seconds.get(open_kind, 0.0) + end_s - self._counted_s}
        kept = tuple(span for span in spans if span.end_s > span.start_s)
        return Story(self.arrival_s, end_s, kept, seconds, self.end_s is not None)


class Timeline:
    """The stories of all open requests, and of the newest `N_FINISHED_MAX` that are over.

    Bounds: at most `N_SPANS_MAX` spans a request; beyond, the middle is folded into one.
    """

    def __init__(self) -> None:
        self._open: dict[Key, _Record] = {}
        self._decoding: dict[Key, _Record] = {}
        self._over: OrderedDict[Key, _Record] = OrderedDict()
        self._chunk_of: Key | None = None

    def arrive(self, key: Key, now_s: float, behind: Iterable[Key] = ()) -> None:
        """A request came and waits, behind those before it (three are kept)."""
        self._open[key] = _Record(now_s, Kind.QUEUED, _names(behind))

    def note(self, key: Key, now_s: float, kind: Kind, by: Iterable[Key] = ()) -> None:
        """From now on the request's time goes to `kind`. One that is not open (a late event) is ignored."""
        record = self._open.get(key)
        if record is None:
            return
        if kind is Kind.DECODE:
            self._decoding[key] = record
            record.mark(now_s, *self._decode_mark(key))
        else:
            self._decoding.pop(key, None)
            record.mark(now_s, kind, _names(by))

    def share_steps(self, now_s: float, chunk_of: Key | None) -> None:
        """From now on steps compute a prompt's chunk beside the decoding rows: whose is the largest; None
        if there is none. Called every step; it costs something when the answer changes."""
        if chunk_of == self._chunk_of:
            return
        self._chunk_of = chunk_of
        for key, record in self._decoding.items():
            record.mark(now_s, *self._decode_mark(key))

    def end(self, key: Key, now_s: float) -> None:
        """The request is over. One that is not open is ignored."""
        record = self._open.pop(key, None)
        if record is None:
            return
        self._decoding.pop(key, None)
        record.close(now_s)
        self._over.pop(key, None)
        self._over[key] = record
        if len(self._over) > N_FINISHED_MAX:
            self._over.popitem(last=False)

    def story(self, key: Key, now_s: float) -> Story | None:
        """A request's time, up to now if it is open; None if it is not known (any more)."""
        record = self._open.get(key) or self._over.get(key)
        return None if record is None else record.story(now_s)

    def _decode_mark(self, key: Key) -> tuple[Kind, tuple[Key, ...]]:
        if self._chunk_of is None or self._chunk_of == key:
            return (Kind.DECODE, ())
        return (Kind.OTHER_CHUNK, (self._chunk_of,))


def _names(keys: Iterable[Key]) -> tuple[Key, ...]:
    return tuple(key for key, _ in zip(keys, range(N_NAMES_MAX), strict=False))
