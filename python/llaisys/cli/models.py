"""`llaisys models`: list embedded models and cached models."""

from __future__ import annotations

import argparse

from llaisys.cli.parsing import Commands, add_command
from llaisys.hub import ModelRow, list_models

_HEADER = ("NAME", "SIZE", "LICENSE", "FROM", "PATH")


def add_parser(commands: Commands) -> None:
    """Add `llaisys models`."""
    add_command(
        commands, "models", "list embedded models and models in the Hugging Face cache", "llaisys models"
    )


def run(arguments: argparse.Namespace) -> int:  # noqa: ARG001 -- every command has this signature
    """Print a table on stdout."""
    lines = [_HEADER, *(_cells(row) for row in list_models())]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADER))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    print("\nA Hugging Face id (org/name), a folder of that format or a .gguf file works as well.")
    return 0


def _cells(row: ModelRow) -> tuple[str, str, str, str, str]:
    where = "not pulled" if row.path is None else str(row.path)
    return (", ".join(row.names), megabytes(row.n_bytes), row.license or "-", row.source, where)


def megabytes(n_bytes: int) -> str:
    """Format a size as `98 MB`; below 10 MB with one decimal."""
    return f"{n_bytes / 1e6:.0f} MB" if n_bytes >= 10e6 else f"{n_bytes / 1e6:.1f} MB"
