"""`llaisys models`: the models that are known by name and those that are in a cache."""

from __future__ import annotations

import argparse

from llaisys.cli.parsing import Commands, add_command
from llaisys.hub import ModelRow, list_models

_HEADER = ("NAME", "SIZE", "LICENCE", "FROM", "PATH")


def add_parser(commands: Commands) -> None:
    """`llaisys models`."""
    add_command(
        commands, "models", "list the embedded models and what was pulled from the Hub", "llaisys models"
    )


def run(arguments: argparse.Namespace) -> int:  # noqa: ARG001 -- every command has this signature
    """Prints a table on stdout."""
    lines = [_HEADER, *(_cells(row) for row in list_models())]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADER))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    print("\nA Hugging Face id (org/name), a folder of that format or a .gguf file works as well.")
    return 0


def _cells(row: ModelRow) -> tuple[str, str, str, str, str]:
    where = "not pulled" if row.path is None else str(row.path)
    return (", ".join(row.names), megabytes(row.n_bytes), row.licence or "-", row.source, where)


def megabytes(n_bytes: int) -> str:
    """`98 MB`; small sizes with a digit more."""
    return f"{n_bytes / 1e6:.0f} MB" if n_bytes >= 10e6 else f"{n_bytes / 1e6:.1f} MB"
