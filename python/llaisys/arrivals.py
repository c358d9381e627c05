"""Outputs on their way from the engine's thread to the event loop: a bounded part of them in each turn of
the loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator

from llaisys.engine.outputs import EngineOutput
from llaisys.mailbox import MAILBOX_BYTES_MAX

# Of one turn: 256 outputs take some 10 ms, and the bytes of a turn must not fill a mailbox.
OUTPUTS_A_TURN, BYTES_A_TURN = 256, MAILBOX_BYTES_MAX // 4


class Arrivals:
    """Hands outputs over in their order. `deliver` is for the client's thread; the rest is the event loop's.

    The readers run between two turns, so steps that arrive faster than they are handed over do not fill the
    mailbox of a healthy reader. Several steps may share a turn: their reader gets them as one delta, which
    is how a loop that is behind catches up. What waits is bounded by the tokens of the open requests.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        hand_over: Callable[[EngineOutput, float], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`hand_over`: takes an output and the time when its step arrived; returns the bytes it made wait
        for a reader."""
        self._loop = loop
        self._hand_over = hand_over
        self._clock = clock
        self._steps: deque[tuple[float, Iterator[EngineOutput]]] = deque()
        self._woken = False
        self._is_behind = False

    def deliver(self, outputs: list[EngineOutput]) -> None:
        """Takes the outputs of a step; called once for each.

        One wake is enough for all steps until the loop turns: a loop that is held up finds one call and one
        byte in its wake-up socket, not thousands.
        """
        self._steps.append((self._clock(), iter(outputs)))
        if self._woken:
            return
        self._woken = True
        try:
            self._loop.call_soon_threadsafe(self._on_wake)
        except RuntimeError:  # the event loop is closed: nothing is read any more
            self._steps.clear()

    def _on_wake(self) -> None:
        self._woken = False  # before the first look: what comes after it wakes again
        if not self._is_behind:
            self._take_turn()

    def _take_turn(self) -> None:
        self._is_behind = False
        n_outputs = n_bytes = 0
        while self._steps:
            arrived_s, outputs = self._steps[0]
            for output in outputs:
                n_outputs += 1
                n_bytes += self._hand_over(output, arrived_s)
                if n_outputs >= OUTPUTS_A_TURN or n_bytes >= BYTES_A_TURN:
                    self._is_behind = True
                    self._loop.call_soon(self._take_turn)
                    return
            self._steps.popleft()
