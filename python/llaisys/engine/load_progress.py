"""What surrounds every load of a model: the thread is bound, and the terminal shows a progress bar."""

from __future__ import annotations

import logging
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

from llaisys.engine.host import bind_thread
from llaisys.engine.memory import WorkerSettings

log = logging.getLogger(__name__)

PERIOD_S = 0.1


@contextmanager
def model_load(settings: WorkerSettings, loading: Callable[[], tuple[int, int]]) -> Iterator[None]:
    """Bind this thread to the CPUs of the settings, and show the progress of the load that follows.

    `loading`: as in `loading_bar`.
    """
    bind_thread(settings.cpu_ids, settings.memory_nodes)
    log.info("loading %s", settings.path)
    shown = settings.shows_progress and settings.gpu is None
    with loading_bar(settings.path.name, loading, shown=shown):
        yield


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
