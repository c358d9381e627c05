"""A real server: `python -m llaisys serve` in a process of its own, on a free port."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from waiting import DEADLINE_S, block_until

GOLDENS = Path(__file__).parent / "data" / "goldens"
READY = re.compile(r"LLAISYS serving (\S+) at ((?:https?://|unix:)\S+)")
COMMAND = (sys.executable, "-m", "llaisys")
END_S = DEADLINE_S
# For servers whose tests act while a completion is generated, count passes or replace sampled tokens. The
# tiny models repeat themselves, so that drafts are right and a long completion ends many times sooner.
NO_SPECULATION = ("--speculative-config", '{"method": "none"}')
# Of the log of a server, after a failed test.
LOG_CHARS_SHOWN = 8000


@dataclass
class Server:
    """A running server. `http`: a client for its address, with the key. `log`: the file of its stderr."""

    process: subprocess.Popen[str]
    model: str
    url: str
    log: Path
    http: httpx.Client

    def samples(self, name: str, **labels: str) -> list[float]:
        """Return the samples of /metrics with this name and these labels."""
        answer = self.http.get("/metrics")
        return [
            sample.value
            for family in text_string_to_metric_families(answer.text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of these samples."""
        return sum(self.samples(name, **labels))

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds; fail if the server ends before."""

        def holds() -> bool:
            assert self.process.poll() is None, self.log.read_text("utf-8")
            return condition()

        block_until(holds)

    def until(self, name: str, value: float, **labels: str) -> None:
        """Wait until the metric has the value."""
        self.wait_for(lambda: self.metric(name, **labels) == value)

    def wait_idle(self) -> None:
        """Wait until no request waits or runs."""
        names = ("vllm:num_requests_waiting", "vllm:num_requests_running")
        self.wait_for(lambda: all(self.metric(name) == 0 for name in names))

    def wait_logged(self, *texts: str) -> None:
        """Wait until the log contains the texts: a thread writes it, and may be late."""
        self.wait_for(lambda: all(text in self.log.read_text("utf-8") for text in texts))

    def lines(self, mark: str) -> list[Any]:
        """Return the JSON lines of the log that contain `mark`, once there are any.

        The server writes a line after the response that it describes.
        """
        found: list[str] = []

        def is_written() -> bool:
            is_over = self.process.poll() is not None
            found[:] = [line for line in self.log.read_text("utf-8").splitlines(True) if mark in line]
            return is_over or any(line.endswith("\n") for line in found)

        block_until(is_written)
        return [json.loads(line) for line in found if line.startswith("{") and line.endswith("\n")]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send the signal, wait for the end, and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(timeout=END_S)


def environment(**extra: str) -> Mapping[str, str]:
    """Return the environment of this process without the settings that a developer may have."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("LLAISYS_") or name == "LLAISYS_HOME"
    }
    return {**kept, **extra}


@contextmanager
def serving(
    folder: Path,
    model: str | None,
    *flags: str,
    key: str = "",
    extra: Mapping[str, str] | None = None,
    program: Sequence[str] | None = None,
) -> Iterator[Server]:
    """Start a server, yield it when it is ready, and kill it at the end if it is still running.

    - `folder` gets its log.
    - `model`: None if the flags name the models.
    - `key`: its keys, as in `a,b`.
    - `extra`: more variables of its environment.
    - `program`: what runs `llaisys`; COMMAND by default.
    """
    log = folder / "server.log"
    # A client that reuses an idle connection while the server closes it gets an error.
    idle = ("--timeout-keep-alive", "600")
    command = [*(program or COMMAND), "serve", *([model] if model else []), "--port", "0", *idle, *flags]
    env = environment(**(extra or {}), **({"LLAISYS_API_KEY": key} if key else {}))
    with (
        log.open("w", encoding="utf-8") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=env) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            ready = READY.match(line)
            assert ready is not None, f"{line}{log.read_text('utf-8')}"
            headers = {"authorization": f"Bearer {key.split(',')[0]}"} if key else {}
            base = ready[2] if ready[2].startswith("http") else "http://localhost"
            with httpx.Client(base_url=base, headers=headers, timeout=None, verify=False) as http:
                yield Server(process, ready[1], ready[2], log, http)
        except BaseException:
            print(f"the end of {log}:\n{log.read_text('utf-8')[-LOG_CHARS_SHOWN:]}")
            raise
        finally:
            process.kill()


def long_model(folder: Path) -> Path:
    """Copy the tiny golden model and raise its context, so that a test can act during a long completion."""
    target = folder / "tiny"
    shutil.copytree(GOLDENS / "qwen2-tied-bf16", target)
    config = json.loads((target / "config.json").read_text("utf-8"))
    (target / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2**17}), "utf-8")
    return target
