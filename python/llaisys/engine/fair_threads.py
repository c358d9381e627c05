"""Threads that take work from one client after another, so that no client waits for all of another's."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from itertools import chain
from typing import Any, TypeVar

T = TypeVar("T")

# llguidance follows rules and `$ref`s by recursion. 64 KiB of text can make it go thousands of levels deep,
# which took up to 100 MiB of stack, and the end of the stack is the end of the process. Address space only.
_STACK_BYTES = 512 << 20
_STACK_SIZE = threading.Lock()  # the size for new threads is the process's


class FairThreads:
    """`num_threads` threads with deep stacks, started by the first `submit`. Usable from any thread."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads = num_threads
        self._name = name
        self._changed = threading.Condition()
        self._queues: OrderedDict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = OrderedDict()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def submit(self, client_id: str, work: Callable[[], T]) -> Future[T]:
        """The result to come: after the client's earlier work, and one piece of each other client's."""
        future: Future[T] = Future()
        with self._changed:
            self._queues.setdefault(client_id, deque()).append((future, work))
            self._changed.notify()
            if not self._threads:
                self._threads = [_deep_thread(self._run, self._name) for _ in range(self._num_threads)]
        return future

    def close(self) -> None:
        """Drops what is queued and waits for what is under way. Idempotent."""
        with self._changed:
            self._closed = True
            for future, _ in chain.from_iterable(self._queues.values()):
                future.cancel()
            self._queues.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (item := self._next()) is not None:
            future, work = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001 -- the submitter gets it, whatever it is
                future.set_exception(error)
            else:
                future.set_result(result)
            del item, future, work  # or an idle thread would keep them

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        """The oldest work of the client that has waited longest; None: closed."""
        with self._changed:
            while not self._queues and not self._closed:
                self._changed.wait()
            if self._closed:
                return None
            client_id, queue = self._queues.popitem(last=False)
            item = queue.popleft()
            if queue:
                self._queues[client_id] = queue  # behind the others
            return item


def _deep_thread(run: Callable[[], None], name: str) -> threading.Thread:
    """A running daemon thread."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    with _STACK_SIZE:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return thread
