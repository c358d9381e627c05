"""A Ray cluster on this machine that serves an application, in a process of its own.

`python ray_cluster.py JSON` starts the application with these arguments of `llaisys.ray:app`, and then obeys
lines of its input: `kill REPLICA`, or `update JSON` with other arguments.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from serving import environment
from waiting import block_until

CPUS, STORE_BYTES = 2, 80 << 20
READY, DONE = "READY", "DONE"


@dataclass
class Cluster:
    """A running cluster. `http`: a client of its proxy. `log`: the file of its stderr."""

    process: subprocess.Popen[str]
    http: httpx.Client
    log: Path

    def order(self, line: str) -> None:
        """Send a line, and wait until it is done."""
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)
        self.expect(DONE)

    def expect(self, word: str) -> None:
        """Read the cluster's output up to a line with this word."""
        assert self.process.stdout is not None
        line = next((line for line in self.process.stdout if line.startswith((word, "Traceback"))), "")
        assert line.startswith(word), self.log.read_text("utf-8")[-8000:]


@contextmanager
def ray_cluster(folder: Path, **arguments: Any) -> Iterator[Cluster]:
    """Start a cluster, yield it when its application serves, and stop it; then no process of it is left."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        port = made.getsockname()[1]
    command = [sys.executable, __file__, json.dumps({**arguments, "port": port})]
    path = os.pathsep.join(p for p in sys.path if p)
    env = environment(RAY_USAGE_STATS_ENABLED="0", RAY_DEDUP_LOGS="0", PYTHONPATH=path)
    log = folder / "ray.log"
    with (
        log.open("w", encoding="utf-8") as stderr,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, env=env
        ) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=None) as http,
    ):
        family: list[psutil.Process] = []
        try:
            cluster = Cluster(process, http, log)
            cluster.expect(READY)
            yield cluster
            family = psutil.Process(process.pid).children(recursive=True)
            assert len(family) > 3
            process.communicate()
        finally:
            with suppress(psutil.NoSuchProcess):
                family += psutil.Process(process.pid).children(recursive=True)
            process.kill()
            block_until(lambda: not any(map(psutil.Process.is_running, family)))


def main() -> None:
    import ray
    from ray import serve

    from llaisys.ray import app

    arguments = json.loads(sys.argv[1])
    ray.init(num_cpus=CPUS, include_dashboard=False, object_store_memory=STORE_BYTES, log_to_driver=True)
    serve.start(http_options={"host": "127.0.0.1", "port": arguments["port"]})
    serve.run(app(arguments), name="llaisys")
    print(READY, flush=True)
    for line in sys.stdin:
        order, _, rest = line.strip().partition(" ")
        if order == "kill":
            replica = ray.get_actor(f"SERVE_REPLICA::llaisys#Replica#{rest}", namespace="serve")
            ray.kill(replica, no_restart=True)
        else:
            serve.run(app({**arguments, **json.loads(rest)}), name="llaisys")
        print(DONE, flush=True)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
