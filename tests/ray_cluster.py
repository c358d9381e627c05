"""A Ray cluster on this machine that serves an application, in a process of its own.

`python ray_cluster.py JSON` starts the application with these arguments of `llaisys.ray:app`, and then obeys
lines of its input: `kill REPLICA`, or `update JSON` with other arguments.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil

from ports import free_port
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
    port = free_port()
    path = os.pathsep.join(p for p in sys.path if p)
    # On a machine that is short of memory, Ray would kill replicas.
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_memory_monitor_refresh_ms": "0"}
    env = environment(PYTHONPATH=path, **quiet)
    log = folder / "ray.log"
    # A connection for each request: Ray's proxy was seen closing an idle one just as the client reused it.
    fresh = httpx.Limits(max_keepalive_connections=0)
    with (
        # Short, because paths of sockets have at most 107 bytes.
        TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as temporary,
        log.open("w", encoding="utf-8") as stderr,
        subprocess.Popen(
            [sys.executable, __file__, json.dumps({**arguments, "port": port}), temporary],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=env,
        ) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=None, limits=fresh) as http,
    ):
        try:
            cluster = Cluster(process, http, log)
            cluster.expect(READY)
            yield cluster
            family = psutil.Process(process.pid).children(recursive=True)
            assert len(family) > 3
            process.communicate()
            block_until(lambda: not any(map(psutil.Process.is_running, family)))
        finally:
            with suppress(psutil.NoSuchProcess):
                for each in [*psutil.Process(process.pid).children(recursive=True), process]:
                    each.kill()


def main() -> None:
    import ray
    from ray import serve

    from llaisys.ray import app

    arguments = json.loads(sys.argv[1])
    limits = {"num_cpus": CPUS, "object_store_memory": STORE_BYTES}
    ray.init(**limits, include_dashboard=False, log_to_driver=True, _temp_dir=sys.argv[2])
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
