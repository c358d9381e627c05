"""Python's garbage collector in processes whose delays are served or measured."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_garbage_collector() -> Iterator[None]:
    """Exclude the objects that exist now from garbage collections, until the end of the context.

    A full collection stops every thread: for 30 ms with the modules, schemas and routes of a server.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
