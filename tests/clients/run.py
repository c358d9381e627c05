"""Serve SmolLM2 and a scripted model, and run client libraries and agents against them."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from agent_tasks import MODEL, agents, run_agents
from scripted import Entry, call_text, scripted_serving

from serving import serving

KEY = "sesame"
LIBRARY_MODEL = "smollm2"
# Completions for the questions of `calls/call_list.py`.
LIBRARY_SCRIPT: list[Entry] = [
    ("weather: sunny.*weather: rainy", "Paris is sunny, Rome is rainy."),
    (
        "the weather in Paris and Rome",
        "\n".join(call_text("weather", city=city) for city in ("Paris", "Rome")),
    ),
    (r"Think about gravity.*<think>\n(?P<thought>.*?)\n</think>.*Again", "It pulled [[thought]]"),
    ("Think about gravity", "<think>\nMass attracts mass.\n</think>\n\nIt pulls."),
]


def main() -> int:
    """Print one line per call and task; return 1 if one failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", required=True, help="the Python that has the client libraries")
    parser.add_argument("--only", choices=("libraries", "agents"), help="run only these")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / each for each in ("smollm2", "scripted", "calls", "tasks")]
        for folder in folders:
            folder.mkdir()
        script = [entry for agent in agents(folders[3]) for entry in agent.script()] + LIBRARY_SCRIPT
        flags = ("--served-model-name", LIBRARY_MODEL, "--served-model-name", MODEL)
        with scripted_serving(folders[1], script, *flags, key=KEY) as scripted:
            n_failed = 0
            if options.only != "agents":
                with serving(folders[0], LIBRARY_MODEL, "--num-kv-cells", "4096", key=KEY) as server:
                    calls = [
                        options.python,
                        str(Path(__file__).with_name("calls")),
                        server.url,
                        KEY,
                        scripted.url,
                    ]
                    n_failed += subprocess.run([*calls, str(folders[2])], check=False).returncode
            if options.only != "libraries":
                n_failed += run_agents(scripted, folders[3], KEY)
    return 1 if n_failed else 0


if __name__ == "__main__":
    sys.exit(main())
