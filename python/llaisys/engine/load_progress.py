"""Shows a progress bar on the terminal while the weights of a model are loaded."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

PERIOD_S = 0.1


@contextmanager
def loading_bar(name: str, loading: Callable[[], tuple[int, int]], *, shown: bool) -> Iterator[None]:
    """Show the progress of loading `name` on stderr.

    `loading` returns the bytes packed so far and in total; it is called on a separate thread. `shown`: stderr
    is a terminal and the load reports progress, which a load onto a GPU does not.
    """
    if not shown:
        yield
        return
    # Pass the size, because tqdm shows no bar on a terminal of unknown size.
    size = shutil.get_terminal_size()
    ncols, nrows = min(size.columns, 100), size.lines
    bar = tqdm(desc=f"loading {name}", unit="B", unit_scale=True, ncols=ncols, nrows=nrows, file=sys.stderr)
    ended = threading.Event()

    def show() -> None:
        n_packed, n_all = loading()
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
