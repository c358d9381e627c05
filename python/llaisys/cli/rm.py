"""`llaisys rm`: delete a model from its cache."""

from __future__ import annotations

import argparse

from llaisys.cli.models import megabytes
from llaisys.cli.parsing import Commands, add_command
from llaisys.hub import remove_model


def add_parser(commands: Commands) -> None:
    """Add `llaisys rm NAME`."""
    parser = add_command(
        commands,
        "rm",
        "delete a model from its cache; the Hugging Face cache is shared with other programs",
        "llaisys rm smollm2\nllaisys rm Qwen/Qwen2.5-0.5B-Instruct",
    )
    parser.add_argument("name", help="a name that `llaisys models` shows with a path (not the path)")


def run(arguments: argparse.Namespace) -> int:
    """Delete a model; print what was deleted on stdout."""
    path, n_bytes = remove_model(arguments.name)
    print(f"deleted {path} ({megabytes(n_bytes)})")
    return 0
