"""An engine on the fake core with a disk tier of its prefix cache."""

from __future__ import annotations

from concurrent.futures import wait
from typing import Any

from fakes.core import CELL_BYTES
from fakes.engines import Engine
from fakes.session_runner import SessionRunner
from llaisys.engine.disk_cache.disk_cache import DiskCache


class DiskRunner(SessionRunner):
    """Runs requests one by one. `run` waits for their loads, but not for writes."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(**{"kv_cell_bytes": CELL_BYTES, "vocab_size": 600, **changes})
        if self.engine.disk_cache is not None:
            self.disk._clock = lambda: 0.0  # as the fake core computes in no time, so that loads are chosen

    @property
    def disk(self) -> DiskCache:
        assert self.engine.disk_cache is not None
        return self.engine.disk_cache

    @property
    def external(self) -> tuple[int, int]:
        """The tokens looked up on disk, and those loaded from there."""
        stats = self.engine.stats()
        return stats.external_query_tokens, stats.external_hit_tokens

    def load(self) -> None:
        """Resume loads until none is left."""
        while self.disk._loads:
            self._wait_for(self.disk._loads[0].future)
            self.disk.resume(is_idle=False)
            self.engine.check()

    def write_all(self) -> None:
        """Resume writes until every released path is on disk, as an idle engine does."""
        while self.disk._released or self.disk._write:
            self._wait_for(self.disk._write and self.disk._write.future)
            self.disk.resume(is_idle=True)
            self.engine.check()

    def finish(self) -> None:
        if self.engine.disk_cache is not None:
            self.load()
        Engine.finish(self)

    def shut_down(self) -> None:
        """Close the engine as a server does that has drained."""
        self.disk.drain()
        self.engine.close()

    @staticmethod
    def _wait_for(future: Any) -> None:
        if future is not None:
            wait([future], 30)
