"""The argument parser of all commands."""

from __future__ import annotations

import argparse
import difflib
import re
from typing import Any, NoReturn, TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


class Parser(argparse.ArgumentParser):
    """An argument parser without abbreviated flags, so that new flags never break a script."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def error_unknown(self, arguments: list[str]) -> NoReturn:
        """Exit with an error that names the unknown arguments and the closest flag."""
        flags = re.findall(r"--[a-z][a-z0-9-]*", self.format_help())
        matches = difflib.get_close_matches(arguments[0].split("=")[0], flags, n=1)
        hint = f" (did you mean {matches[0]}?)" if matches else ""
        self.error(f"unknown arguments: {' '.join(arguments)}{hint}")


def add_command(commands: Commands, name: str, summary: str, examples: str) -> Parser:
    """Add and return a command's parser; `examples`: the last lines of `--help`."""
    parser = commands.add_parser(
        name, help=summary, description=summary, epilog=f"examples:\n{_indented(examples)}"
    )
    parser.set_defaults(error_unknown=parser.error_unknown)  # a subcommand overrides it
    return parser


def _indented(text: str) -> str:
    return "\n".join(f"  {line.strip()}" for line in text.strip().splitlines())
