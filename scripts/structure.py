"""Print the structure of the Python package: import cycles and levels, and files that a chat executes.

`PYTHONPATH=TREE/python python scripts/structure.py [--chat]`. With `--chat` it serves the embedded model,
sends one streamed chat and lists the files of the package whose code ran for it in the server's process.
"""

import argparse
import json
import os
import signal
import sys
import threading
import time
import urllib.request
from pathlib import Path
from types import FrameType
from typing import Any

import grimp

import llaisys

PORT = 8765


def components(edges: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components, each before those that import it (Tarjan, 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(edges[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            found.append(stack[at:])
            del stack[at:]

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return found


def imports(package: str) -> dict[str, set[str]]:
    """Return each module of a part of the package, with the modules of that part that it imports at run
    time."""
    graph = grimp.build_graph("llaisys", exclude_type_checking_imports=True)
    modules = {m for m in graph.modules if m == package or m.startswith(f"{package}.")}
    return {m: graph.find_modules_directly_imported_by(m) & modules for m in modules}


def levels(edges: dict[str, set[str]]) -> int:
    """Return the number of modules on the longest chain of imports."""
    depth: dict[str, int] = {}
    for component in components(edges):
        below = {other for node in component for other in edges[node]} - set(component)
        for node in component:
            depth[node] = 1 + max((depth[other] for other in below), default=0)
    return max(depth.values())


class Tracer:
    """Collects the files of the package whose functions are called, in all threads, while it is active."""

    def __init__(self) -> None:
        self.on = False
        self.files: set[str] = set()
        self._root = str(Path(llaisys.__file__).parent)

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Record a call (the profile function of each thread)."""
        if self.on and event == "call" and frame.f_code.co_filename.startswith(self._root):
            self.files.add(os.path.relpath(frame.f_code.co_filename, self._root))


def chat(tracer: Tracer) -> None:
    """Send one chat to the server of this process, print what ran for it, and stop the server."""
    url = f"http://127.0.0.1:{PORT}"
    body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    for n_sent in range(2):  # the first one imports and starts what is made on first use
        while True:
            try:
                urllib.request.urlopen(f"{url}/health").read()
                break
            except OSError:
                time.sleep(0.2)
        tracer.on = n_sent == 1
        frames = urllib.request.urlopen(request).read()
        tracer.on = False
        assert frames.endswith(b"data: [DONE]\n\n")
    print(f"files that a streamed chat executes: {len(tracer.files)}")
    print(*sorted(tracer.files), sep="\n", flush=True)
    os.kill(os.getpid(), signal.SIGINT)


def main() -> None:
    """Print the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chat", action="store_true")
    args = parser.parse_args()
    edges = imports("llaisys")
    cycles = [component for component in components(edges) if len(component) > 1]
    print(f"modules: {len(edges)}; import cycles: {len(cycles)} {cycles or ''}")
    engine = imports("llaisys.engine")
    print(f"modules of engine/: {len(engine)}; import levels: {levels(engine)}", flush=True)
    if args.chat:
        tracer = Tracer()
        threading.setprofile(tracer)
        sys.setprofile(tracer)
        from llaisys.cli.main import main as llaisys_main

        threading.Thread(target=chat, args=[tracer], daemon=True).start()
        llaisys_main(["serve", "smollm2", "--port", str(PORT), "--num-kv-cells", "2048"])


if __name__ == "__main__":
    main()
