"""What every command's parser shares."""

from __future__ import annotations

import argparse
import difflib
import re
from typing import Any, NoReturn, TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


class Parser(argparse.ArgumentParser):
    """Flags are spelt out, never abbreviated: a script keeps its meaning when a flag is added."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def refuse_unknown(self, arguments: list[str]) -> NoReturn:
        """Ends with an error that names the unknown arguments and the nearest flag."""
        flags = re.findall(r"--[a-z][a-z0-9-]*", self.format_help())
        near = difflib.get_close_matches(arguments[0].split("=")[0], flags, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        self.error(f"unknown arguments: {' '.join(arguments)}{hint}")


def add_command(commands: Commands, name: str, summary: str, examples: str) -> Parser:
    """A command's parser; `examples` are the lines that `--help` ends with."""
    parser = commands.add_parser(
        name, help=summary, description=summary, epilog=f"examples:\n{_indented(examples)}"
    )
    parser.set_defaults(refuse_unknown=parser.refuse_unknown)  # of a command's command: the inner one's
    return parser


def _indented(text: str) -> str:
    return "\n".join(f"  {line.strip()}" for line in text.strip().splitlines())
