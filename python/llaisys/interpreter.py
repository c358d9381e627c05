"""Settings of Python's interpreter in processes whose delays are served or measured."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# New objects, less those freed, before the youngest generation is collected (CPython: 700), and collections
# of a generation before one of the next (CPython: 10 and 10). With 256 streams a full collection takes 20 to
# 90 ms, and is due every three seconds with CPython's numbers. Here it is due after 400,000 objects (40 MB).
GC_THRESHOLDS = (1_000, 10, 40)
# Seconds after which a thread must hand over the interpreter to one that waits for it (CPython: 0.005). After
# each write to a client the event loop may have to wait for the engine's thread.
SWITCH_INTERVAL_S = 0.0005


@contextmanager
def responsive_interpreter() -> Iterator[None]:
    """Shorten the interpreter's pauses until the end of the context.

    Objects that exist now are excluded from garbage collections, which stop every thread: for 30 ms with the
    modules, schemas and routes of a server. Collections are rarer, and threads alternate more often.
    """
    thresholds, interval_s = gc.get_threshold(), sys.getswitchinterval()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(interval_s)
        gc.set_threshold(*thresholds)
        gc.unfreeze()
