"""`llaisys pull`: brings an embedded model into the cache."""

from __future__ import annotations

import argparse

from llaisys.cli.parsing import Commands, add_command
from llaisys.hub import pull


def add_parser(commands: Commands) -> None:
    """`llaisys pull NAME`."""
    parser = add_command(
        commands,
        "pull",
        "bring a model into the cache folder (LLAISYS_HOME, by default ~/.cache/llaisys)",
        "llaisys pull smollm2\nLLAISYS_HOME=/data/llaisys llaisys pull smollm2 --quiet",
    )
    parser.add_argument("name", help="a name that `llaisys models` lists")
    parser.add_argument("--quiet", action="store_true", help="no progress, only the path")


def run(arguments: argparse.Namespace) -> int:
    """Prints the file's path on stdout; progress goes to stderr."""
    print(pull(arguments.name, progress=not arguments.quiet))
    return 0
