"""A bar on the terminal while the weights of a model are packed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tqdm import tqdm

if TYPE_CHECKING:
    from llaisys._core import Progress

PERIOD_S = 0.1


@contextmanager
def loading_bar(name: str, progress: Progress) -> Iterator[None]:
    """Shows how far `progress` has loaded `name`, if stderr is a terminal; else nothing."""
    if not sys.stderr.isatty():
        yield
        return
    bar = tqdm(desc=f"loading {name}", unit="B", unit_scale=True, file=sys.stderr)
    ended = threading.Event()

    def show() -> None:
        n_packed, n_all = progress.loading
        bar.total, bar.n = max(n_packed, n_all) or None, n_packed
        bar.refresh()

    def watch() -> None:
        while not ended.wait(PERIOD_S):
            show()

    thread = threading.Thread(target=watch, name="llaisys-loading-bar", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        show()
        bar.close()
