"""Arguments -> command -> exit code: 0 done, 1 failed with a message, 2 wrong arguments, 130 interrupted, 141
stdout was closed by its reader (a shell's codes for SIGINT and SIGPIPE)."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Protocol

from llaisys.cli import batch, bench, chat, config, doctor, generate, models, pull, rm, serve
from llaisys.cli.parsing import Commands, Parser
from llaisys.config import package_version
from llaisys.errors import LlaisysError


class Command(Protocol):
    """What a module of this package offers. What is heavy it imports when it runs: `pull` loads no server."""

    def add_parser(self, commands: Commands) -> None:
        """Adds the command's own parser."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Carries the command out; the exit code."""


# In the order of `llaisys --help`.
COMMANDS: dict[str, Command] = {
    "serve": serve,
    "chat": chat,
    "generate": generate,
    "run-batch": batch,
    "pull": pull,
    "models": models,
    "rm": rm,
    "doctor": doctor,
    "config": config,
    "bench": bench,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; `argv` without the program's name (default: the process's). Returns the exit code."""
    parser = Parser(prog="llaisys", description="LLM inference and serving")
    parser.add_argument("--version", action="version", version=f"llaisys {package_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in COMMANDS.values():
        module.add_parser(commands)
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        arguments.refuse_unknown(unknown)
    try:
        exit_code = COMMANDS[arguments.command].run(arguments)
        sys.stdout.flush()
        return exit_code
    except BrokenPipeError:  # as `llaisys ... | head -1` ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it exits
        return 141
    except LlaisysError as e:
        print(f"llaisys {arguments.command}: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
