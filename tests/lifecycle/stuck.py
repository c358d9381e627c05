"""`llaisys` with a part that gets stuck: `stuck.py MARK thread|process|loop ARGUMENTS`.

With `thread` and `process` the twentieth step of the engine does not end; the file MARK records that it has
happened once. With `loop` the event loop stops.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from llaisys.cli.main import main
from llaisys.engine import process, watchdog
from llaisys.engine.engine import LLMEngine
from llaisys.engine.engine_output import EngineOutput
from llaisys.registry import ModelRegistry
from llaisys.server.lifecycle import Lifecycle


def stop_a_step(mark: str) -> None:
    """Patch the engine of this process."""
    step = LLMEngine.step

    def stops(engine: LLMEngine, now_s: float) -> list[EngineOutput]:
        if engine.stats().num_steps == 20 and not Path(mark).exists():
            Path(mark).touch()
            time.sleep(600)
        return step(engine, now_s)

    LLMEngine.step = stops  # type: ignore[method-assign]


def run() -> int:
    mark, how = sys.argv.pop(1), sys.argv.pop(1)
    match how:
        case "thread":
            stop_a_step(mark)
        case "process":
            here = (
                f"sys.path.append({str(Path(__file__).parent)!r}); import stuck; stuck.stop_a_step({mark!r})"
            )
            process._BOOT = process._BOOT.replace("; from", f"; {here}; from")
        case "loop":
            watchdog.EXIT_AFTER_S = 3.0  # the log is written meanwhile

            async def stops(_: Any, models: ModelRegistry) -> None:
                models.beat()
                time.sleep(600)  # noqa: ASYNC251 -- it blocks the event loop

            Lifecycle._beat_watchdogs = stops  # type: ignore[method-assign]
    return main()


if __name__ == "__main__":
    sys.exit(run())
