"""The entry point of the `llaisys` command.

Exit codes: 0 success, 1 failed with a message, 2 invalid arguments, 130 interrupted (SIGINT), 141 stdout was
closed by its reader (SIGPIPE).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Protocol

from llaisys.cli import bench, chat, config, doctor, generate, models, pull, rm, run_batch, serve
from llaisys.cli.parsing import Commands, Parser
from llaisys.config import package_version
from llaisys.errors import LlaisysError


class Command(Protocol):
    """The interface of a command module. Heavy imports belong in `run`, so that `pull` loads no server."""

    def add_parser(self, commands: Commands) -> None:
        """Add the command's parser."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the command; return the exit code."""


# In the order of `llaisys --help`.
COMMANDS: dict[str, Command] = {
    "serve": serve,
    "chat": chat,
    "generate": generate,
    "run-batch": run_batch,
    "pull": pull,
    "models": models,
    "rm": rm,
    "doctor": doctor,
    "config": config,
    "bench": bench,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code. `argv`: arguments without the program name."""
    parser = Parser(prog="llaisys", description="LLM inference and serving")
    parser.add_argument("--version", action="version", version=f"llaisys {package_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in COMMANDS.values():
        module.add_parser(commands)
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        arguments.error_unknown(unknown)
    try:
        exit_code = COMMANDS[arguments.command].run(arguments)
        sys.stdout.flush()
        return exit_code
    except BrokenPipeError:  # for example, `llaisys ... | head -1`
        # Prevents Python's error message at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except LlaisysError as e:
        print(f"llaisys {arguments.command}: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
